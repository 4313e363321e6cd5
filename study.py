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
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoint import load_checkpoint, load_model
from model import ModelConfig
from records import fingerprint, newest, read_records
from shards import lock_folder, replacing
from train import DIVERGED, TrainConfig

ROOT = Path(__file__).resolve().parent
RATES = ("learning_rate", "prior_lr", "ssmax_lr")
# the passkey test, but for what a part of the protocol changes about it
PLAIN = {"seeds": [1, 2, 3], "depths": 20, "filler": "passkey", "wording": "passkey", "window_attention": 0, "set": []}


class Variant(NamedTuple):
    """One row of the study."""

    label: str
    seeds: int  # trainings: the first so many of the seeds
    options: str  # what makes the config this variant
    base: str = ""  # the encoding whose rate it takes; none: its own is searched


PES = {"nope": "NoPE", "sinusoidal": "sinusoidal", "rope": "RoPE", "alibi": "ALiBi", "ggd": "GGD-BAM"}
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
        ("slopes", "ALiBi's slopes at the start", 1, "--theta_alpha=-1.386,-2.773,-4.159,-5.545 --theta_beta=1"),
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
            raise ValueError(f"variants has {', '.join(sorted(unknown))}; it may hold {', '.join(VARIANTS)}")
        for name in ("variants", "seeds", "rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; give at least one, and none twice")
        if min(*self.rates, self.workers) <= 0:
            raise ValueError("rates and workers must be above 0")
        if missing := {VARIANTS[name].base for name in self.variants} - {"", *self.variants}:
            raise ValueError(f"these variants take the rate of {', '.join(sorted(missing))}; name it too")


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
        fail(f"{shlex.join(command)} ended with status {done.returncode}; start the study again to continue")
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
        if saved["model_config"] != asdict(model) or any(saved["train_config"].get(k) != v for k, v in now.items()):
            fail(f"{folder} holds a run of other options; move it away, or choose another --out_dir")
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
        words = [f"--{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in config.items()]
        lengths = {m: m * trained for m in multiples}
        call(cfg, "eval_passkey.py", run, f"--lengths={','.join(map(str, lengths.values()))}", *words, "--resume")
        found = read_records(run / "eval" / "passkey.jsonl")  # of all tests, the newest last
        found = {r["length"]: r["correct"] / r["n"] for r in found if config.items() <= r["config"].items()}
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
    contexts = ",".join(str(m * trained) for m in (1, 4, 16, 32))  # the longest held-out documents have 56x
    call(cfg, "eval_downstream.py", run, f"--contexts={contexts}", "--resume")
    if first:
        tasks = "--tasks=niah_single_1,niah_single_2,niah_single_3"
        lengths = ",".join(str(m * trained) for m in ((4, 16, 64) if retrieves else (4,)))
        call(cfg, "eval_ruler.py", run, tasks, f"--lengths={lengths}", "--samples=20", "--resume")


def far_heads(run: Path) -> list[str]:
    """The anti-local heads of a run, as --set takes them, to make them uniform."""
    betas = load_model(run)[0].prior_values().get("theta_beta", [])
    return [f"{i}.{h}.theta_beta=0" for i, layer in enumerate(betas) for h, beta in enumerate(layer) if beta < 0]


def records_of(cfg: StudyConfig, job: Job, chosen: bool) -> Iterator[dict]:
    """What is known of a run: its training and, at the chosen rate, the newest record of each of its evaluations."""
    folder, about, end = job.folder(cfg), job._asdict(), log_of(cfg, job)[-1]
    saved = load_checkpoint(folder)
    numbers = {name: end[name] for name in ("step", "val", "val_1x", "val_2x", "val_4x", "seconds")}
    numbers |= {name: saved[name] for name in ("commit", "train_config", "model_config")}
    numbers |= {name: end[name] for name in ("theta_alpha", "theta_beta", "theta_mu", "s") if name in end}
    yield about | {"metric": "training", "chosen": chosen, "loss": final_loss(cfg, job)} | numbers
    weights = fingerprint(load_model(folder)[0]) if chosen else None
    files = sorted((folder / "eval").glob("*.jsonl")) if chosen else ()
    found = [r for file in files for r in read_records(file)]
    for record in newest(r for r in found if r["weights"] == weights or r["config"].get("set")):
        left_out = ("checkpoint", "model_config", "train_config", "step", "commit")  # the training's record has them
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
            tried = train_all([Job(n, r, seed) for n in own for r in ([rate[n]] if n in rate else cfg.rates)])
            by_loss = sorted(tried, key=lambda job: final_loss(cfg, job))
            best = [next(job for job in by_loss if job.variant == n) for n in own if n in {j.variant for j in tried}]
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
