"""The laptop study: what each encoding finds in long texts, by results/PROTOCOL.md.

python study.py --workers=2                            # start, or continue where it stopped
python study.py --seeds=1 --variants=rope,ggd_ssmax    # a part of it
python study.py --tables                               # tables and pictures, from results/

With the first seed each of the ten encodings is trained at every rate. The one with the lowest loss
on its last windows, which no step saw before, is its rate for all seeds and for what varies it. The
work is done by the scripts that anyone can call: each command is printed before it runs. A variant
and a seed are a row; when it is trained and evaluated, its records are added to one file. What that
file holds is not done again, also on another machine.
"""

import configurator
from configurator import fail, user_errors

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from data import lock_folder, replacing
from model import ModelConfig
from runs import append_record, fingerprint, load_checkpoint, load_model, newest, read_records
from train import DIVERGED, TrainConfig

ROOT = Path(__file__).resolve().parent


class Variant(NamedTuple):
    """One row of the study."""

    label: str
    seeds: int  # trainings: the first so many of the seeds
    options: str  # what makes the config this variant
    base: str = ""  # the encoding whose rate it takes; none: its own is searched


# s begins at 1 / ln 256: about as sharp as plain softmax
PLAIN = "--ssmax=false --virtual_length=1 --ssmax_init=0.18"
SSMAX = "--ssmax=true --virtual_length=1 --ssmax_init=0.18"
VIRTUAL = "--ssmax=true --virtual_length=1000 --ssmax_init=0.12"
FULL = f"--pe=ggd {SSMAX}"  # the paper's method
WINDOWS = (
    "--theta_alpha=-3.24,-8.79,-12.88,-16.64,-3.24,-8.79,-12.88,-16.64,-3.24,-16.64,0,0"
    " --theta_beta=8,8,8,8,8,8,8,8,8,8,-1,-2"
)
SLOPES = "--theta_alpha=-1.386,-2.773,-4.159,-5.545 --theta_beta=1"
ENCODINGS = {
    "nope": Variant("NoPE", 3, f"--pe=nope {PLAIN}"),
    "sinusoidal": Variant("sinusoidal", 3, f"--pe=sinusoidal {PLAIN}"),
    "rope": Variant("RoPE", 3, f"--pe=rope {PLAIN}"),
    "alibi": Variant("ALiBi", 3, f"--pe=alibi {PLAIN}"),
    "ggd": Variant("GGD-BAM", 3, f"--pe=ggd {PLAIN}"),
    "nope_ssmax": Variant("NoPE, SSMax", 3, f"--pe=nope {SSMAX}"),
    "sinusoidal_ssmax": Variant("sinusoidal, SSMax", 3, f"--pe=sinusoidal {SSMAX}"),
    "rope_ssmax": Variant("RoPE, SSMax", 3, f"--pe=rope {SSMAX}"),
    "alibi_ssmax": Variant("ALiBi, SSMax", 5, f"--pe=alibi {SSMAX}"),
    "ggd_ssmax": Variant("GGD-BAM, SSMax", 5, FULL),
    "ggd_virtual": Variant("GGD-BAM, virtual length", 5, f"--pe=ggd {VIRTUAL}", "ggd_ssmax"),
    "alibi_virtual": Variant("ALiBi, virtual length", 3, f"--pe=alibi {VIRTUAL}", "alibi_ssmax"),
    "rope_virtual": Variant("RoPE, virtual length", 3, f"--pe=rope {VIRTUAL}", "rope_ssmax"),
    "nope_virtual": Variant("NoPE, virtual length", 3, f"--pe=nope {VIRTUAL}", "nope_ssmax"),
}
ABLATIONS = {
    name: Variant(f"GGD-BAM, SSMax, {change}", seeds, f"{FULL} {options}", "ggd_ssmax")
    for name, change, seeds, options in (
        ("beta_from_0", "theta_beta at least 0", 5, "--theta_beta_min=0"),
        ("content", "SSMax on the content only", 3, "--ssmax_scales=content"),
        ("windows", "windows in the first layers at the start", 1, WINDOWS),
        ("mu", "mu learned", 1, "--theta_learned=alpha,beta,mu"),
        ("slopes", "ALiBi's slopes at the start", 1, SLOPES),
        ("fixed", "theta stays 0", 1, "--theta_learned="),
    )
}
LONGER = {  # as the protocol says: each has a seed that has not learned the task
    f"{name}_long": Variant(
        f"{ENCODINGS[name].label}, twice the steps",
        3,
        f"{ENCODINGS[name].options} --max_steps=6400",
        ENCODINGS[name].base or name,
    )
    for name in ("rope", "nope_ssmax", "rope_ssmax", "rope_virtual", "nope_virtual")
}
VARIANTS = ENCODINGS | LONGER | ABLATIONS


