"""The laptop study: what each encoding finds in long texts, by results/PROTOCOL.md.

python study.py --workers=2                            # continues where it stopped
python study.py --seeds=1 --variants=rope,ggd_ssmax    # a part of it

With the first seed each of the ten encodings is trained at every rate. The one with the lowest loss
on its last windows, which no step saw before, is its rate for all seeds and for what varies it. What
is trained and evaluated stays, so nothing is done twice; all records are collected in one file. The
work is done by the scripts that anyone can call: each command is printed before it runs.
"""

import configurator
from configurator import fail, user_errors

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from data import lock_folder, replacing
from model import ModelConfig
from plot_priors import panels, save
from runs import STYLES, fingerprint, load_checkpoint, load_model, newest, read_records
from train import DIVERGED, TrainConfig

# ---- study

ROOT = Path(__file__).resolve().parent
RATES = ("learning_rate", "prior_lr", "ssmax_lr")
# the passkey test, but for what a part of the protocol changes about it
PLAIN = {
    "seeds": [1, 2, 3],
    "depths": 20,
    "filler": "passkey",
    "wording": "passkey",
    "window_attention": 0,
    "set": [],
}


class Variant(NamedTuple):
    """One row of the study."""

    label: str
    seeds: int  # trainings: the first so many of the seeds
    options: str  # what makes the config this variant
    base: str = ""  # the encoding whose rate it takes; none: its own is searched


PES = {
    "nope": "NoPE",
    "sinusoidal": "sinusoidal",
    "rope": "RoPE",
    "alibi": "ALiBi",
    "ggd": "GGD-BAM",
}
REAL = "--virtual_length=1 --ssmax_init=0.18"  # s: 1 / ln 256, about as sharp as plain softmax at the start
VIRTUAL = "--ssmax=true --virtual_length=1000 --ssmax_init=0.12"
FULL = f"--pe=ggd --ssmax=true {REAL}"  # the paper's method
VARIANTS = {pe: Variant(name, 3, f"--pe={pe} --ssmax=false {REAL}") for pe, name in PES.items()}
for pe, name in PES.items():
    seeds = 5 if pe in ("alibi", "ggd") else 3
    VARIANTS[f"{pe}_ssmax"] = Variant(f"{name}, SSMax", seeds, f"--pe={pe} --ssmax=true {REAL}")
for pe, seeds in {"ggd": 5, "alibi": 3, "rope": 3, "nope": 3}.items():
    label = f"{PES[pe]}, SSMax, virtual length"
    VARIANTS[f"{pe}_virtual"] = Variant(label, seeds, f"--pe={pe} {VIRTUAL}", f"{pe}_ssmax")
VARIANTS |= {
    name: Variant(f"GGD-BAM, SSMax, {label}", seeds, f"{FULL} {options}", "ggd_ssmax")
    for name, label, seeds, options in (
        ("beta_from_0", "theta_beta at least 0", 5, "--theta_beta_min=0"),
        ("content", "SSMax on the content only", 3, "--ssmax_scales=content"),
        (
            "windows",
            "windows in the first layers at the start",
            1,
            "--theta_alpha=-3.24,-8.79,-12.88,-16.64,-3.24,-8.79,-12.88,-16.64,-3.24,-16.64,0,0"
            " --theta_beta=8,8,8,8,8,8,8,8,8,8,-1,-2",
        ),
        ("mu", "mu learned", 1, "--theta_learned=alpha,beta,mu"),
        (
            "slopes",
            "ALiBi's slopes at the start",
            1,
            "--theta_alpha=-1.386,-2.773,-4.159,-5.545 --theta_beta=1",
        ),
        ("fixed", "theta stays 0", 1, "--theta_learned="),
    )
}


