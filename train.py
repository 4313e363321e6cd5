"""Train a model: python train.py config/ggd_bam_cpu.py --key=value

torchrun --standalone --nproc_per_node=8 train.py config/ggd_bam_120m.py    # the same run on eight GPUs

Writes last.pt, best.pt (lowest validation loss), log.jsonl and config.json into out_dir. Ctrl-C stops after the current
step with a checkpoint; --resume continues any stopped or killed run exactly as if it had never stopped.
"""

import configurator
from configurator import check_folder, fail, say, user_errors

import io
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data import (
    UNFINISHED,
    Order,
    Windows,
    get_tokenizer,
    lock_folder,
    long_windows,
    read_meta,
    replacing,
    shard_files,
)
from device import Processes, peak_flops, peak_memory, pick_device, pick_dtype
from model import GPT, ModelConfig, documents
from prepare_fineweb import PrepareConfig, changes
from runs import load_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parent
PATIENCE = (
    10  # steps in a row whose loss or gradient may be infinite or NaN before a run is given up
)
DIVERGED = (
    3  # exit status of such a run, so that a script which tries rates can tell it from a mistake
)
CONTEXTS = (1, 2, 4)  # validation also at these multiples of the training length
VIRTUAL = 1  # the part of a step's random numbers that draws virtual lengths


@dataclass
class TrainConfig:
    """How to train. Raises ValueError, in one sentence, if it makes no sense."""

    data: str = "data/fineweb10B"  # folder of token shards
    prepare: str = (
        ""  # options with which prepare_fineweb.py is run first if that folder is not there
    )
    out_dir: str = "out/run"  # folder of this run
    seed: int = 1  # of the initial weights and of the order of the windows
    batch_size: int = 32  # windows of block_size tokens per micro-step and process
    tokens_per_step: int = 589_824  # tokens per optimizer step, over all micro-steps and processes
    max_steps: int = 20_000  # optimizer steps
    optimizer: Literal["adamw", "radam"] = "radam"  # both with decoupled weight decay
    learning_rate: float = 1e-3  # of the weights
    prior_lr: float = 1e-3  # of theta, the parameters of the ggd prior
    ssmax_lr: float = 1e-3  # of s
    warmup_steps: int = 0  # steps of linear warm-up
    min_lr_fraction: float = 0.1  # the rates fall along a cosine to this fraction of their peak
    beta1: float = 0.9  # optimizer: decay of the mean of the gradient
    beta2: float = 0.95  # optimizer: decay of the mean of its square
    weight_decay: float = 0.1  # of matrices and embeddings; norms, theta and s have none
    shard_optimizer: bool = (
        False  # each process of torchrun holds a part of the optimizer's state (ZeRO stage 1)
    )
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    log_interval: int = 10  # steps between log lines
    eval_interval: int = 500  # steps between validations and checkpoints
    eval_windows: int = 256  # validation windows of block_size tokens
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # autocast; the weights stay float32
    )
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile; auto: on CUDA
    attention: Literal["auto", "reference", "fused"] = (
        "auto"  # fused: one kernel without a T x T tensor, on CUDA with
    )
    # compile; reference: explicit scores, anywhere; auto: fused where it can be
    resume: bool = False  # continue the run in out_dir from its last.pt

    def __post_init__(self):
        for name in (
            "batch_size",
            "tokens_per_step",
            "max_steps",
            "log_interval",
            "eval_interval",
            "eval_windows",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "learning_rate",
            "prior_lr",
            "ssmax_lr",
            "warmup_steps",
            "weight_decay",
            "grad_clip",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name, top in (("beta1", 1), ("beta2", 1), ("seed", 2**63)):
            if not 0 <= getattr(self, name) < top:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 0 and below {top}"
                )
        if not 0 <= self.min_lr_fraction <= 1:
            raise ValueError(f"min_lr_fraction is {self.min_lr_fraction}; it must be from 0 to 1")
        if not self.out_dir or not self.data:
            raise ValueError("data and out_dir must name folders")