@dataclass
class StudyConfig:
    """What to train and ask."""

    config: str = "config/ggd_bam_cpu.py"  # of every training
    variants: tuple[str, ...] = tuple(VARIANTS)  # rows of the study
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # of the trainings; a row may have fewer
    rates: tuple[float, ...] = (1.0, 0.33)  # times the three learning rates of the config
    workers: int = 1  # commands at a time; with several each has one thread
    out_dir: str = "out/study"  # folder of all runs
    records: str = "out/study/study.jsonl"  # all that was found; its rows are not done again
    tables: bool = False  # only make the tables and pictures from the records in results/

    def __post_init__(self):
        if unknown := ", ".join(set(self.variants) - set(VARIANTS)):
            raise ValueError(f"variants has {unknown}; it may hold {', '.join(VARIANTS)}")
        for name in ("variants", "seeds", "rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; give at least one, and none twice")
        if min(*self.rates, self.workers) <= 0:
            raise ValueError("rates and workers must be above 0")
        bases = {VARIANTS[name].base for name in self.variants}
        if missing := ", ".join(bases - {"", *self.variants}):
            raise ValueError(f"these variants take the rate of {missing}; name it too")


class Job(NamedTuple):
    """One training."""

    variant: str
    rate: float
    seed: int

    def folder(self, cfg: StudyConfig) -> Path:
        return Path(cfg.out_dir) / f"{self.variant}_x{self.rate:g}_s{self.seed}"


# ---- training


def call(cfg: StudyConfig, script: str, *words: object) -> int:
    """Run one of the scripts and return its status, 0 or DIVERGED; any other ends the study. If
    others run beside it, it has one thread and writes into the log."""
    command = shlex.join([script, *map(str, words)])
    print(f"$ python {command}", flush=True)
    arguments = [sys.executable, str(ROOT / script), *map(str, words)]
    if cfg.workers == 1:
        status = subprocess.run(arguments).returncode
    else:
        threads = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(Path(cfg.out_dir) / "log.txt", "ab") as log:
            status = subprocess.run(arguments, env=threads, stdout=log, stderr=log).returncode
    if status == 130:  # Ctrl-C reaches the script too: it has saved its work
        sys.exit(130)
    if status not in (0, DIVERGED):
        fail(f"{command} ended with status {status}; start the study again to continue")
    return status


def options(cfg: StudyConfig, base: TrainConfig, job: Job) -> list[str]:
    """The words that make the config file this job."""
    names = ("learning_rate", "prior_lr", "ssmax_lr")
    rates = [f"--{name}={job.rate * getattr(base, name):.3g}" for name in names]
    variant = shlex.split(VARIANTS[job.variant].options)
    return [f"--seed={job.seed}", *rates, *variant, f"--out_dir={job.folder(cfg)}"]


def parse(words: list[str]) -> list:
    """ModelConfig and TrainConfig of a command line of train.py."""
    return configurator.parse([ModelConfig, TrainConfig], words, None, positional="config")[0]


