"""The laptop study: ten encodings, three seeds, each at the best of the same three learning rates, and ablations.

python study.py                                        # hours on two cores; after Ctrl-C the same command goes on
python study.py --seeds=1 --variants=rope,ggd_ssmax    # a part of it
python plot_priors.py --readme                         # its records as the README's tables and pictures

With the first seed every encoding is trained at every rate; the one with the lowest validation loss at the end is its
rate for all seeds. What is trained and evaluated stays, so nothing is done twice; all records are collected in one
file. The work is done by the scripts that anyone can call: each command is printed before it runs.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import configurator
from checkpoint import load_checkpoint
from configurator import fail, user_errors
from model import ModelConfig
from records import read_records
from shards import replacing
from train import TrainConfig

ROOT = Path(__file__).resolve().parent
PES = ("nope", "sinusoidal", "rope", "alibi", "ggd")
ENCODINGS = {
    f"{pe}{'_ssmax' * ssmax}": (f"--pe={pe}", f"--ssmax={'true' if ssmax else 'false'}")
    for pe in PES
    for ssmax in (False, True)
}
FULL = "ggd_ssmax"  # the paper's method, of which the ablations take something away
ABLATIONS = {  # what each changes, at the full method's rate and with the first seed
    "start_uniform": ("--theta_alpha=0", "--theta_beta=0"),
    "start_global": ("--theta_alpha=-3.24,-16.64,0,0", "--theta_beta=8,8,-1,-2"),
    "start_wide": ("--theta_alpha=" + "-3.24,-11.09,-16.64,-25.42," * 2 + "-3.24,-16.64,0,0",),
    "learned_alibi": ("--theta_alpha=-1.386,-2.773,-4.159,-5.545", "--theta_beta=1", "--theta_learned=alpha"),
    "theta_fixed": ("--theta_learned=",),
    "s_1": ("--ssmax_init=1",),
    "prior_lr_1e-2": ("--prior_lr=1e-2",),
    "prior_lr_1e-1": ("--prior_lr=1e-1",),
}
RATES = ("learning_rate", "prior_lr", "ssmax_lr")
CONDITIONS = ("--filler=unseen", "--wording=reworded")  # passkey tests that no exercise resembles


@dataclass
class StudyConfig:
    """What to train and ask. Raises ValueError, in one sentence, if it makes no sense."""

    config: str = "config/cpu_study.py"  # of every training
    variants: tuple[str, ...] = (*ENCODINGS, *ABLATIONS)  # encodings, then what is changed about ggd_ssmax
    seeds: tuple[int, ...] = (1, 2, 3)  # of the trainings
    rates: tuple[float, ...] = (0.33, 1.0, 3.0)  # what the config's three learning rates are multiplied by, in turn
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 64)  # lengths of the passkey test, in units of the training length
    longest: tuple[int, ...] = (256, 1000)  # lengths for ggd_ssmax alone, likewise
    samples: int = 20  # prompts a length: depths of the passkey test, samples of RULER
    out_dir: str = "out/study"  # folder of all runs
    records: str = "results/study.jsonl"  # what was found

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
        if min(self.rates) <= 0 or min(*self.multiples, *self.longest, self.samples) < 1:
            raise ValueError("rates must be above 0; multiples, longest and samples at least 1")


class Job(NamedTuple):
    """One training."""

    variant: str
    rate: float
    seed: int

    def folder(self, cfg: StudyConfig) -> Path:
        return Path(cfg.out_dir) / f"{self.variant}_x{self.rate:g}_s{self.seed}"


def call(script: str, *words: object) -> None:
    """Run one of the scripts; its failure, or Ctrl-C in it, ends the study."""
    words = [script, *map(str, words)]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, str(ROOT / script), *words[1:]]).returncode
    if status == 130:
        sys.exit(130)
    if status:
        fail(f"{script} ended with status {status}; see above, then start the study again: it goes on from here")


def training_options(cfg: StudyConfig, base: TrainConfig, job: Job) -> list[str]:
    """The words that make the config file this job."""
    rates = [f"--{name}={job.rate * getattr(base, name):.3g}" for name in RATES]
    changes = ENCODINGS.get(job.variant) or (*ENCODINGS[FULL], *ABLATIONS[job.variant])
    return [f"--seed={job.seed}", *rates, *changes, f"--out_dir={job.folder(cfg)}"]


def train(cfg: StudyConfig, base: TrainConfig, job: Job) -> None:
    """Train, or go on where a training stopped; nothing if it is finished."""
    last = job.folder(cfg) / "last.pt"
    if last.exists():
        with user_errors():
            if load_checkpoint(last)["step"] >= base.max_steps:
                return
    call("train.py", cfg.config, *training_options(cfg, base, job), *["--resume"] * last.exists())


def final_loss(cfg: StudyConfig, job: Job) -> float:
    """The validation loss at the end of a training."""
    return read_records(job.folder(cfg) / "log.jsonl")[-1]["val"]


def evaluate(cfg: StudyConfig, runs: list[Path], trained: int) -> None:
    """Passkey, perplexity and RULER's first task, for a group of runs at once; what is in their records is kept."""

    def lengths(multiples: tuple[int, ...]) -> str:
        return "--lengths=" + ",".join(str(m * trained) for m in multiples)

    depths = f"--depths={cfg.samples}"
    call("eval_passkey.py", *runs, lengths(cfg.multiples), depths, "--resume")
    for condition in CONDITIONS:
        call("eval_passkey.py", *runs, lengths((4, 16)), condition, depths, "--resume")
    call("eval_downstream.py", *runs, "--resume")
    ruler = ("--tasks=niah_single_1", f"--samples={cfg.samples}", lengths((4, 8, 16)))
    call("eval_ruler.py", *runs, *ruler, "--resume")
    if cfg.longest and (full := [run for run in runs if run.name.startswith(f"{FULL}_x")]):
        call("eval_passkey.py", *full, lengths(cfg.longest), depths, "--resume")


