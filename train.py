"""Train a model: python train.py config/ggd_bam_cpu.py --key=value

torchrun --standalone --nproc_per_node=8 train.py config/ggd_bam_120m.py  # the same run on 8 GPUs

Writes last.pt, best.pt (lowest validation loss), log.jsonl and config.json into out_dir. Ctrl-C
stops after the current step with a checkpoint. --resume continues any stopped or killed run
exactly as if it had never stopped.
"""

import configurator
from configurator import check_folder, fail, say, user_errors

import io
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
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
    write_json,
)
from device import Processes, peak_flops, peak_memory, pick_device, pick_dtype
from model import GPT, ModelConfig, documents
from prepare_fineweb import PrepareConfig, changes
from runs import load_checkpoint, read_records, save_checkpoint

ROOT = Path(__file__).resolve().parent
PATIENCE = 10  # give a run up after this many steps in a row without a finite loss and gradient
DIVERGED = 3  # exit status of such a run, by which study.py tells it from a mistake
PROGRESS = ("step", "best", "seconds", "skipped")  # fields of State that a checkpoint holds
VIRTUAL = 1  # the part of a step's random numbers that draws virtual lengths


@dataclass
class TrainConfig:
    """How to train."""

    data: str = "data/fineweb10B"  # folder of token shards
    prepare: str = ""  # if that folder is missing, run prepare_fineweb.py first with these options
    out_dir: str = "out/run"  # folder of the run
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
    shard_optimizer: bool = False  # under torchrun each process holds a part of the optimizer's
    # state (ZeRO stage 1)
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    log_interval: int = 10  # steps between log lines
    eval_interval: int = 500  # steps between validations and checkpoints
    eval_windows: int = 256  # validation windows of block_size tokens
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # autocast; the weights stay
    # float32
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile; auto: on CUDA
    attention: Literal["auto", "reference", "fused"] = "auto"  # fused: one kernel without a T x T
    # tensor, on CUDA with compile; reference: explicit scores, anywhere; auto: fused where possible
    resume: bool = False  # continue the run in out_dir from its last.pt

    def __post_init__(self):
        counts = "batch_size tokens_per_step max_steps log_interval eval_interval eval_windows"
        sizes = "seed learning_rate prior_lr ssmax_lr warmup_steps weight_decay grad_clip"
        shares = "min_lr_fraction beta1 beta2"
        for names, low, high in ((counts, 1, math.inf), (sizes, 0, math.inf), (shares, 0, 1)):
            for name in names.split():
                if not low <= (value := getattr(self, name)) <= high:
                    allowed = f"from {low} to {high}" if high == 1 else f"at least {low}"
                    raise ValueError(f"{name} is {value}; it must be {allowed}")
        if not self.out_dir or not self.data:
            raise ValueError("data and out_dir must name folders")


# ---- data


@user_errors()
def find_data(
    cfg: TrainConfig, model_cfg: ModelConfig, world: int
) -> tuple[Windows, Windows, dict]:
    """Training windows, validation windows and meta.json. Prepares the data if it is missing."""
    folder, T, vocab = Path(cfg.data), model_cfg.block_size, model_cfg.vocab_size
    options = [*shlex.split(cfg.prepare), f"--out_dir={folder}"]
    missing = all(path.name.startswith(".") for path in folder.glob("*"))
    if cfg.prepare and world == 1 and (missing or (folder / UNFINISHED).exists()):
        print(f"{folder} is not there yet: prepare_fineweb.py {cfg.prepare}", flush=True)
        if subprocess.run([sys.executable, str(ROOT / "prepare_fineweb.py"), *options]).returncode:
            fail(f"preparing {folder} did not succeed; see the message above")
    files = [shard_files(folder, kind) for kind in ("train_*", "val_*")]
    if not all(files):
        fail(f"no *train_*.bin and *val_*.bin in {folder}; make them with prepare_fineweb.py")
    if (meta := read_meta(folder)) is None:
        meta = {"tokenizer": "gpt2", "window": None}
        print(f"{folder} has no meta.json: tokenizer gpt2 is assumed")
    meta["eot"] = eot = get_tokenizer(meta["tokenizer"]).eot_token
    train, val = (Windows(paths, T) for paths in files)
    if cfg.prepare:
        check_settings(cfg, options, meta.get("settings"))
    if meta["window"] not in (None, T):
        packed = f"packed for windows of {meta['window']} tokens, block_size is {T}"
        fail(f"{folder} has exercises {packed}; prepare it again")
    if eot >= vocab:
        fail(f"{folder} has ids up to {eot}, vocab_size is {vocab}; set vocab_size to {eot + 1}")
    for name, windows in (("training", train), ("validation", val)):
        if not len(windows):
            size = f"{sum(map(len, windows.shards))} {name} tokens, less than {T} + 1"
            fail(f"{folder} has {size}; use more text or a smaller block_size")
    # the validation, which is small; read_batches() checks the training windows as it reads them
    if (highest := max(int(shard.max()) for shard in val.shards)) >= vocab:
        where = f"the token id {highest} in its validation, vocab_size is {vocab}"
        fail(f"{folder} has {where}; see prepare_fineweb.py --check {folder}")
    return train, val, meta


