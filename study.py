"""The laptop study: ten encodings and the paper's start, three seeds, the best of four learning rates, and ablations.

python study.py                                        # some two hours on two cores; goes on where it stopped
python study.py --seeds=1 --variants=rope,ggd_ssmax    # a part of it
python study.py --records=results/study.jsonl && python plot_priors.py --readme    # into the README

With the first seed every encoding is trained at every rate; the one with the lowest loss on its last windows, which no
step saw before, is its rate for all seeds. What is trained and evaluated stays, so nothing is done twice; all records
are collected in one file. The work is done by the scripts that anyone can call: each command is printed before it runs.
"""

import configurator
from configurator import fail, user_errors

import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoint import load_checkpoint, load_model
from model import ModelConfig
from records import fingerprint, newest, read_records
from shards import replacing
from train import DIVERGED, TrainConfig

ROOT = Path(__file__).resolve().parent
PES = {"nope": "NoPE", "sinusoidal": "sinusoidal", "rope": "RoPE", "alibi": "ALiBi", "ggd": "GGD-BAM"}
SSMAX = {"": "", "_ssmax": ", SSMax"}
LABELS = {f"{pe}{ending}": name + more for pe, name in PES.items() for ending, more in SSMAX.items()}
ENCODINGS = {
    f"{pe}{ending}": (f"--pe={pe}", f"--ssmax={'true' if ending else 'false'}") for pe in PES for ending in SSMAX
}
FULL = "ggd_ssmax"  # the paper's method, about which the ablations change something
UNIFORM = "start_uniform"  # the same with theta = 0 at the start, as in the paper: an eleventh beside the encodings
LABELS |= {UNIFORM: f"{LABELS[FULL]}, uniform start"}
ENCODINGS |= {UNIFORM: (*ENCODINGS[FULL], "--theta_alpha=0", "--theta_beta=0")}
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
RATES = ("learning_rate", "prior_lr", "ssmax_lr")
CONDITIONS = ("--filler=unseen", "--wording=reworded")  # passkey tests whose texts are in no exercise