def train(cfg: StudyConfig, base: TrainConfig, job: Job) -> bool:
    """Train, or continue what stopped; nothing if it is finished. False if it diverged."""
    words, folder, step = [cfg.config, *options(cfg, base, job)], job.folder(cfg), 0
    model, training = map(asdict, parse(words))
    steps = training["max_steps"]
    if (folder / "last.pt").exists():
        with user_errors():
            saved = load_checkpoint(folder)
        step, log = saved["step"], read_log(cfg, job)
        compared = training.keys() - {"resume", "out_dir", "device", "dtype"}
        same = all(saved["train_config"].get(name) == training[name] for name in compared)
        if saved["model_config"] != model or not same:
            fail(f"{folder} holds a run of other options; move it away, or change --out_dir")
        if step >= steps and log and log[-1]["step"] == step:
            return True
    if not 0 < step < steps:  # nothing to continue
        shutil.rmtree(folder, ignore_errors=True)
        step = 0
    return call(cfg, "train.py", *words, *["--resume"] * (step > 0)) != DIVERGED


def read_log(cfg: StudyConfig, job: Job) -> list[dict]:
    return read_records(job.folder(cfg) / "log.jsonl")


def final_loss(cfg: StudyConfig, job: Job) -> float:
    """The mean training loss over the last quarter of the steps, each of whose windows is new."""
    log = read_log(cfg, job)
    losses = [r["loss"] for r in log if r["step"] > 0.75 * log[-1]["step"]]
    return math.inf if None in losses else float(np.mean(losses))


# ---- evaluation

PASSKEY = {"seeds": [1, 2, 3], "depths": 20, "filler": "passkey", "wording": "passkey"}
PASSKEY |= {"digits": 5, "window_attention": 0, "set": []}  # the plain test
LADDER = ((1, 2, 4), (8, 16), (64,))  # training lengths; stops after a step without a key found


def evaluate(cfg: StudyConfig, job: Job) -> list[dict]:
    """Ask a run all that the protocol asks and that its records do not answer yet, and return these
    records."""
    run, records, first = job.folder(cfg), [], job.seed == cfg.seeds[0]
    model, _ = load_model(run)
    trained, weights = model.cfg.block_size, fingerprint(model)

    def test(metric: str, multiples: Iterable[int], **options: object) -> dict[int, dict]:
        """The newest record at each of these multiples of the training length."""
        sizes = {multiple * trained: multiple for multiple in multiples}
        downstream = metric == "perplexity"
        words = {"contexts" if downstream else "lengths": list(sizes)} | options
        joined = {k: ",".join(map(str, v)) if type(v) is list else v for k, v in words.items()}
        script = f"eval_{'downstream' if downstream else metric}.py"
        call(cfg, script, run, *(f"--{k}={v}" for k, v in joined.items()), "--resume")
        tasks, answers = options.pop("tasks", [None]), {}
        for r in read_records(run / "eval" / f"{metric}.jsonl"):
            config = r["config"]
            size = config.get("context") if downstream else r["length"]
            asked = options.items() <= config.items() and r.get("task") in tasks
            same = r["weights"] == weights or config.get("set")  # else of an earlier checkpoint
            if asked and same and size in sizes:
                records.append(r)
                answers[sizes[size]] = r
        return answers

    def passkey(multiples: Iterable[int], **options: object) -> dict[int, float]:
        answers = test("passkey", multiples, **PASSKEY | options)
        return {multiple: r["correct"] / r["n"] for multiple, r in answers.items()}

    def climb(**options: object) -> dict[int, float]:
        shares = {}
        for step in LADDER:
            shares |= passkey(step, **options)
            if not shares.get(step[-1]):
                break
        return shares

    shares = climb()
    near = [multiple for multiple in (1, 4, 16) if multiple in shares]
    passkey(near, filler="unseen")
    passkey(near, wording="vault")
    if job.variant.startswith("rope"):
        climb(window_attention=trained)
    retrieves = shares.get(16, 0) >= 0.5
    if shares.get(64, 0) >= 0.5:
        front = first and job.variant in ENCODINGS  # far heads in lower layers make it hours
        passkey((256, 500, 1000) if front else (256,), seeds=[1])
        passkey((4096,) if front else (500,), seeds=[1], depths=5)
    betas = enumerate(model.prior_values().get("theta_beta", []))
    far = [f"{i}.{h}.theta_beta=0" for i, heads in betas for h, b in enumerate(heads) if b < 0]
    if retrieves and far:  # the anti-local heads made uniform
        passkey((16, 64), set=far)
    test("perplexity", (1, 4, 16, 32))  # the longest held-out documents have 56x
    if first:
        tasks = ["niah_single_1", "niah_single_2", "niah_single_3"]
        test("ruler", (4, 16, 64) if retrieves else (4,), tasks=tasks, samples=20)
    return records