def check_settings(cfg: TrainConfig, options: list[str], settings: dict | None) -> None:
    """Refuse data that was prepared with other settings than `prepare` has."""
    (wanted,), _ = configurator.parse([PrepareConfig], options, None)
    if settings is None:
        return print(f"{cfg.data} does not say how it was prepared, and is used as it is")
    differ = changes(settings, wanted)
    if not all(Path(name).is_file() for name in wanted.files):  # the texts may be gone by now
        differ = [change for change in differ if not change.startswith("files=")]
    if differ:
        new = f"{cfg.data.rstrip('/')}_new"
        make = f"python prepare_fineweb.py {cfg.prepare} --out_dir={new}"
        advice = f"run {make}, and train with --data={new}; or use it as it is, with --prepare="
        fail(f"{cfg.data} was prepared with {', '.join(differ)}; {advice}")


def read_batches(
    train: Windows, order: Order, meta: dict, cfg: TrainConfig, model_cfg: ModelConfig,
    processes: Processes, device: torch.device, step: int,
) -> Iterator[tuple[Tensor | None, ...]]:  # fmt: skip
    """This process's part of a step, a tuple for each micro-step: inputs, targets, documents, all
    (B, T), and (B,) the logarithms of the virtual lengths, or None."""
    rank, world, B = processes.rank, processes.world, cfg.batch_size
    indices = order.step(step, rank, world)
    generator = np.random.default_rng((cfg.seed, step, VIRTUAL))
    log_virtual = generator.random(order.per_step, dtype=np.float32)[rank::world]
    log_virtual = torch.from_numpy(log_virtual * math.log(model_cfg.virtual_length))
    for at in range(0, len(indices), B):
        windows = torch.from_numpy(train.take(indices[at : at + B]))
        if (highest := windows.max()) >= model_cfg.vocab_size:
            fail(f"{cfg.data} has the token id {highest}, vocab_size is {model_cfg.vocab_size}")
        windows = windows.to(device)
        idx, targets = windows[:, :-1], windows[:, 1:].clone()
        if meta["window"]:  # packed windows are shuffled: the token after one is of another text
            targets[:, -1] = -100
        virtual = log_virtual[at : at + B].to(device) if model_cfg.virtual_length > 1 else None
        yield idx, targets, documents(idx, meta["eot"]), virtual


# ---- model and optimizer


@user_errors()
def choose_device(
    cfg: TrainConfig, processes: Processes
) -> tuple[torch.device, torch.dtype, bool, str]:
    """Device, autocast type, whether to compile, how to compute attention. Prints what and why."""
    device, why = pick_device(cfg.device)
    if device.type == "cuda" and processes.world > 1:
        device, why = torch.device("cuda", processes.local), f"one of {processes.world} processes"
    dtype, reason = pick_dtype(cfg.dtype, device)
    compiled = cfg.compile == "true" or (cfg.compile == "auto" and device.type == "cuda")
    lacking = "CUDA" if device.type != "cuda" else "" if compiled else "compile"
    attention, because = cfg.attention, "as requested"
    if attention == "fused" and lacking:
        need = f"needs CUDA and compile, and {lacking} is missing"
        fail(f"attention fused {need}; use --attention=reference")
    if attention == "auto":
        attention = "reference" if lacking else "fused"
        because = f"no {lacking}" if lacking else "CUDA and compile"
    print(f"device {device} ({why}), {str(dtype).removeprefix('torch.')} ({reason}), ", end="")
    print(f"compile {'on' if compiled else 'off'}, attention {attention} ({because})")
    return device, dtype, compiled, attention