def find_data(
    cfg: TrainConfig, model_cfg: ModelConfig, processes: Processes
) -> tuple[Windows, Windows, dict]:
    """Training windows, validation windows and meta.json of a data folder, which is prepared first if it is missing."""
    folder = Path(cfg.data)
    with user_errors():
        there = any(not path.name.startswith(".") for path in folder.glob("*"))
        unfinished = not there or (folder / UNFINISHED).exists()
        options = [*shlex.split(cfg.prepare), f"--out_dir={folder}"]
    if cfg.prepare and processes.world == 1 and unfinished:
        print(f"{folder} is not there yet: prepare_fineweb.py {cfg.prepare}", flush=True)
        if subprocess.run([sys.executable, str(ROOT / "prepare_fineweb.py"), *options]).returncode:
            fail(f"preparing {folder} did not succeed; see the message above")
    train, val = shard_files(folder, "train_*"), shard_files(folder, "val_*")
    if not train or not val:
        fail(
            f"no *train_*.bin and *val_*.bin shards in {folder}; make them with prepare_fineweb.py"
        )
    with user_errors():
        meta = read_meta(folder)
        if meta is None:
            meta = {"tokenizer": "gpt2", "window": None}
            print(f"{folder} has no meta.json: tokenizer gpt2 is assumed")
        meta["eot"] = get_tokenizer(meta["tokenizer"]).eot_token
        train, val = Windows(train, model_cfg.block_size), Windows(val, model_cfg.block_size)
    if cfg.prepare:
        check_settings(cfg, options, meta.get("settings"))
    check_data(cfg, model_cfg, meta, train, val)
    return train, val, meta


def check_settings(cfg: TrainConfig, options: list[str], there: dict | None) -> None:
    """fail() if data was prepared with other settings than `prepare` has. Its text files may be gone by now."""
    (wanted,), _ = configurator.parse([PrepareConfig], options, None)
    if there is None:
        print(f"{cfg.data} does not say how it was prepared; taken for what prepare asks for")
        return
    gone = not all(Path(name).is_file() for name in wanted.files)
    if changed := [
        change for change in changes(there, wanted) if not (gone and change.startswith("files="))
    ]:
        new = f"{cfg.data.rstrip('/')}_new"
        make = (
            f"python prepare_fineweb.py {cfg.prepare} --out_dir={new}, and train with --data={new}"
        )
        fail(
            f"{cfg.data} was prepared with {', '.join(changed)}; run {make}; or use it as it is, with --prepare="
        )


def check_data(
    cfg: TrainConfig, model_cfg: ModelConfig, meta: dict, train: Windows, val: Windows
) -> None:
    T, window, eot = model_cfg.block_size, meta["window"], meta["eot"]
    if window and window != T:
        fail(
            f"{cfg.data} has exercises packed for windows of {window} tokens, block_size is {T}; prepare it again"
        )
    if eot >= model_cfg.vocab_size:
        fail(
            f"{cfg.data} has token ids up to {eot}, vocab_size is {model_cfg.vocab_size}; set vocab_size to {eot + 1}"
        )
    for name, windows in (("training", train), ("validation", val)):
        if not len(windows):
            tokens = sum(len(s) for s in windows.shards)
            fail(
                f"{cfg.data} has {tokens} {name} tokens, less than {T} + 1; use more text or a smaller block_size"
            )
    # all of the validation, which is small and read in full anyhow; training windows are checked as they are read
    if (highest := max(int(shard.max()) for shard in val.shards)) >= model_cfg.vocab_size:
        size = f"vocab_size is {model_cfg.vocab_size}; see prepare_fineweb.py --check {cfg.data}"
        fail(f"{cfg.data} has the token id {highest} in its validation, {size}")