FACTS = ("commit", "train_config", "model_config")  # the same in all records of a training
ENDS = ("step", "val", "val_1x", "val_2x", "val_4x", "seconds")
ENDS += ("theta_alpha", "theta_beta", "theta_mu", "s")


def training_record(cfg: StudyConfig, job: Job, chosen: bool) -> dict:
    saved, end = load_checkpoint(job.folder(cfg)), read_log(cfg, job)[-1]
    record = {"metric": "training", "chosen": chosen, "loss": final_loss(cfg, job)}
    return record | {k: end[k] for k in ENDS if k in end} | {k: saved[k] for k in FACTS}


def study(cfg: StudyConfig, base: TrainConfig) -> None:
    """All rows: first those that search their rate, then the others, seed by seed."""
    file = Path(cfg.records)
    trained = [r for r in read_records(file) if r["metric"] == "training"]
    rate = {r["variant"]: r["rate"] for r in trained if r["chosen"]}
    done = {(r["variant"], r["seed"]) for r in trained}
    lock = Lock()

    def row(name: str, seed: int) -> None:
        known = VARIANTS[name].base or name
        if (name, seed) in done or (known not in rate and (known, cfg.seeds[0]) in done):
            return  # it is there, or its encoding diverged at every rate
        jobs = [Job(name, x, seed) for x in ([rate[known]] if known in rate else cfg.rates)]
        jobs = [job for job in jobs if train(cfg, base, job)]
        records = []
        if jobs:
            best = min(jobs, key=lambda job: final_loss(cfg, job))
            for r in newest(evaluate(cfg, best)):
                kept = {k: r[k] for k in r if k not in (*FACTS, "checkpoint", "step")}
                records.append(best._asdict() | kept)
            rate.setdefault(name, best.rate)
        for job in jobs:  # last: they say that the row is whole
            records.append(job._asdict() | training_record(cfg, job, job is best))
        with lock:
            done.add((name, seed))
            for record in records:
                append_record(file, record)

    if base.prepare and not Path(base.data).exists():  # once, not by two trainings at a time
        call(cfg, "prepare_fineweb.py", *shlex.split(base.prepare), f"--out_dir={base.data}")
    pool = ThreadPoolExecutor(cfg.workers)
    try:
        own = {name: cfg.seeds[: variant.seeds] for name, variant in VARIANTS.items()}
        rows = [(name, s) for s in cfg.seeds for name in cfg.variants if s in own[name]]
        searched = [(name, s) for name, s in rows if s == cfg.seeds[0] and not VARIANTS[name].base]
        for todo in (searched, [r for r in rows if r not in searched]):
            for done_row in as_completed([pool.submit(row, *r) for r in todo]):
                done_row.result()  # raises what ended it
    finally:  # after a mistake or Ctrl-C begin nothing new, and wait for what saves its work
        pool.shutdown(cancel_futures=True)
    print(f"\nrecords in {cfg.records}")


# ---- tables and pictures

LABELS = {}  # in the order of the tables; a window of attention is a row of its own
for name, variant in VARIANTS.items():
    LABELS |= {name: variant.label, f"{name}_window": f"Local {variant.label}"}