@dataclass
class StudyConfig:
    """What to train and ask. Raises ValueError, in one sentence, if it makes no sense."""

    config: str = "config/cpu_study.py"  # of every training
    variants: tuple[str, ...] = (*ENCODINGS, *ABLATIONS)  # encodings, and what is changed about ggd_ssmax
    seeds: tuple[int, ...] = (1, 2, 3)  # of the trainings
    rates: tuple[float, ...] = (0.1, 0.33, 1.0, 3.0)  # times the three learning rates of the config
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 64)  # lengths of the passkey test, in units of the training length
    longest: tuple[int, ...] = (256, 1000)  # lengths for ggd_ssmax and start_uniform alone, likewise
    samples: int = 20  # prompts a length: depths of the passkey test, samples of RULER (first seed only)
    out_dir: str = "out/study"  # folder of all runs
    records: str = "out/study/study.jsonl"  # all that was found; results/study.jsonl is what the README shows

    def __post_init__(self):
        known = {**ENCODINGS, **ABLATIONS}
        if unknown := set(self.variants) - set(known):
            raise ValueError(f"variants has {', '.join(sorted(unknown))}; it may hold {', '.join(known)}")
        self.variants = tuple(name for name in known if name in self.variants)  # in their order
        if set(self.variants) & set(ABLATIONS) and FULL not in self.variants:
            raise ValueError(f"the ablations need {FULL}, whose rate they take; name it too")
        for name in ("variants", "seeds", "rates", "multiples"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; give at least one, and none twice")
        self.seeds = tuple(sorted(self.seeds))
        if min(self.rates) <= 0 or min(*self.multiples, *self.longest, self.samples) < 1:
            raise ValueError("rates must be above 0; multiples, longest and samples at least 1")


class Job(NamedTuple):
    """One training."""

    variant: str
    rate: float
    seed: int

    def folder(self, cfg: StudyConfig) -> Path:
        return Path(cfg.out_dir) / f"{self.variant}_x{self.rate:g}_s{self.seed}"


def call(script: str, *words: object) -> int:
    """Run one of the scripts and return its status, 0 or train.py's DIVERGED; any other, or Ctrl-C, ends the study."""
    words = [script, *map(str, words)]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    process, status = subprocess.Popen([sys.executable, str(ROOT / script), *words[1:]]), None
    while status is None:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the script has got it too: it saves its work and ends
            continue
    if status == 130:
        sys.exit(130)
    if status not in (0, DIVERGED):
        fail(f"{script} ended with status {status}; see above, then start the study again: it goes on from here")
    return status


def options(cfg: StudyConfig, base: TrainConfig, job: Job) -> list[str]:
    """The words that make the config file this job."""
    rates = [f"--{name}={job.rate * getattr(base, name):.3g}" for name in RATES]
    changes = ENCODINGS.get(job.variant) or (*ENCODINGS[FULL], *ABLATIONS[job.variant][1:])
    return [f"--seed={job.seed}", *rates, *changes, f"--out_dir={job.folder(cfg)}"]


def parse(words: list[str]) -> list:
    """ModelConfig and TrainConfig of a command line of train.py."""
    return configurator.parse([ModelConfig, TrainConfig], words, None, positional="config")[0]


def log_of(cfg: StudyConfig, job: Job) -> list[dict]:
    return read_records(job.folder(cfg) / "log.jsonl")


def train(cfg: StudyConfig, base: TrainConfig, job: Job) -> bool:
    """Train, or go on where a training stopped; nothing if it is finished. False if the loss diverged."""
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
    if not 0 < step < base.max_steps:  # nothing to go on from
        shutil.rmtree(folder, ignore_errors=True)
        step = 0
    return call("train.py", *words, *["--resume"] * (step > 0)) != DIVERGED


def final_loss(cfg: StudyConfig, job: Job) -> float:
    """The mean training loss over the last quarter of the steps. Every window is read once, so none was seen before."""
    log = log_of(cfg, job)
    losses = [r["loss"] for r in log if r["step"] > 0.75 * log[-1]["step"]]
    return math.inf if None in losses else float(np.mean(losses))


def evaluate(cfg: StudyConfig, runs: list[Path], trained: int, first: bool) -> None:
    """Passkey, perplexity and, for the first seed, RULER's first task, which is slow: all runs of a seed at once. What
    is in their records already is kept."""

    def lengths(multiples: tuple[int, ...]) -> str:
        return "--lengths=" + ",".join(str(m * trained) for m in multiples)

    depths = f"--depths={cfg.samples}"
    call("eval_passkey.py", *runs, lengths(cfg.multiples), depths, "--resume")
    for condition in CONDITIONS:
        call("eval_passkey.py", *runs, lengths((4, 16)), condition, depths, "--resume")
    call("eval_downstream.py", *runs, "--resume")
    if first:
        ruler = ("--tasks=niah_single_1", f"--samples={cfg.samples}", lengths((4, 8, 16)))
        call("eval_ruler.py", *runs, *ruler, "--resume")
    if cfg.longest and (far := [run for run in runs if run.name.startswith((f"{FULL}_x", f"{UNIFORM}_x"))]):
        call("eval_passkey.py", *far, lengths(cfg.longest), depths, "--resume")


def asked(cfg: StudyConfig, record: dict, weights: str) -> bool:
    """Is this record of an evaluation one of the study, and not of other weights or options in the same file?"""
    fixed = {"depths": cfg.samples, "seeds": [1], "samples": cfg.samples, "window": 0, "exact": False}
    config = record["config"] if record["metric"] != "perplexity" else {"seeds": [1]}
    return record["weights"] == weights and all(config.get(k, v) == v for k, v in fixed.items())


def records_of(cfg: StudyConfig, job: Job, chosen: bool) -> Iterator[dict]:
    """What is known of a run: its training and, at the chosen rate, the newest record of each of its evaluations."""
    folder, about, end = job.folder(cfg), job._asdict(), log_of(cfg, job)[-1]
    saved = load_checkpoint(folder)
    numbers = {name: end[name] for name in ("step", "val", "val_1x", "val_2x", "val_4x", "seconds")}
    numbers |= {name: saved[name] for name in ("commit", "train_config", "model_config")}
    yield about | {"metric": "training", "chosen": chosen, "loss": final_loss(cfg, job)} | numbers
    weights = fingerprint(load_model(folder)[0]) if chosen else None
    files = sorted((folder / "eval").glob("*.jsonl")) if chosen else ()
    for record in newest(r for file in files for r in read_records(file) if asked(cfg, r, weights)):
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
    """All trainings and evaluations, seed by seed; the records are written anew after each seed."""
    jobs: dict[Job, bool] = {}
    chosen: dict[str, float] = {}
    for seed in cfg.seeds:
        runs = []
        for variant in cfg.variants:
            if variant in ABLATIONS and seed != cfg.seeds[0]:
                continue
            known = chosen.get(FULL if variant in ABLATIONS else variant)
            jobs_of = [Job(variant, rate, seed) for rate in ((known,) if known else cfg.rates)]
            tried = [job for job in jobs_of if train(cfg, base, job)]
            if not tried:
                print(f"{variant} diverged at every rate with seed {seed}; it is left out")
                continue
            best = min(tried, key=lambda job: final_loss(cfg, job))
            chosen[variant] = best.rate
            jobs |= {job: job == best for job in tried}
            runs.append(best.folder(cfg))
        if runs:
            evaluate(cfg, runs, trained, first=seed == cfg.seeds[0])
        collect(cfg, jobs)
    print(f"\nrecords in {cfg.records}")


def main() -> None:
    (cfg,), _ = configurator.parse([StudyConfig], sys.argv[1:], __doc__)
    if not Path(cfg.config).exists():
        cfg.config = str(ROOT / cfg.config)
    model, base = parse([cfg.config])
    with user_errors():
        configurator.check_folder(Path(cfg.out_dir))
        configurator.check_folder(Path(cfg.records).parent)
    for variant in cfg.variants:  # what cannot be trained shows before the first training
        parse([cfg.config, *options(cfg, base, Job(variant, 1.0, 1))])
    study(cfg, base, model.block_size)


if __name__ == "__main__":
    configurator.run(main)