def records_of(cfg: StudyConfig, job: Job, chosen: bool) -> Iterator[dict]:
    """What is known of a run: its training, then the newest record of each of its evaluations."""
    folder, about = job.folder(cfg), job._asdict()
    if not (log := [r for r in read_records(folder / "log.jsonl") if "val" in r]):
        return
    names = ("step", "val", "val_1x", "val_2x", "val_4x", "seconds")
    saved = load_checkpoint(folder)
    command = {"commit": saved["commit"], "train_config": saved["train_config"], "model_config": saved["model_config"]}
    yield about | {"metric": "training", "chosen": chosen} | {name: log[-1][name] for name in names} | command
    newest = {}
    for file in sorted((folder / "eval").glob("*.jsonl")):
        for record in read_records(file):
            cell = {k: record.get(k) for k in ("metric", "task", "length", "config")}
            newest[json.dumps(cell)] = record
    for record in newest.values():
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
    """All trainings and evaluations, seed by seed; the records are written anew after each of the steps."""
    jobs: dict[Job, bool] = {}
    chosen: dict[str, float] = {}
    for seed in cfg.seeds:
        runs = []
        for variant in cfg.variants:
            if variant in ABLATIONS and seed != cfg.seeds[0]:
                continue
            known = chosen.get(FULL if variant in ABLATIONS else variant)
            tried = [Job(variant, rate, seed) for rate in ((known,) if known else cfg.rates)]
            for job in tried:
                train(cfg, base, job)
            best = min(tried, key=lambda job: final_loss(cfg, job))
            chosen[variant] = best.rate
            jobs |= {job: job == best for job in tried}
            runs.append(best.folder(cfg))
            collect(cfg, jobs)
        evaluate(cfg, runs, trained)
        collect(cfg, jobs)
    print(f"\nrecords in {cfg.records}; python plot_priors.py --readme shows them")


def main() -> None:
    (cfg,), _ = configurator.parse([StudyConfig], sys.argv[1:], __doc__)
    with user_errors():
        path = Path(cfg.config) if Path(cfg.config).exists() else ROOT / cfg.config
        values = configurator.load_file(path, configurator.field_types([ModelConfig, TrainConfig]))
        configurator.check_folder(Path(cfg.out_dir))
        configurator.check_folder(Path(cfg.records).parent)
        base = TrainConfig(**{k: v for k, v in values.items() if k in TrainConfig.__dataclass_fields__})
        model = ModelConfig(**{k: v for k, v in values.items() if k in ModelConfig.__dataclass_fields__})
    cfg.config = str(path)
    study(cfg, base, model.block_size)


if __name__ == "__main__":
    configurator.run(main)