@dataclass
class StudyConfig:
    """What to train and ask. Raises ValueError, in one sentence, if it makes no sense."""

    config: str = "config/ggd_bam_cpu.py"  # of every training
    variants: tuple[str, ...] = tuple(VARIANTS)  # rows of the study
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # of the trainings; a row may have fewer
    rates: tuple[float, ...] = (1.0, 0.33)  # times the three learning rates of the config
    workers: int = 1  # commands at a time; with several each has one thread
    out_dir: str = "out/study"  # folder of all runs
    records: str = "out/study/study.jsonl"  # all that was found

    def __post_init__(self):
        if unknown := set(self.variants) - set(VARIANTS):
            raise ValueError(
                f"variants has {', '.join(sorted(unknown))}; it may hold {', '.join(VARIANTS)}"
            )
        for name in ("variants", "seeds", "rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; give at least one, and none twice")
        if min(*self.rates, self.workers) <= 0:
            raise ValueError("rates and workers must be above 0")
        if missing := {VARIANTS[name].base for name in self.variants} - {"", *self.variants}:
            raise ValueError(
                f"these variants take the rate of {', '.join(sorted(missing))}; name it too"
            )


class Job(NamedTuple):
    """One training."""

    variant: str
    rate: float
    seed: int

    def folder(self, cfg: StudyConfig) -> Path:
        return Path(cfg.out_dir) / f"{self.variant}_x{self.rate:g}_s{self.seed}"


def call(cfg: StudyConfig, script: str, *words: object) -> int:
    """Run one of the scripts, its output into a log if others run beside it, and return its status, 0
    or train.py's DIVERGED. Any other status ends the study."""
    command = [script, *map(str, words)]
    print(f"$ python {shlex.join(command)}", flush=True)
    alone = cfg.workers == 1
    threads = {} if alone else {"OMP_NUM_THREADS": "1"}
    with open(os.devnull if alone else Path(cfg.out_dir) / "log.txt", "a", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *command[1:]],
            env={**os.environ, **threads},
            stdout=None if alone else log,
            stderr=None if alone else log,
        )
    if done.returncode == 130:  # Ctrl-C reaches the script too: it has saved its work
        sys.exit(130)
    if done.returncode not in (0, DIVERGED):
        fail(
            f"{shlex.join(command)} ended with status {done.returncode}; start the study again to continue"
        )
    return done.returncode


def options(cfg: StudyConfig, base: TrainConfig, job: Job) -> list[str]:
    """The words that make the config file this job."""
    rates = [f"--{name}={job.rate * getattr(base, name):.3g}" for name in RATES]
    variant = shlex.split(VARIANTS[job.variant].options)
    return [f"--seed={job.seed}", *rates, *variant, f"--out_dir={job.folder(cfg)}"]


def parse(words: list[str]) -> list:
    """ModelConfig and TrainConfig of a command line of train.py."""
    return configurator.parse([ModelConfig, TrainConfig], words, None, positional="config")[0]


def log_of(cfg: StudyConfig, job: Job) -> list[dict]:
    return read_records(job.folder(cfg) / "log.jsonl")


def train(cfg: StudyConfig, base: TrainConfig, job: Job) -> bool:
    """Train, or continue a training that stopped; nothing if it is finished. False if it diverged."""
    words, folder = [cfg.config, *options(cfg, base, job)], job.folder(cfg)
    step, log = 0, log_of(cfg, job)
    if (folder / "last.pt").exists():
        with user_errors():
            saved = load_checkpoint(folder)
        step, (model, training) = saved["step"], parse(words)
        free = ("resume", "out_dir", "device")
        now = {k: v for k, v in asdict(training).items() if k not in free}
        if saved["model_config"] != asdict(model) or any(
            saved["train_config"].get(k) != v for k, v in now.items()
        ):
            fail(
                f"{folder} holds a run of other options; move it away, or choose another --out_dir"
            )
        if step >= base.max_steps and log and log[-1]["step"] == step:
            return True
    if not 0 < step < base.max_steps:  # nothing to continue
        shutil.rmtree(folder, ignore_errors=True)
        step = 0
    return call(cfg, "train.py", *words, *["--resume"] * (step > 0)) != DIVERGED