FRONT = [name for name in LABELS if name in ENCODINGS and not VARIANTS[name].base]
FRONT += ["rope_window", "ggd_virtual"]
TESTS = {  # filler, wording, is a parameter changed? -> heading of a passkey test, in order
    ("passkey", "passkey", False): "",
    ("unseen", "passkey", False): "unseen filler, ",
    ("passkey", "vault", False): "held-out frame, ",
    ("passkey", "passkey", True): "far heads uniform, ",
}


def column_of(r: dict) -> tuple | None:
    """(table, place, length, heading) of the column in which a record stands."""
    if r["metric"] == "passkey":
        config, n = r["config"], r["length"]
        texts = config["filler"], config["wording"], bool(config["set"])
        heading = f"{TESTS[texts]}{n:,} ({n / r['training_length']:g}x)"
        return "texts" if TESTS[texts] else "plain", list(TESTS).index(texts), n, heading
    if r["metric"] == "perplexity" and (n := r["config"].get("context")):
        return "perplexity", 0, n, f"context {n:,}"
    if r["metric"] == "ruler" and r["n"]:
        return "ruler", r["task"], r["length"], f"{r['task']}, {r['length']:,}"
    return None


def read_study(file: Path) -> list[dict]:
    """The newest records. Where no key was found, the longer texts that were not asked count as 0,
    as the protocol says."""
    if not (records := newest(read_records(file))):
        raise ValueError(f"{file} has no records; run the evaluations first")
    asked = defaultdict(dict)
    for r in records:
        if r.get("config", {}).get("window_attention"):
            r["variant"] += "_window"
        if (column := column_of(r)) and column[0] == "plain":
            asked[r["variant"], r["seed"]][r["length"]] = r
    for run in asked.values():
        n, last = max(run.items())
        lengths = [multiple * last["training_length"] for step in LADDER for multiple in step]
        records += [last | {"length": m} for m in lengths if m > n and not last["correct"]]
    return records


def group(records: list[dict], tables: list[str], rows: Iterable[str]) -> dict:
    """{variant: {column: records}} in the order of the labels."""
    cells = defaultdict(lambda: defaultdict(list))
    for r in records:
        if (column := column_of(r)) and r["variant"] in rows and column[0] in tables:
            cells[r["variant"]][column].append(r)
    order = list(LABELS)
    return {name: dict(sorted(cells[name].items())) for name in sorted(cells, key=order.index)}


def markdown(rows: Iterable[Iterable[object]]) -> str:
    """A table whose first row is the header."""
    header, *body = [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body))


def spread(values: list[float], digits: int = 0) -> str:
    """Mean [least, most]; one number where they are the same."""
    low, mean, high = (f"{x:.{digits}f}" for x in (min(values), np.mean(values), max(values)))
    return mean if low == high else f"{mean} [{low}, {high}]"


def values_of(records: list[dict]) -> list[float]:
    """Perplexities, or right answers in percent."""
    return [r["perplexity"] if "perplexity" in r else 100 * r["correct"] / r["n"] for r in records]


def format_cell(records: list[dict], seeds: int) -> str:
    text = spread(values_of(records), 2 * ("perplexity" in records[0]))
    if "tokens_right" in records[0]:
        return f"{text} / {spread([100 * r['tokens_right'] for r in records])}"
    return text + f" ({len(records)} of {seeds})" * (len(records) < seeds)


MAIN = [name for name in LABELS if name not in ABLATIONS]


def cell_table(records: list[dict], tables: list[str], rows=LABELS, multiples=()) -> str:
    """A row a variant, a column a test and length; all lengths if no multiples are named."""
    cells = group(records, tables, rows)
    columns = sorted({column for row in cells.values() for column in row})
    if multiples:
        trained = next(r["training_length"] for r in records if "training_length" in r)
        columns = [c for c in columns if c[2] in [m * trained for m in multiples]]
    table = [["encoding", "seeds", *(heading for *_, heading in columns)]]
    for name, row in cells.items():
        seeds = max(map(len, row.values()))
        texts = [format_cell(row[c], seeds) if c in row else "" for c in columns]
        table.append([LABELS[name], seeds, *texts])
    return markdown(table)