def compile_model(model: GPT, batch: tuple[Tensor | None, ...], autocast) -> Callable[..., Tensor]:
    """The compiled model, tried on one batch. Without a working compiler, the model itself."""
    run = torch.compile(model, dynamic=False)
    try:
        with autocast:
            loss = run(*batch)
        loss.backward()
    except torch.OutOfMemoryError:
        fail(f"batch_size {len(batch[0])} does not fit the device's memory; use a smaller one")
    except Exception as error:  # a compiler has many ways to fail
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        print(f"compiling failed ({reason}); continuing uncompiled, with reference attention")
        model.attention, run = "reference", model
    model.zero_grad(set_to_none=True)
    return run


@user_errors()
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


def learning_rate_factor(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then a cosine from 1 to min_lr_fraction. Multiplies every peak rate."""
    if step < cfg.warmup_steps:
        return (step + 1) / (cfg.warmup_steps + 1)
    progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr_fraction + (1 - cfg.min_lr_fraction) * cosine


# ---- validation


def pick_validation(val: Windows, eot: int, count: int) -> dict[str, tuple[Tensor, int]]:
    """Name -> fixed windows, and how many of their last tokens are targets. "val": `count` windows
    as in training. "val_1x", "val_2x", "val_4x": windows inside long documents, whose last T/2
    tokens are the same targets with T, 2T and 4T tokens of context."""
    picks = np.linspace(0, len(val) - 1, min(count, len(val))).astype(int)
    validation = {"val": (torch.from_numpy(val.take(picks)), val.T)}
    long = long_windows(val, eot, 4, max(1, count // 4))
    if long is None:
        print(f"validation: no document is longer than 4 x {val.T} tokens, so no val_2x and val_4x")
        return validation
    for c in (1, 2, 4):
        windows = torch.from_numpy(long[:, -c * val.T - 1 :])
        validation[f"val_{c}x"] = (windows, val.T // 2)
    return validation


@torch.no_grad()
def evaluate(
    model: GPT, validation: dict, eot: int, tokens: int, processes: Processes, autocast
) -> dict[str, float]:
    """Name -> mean loss of the targets. Each process takes its share, about `tokens` at once."""
    model.eval()
    losses, device = {}, next(model.parameters()).device
    for name, (windows, targets) in validation.items():
        total = torch.zeros((), dtype=torch.float64, device=device)
        rows = max(1, tokens // (windows.shape[1] - 1))
        for w in windows[processes.rank :: processes.world].split(rows):
            if not len(w):  # fewer windows than processes
                continue
            idx, y = w[:, :-1].to(device), w[:, 1:].clone()
            y[:, :-targets] = -100
            with autocast:
                total += model(idx, y.to(device), documents(idx, eot)).double() * len(w)
        losses[name] = processes.mean(total).item() * processes.world / len(windows)
    model.train()
    return losses


# ---- checkpoints


@dataclass
class State:
    """What a checkpoint holds."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    about: dict  # how the run was started
    step: int = 0
    best: float = math.inf  # lowest validation loss
    seconds: float = 0.0  # of training and validation
    skipped: int = 0  # steps without a finite loss and gradient


def save(path: Path, state: State, rank: int) -> None:
    """Write a checkpoint. All processes call this, and the first one writes."""
    if state.about["train_config"]["shard_optimizer"]:
        state.optimizer.consolidate_state_dict(to=0)
    if rank:
        return
    parts = {"optimizer": state.optimizer.state_dict(), "scaler": state.scaler.state_dict()}
    progress = {name: getattr(state, name) for name in PROGRESS} | {"rng": torch.get_rng_state()}
    save_checkpoint(path, state.model.checkpoint() | parts | progress | state.about)


def resume(out: Path, state: State, saved: dict) -> None:
    """Continue from a checkpoint. Prints which options differ from the run's so far."""
    now, then, tokenizer = state.about, saved.get("train_config"), saved.get("tokenizer")
    if saved["model_config"] != asdict(state.model.cfg):
        fail(f"{out} holds a run of another model; resume it with the options of its start")
    needed = ("optimizer", "scaler", *PROGRESS, "rng", "processes", "train_config", "tokenizer")
    if missing := sorted(name for name in needed if saved.get(name) is None):
        fail(f"{out} cannot be resumed: its last.pt has no {', '.join(missing)}")
    if tokenizer != now["tokenizer"]:
        fail(f"{out} was trained with tokenizer {tokenizer}, not {now['tokenizer']}")
    state.model.load_state_dict(saved["model"])
    state.scaler.load_state_dict(saved["scaler"])
    options = [{k: v for k, v in g.items() if k != "params"} for g in state.optimizer.param_groups]
    state.optimizer.load_state_dict(saved["optimizer"])
    for group, option in zip(state.optimizer.param_groups, options, strict=True):
        group.update(option)  # rates, decay and betas are those of this call
    for name in PROGRESS:
        setattr(state, name, saved[name])
    torch.set_rng_state(saved["rng"])
    pairs = {k: (then.get(k), v) for k, v in now["train_config"].items() if k != "resume"}
    pairs["processes"] = (saved["processes"], now["processes"])
    changed = ", ".join(f"{k} {a} -> {b}" for k, (a, b) in pairs.items() if a != b)
    print(f"resumed {out} at step {state.step}" + f", changed: {changed}" * bool(changed))


def git_commit() -> str | None:
    """This program's commit, with -dirty if its files differ, or None if it is unknown."""
    try:  # with the folder named: git would go up to a repository that merely holds this program
        command = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
        command += ["describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---- the run


def format_line(record: dict, max_steps: int, seconds_left: float) -> str:
    parts = [f"step {record['step']:>6}/{max_steps}", f"loss {record['loss']:.4f}"]
    parts += [f"{name} {record[name]:.4f}" for name in record if name.startswith("val")]
    parts += [f"norm {record['grad_norm']:.2f}", f"{record['tokens_per_second']:,} tok/s"]
    parts += [f"MFU {100 * record['mfu']:.0f}%" if record["mfu"] else "MFU n/a"]
    parts += [f"{record['peak_memory'] / 1e9:.1f} GB"] if record["peak_memory"] else []
    return " | ".join([*parts, f"{timedelta(seconds=round(seconds_left))} left"])


def main() -> None:
    (model_cfg, cfg), _ = configurator.parse(
        [ModelConfig, TrainConfig], sys.argv[1:], __doc__, positional="config"
    )
    out, last, T = Path(cfg.out_dir), Path(cfg.out_dir) / "last.pt", model_cfg.block_size
    with user_errors():
        processes = Processes.join(cfg.device)
        rank, world = processes.rank, processes.world
        if rank == 0:
            lock_folder(out)
        else:
            sys.stdout = io.StringIO()  # the first process speaks for all
        saved = load_checkpoint(last) if cfg.resume else None
        check_folder(out)
    if saved is None and any(out.glob("*.pt")):
        fail(f"{out} already holds a run; use --resume to continue it, or another --out_dir")
    micro_steps, rest = divmod(cfg.tokens_per_step, world * cfg.batch_size * T)
    if rest:
        unit = f"processes x batch_size x block_size = {world * cfg.batch_size * T:,}"
        fail(f"tokens_per_step {cfg.tokens_per_step:,} is not a multiple of {unit}; change one")
    if cfg.shard_optimizer and world == 1:
        fail("shard_optimizer needs several processes; start with torchrun, or leave it out")

    # data, model, optimizer
    train, val, meta = find_data(cfg, model_cfg, world)
    device, dtype, compiled, attention = choose_device(cfg, processes)
    order = Order(len(train), cfg.tokens_per_step // T, cfg.seed)
    batches = partial(read_batches, train, order, meta, cfg, model_cfg, processes, device)
    validation = pick_validation(val, meta["eot"], cfg.eval_windows)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    torch.manual_seed(cfg.seed)
    model = GPT(model_cfg).to(device)
    model.attention = attention
    optimizer = make_optimizer(model, cfg)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    about = {"processes": world, "train_config": asdict(cfg), "tokenizer": meta["tokenizer"]}
    state = State(model, optimizer, scaler, about | {"data": cfg.data, "commit": git_commit()})
    if saved is not None:
        resume(out, state, saved)
        saved = None  # free its memory
    run = compile_model(model, next(batches(state.step)), autocast) if compiled else model
    if world > 1:  # around the compiled model, since a fused kernel needs the graph in one piece
        run = DistributedDataParallel(run, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if rank == 0:
        write_json(out / "config.json", {"model": asdict(model_cfg), "train": asdict(cfg)})
        # what a killed run logged after its checkpoint will be logged again
        log = [record for record in read_records(out / "log.jsonl") if record["step"] <= state.step]
        with replacing(out / "log.jsonl") as file:
            file.write("".join(json.dumps(record) + "\n" for record in log).encode())
    sizes = {k: sum(p.numel() for p in group) for k, group in model.parameter_groups().items()}
    parts = ", ".join(f"{kind} {n:,}" for kind, n in sizes.items())
    print(f"{sum(sizes.values()):,} parameters: {parts}")
    print(f"{len(train):,} windows of {T} tokens an epoch, {order.per_step} a step")
    if state.step >= cfg.max_steps:
        print(f"{out} is at step {state.step} of {cfg.max_steps} already: nothing to do")

    # Three things stop the run after the current step: Ctrl-C (a second one ends it at once),
    # SIGTERM (from torchrun and job schedulers), and a reader that has gone (`| head`).
    stop = stopping = False

    def report(line: str) -> None:
        nonlocal stop
        if not say(line):
            stop = True

    def interrupt(*_) -> None:
        nonlocal stop
        stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        report("stopping after this step (Ctrl-C again: at once)")

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)

    began, first, seconds = time.perf_counter(), state.step, state.seconds
    logged, logged_step = began, first  # of the last log line
    skipped_in_a_row = 0
    kept = f"{last} has step {first}" if first else "no checkpoint was written yet"
    while state.step < cfg.max_steps and not stopping:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * learning_rate_factor(state.step, cfg)

        total = torch.zeros((), device=device)
        for i, batch in enumerate(batches(state.step)):
            if world > 1:  # read in the forward pass: only the last micro-step sums over processes
                run.require_backward_grad_sync = i == micro_steps - 1
            with autocast:
                loss = run(*batch)
            loss = loss / micro_steps
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)  # before clipping, or the clip would see scaled gradients
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf).item()
        loss = processes.mean(total).item()

        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            scaler.step(optimizer)
            model.constrain()
        scaler.update()  # lowers the scale if unscaling has met an infinite gradient
        optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.seconds = seconds + time.perf_counter() - began
        skipped_in_a_row = 0 if finite else skipped_in_a_row + 1
        if not finite:
            state.skipped += 1
            numbers = f"loss {loss}, gradient norm {norm}"
            report(f"step {state.step}: {numbers}: skipped, {state.skipped} in all")
        if skipped_in_a_row == PATIENCE:
            why = f"{PATIENCE} steps in a row had no finite loss and gradient"
            fail(f"{why}; {kept}; use lower learning rates", DIVERGED)

        # A signal may have reached one process only: all of them must stop after the same step.
        stopping = processes.mean(torch.tensor(float(stop), device=device)).item() > 0
        validate = state.step % cfg.eval_interval == 0 or state.step == cfg.max_steps
        # A skipped step may mean ruined weights, unless the loss scaler is trying its scale.
        trouble = "" if finite or scaler.is_enabled() else "was skipped"
        if stopping and not trouble:  # first: whoever stopped the run may not wait for validation
            save(last, state, rank)
            kept = f"{last} has step {state.step}"
        if not stopping and not validate and state.step % cfg.log_interval:
            continue

        elapsed = max(time.perf_counter() - logged, 1e-9)  # a clock may not have moved
        rate = (state.step - logged_step) * cfg.tokens_per_step / elapsed
        peak = peak_flops(device, dtype)
        record = {"step": state.step, "loss": loss, "grad_norm": norm, "skipped": state.skipped}
        record |= {"seconds": state.seconds, "tokens_per_second": round(rate)}
        record["mfu"] = rate * model.flops_per_token(T) / (peak * world) if peak else None
        record["peak_memory"] = peak_memory(device)
        if validate:
            record |= evaluate(
                model, validation, meta["eot"], cfg.batch_size * T, processes, autocast
            )
            if not math.isfinite(record["val"]):
                trouble = f"has the validation loss {record['val']}"
            if not trouble and record["val"] < state.best:
                state.best = record["val"]
                save(out / "best.pt", state, rank)  # before the last.pt that knows its loss
            if not trouble:
                save(last, state, rank)
                kept = f"{last} has step {state.step}"
        if trouble and (validate or stopping):
            report(f"step {state.step} {trouble}, so no checkpoint is written")
        if rank == 0:
            numbers = {k: v if v is None or math.isfinite(v) else None for k, v in record.items()}
            with open(out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(numbers | model.prior_values()) + "\n")
        left = (time.perf_counter() - began) / (state.step - first) * (cfg.max_steps - state.step)
        report(format_line(record, cfg.max_steps, left))
        logged, logged_step = time.perf_counter(), state.step

    if stopping:
        report(f"stopped at step {state.step}; {kept}, --resume continues")
    processes.leave()
    if stopping:
        sys.exit(130)


if __name__ == "__main__":
    configurator.run(main)