def final_loss(cfg: StudyConfig, job: Job) -> float:
    """The mean training loss over the last quarter of the steps, each of whose windows is new."""
    log = log_of(cfg, job)
    losses = [r["loss"] for r in log if r["step"] > 0.75 * log[-1]["step"]]
    return math.inf if None in losses else float(np.mean(losses))


def evaluate(cfg: StudyConfig, job: Job, trained: int, first: bool) -> None:
    """All tests of one run, as the protocol says. What is in its records already is kept."""
    run = job.folder(cfg)

    def passkey(multiples: Iterable[int], **options: object) -> dict[int, float]:
        """The share of keys found at each of these multiples of the training length."""
        config = PLAIN | options
        words = [
            f"--{k}={','.join(map(str, v)) if isinstance(v, list) else v}"
            for k, v in config.items()
        ]
        lengths = {m: m * trained for m in multiples}
        call(
            cfg,
            "eval_passkey.py",
            run,
            f"--lengths={','.join(map(str, lengths.values()))}",
            *words,
            "--resume",
        )
        found = read_records(run / "eval" / "passkey.jsonl")  # of all tests, the newest last
        found = {
            r["length"]: r["correct"] / r["n"]
            for r in found
            if config.items() <= r["config"].items()
        }
        return {m: found[length] for m, length in lengths.items()}

    def ladder(**options: object) -> dict[int, float]:
        """The same for ever longer texts, until no key is found in one."""
        found = {}
        for stage in ((1, 2, 4), (8, 16), (64,)):
            found |= passkey(stage, **options)
            if not found[stage[-1]]:
                break
        return found

    found = ladder()
    near = [m for m in (1, 4, 16) if m in found]
    passkey(near, filler="unseen")
    passkey(near, wording="vault")
    if job.variant.startswith("rope"):
        ladder(window_attention=trained)
    retrieves = found.get(16, 0) >= 0.5
    if found.get(64, 0) >= 0.5:
        passkey((256, 500, 1000), seeds=[1])
        if first:
            passkey((4096,), seeds=[1], depths=5)
    if retrieves and (far := far_heads(run)):
        passkey((16, 64), set=far)
    contexts = ",".join(
        str(m * trained) for m in (1, 4, 16, 32)
    )  # the longest held-out documents have 56x
    call(cfg, "eval_downstream.py", run, f"--contexts={contexts}", "--resume")
    if first:
        tasks = "--tasks=niah_single_1,niah_single_2,niah_single_3"
        lengths = ",".join(str(m * trained) for m in ((4, 16, 64) if retrieves else (4,)))
        call(cfg, "eval_ruler.py", run, tasks, f"--lengths={lengths}", "--samples=20", "--resume")


def far_heads(run: Path) -> list[str]:
    """The anti-local heads of a run, as --set takes them, to make them uniform."""
    betas = load_model(run)[0].prior_values().get("theta_beta", [])
    return [
        f"{i}.{h}.theta_beta=0"
        for i, layer in enumerate(betas)
        for h, beta in enumerate(layer)
        if beta < 0
    ]


def records_of(cfg: StudyConfig, job: Job, chosen: bool) -> Iterator[dict]:
    """What is known of a run: its training and, at the chosen rate, the newest record of each of its evaluations."""
    folder, about, end = job.folder(cfg), job._asdict(), log_of(cfg, job)[-1]
    saved = load_checkpoint(folder)
    numbers = {name: end[name] for name in ("step", "val", "val_1x", "val_2x", "val_4x", "seconds")}
    numbers |= {name: saved[name] for name in ("commit", "train_config", "model_config")}
    numbers |= {
        name: end[name] for name in ("theta_alpha", "theta_beta", "theta_mu", "s") if name in end
    }
    yield about | {"metric": "training", "chosen": chosen, "loss": final_loss(cfg, job)} | numbers
    weights = fingerprint(load_model(folder)[0]) if chosen else None
    files = sorted((folder / "eval").glob("*.jsonl")) if chosen else ()
    found = [r for file in files for r in read_records(file)]
    for record in newest(r for r in found if r["weights"] == weights or r["config"].get("set")):
        left_out = (
            "checkpoint",
            "model_config",
            "train_config",
            "step",
            "commit",
        )  # the training's record has them
        yield about | {k: v for k, v in record.items() if k not in left_out}