PAIRS = (  # what the protocol compares: does the first find more keys than the second?
    ("ggd_ssmax", "alibi_ssmax"),
    ("ggd_ssmax", "beta_from_0"),
    ("ggd_ssmax", "ggd"),
    ("ggd_virtual", "ggd_ssmax"),
    ("ggd_virtual", "alibi_virtual"),
    ("ggd_ssmax", "content"),
)


def pair_table(records: list[dict]) -> str:
    """In how many training seeds the first of a pair finds more of as many keys, as many, fewer."""
    found = defaultdict(dict)
    for r in records:
        if (column := column_of(r)) and column[0] == "plain":
            found[r["variant"], r["length"], column[-1]][r["seed"]] = r
    columns = sorted({(n, heading) for _, n, heading in found})
    table = [["first : second", *(heading for _, heading in columns)]]
    for a, b in PAIRS:
        row = [f"{LABELS[a]} : {LABELS[b].removeprefix(f'{LABELS[a]}, ')}"]
        for column in columns:
            one, other = found[a, *column], found[b, *column]
            both = [(one[s], other[s]) for s in one.keys() & other.keys()]
            signs = [np.sign(x["correct"] - y["correct"]) for x, y in both if x["n"] == y["n"]]
            row.append("-".join(str(signs.count(x)) for x in (1, 0, -1)) if signs else "")
        if any(row[1:]):
            table.append(row)
    return markdown(table)


def rate_table(records: list[dict]) -> str:
    """The loss at every rate with the first seed, and with all seeds at the chosen rate."""
    trainings = [r for r in records if r["metric"] == "training"]
    rates, first = sorted({r["rate"] for r in trainings}), min(r["seed"] for r in trainings)
    table = [["encoding", *(f"x{rate:g}" for rate in rates), "chosen", "seeds", "loss"]]
    for name in LABELS:
        own = [r for r in trainings if r["variant"] == name]
        if chosen := [r for r in own if r["chosen"]]:
            at = {r["rate"]: f"{r['loss']:.3f}" for r in own if r["seed"] == first}
            row = [LABELS[name], *(at.get(rate, "") for rate in rates), f"x{chosen[0]['rate']:g}"]
            table.append([*row, len(chosen), spread([r["loss"] for r in chosen], 2)])
    return markdown(table)


def streaming_table(records: list[dict]) -> str:
    """Seconds, and MB above the loaded model, for one answer, by length and way of computing."""
    cells = {(r["way"], r["length"]): r for r in records if "error" not in r}
    ways = [w for w in ("plain", "dense", "exact", "skipping") if w in {way for way, _ in cells}]
    table = [["tokens", *(f"{unit}: {way}" for unit in ("seconds", "MB") for way in ways)]]
    for n in sorted({length for _, length in cells}):
        row = [cells.get((way, n)) for way in ways]
        seconds = [f"{r['seconds']:.2f}" if r else "" for r in row]
        table.append([f"{n:,}", *seconds, *(f"{r['bytes'] / 1e6:.0f}" if r else "" for r in row)])
    return markdown(table)


TABLES = {
    "front": lambda records: cell_table(records, ["plain"], FRONT, (1, 4, 16, 64, 500)),
    "passkey": lambda records: cell_table(records, ["plain"], MAIN),
    "texts": lambda records: cell_table(records, ["texts"]),
    "ablations": lambda records: cell_table(records, ["plain"], ["ggd_ssmax", *ABLATIONS]),
    "perplexity": lambda records: cell_table(records, ["perplexity"]),
    "ruler": lambda records: cell_table(records, ["ruler"]),
    "pairs": pair_table,
    "rates": rate_table,
    "streaming": streaming_table,
}