def learning_rate_factor(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then a cosine from 1 to min_lr_fraction; multiplies the peak rate of every group."""
    if step < cfg.warmup_steps:
        return (step + 1) / (cfg.warmup_steps + 1)
    progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    return cfg.min_lr_fraction + (1 - cfg.min_lr_fraction) * 0.5 * (
        1 + math.cos(math.pi * progress)
    )


def choose_device(
    cfg: TrainConfig, processes: Processes
) -> tuple[torch.device, torch.dtype, bool, str]:
    """Device, autocast type, whether to compile, and how to compute attention; prints what was chosen and why."""
    with user_errors():
        device, why = pick_device(cfg.device)
        if device.type == "cuda" and processes.world > 1:
            device, why = (
                torch.device("cuda", processes.local),
                f"one of {processes.world} processes",
            )
        dtype, reason = pick_dtype(cfg.dtype, device)
    compiled = cfg.compile == "true" or (cfg.compile == "auto" and device.type == "cuda")
    lacking = (
        "CUDA" if device.type != "cuda" else "" if compiled else "compile"
    )  # what fused attention needs
    if lacking and cfg.attention == "fused":
        fail(
            f"attention fused needs CUDA and compile, and {lacking} is missing; use --attention=reference"
        )
    attention, told = (
        ("reference" if lacking else "fused", "auto")
        if cfg.attention == "auto"
        else (cfg.attention, "")
    )
    because = (f"no {lacking}" if lacking else "CUDA and compile") if told else "as told"
    number = str(dtype).removeprefix("torch.")
    print(
        f"device {device} ({why}), {number} ({reason}), compile {'on' if compiled else 'off'}",
        end=", ",
    )
    print(f"attention {attention} ({because})")
    return device, dtype, compiled, attention


def git_commit() -> str | None:
    """The commit of this program, and -dirty if its files differ; None where that is unknown."""
    try:  # with the folder named: git would go up to a repository that merely holds this program
        command = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
        command += ["describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def make_optimizer(model: GPT, cfg: TrainConfig) -> torch.optim.Optimizer:
    groups = model.optimizer_groups(cfg.learning_rate, cfg.prior_lr, cfg.ssmax_lr, cfg.weight_decay)
    for group in groups:
        group["peak_lr"] = group["lr"]
    kind, options = torch.optim.AdamW, {"betas": (cfg.beta1, cfg.beta2)}
    if cfg.optimizer == "radam":
        kind, options = torch.optim.RAdam, options | {"decoupled_weight_decay": True}
    if cfg.shard_optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)
    return kind(groups, **options)


class Validation:
    """Losses on fixed windows: `val` on windows as in training, and `val_1x`, `val_2x`, `val_4x` with the same target
    tokens, the last T/2 of long documents' windows, seen with T, 2T and 4T tokens of context."""

    def __init__(self, val: Windows, eot: int, count: int, batch: int, processes: Processes):
        """`count` windows of the training length, evenly spread, `batch` of them at a time in each process."""
        self.eot, self.batch, self.processes = eot, batch, processes
        picks = np.linspace(0, len(val) - 1, min(count, len(val))).astype(int)
        self.windows, self.T = torch.from_numpy(val.take(picks)), val.T
        long = long_windows(val, eot, CONTEXTS[-1], max(1, count // CONTEXTS[-1]))
        self.long = None if long is None else torch.from_numpy(long)
        if self.long is None:
            print(
                f"validation: no document is longer than {CONTEXTS[-1]} x {val.T} tokens, so no val_2x and val_4x"
            )

    @torch.no_grad()
    def run(self, model: GPT, device: torch.device, autocast) -> dict[str, float]:
        model.eval()
        losses = {"val": self.mean(model, self.windows, self.T, device, autocast)}
        for c in CONTEXTS if self.long is not None else ():
            losses[f"val_{c}x"] = self.mean(
                model, self.long[:, -c * self.T - 1 :], self.T // 2, device, autocast
            )
        model.train()
        return losses

    def mean(
        self, model: GPT, windows: Tensor, targets: int, device: torch.device, autocast
    ) -> float:
        """Mean loss of the last `targets` tokens of every window; every process takes its share of the windows."""
        rows = max(1, self.batch * self.T // (windows.shape[1] - 1))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for w in windows[self.processes.rank :: self.processes.world].split(rows):
            if not len(w):  # fewer windows than processes
                continue
            idx, y = w[:, :-1].to(device), w[:, 1:].clone()
            y[:, :-targets] = -100
            with autocast:
                total += model(idx, y.to(device), documents(idx, self.eot)).double() * len(w)
        return self.processes.mean(total).item() * self.processes.world / len(windows)


class Trainer:
    """One run: the model, its optimizer, its data and how far it is."""

    def __init__(self, cfg: TrainConfig, model_cfg: ModelConfig, processes: Processes):
        self.cfg, self.T, self.processes = cfg, model_cfg.block_size, processes
        self.out, self.commit = Path(cfg.out_dir), git_commit()
        self.saved = self.previous_run()
        windows_per_step, rest = divmod(cfg.tokens_per_step, self.T)
        self.micro_steps, uneven = divmod(windows_per_step, cfg.batch_size * processes.world)
        if rest or uneven or not windows_per_step:
            unit = f"processes x batch_size x block_size = {processes.world * cfg.batch_size * self.T:,}"
            fail(
                f"tokens_per_step {cfg.tokens_per_step:,} is not a multiple of {unit}; change one of them"
            )
        if cfg.shard_optimizer and processes.world == 1:
            fail(
                "shard_optimizer needs several processes; start train.py with torchrun, or leave it out"
            )
        self.train, val, self.meta = find_data(cfg, model_cfg, processes)
        self.order = Order(len(self.train), windows_per_step, cfg.seed)
        self.device, self.dtype, compiled, attention = choose_device(cfg, processes)
        self.autocast = torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype != torch.float32
        )
        self.validation = Validation(
            val, self.meta["eot"], cfg.eval_windows, cfg.batch_size, processes
        )
        torch.manual_seed(cfg.seed)
        self.model = GPT(model_cfg).to(self.device)
        self.model.attention = attention
        self.optimizer = make_optimizer(self.model, cfg)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.step, self.best, self.seconds, self.stop = 0, math.inf, 0.0, False
        self.skipped, self.skipped_in_a_row = 0, 0
        self.kept: int | None = None  # the step of last.pt
        self.restore()
        self.run = self.compiled() if compiled else self.model
        if (
            processes.world > 1
        ):  # around the compiled model, since a fused kernel does not allow to split its graph
            self.run = DistributedDataParallel(
                self.run, forward_sync_buffers=False, gradient_as_bucket_view=True
            )

    def windows(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """This process's windows of a step and the logarithms of their virtual lengths, a pair per micro-step."""
        indices = self.order.step(step, self.processes.rank, self.processes.world)
        drawn = np.random.default_rng((self.cfg.seed, step, VIRTUAL)).random(
            self.order.per_step, dtype=np.float32
        )
        drawn = drawn[self.processes.rank :: self.processes.world] * math.log(
            self.model.cfg.virtual_length
        )
        return list(
            zip(np.split(indices, self.micro_steps), np.split(drawn, self.micro_steps), strict=True)
        )

    def compiled(self):
        """The compiled model, tried on the next batch: without a working compiler, better slowly than not at all."""
        run = torch.compile(self.model, dynamic=False)
        try:
            self.loss(run, *self.windows(self.step)[0]).backward()
        except torch.OutOfMemoryError:
            fail(
                f"batch_size {self.cfg.batch_size} does not fit the memory of {self.device}; use a smaller one"
            )
        except Exception as error:  # a compiler has many ways to fail
            reason = (str(error).splitlines() or [""])[0]
            print(
                f"compiling failed ({type(error).__name__}: {reason}); going on uncompiled, with reference attention"
            )
            self.model.attention, run = "reference", self.model
        self.optimizer.zero_grad(set_to_none=True)
        return run

    def previous_run(self) -> dict | None:
        """The checkpoint to resume from. Refuses to write over a run that is there."""
        last = self.out / "last.pt"
        if self.cfg.resume:
            with user_errors():
                return load_checkpoint(last)
        if any(self.out.glob("*.pt")):
            fail(
                f"{self.out} already holds a run; --resume continues it, another --out_dir starts a new one"
            )
        with user_errors():
            check_folder(self.out)
        return None

    def restore(self) -> None:
        with user_errors():
            self.out.mkdir(parents=True, exist_ok=True)
        if self.saved is None:
            if self.processes.rank == 0:
                (self.out / "log.jsonl").write_text("", encoding="utf-8")
            return
        with user_errors():
            if self.saved["model_config"] != asdict(self.model.cfg):
                raise ValueError(
                    f"{self.out} holds a run of another model; resume it with the options of its start"
                )
            needed = {
                "optimizer",
                "scaler",
                "step",
                "best",
                "seconds",
                "skipped",
                "processes",
                "rng",
                "train_config",
            }
            if missing := {name for name in (*needed, "tokenizer") if self.saved.get(name) is None}:
                raise ValueError(
                    f"{self.out} cannot be resumed: its last.pt has no {', '.join(sorted(missing))}"
                )
            if (tokenizer := self.saved["tokenizer"]) != self.meta["tokenizer"]:
                raise ValueError(
                    f"{self.out} was trained with tokenizer {tokenizer}, not {self.meta['tokenizer']}"
                )
        self.model.load_state_dict(self.saved["model"])
        options = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(self.saved["optimizer"])
        for group, now in zip(self.optimizer.param_groups, options, strict=True):
            group.update(now)  # rates, decay and betas are those of this call
        self.scaler.load_state_dict(self.saved["scaler"])
        for name in ("step", "best", "seconds", "skipped"):
            setattr(self, name, self.saved[name])
        torch.set_rng_state(self.saved["rng"])
        self.kept = self.step
        if self.processes.rank == 0:
            self.shorten_log()
        now, then = asdict(self.cfg), self.saved["train_config"]
        changed = [
            f"{k} {then.get(k)} -> {now[k]}" for k in now if k != "resume" and now[k] != then.get(k)
        ]
        if (world := self.saved["processes"]) != self.processes.world:
            changed.append(
                f"processes {world} -> {self.processes.world} (the same windows in every step, added up anew)"
            )
        print(
            f"resumed {self.out} at step {self.step}"
            + ", changed: " * bool(changed)
            + ", ".join(changed)
        )
        self.saved = None

    def shorten_log(self) -> None:
        """Take out what a killed run logged after its checkpoint, since that comes again."""
        log = self.out / "log.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
        step = re.compile(r'\{"step": (\d+),.*\}\n')
        kept = [
            line for line in lines if (found := step.fullmatch(line)) and int(found[1]) <= self.step
        ]
        with replacing(log) as file:
            file.write("".join(kept).encode())

    def save(self, name: str) -> None:
        """Write a checkpoint; all processes call this, and the first one writes."""
        if self.cfg.shard_optimizer:
            self.optimizer.consolidate_state_dict(to=0)
        if self.processes.rank:
            return
        state = self.model.checkpoint() | {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "best": self.best,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "processes": self.processes.world,
            "rng": torch.get_rng_state(),
            "train_config": asdict(self.cfg),
            "tokenizer": self.meta["tokenizer"],
            "data": self.cfg.data,
            "commit": self.commit,
        }
        save_checkpoint(self.out / name, state)

    def loss(
        self, run: Callable[..., Tensor], indices: np.ndarray, log_virtual: np.ndarray
    ) -> Tensor:
        """Mean loss of one micro-step's windows; `run` is the model or its compiled form."""
        batch = torch.from_numpy(self.train.take(indices))
        if batch.max() >= self.model.cfg.vocab_size:
            fail(
                f"{self.cfg.data} has the token id {batch.max()}, vocab_size is {self.model.cfg.vocab_size}"
            )
        batch = batch.to(self.device)
        idx, targets = batch[:, :-1], batch[:, 1:].clone()
        if self.meta[
            "window"
        ]:  # packed windows are shuffled: what follows the last token is of another text
            targets[:, -1] = -100
        with self.autocast:
            virtual = (
                torch.from_numpy(log_virtual).to(self.device)
                if self.model.cfg.virtual_length > 1
                else None
            )
            return run(idx, targets, documents(idx, self.meta["eot"]), virtual)

    def train_step(self) -> tuple[float, float]:
        """One optimizer step; returns the mean loss and the gradient's norm before clipping. Unless both are finite, it
        changes nothing."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * learning_rate_factor(self.step, self.cfg)
        total = torch.zeros((), device=self.device)
        for i, (indices, log_virtual) in enumerate(self.windows(self.step)):
            if (
                self.processes.world > 1
            ):  # read in the forward pass: only the last micro-step adds up over processes
                self.run.require_backward_grad_sync = i == self.micro_steps - 1
            loss = self.loss(self.run, indices, log_virtual) / self.micro_steps
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(
            self.optimizer
        )  # before clipping, or the clip would see scaled gradients
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.cfg.grad_clip or math.inf
        )
        numbers = self.processes.mean(total).item(), norm.item()
        finite = all(map(math.isfinite, numbers))
        if finite:
            self.scaler.step(self.optimizer)
            self.model.constrain()
        self.scaler.update()  # lowers the scale if unscaling has met an infinite gradient
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.count_skipped(finite, *numbers)
        return numbers

    def count_skipped(self, finite: bool, loss: float, norm: float) -> None:
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if finite:
            return
        self.skipped += 1
        self.say(
            f"step {self.step}: loss {loss}, gradient norm {norm}: skipped, {self.skipped} in all"
        )
        if self.skipped_in_a_row == PATIENCE:
            kept = (
                f"{self.out / 'last.pt'} has step {self.kept}"
                if self.kept
                else "no checkpoint was written yet"
            )
            fail(
                f"{PATIENCE} steps in a row had no finite loss and gradient; {kept}; use lower learning rates",
                DIVERGED,
            )

    def log(self, record: dict) -> None:
        if self.processes.rank:
            return
        record = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        with open(self.out / "log.jsonl", "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")

    def evaluate(self) -> dict[str, float]:
        """Validation losses; saves last.pt, and best.pt if the validation loss is the lowest so far."""
        losses = self.validation.run(self.model, self.device, self.autocast)
        if not math.isfinite(losses["val"]):
            self.say(
                f"step {self.step}: the validation loss is {losses['val']}, so no checkpoint is written"
            )
            return losses
        if losses["val"] < self.best and not self.doubtful():
            self.best = losses["val"]
            self.save(
                "best.pt"
            )  # first, so that a last.pt never speaks of a best.pt that was not written
        self.save_last()
        return losses

    def doubtful(self) -> bool:
        """After a skipped step the weights may be ruined, unless it is the loss scaler that tries its scale."""
        return self.skipped_in_a_row > 0 and not self.scaler.is_enabled()

    def save_last(self) -> None:
        if self.doubtful():
            self.say(f"step {self.step} was skipped, so no checkpoint is written")
            return
        self.save("last.pt")
        self.kept = self.step

    def speed(self, steps: int, seconds: float) -> dict:
        """Tokens a second, the share of the device's peak that the model's own operations are, and memory in bytes."""
        rate = steps * self.cfg.tokens_per_step / max(seconds, 1e-9)  # a clock may not have moved
        peak = peak_flops(self.device, self.dtype)
        mfu = (
            rate * self.model.flops_per_token(self.T) / (peak * self.processes.world)
            if peak
            else None
        )
        return {
            "tokens_per_second": round(rate),
            "mfu": mfu,
            "peak_memory": peak_memory(self.device),
        }

    def told_to_stop(self) -> bool:
        """Has any process got a signal? All of them must answer alike, to stop after the same step."""
        told = torch.tensor(float(self.stop), device=self.device)
        return self.processes.mean(told).item() > 0

    def loop(self) -> None:
        cfg, began, before, first = self.cfg, time.perf_counter(), self.seconds, self.step
        if first >= cfg.max_steps:
            print(f"{self.out} is at step {first} of {cfg.max_steps} already: nothing to do")
        since, steps = began, 0  # of the last log line, without the time of validations
        told = False
        while self.step < cfg.max_steps and not told:
            loss, norm = self.train_step()
            steps += 1
            self.seconds = before + time.perf_counter() - began
            if (
                told := self.told_to_stop()
            ):  # first of all, since who stops a run may not wait for a validation
                self.save_last()
            validate = self.step % cfg.eval_interval == 0 or self.step == cfg.max_steps
            if not validate and not told and self.step % cfg.log_interval:
                continue
            record = {"step": self.step, "loss": loss, "grad_norm": norm, "skipped": self.skipped}
            record |= {"seconds": self.seconds, **self.speed(steps, time.perf_counter() - since)}
            record |= self.evaluate() if validate else {}
            since, steps = time.perf_counter(), 0
            self.log(record | self.model.prior_values())
            left = (time.perf_counter() - began) / (self.step - first) * (cfg.max_steps - self.step)
            self.say(log_line(record, cfg.max_steps, left))
        if told:
            self.say(
                f"stopped at step {self.step}; {self.out / 'last.pt'} has step {self.kept}, --resume continues"
            )
        self.stop = told

    def interrupt(self, *_) -> None:
        """First Ctrl-C: finish this step, save, stop. Second: stop at once."""
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.say("stopping after this step (Ctrl-C again: at once)")

    def say(self, line: str) -> None:
        """Print. When nobody reads any more (`| head`), stop as after Ctrl-C."""
        if not say(line):
            self.stop = True


def log_line(record: dict, max_steps: int, seconds_left: float) -> str:
    parts = [f"step {record['step']:>6}/{max_steps}", f"loss {record['loss']:.4f}"]
    parts += [f"{name} {record[name]:.4f}" for name in record if name.startswith("val")]
    minutes, seconds = divmod(round(seconds_left), 60)
    parts += [f"norm {record['grad_norm']:.2f}", f"{record['tokens_per_second']:,} tok/s"]
    parts += [f"MFU {100 * record['mfu']:.0f}%" if record["mfu"] else "MFU n/a"]
    parts += [f"{record['peak_memory'] / 1e9:.1f} GB"] if record["peak_memory"] else []
    hours, minutes = divmod(minutes, 60)
    return " | ".join(
        [*parts, f"{f'{hours}:{minutes:02d}' if hours else minutes}:{seconds:02d} left"]
    )


def main() -> None:
    (model_cfg, cfg), _ = configurator.parse(
        [ModelConfig, TrainConfig], sys.argv[1:], __doc__, positional="config"
    )
    with user_errors():
        processes = Processes.join(cfg.device)
        if processes.rank == 0:
            lock_folder(Path(cfg.out_dir))
    if processes.rank:
        sys.stdout = io.StringIO()  # the first process speaks for all
    trainer = Trainer(cfg, model_cfg, processes)
    config = json.dumps({"model": asdict(model_cfg), "train": asdict(cfg)}, indent=1)
    if processes.rank == 0:
        with replacing(trainer.out / "config.json") as file:
            file.write(config.encode())
    groups = {
        kind: sum(p.numel() for p in params)
        for kind, params in trainer.model.parameter_groups().items()
    }
    print(
        f"{sum(groups.values()):,} parameters: "
        + ", ".join(f"{kind} {n:,}" for kind, n in groups.items())
    )
    print(
        f"{len(trainer.train):,} windows of {trainer.T} tokens an epoch, {trainer.order.per_step} a step"
    )
    signal.signal(signal.SIGINT, trainer.interrupt)
    signal.signal(signal.SIGTERM, trainer.interrupt)  # how torchrun and job schedulers say it
    trainer.loop()
    processes.leave()
    if trainer.stop:
        sys.exit(130)


if __name__ == "__main__":
    configurator.run(main)
