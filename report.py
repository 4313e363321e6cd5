"""The README's tables and front-page pictures, from the records in results/: no number there is typed by hand.

A table of README.md stands between the lines <!-- NAME --> and <!-- end -->; plot_priors.py --readme calls write().
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from posteriors import panels, save
from records import STYLES, newest, read_records
from shards import replacing
from study import PES

ROOT = Path(__file__).resolve().parent
SSMAX = {"": "", "_ssmax": ", SSMax"}
LABELS = {f"{pe}{ending}": name + more for pe, name in PES.items() for ending, more in SSMAX.items()}
FULL = "ggd_ssmax"  # the paper's method, about which the ablations change something
UNIFORM = "start_uniform"  # the same with theta = 0 at the start, as in the paper: an eleventh beside the encodings
LABELS |= {UNIFORM: f"{LABELS[FULL]}, uniform start"}
ABLATIONS = {  # what, and how; at the full method's rate and with the first seed
    "start_global": (
        "two of four heads start anti-local in every layer",
        "--theta_alpha=-3.24,-16.64,0,0",
        "--theta_beta=8,8,-1,-2",
    ),
    "start_wide": (
        "windows of up to 24 tokens instead of 8",
        "--theta_alpha=" + "-3.24,-11.09,-16.64,-25.42," * 2 + "-3.24,-16.64,0,0",
    ),
    "learned_alibi": (
        "starts at ALiBi's slopes, theta_beta fixed at 1",
        "--theta_alpha=-1.386,-2.773,-4.159,-5.545",
        "--theta_beta=1",
        "--theta_learned=alpha",
    ),
    "theta_fixed": ("theta not learned", "--theta_learned="),
    "s_1": ("s = 1 at the start (the paper)", "--ssmax_init=1"),
    "prior_lr_1e-2": ("learning rate of theta 1e-2", "--prior_lr=1e-2"),
    "prior_lr_1e-1": ("learning rate of theta 1e-1", "--prior_lr=1e-1"),
}
TESTS = {  # of the passkey, in the order of the tables: filler and wording
    "": ("passkey", "passkey"),
    "unseen filler, ": ("unseen", "passkey"),
    "reworded, ": ("passkey", "reworded"),
    "both, ": ("unseen", "reworded"),
}


# Records -------------------------------------------------------------------------------------------------------------


def passkey_cells(records: Iterable[dict], row: str) -> dict:
    """{(row's value, test, length): records}, of the passkey records; `row` is what names a table's row."""
    tests, cells = {texts: test for test, texts in TESTS.items()}, defaultdict(list)
    for r in records:
        plain = r["metric"] == "passkey" and unchanged(r) and r["config"].get("digits", 5) == 5
        texts = plain and (r["config"]["filler"], r["config"]["wording"])
        if texts in tests:
            cells[r[row], tests[texts], r["length"]].append(r)
    return cells


def unchanged(record: dict) -> bool:
    """Is this record of an evaluation one of the model as it was trained?"""
    return not record["config"].get("window_attention") and not record["config"].get("set")


def columns(cells: dict, rows: Iterable) -> list[tuple[str, int]]:
    """The tests and lengths that a table of these rows has, as columns in order."""
    rows, order = set(rows), list(TESTS)
    return sorted({(test, n) for row, test, n in cells if row in rows}, key=lambda c: (order.index(c[0]), c[1]))


def multiple(n: int, trained: int) -> str:
    return f"{n:,} ({n / trained:g}x)"


# Text ----------------------------------------------------------------------------------------------------------------


def markdown(rows: Iterable[Iterable[object]]) -> str:
    """A table whose first row is the header."""
    header, *body = [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body))


def spread(values: list[float], digits: int = 0) -> str:
    """Mean [minimum, maximum]; one number where they are the same; nothing where there are none."""
    if not values:
        return ""
    low, mean, high = (f"{x:.{digits}f}" for x in (min(values), np.mean(values), max(values)))
    return mean if low == high else f"{mean} [{low}, {high}]"


def percents(found: list[dict]) -> str:
    return spread([100 * r["correct"] / r["n"] for r in found])


def counted(found: list[dict]) -> str:
    """Right answers and the 95% interval of their share in percent, of the one record of a cell."""
    if not found:
        return ""
    (record,) = found
    low, high = (round(100 * x) for x in record["interval_95"])
    return f"{record['correct']} [{low}, {high}]"


# Tables of the study -------------------------------------------------------------------------------------------------


def chosen(study: list[dict], variants: Iterable[str]) -> dict[str, list[dict]]:
    """The trainings at the chosen rate, by variant, of those that there are."""
    found = {v: [r for r in study if r["metric"] == "training" and r["chosen"] and r["variant"] == v] for v in variants}
    return {variant: trainings for variant, trainings in found.items() if trainings}


def passkey_table(study: list[dict]) -> str:
    """Every encoding: its rate, its loss, and the passkeys found by test and length."""
    trainings, cells = chosen(study, LABELS), passkey_cells(study, "variant")
    tests = columns(cells, trainings)
    size = next(iter(trainings.values()))[0]["model_config"]["block_size"]
    rows = [["encoding", "seeds", "rate", "loss", *(test + multiple(n, size) for test, n in tests)]]
    for variant, found in trainings.items():
        row = [LABELS[variant], len(found), f"x{found[0]['rate']:g}", spread([r["loss"] for r in found], 2)]
        rows.append(row + [percents(cells[variant, test, n]) for test, n in tests])
    return markdown(rows)


def ablation_table(study: list[dict]) -> str:
    """What the full method loses with one thing changed; first seed only."""
    first = min(r["seed"] for r in study)
    study = [r for r in study if r["seed"] == first]
    labels = {FULL: "nothing changed"} | {variant: label for variant, (label, *_) in ABLATIONS.items()}
    trainings, cells = chosen(study, labels), passkey_cells(study, "variant")
    tests = columns(cells, set(trainings) - {FULL})
    rows = [["changed", "loss", *(f"{test}{n:,}" for test, n in tests)]]
    for variant, (training, *_) in trainings.items():
        numbers = [counted(cells[variant, test, n]) for test, n in tests]
        rows.append([labels[variant], f"{training['loss']:.2f}", *numbers])
    return markdown(rows)


def perplexities(study: list[dict]) -> dict[str, dict[int, list[float]]]:
    """{variant: {context: perplexities, one a training seed}}, of the encodings."""
    points: dict = {variant: defaultdict(list) for variant in LABELS}
    for r in study:
        if r["metric"] == "perplexity" and "context" in r["config"] and r["variant"] in LABELS and unchanged(r):
            points[r["variant"]][r["config"]["context"]].append(r["perplexity"])
    return points


def perplexity_table(study: list[dict]) -> str:
    points = perplexities(study)
    contexts = sorted({n for found in points.values() for n in found})
    rows = [["encoding", *(f"context {n:,}" for n in contexts)]]
    for variant in chosen(study, LABELS):
        rows.append([LABELS[variant], *(spread(points[variant].get(n, []), 2) for n in contexts)])
    return markdown(rows)


def ruler_table(study: list[dict]) -> str:
    trainings = chosen(study, LABELS)
    found = [r for r in study if r["metric"] == "ruler" and r["n"]]
    lengths = sorted({r["length"] for r in found})
    rows = [["encoding", *(f"{n:,}" for n in lengths)]]
    for variant in trainings:
        cells = [[r for r in found if (r["variant"], r["length"]) == (variant, n)] for n in lengths]
        right = [spread([100 * r["tokens_right"] for r in cell]) for cell in cells]
        rows.append(
            [LABELS[variant], *(f"{percents(c)} / {t}" if c else "" for c, t in zip(cells, right, strict=True))]
        )
    return markdown(rows)


def rates_table(study: list[dict]) -> str:
    """The loss of every encoding at every rate, first seed."""
    first = min(r["seed"] for r in study)
    trainings = [r for r in study if r["metric"] == "training" and r["seed"] == first]
    rates = sorted({r["rate"] for r in trainings})
    rows = [["encoding", *(f"x{rate:g}" for rate in rates)]]
    for variant in chosen(study, LABELS):
        loss = {r["rate"]: f"{r['loss']:.3f}" for r in trainings if r["variant"] == variant}
        rows.append([LABELS[variant], *(loss.get(rate, "") for rate in rates)])
    return markdown(rows)


# Tables of the quick start's model -----------------------------------------------------------------------------------


def default_table(records: list[dict]) -> str:
    """The quick start's recipe by training seed: right answers with the interval of their share."""
    records = [r | {"training seed": r["train_config"]["seed"]} for r in records]
    cells = passkey_cells(records, "training seed")
    seeds = sorted({r["training seed"] for r in records})
    tests, size = columns(cells, seeds), records[0]["training_length"]
    rows = [["training seed", *(test + multiple(n, size) for test, n in tests)]]
    rows.append(["n", *(max(r["n"] for seed in seeds for r in cells[seed, test, n]) for test, n in tests)])
    return markdown(rows + [[seed, *(counted(cells[seed, test, n]) for test, n in tests)] for seed in seeds])


def streaming_table(records: list[dict]) -> str:
    """Seconds, and MB above the loaded model, for one answer, by length and way of computing."""
    records = [r for r in records if "error" not in r]
    ways = [way for way in ("plain", "dense", "exact", "skipping") if any(r["way"] == way for r in records)]
    found = {(r["way"], r["length"]): r for r in records}
    rows = [["tokens", *(f"seconds: {way}" for way in ways), *(f"MB: {way}" for way in ways)]]
    for n in sorted({r["length"] for r in records}):
        there = [found.get((way, n)) for way in ways]
        seconds = [f"{r['seconds']:.2f}" if r else "" for r in there]
        rows.append([f"{n:,}", *seconds, *(f"{r['bytes'] / 1e6:.0f}" if r else "" for r in there)])
    return markdown(rows)


# Pictures ------------------------------------------------------------------------------------------------------------


def curves(axis: Axes, points: dict[str, dict[int, list[float]]]) -> None:
    """Mean over the seeds by length and a dot a seed; a colour and marker an encoding, filled and solid with SSMax."""
    for i, (variant, values) in enumerate(points.items()):
        if not values:
            continue
        x, y = zip(*sorted(values.items()), strict=True)
        x = np.array(x) * 1.03 ** (i - len(points) / 2)  # so that dots at one length do not cover each other
        plain = {"linestyle": "--", "fillstyle": "none"}
        style = {"linestyle": "-", "fillstyle": "full"} if "SSMax" in LABELS[variant] else plain
        color, marker = f"C{i // len(SSMAX)}", STYLES[i // len(SSMAX)][0]
        axis.plot(x, [np.mean(v) for v in y], color=color, marker=marker, label=LABELS[variant], **style)
        dots = np.repeat(x, [len(v) for v in y]), np.concatenate(y)
        axis.plot(*dots, linestyle="", color=color, marker=".", markersize=4, alpha=0.6)


def by_length(records: Iterable[dict]) -> dict[str, dict[int, list[float]]]:
    """{variant: {length: percent of passkeys found, one number a training seed}}, of the plain passkey test."""
    points: dict = {variant: {} for variant in LABELS}
    for (variant, test, n), found in passkey_cells(records, "variant").items():
        if variant in points and not test:
            points[variant][n] = [100 * r["correct"] / r["n"] for r in found]
    return points


def passkey_picture(studies: list[list[dict]]) -> Figure:
    """Front page: the share of passkeys found by length; a panel a study."""
    figure, axes = panels(1, len(studies), 6, 4.5, sharey=True)
    for axis, study in zip(axes[0], studies, strict=True):
        curves(axis, by_length(study))
        n = max(r["n"] for r in study if r["metric"] == "passkey")
        axis.set(ylabel="passkeys found (%)", title=f"{about(study)}, n = {n}")
        length_axis(axis, study, "length in bytes")
    return legend(figure)


def perplexity_picture(studies: list[list[dict]]) -> Figure:
    """Front page: perplexity of the same targets by context; a panel a study."""
    figure, axes = panels(1, len(studies), 6, 4.5, sharey=True)
    for axis, study in zip(axes[0], studies, strict=True):
        curves(axis, perplexities(study))
        axis.set(yscale="log", ylabel="perplexity per byte", title=about(study))
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter())
        length_axis(axis, study, "context in bytes")
    return legend(figure)


def about(study: list[dict]) -> str:
    """A panel's title: how much its models have read, and what its dots are."""
    trainings = chosen(study, LABELS).values()
    first, seeds = next(iter(trainings))[0], sorted({len(found) for found in trainings})
    read = first["step"] * first["train_config"]["tokens_per_step"] / 1e6
    span = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    return f"{read:.1f}M bytes of training\nmean, and a dot a training seed (of {span})"


def length_axis(axis: Axes, study: list[dict], label: str) -> None:
    trained = next(r for r in study if r["metric"] == "training")["model_config"]["block_size"]
    axis.title.set_fontsize(10)
    axis.axvline(trained, color="grey", linewidth=1)
    axis.set(xscale="log", xlabel=f"{label} (grey: the training length, {trained})")
    ticks = [trained * 4**k for k in range(9) if trained * 4**k < 1.3 * axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    axis.xaxis.minorticks_off()


def legend(figure: Figure) -> Figure:
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, handlelength=4)
    return figure


# README --------------------------------------------------------------------------------------------------------------

SOURCES: dict[str, dict[str, Callable[[list[dict]], str]]] = {  # {file in results/: {table's name: its maker}}
    "study.jsonl": {
        "passkey_table": passkey_table,
        "rates_table": rates_table,
        "perplexity_table": perplexity_table,
        "ruler_table": ruler_table,
        "ablation_table": ablation_table,
    },
    "study_long.jsonl": {"long_passkey_table": passkey_table, "long_perplexity_table": perplexity_table},
    "passkey_cpu.jsonl": {"default_table": default_table},
    "passkey_uniform_cpu.jsonl": {"uniform_table": default_table},
    "streaming_cpu.jsonl": {"streaming_table": streaming_table},
}


def filled(readme: str, tables: dict[str, str]) -> str:
    """The text with every table between its two lines. Raises ValueError where a line is missing."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(place.findall(readme)) != 1:
            raise ValueError(f"README.md needs the lines <!-- {name} --> and <!-- end -->, once")
        readme = place.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", readme)
    return readme


def tables(root: Path) -> dict[str, str]:
    """Every table by its name. ValueError, in one sentence, if a file has no records."""
    found = {}
    for name, makers in SOURCES.items():
        if not (records := newest(read_records(root / "results" / name))):
            raise ValueError(f"{root / 'results' / name} has no records; run the evaluations first")
        found |= {table: make(records) for table, make in makers.items()}
    return found


def write(root: Path = ROOT) -> None:
    """README.md with the tables of the records under root/results, and the pictures. ValueError or OSError, in one
    sentence, if a file is missing; README.md is then what it was."""
    made, results = tables(root), root / "results"
    text = filled((root / "README.md").read_text(encoding="utf-8"), made)
    studies = [newest(read_records(results / name)) for name in ("study.jsonl", "study_long.jsonl")]
    save(passkey_picture(studies), results, "study_passkey.png")
    save(perplexity_picture(studies), results, "study_perplexity.png")
    with replacing(root / "README.md") as file:
        file.write(text.encode())
    print(f"wrote {len(made)} tables into {root / 'README.md'}")