def draw(records: list[dict], table: str, ylabel: str, yscale: str) -> Figure:
    """Means by length, with a line as far as all seeds were asked, and a dot a seed."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis, cells = figure.subplots(), group(records, [table], ENCODINGS)
    for i, (name, row) in enumerate(cells.items()):
        pe, _, more = name.partition("_")
        place = ["nope", "sinusoidal", "rope", "alibi", "ggd"].index(pe)
        line = "os^Dv"[place] + {"": "--", "virtual": ":"}.get(more, "-")
        fill = {"": "none", "virtual": "left"}
        style = {"color": f"C{place}", "fillstyle": fill.get(more, "full")}
        x = np.array([n for _, _, n, _ in row]) * 1.03 ** (i - len(cells) / 2)  # side by side
        y = [values_of(records) for records in row.values()]
        mean, seeds = np.array([np.mean(values) for values in y]), np.array([*map(len, y)])
        whole = seeds == max(seeds)
        axis.plot(x[whole], mean[whole], line, label=LABELS[name], **style)
        axis.plot(x[~whole], mean[~whole], line[0], **style)
        axis.plot(np.repeat(x, seeds), np.concatenate(y), f"C{place}.", markersize=4, alpha=0.6)
    trained = next(r["model_config"]["block_size"] for r in records if r["metric"] == "training")
    axis.axvline(trained, color="grey", linewidth=1)
    axis.set(xscale="log", yscale=yscale, ylabel=ylabel)
    axis.set(title="mean, and a dot a training seed; without a line: the first seed")
    axis.set(xlabel=f"bytes (grey: the training length, {trained})")
    ticks = sorted({n for row in cells.values() for _, _, n, _ in row})
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45, fontsize=8)
    axis.xaxis.minorticks_off()
    if yscale == "log":
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter())
    figure.legend(loc="outside right center", fontsize=8, handlelength=4)
    return figure


def fill(page: str, results: Path) -> str:
    """The page with each table between its two lines, <!-- FILE: TABLE --> and <!-- end -->."""

    def make(place: re.Match) -> str:
        file, name = place.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name}; there are {', '.join(TABLES)}")
        table = TABLES[name](read_study(results / file))
        return f"<!-- {file}: {name} -->\n{table}\n<!-- end -->"

    places = r"<!-- (\S+): (\w+) -->\n(?:(?!<!--).*\n)*<!-- end -->"
    page, n = re.subn(places, make, page)
    if 2 * n != page.count("<!-- "):
        raise ValueError("each table needs the lines <!-- FILE: TABLE --> and <!-- end -->")
    return page


def write_tables(root: Path = ROOT) -> None:
    """Both pages and both pictures from root/results, or nothing if a file is missing."""
    results = root / "results"
    pages = [root / "README.md", results / "README.md"]
    texts = [fill(page.read_text(encoding="utf-8"), results) for page in pages]
    records = read_study(results / "study.jsonl")
    for file, picture in {
        "study_passkey.png": draw(records, "plain", "passkeys found (%)", "linear"),
        "study_perplexity.png": draw(records, "perplexity", "perplexity per byte", "log"),
    }.items():
        with replacing(results / file) as f:
            picture.savefig(f, format="png", dpi=150)
    for page, text in zip(pages, texts, strict=True):
        with replacing(page) as f:
            f.write(text.encode())
    print(f"wrote {', '.join(map(str, pages))} and the pictures in {results}")


def main() -> None:
    (cfg,), _ = configurator.parse([StudyConfig], sys.argv[1:], __doc__)
    if cfg.tables:
        with user_errors():
            return write_tables()
    if not Path(cfg.config).exists():
        cfg.config = str(ROOT / cfg.config)
    _, base = parse([cfg.config])
    with user_errors():
        configurator.check_folder(Path(cfg.records).parent)
        lock_folder(Path(cfg.out_dir))
    for variant in cfg.variants:  # what cannot be trained shows before the first training
        parse([cfg.config, *options(cfg, base, Job(variant, 1.0, 1))])
    study(cfg, base)


if __name__ == "__main__":
    configurator.run(main)