def collect(cfg: StudyConfig, jobs: dict[Job, bool]) -> None:
    """Write the records of all jobs, {job: is its rate the chosen one?}, into one file."""
    path = Path(cfg.records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for job, chosen in jobs.items():
            for record in records_of(cfg, job, chosen):
                file.write(json.dumps(record).encode() + b"\n")


def study(cfg: StudyConfig, base: TrainConfig, trained: int) -> None:
    """All trainings and evaluations, seed by seed; the records are written anew after each of the two."""
    jobs: dict[Job, bool] = {}
    rate: dict[str, float] = {}
    pool = ThreadPoolExecutor(cfg.workers)

    def train_all(todo: list[Job]) -> list[Job]:
        done = pool.map(lambda job: train(cfg, base, job), todo)
        return [job for job, finished in zip(todo, done, strict=True) if finished]

    try:
        for place, seed in enumerate(cfg.seeds):
            names = [name for name in cfg.variants if place < VARIANTS[name].seeds]
            own = [name for name in names if not VARIANTS[name].base]
            tried = train_all(
                [Job(n, r, seed) for n in own for r in ([rate[n]] if n in rate else cfg.rates)]
            )
            by_loss = sorted(tried, key=lambda job: final_loss(cfg, job))
            best = [
                next(job for job in by_loss if job.variant == n)
                for n in own
                if n in {j.variant for j in tried}
            ]
            rate |= {job.variant: job.rate for job in best}
            based = {n: VARIANTS[n].base for n in names if VARIANTS[n].base in rate}
            best += train_all([Job(n, rate[b], seed) for n, b in based.items()])
            jobs |= {job: job in best for job in [*tried, *best]}
            collect(cfg, jobs)
            list(pool.map(lambda job, first=not place: evaluate(cfg, job, trained, first), best))
            collect(cfg, jobs)
    finally:  # after a mistake or Ctrl-C begin nothing new, and wait for what saves its work
        pool.shutdown(cancel_futures=True)
    print(f"\nrecords in {cfg.records}")


# ---- report

SSMAX = {"": "", "_ssmax": ", SSMax"}
LABELS = {
    f"{pe}{ending}": name + more for pe, name in PES.items() for ending, more in SSMAX.items()
}
FULL_ROW = "ggd_ssmax"  # the paper's method, about which the ablations change something
UNIFORM = "start_uniform"  # the same with theta = 0 at the start, as in the paper: an eleventh beside the encodings
LABELS |= {UNIFORM: f"{LABELS[FULL_ROW]}, uniform start"}
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
    return sorted(
        {(test, n) for row, test, n in cells if row in rows},
        key=lambda c: (order.index(c[0]), c[1]),
    )


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
    found = {
        v: [r for r in study if r["metric"] == "training" and r["chosen"] and r["variant"] == v]
        for v in variants
    }
    return {variant: trainings for variant, trainings in found.items() if trainings}


def passkey_table(study: list[dict]) -> str:
    """Every encoding: its rate, its loss, and the passkeys found by test and length."""
    trainings, cells = chosen(study, LABELS), passkey_cells(study, "variant")
    tests = columns(cells, trainings)
    size = next(iter(trainings.values()))[0]["model_config"]["block_size"]
    rows = [["encoding", "seeds", "rate", "loss", *(test + multiple(n, size) for test, n in tests)]]
    for variant, found in trainings.items():
        row = [
            LABELS[variant],
            len(found),
            f"x{found[0]['rate']:g}",
            spread([r["loss"] for r in found], 2),
        ]
        rows.append(row + [percents(cells[variant, test, n]) for test, n in tests])
    return markdown(rows)


def ablation_table(study: list[dict]) -> str:
    """What the full method loses with one thing changed; first seed only."""
    first = min(r["seed"] for r in study)
    study = [r for r in study if r["seed"] == first]
    labels = {FULL_ROW: "nothing changed"} | {
        variant: label for variant, (label, *_) in ABLATIONS.items()
    }
    trainings, cells = chosen(study, labels), passkey_cells(study, "variant")
    tests = columns(cells, set(trainings) - {FULL_ROW})
    rows = [["changed", "loss", *(f"{test}{n:,}" for test, n in tests)]]
    for variant, (training, *_) in trainings.items():
        numbers = [counted(cells[variant, test, n]) for test, n in tests]
        rows.append([labels[variant], f"{training['loss']:.2f}", *numbers])
    return markdown(rows)


def perplexities(study: list[dict]) -> dict[str, dict[int, list[float]]]:
    """{variant: {context: perplexities, one a training seed}}, of the encodings."""
    points: dict = {variant: defaultdict(list) for variant in LABELS}
    for r in study:
        if (
            r["metric"] == "perplexity"
            and "context" in r["config"]
            and r["variant"] in LABELS
            and unchanged(r)
        ):
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
            [
                LABELS[variant],
                *(f"{percents(c)} / {t}" if c else "" for c, t in zip(cells, right, strict=True)),
            ]
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
    rows.append(
        ["n", *(max(r["n"] for seed in seeds for r in cells[seed, test, n]) for test, n in tests)]
    )
    return markdown(
        rows + [[seed, *(counted(cells[seed, test, n]) for test, n in tests)] for seed in seeds]
    )


def streaming_table(records: list[dict]) -> str:
    """Seconds, and MB above the loaded model, for one answer, by length and way of computing."""
    records = [r for r in records if "error" not in r]
    ways = [
        way
        for way in ("plain", "dense", "exact", "skipping")
        if any(r["way"] == way for r in records)
    ]
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
        x = np.array(x) * 1.03 ** (
            i - len(points) / 2
        )  # so that dots at one length do not cover each other
        plain = {"linestyle": "--", "fillstyle": "none"}
        style = {"linestyle": "-", "fillstyle": "full"} if "SSMax" in LABELS[variant] else plain
        color, marker = f"C{i // len(SSMAX)}", STYLES[i // len(SSMAX)][0]
        axis.plot(
            x, [np.mean(v) for v in y], color=color, marker=marker, label=LABELS[variant], **style
        )
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
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside right center",
        fontsize=8,
        handlelength=4,
    )
    return figure


# README --------------------------------------------------------------------------------------------------------------

SOURCES: dict[
    str, dict[str, Callable[[list[dict]], str]]
] = {  # {file in results/: {table's name: its maker}}
    "study.jsonl": {
        "passkey_table": passkey_table,
        "rates_table": rates_table,
        "perplexity_table": perplexity_table,
        "ruler_table": ruler_table,
        "ablation_table": ablation_table,
    },
    "study_long.jsonl": {
        "long_passkey_table": passkey_table,
        "long_perplexity_table": perplexity_table,
    },
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


def main() -> None:
    (cfg,), _ = configurator.parse([StudyConfig], sys.argv[1:], __doc__)
    if not Path(cfg.config).exists():
        cfg.config = str(ROOT / cfg.config)
    model, base = parse([cfg.config])
    with user_errors():
        configurator.check_folder(Path(cfg.records).parent)
        lock_folder(Path(cfg.out_dir))
    for variant in cfg.variants:  # what cannot be trained shows before the first training
        parse([cfg.config, *options(cfg, base, Job(variant, 1.0, 1))])
    study(cfg, base, model.block_size)


if __name__ == "__main__":
    configurator.run(main)
