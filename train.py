"""Train a model: python train.py config/ggd_bam_cpu.py --key=value

torchrun --standalone --nproc_per_node=8 train.py config/ggd_bam_120m.py  # the same run on 8 GPUs

Writes last.pt, best.pt (lowest validation loss), log.jsonl and config.json into out_dir. Ctrl-C
stops after the current step with a checkpoint. --resume continues any stopped or killed run
exactly as if it had never stopped.
"""

import configurator
from configurator import fail, say, user_errors

import io
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import data
from data import Order, Windows, long_windows, shard_files
from device import Processes, peak_flops, peak_memory, pick_device, pick_dtype, set_up_cpu
from model import GPT, ModelConfig, documents
from prepare_fineweb import PrepareConfig, changes
from runs import load_checkpoint, read_records, save_checkpoint

ROOT = Path(__file__).resolve().parent
PATIENCE = 10  # give a run up after this many steps in a row without a finite loss and gradient
DIVERGED = 3  # exit status of such a run, by which study.py tells it from a mistake


@dataclass
class TrainConfig:
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
    shard_optimizer: bool = False  # under torchrun: each process holds a part of its state (ZeRO 1)
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    log_interval: int = 10  # steps between log lines
    eval_interval: int = 500  # steps between validations and checkpoints
    eval_windows: int = 256  # validation windows of block_size tokens
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # autocast; weights: float32
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile; auto: on CUDA. There
    # it fuses attention to one kernel without a T x T tensor
    resume: bool = False  # continue the run in out_dir from its last.pt

    def __post_init__(self):
        counts = "batch_size tokens_per_step max_steps log_interval eval_interval eval_windows"
        for name, value in vars(self).items():
            least = int(name in counts.split())
            if not isinstance(value, str) and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")


# ---- data


@user_errors()
def find_data(cfg: TrainConfig, model_cfg: ModelConfig, world: int):
    """Training windows, validation windows and meta.json. Prepares the data if it is missing."""
    folder, T, vocab = Path(cfg.data), model_cfg.block_size, model_cfg.vocab_size
    missing = not shard_files(folder) or (folder / data.UNFINISHED).exists()
    if missing and cfg.prepare and world == 1:
        print(f"{folder} is not there yet: prepare_fineweb.py {cfg.prepare}", flush=True)
        script, options = str(ROOT / "prepare_fineweb.py"), shlex.split(cfg.prepare)
        if subprocess.run([sys.executable, script, *options, f"--out_dir={folder}"]).returncode:
            fail(f"preparing {folder} did not succeed; see the message above")
    train, val = (Windows(shard_files(folder, kind), T) for kind in ("train_*", "val_*"))
    if not len(train) or not len(val):
        there = f"{len(train)} training and {len(val)} validation windows of {T} tokens"
        fail(f"{folder} has {there}; use prepare_fineweb.py, or a smaller block_size")
    meta = data.read_meta(folder) or {"tokenizer": "gpt2", "window": None}  # llm.c's have none
    meta["eot"] = data.get_tokenizer(meta["tokenizer"]).eot_token
    if cfg.prepare:
        (wanted,), _ = configurator.parse([PrepareConfig], shlex.split(cfg.prepare), None)
        if differ := ", ".join(changes(meta.get("settings", {}), wanted)):
            advice = "choose a new folder, --data=NAME, or use it as it is, --prepare="
            fail(f"{folder} was prepared with {differ}; {advice}")
    if meta["window"] not in (None, T):
        packed = f"packed for windows of {meta['window']} tokens, block_size is {T}"
        fail(f"{folder} has exercises {packed}; prepare it again")
    if (highest := max(meta["eot"], *(int(shard.max()) for shard in val.shards))) >= vocab:
        advice = f"set vocab_size to {highest + 1}, or see prepare_fineweb.py --check {folder}"
        fail(f"{folder} has the token id {highest}, vocab_size is {vocab}; {advice}")
    return train, val, meta


def read_batches(train: Windows, order: Order, meta, cfg, model_cfg, processes, device, step: int):
    """This process's part of a step, a tuple for each micro-step: inputs, targets, documents, all
    (B, T), and (B,) the logarithms of the virtual lengths, or None."""
    rank, world = processes
    indices = order.step(step, rank, world)
    generator = np.random.default_rng((cfg.seed, step, 1))  # the same in all processes
    log_virtual = generator.random(order.per_step, dtype=np.float32)[rank::world]
    log_virtual = torch.from_numpy(log_virtual * math.log(model_cfg.virtual_length)).to(device)
    for at in range(0, len(indices), cfg.batch_size):
        part = slice(at, at + cfg.batch_size)
        windows = torch.from_numpy(train.take(indices[part])).to(device)
        idx, targets = windows[:, :-1], windows[:, 1:].clone()
        if meta["window"]:  # packed windows are shuffled: the token after one is of another text
            targets[:, -1] = -100
        virtual = log_virtual[part] if model_cfg.virtual_length > 1 else None
        yield idx, targets, documents(idx, meta["eot"]), virtual


# ---- model and optimizer


def compile_model(model: GPT, batch, autocast):
    """The compiled model, tried on one batch. Without a working compiler, the model itself."""
    run = torch.compile(model, dynamic=False)
    try:
        with autocast:
            loss = run(*batch)
        loss.backward()
    except torch.OutOfMemoryError:
        fail(f"batch_size {len(batch[0])} does not fit the device's memory; use a smaller one")
    except Exception as error:  # a compiler has many ways to fail
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
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

        kind = partial(ZeroRedundancyOptimizer, optimizer_class=kind)
    return kind(groups, **options)


def learning_rate_factor(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then a cosine from 1 to min_lr_fraction. Multiplies every peak rate."""
    if step < cfg.warmup_steps:
        return (step + 1) / (cfg.warmup_steps + 1)
    progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr_fraction + (1 - cfg.min_lr_fraction) * cosine


# ---- validation


def pick_validation(val: Windows, eot: int, count: int) -> dict[str, tuple[torch.Tensor, int]]:
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
        validation[f"val_{c}x"] = torch.from_numpy(long[:, -c * val.T - 1 :]), val.T // 2
    return validation


@torch.no_grad()
def evaluate(model: GPT, validation: dict, eot: int, tokens: int, processes, autocast) -> dict:
    """Name -> mean loss of the targets. Each process takes its share, about `tokens` at once."""
    model.eval()
    losses, device = {}, model.embedding.weight.device
    for name, (windows, targets) in validation.items():
        total = torch.zeros((), dtype=torch.float64, device=device)
        rows = max(1, tokens // (windows.shape[1] - 1))
        share = windows[processes.rank :: processes.world]
        for at in range(0, len(share), rows):
            w = share[at : at + rows].to(device)
            idx, y = w[:, :-1], w[:, 1:].clone()
            y[:, :-targets] = -100
            with autocast:
                total += model(idx, y, documents(idx, eot)).double() * len(w)
        losses[name] = processes.mean(total).item() * processes.world / len(windows)
    model.train()
    return losses


# ---- the run


def resume(out: Path, saved: dict, model: GPT, optimizer, scaler, about: dict) -> None:
    """Continue from a checkpoint. Prints which options differ from the run's so far."""
    if (saved["model_config"], saved["tokenizer"]) != (asdict(model.cfg), about["tokenizer"]):
        advice = "resume it with the options of its start"
        fail(f"{out} holds a run of another model or tokenizer; {advice}")
    if "optimizer" not in saved:
        fail(f"{out} cannot be resumed: it is a copy without the optimizer's state")
    model.load_state_dict(saved["model"])
    scaler.load_state_dict(saved["scaler"])
    for old, new in zip(saved["optimizer"]["param_groups"], optimizer.param_groups, strict=True):
        old |= {k: v for k, v in new.items() if k != "params"}  # this call's rates, decay and betas
    optimizer.load_state_dict(saved["optimizer"])
    then, now = (run["train_config"] | {"processes": run["processes"]} for run in (saved, about))
    differ = [k for k in now if k != "resume" and now[k] != then.get(k)]
    changed = [f"{k} {then.get(k)} -> {now[k]}" for k in differ]
    print(f"resumed {out} at step {saved['step']} of {now['max_steps']}", *changed, sep=", ")


def git_commit() -> str | None:
    """This program's commit, with -dirty if its files differ, or None if it is unknown."""
    # with --git-dir: git would go up to a repository that merely holds this program
    command = 'git --git-dir=.git describe --always --dirty "--exclude=*"'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def format_line(record: dict, max_steps: int, seconds_left: float) -> str:
    parts = [f"step {record['step']:>6}/{max_steps}", f"loss {record['loss']:.4f}"]
    parts += [f"{name} {record[name]:.4f}" for name in record if name.startswith("val")]
    parts += [f"norm {record['grad_norm']:.2f}", f"{record['tokens_per_second']:,} tok/s"]
    parts += [f"MFU {100 * record['mfu']:.0f}%" if record["mfu"] else "MFU n/a"]
    parts += [f"{record['peak_memory'] / 1e9:.1f} GB"] if record["peak_memory"] else []
    return " | ".join([*parts, f"{timedelta(seconds=round(seconds_left))} left"])


def main() -> None:
    kinds = [ModelConfig, TrainConfig]
    (model_cfg, cfg), _ = configurator.parse(kinds, sys.argv[1:], __doc__, positional="config")
    out, T = Path(cfg.out_dir), model_cfg.block_size
    with user_errors():
        processes = Processes.join(cfg.device)
        rank, world = processes
        if rank == 0:
            data.lock_folder(out)
        else:
            sys.stdout = io.StringIO()  # the first process speaks for all
        saved = load_checkpoint(out / "last.pt") if cfg.resume else None
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
    with user_errors():
        device, why = pick_device(cfg.device)
        dtype, reason = pick_dtype(cfg.dtype, device)
    cfg.dtype = str(dtype).removeprefix("torch.")  # what the run's records shall say
    if device.type == "cpu":
        set_up_cpu()
    compiled = cfg.compile == "true" or (cfg.compile == "auto" and device.type == "cuda")
    order = Order(len(train), cfg.tokens_per_step // T, cfg.seed)
    batches = partial(read_batches, train, order, meta, cfg, model_cfg, processes, device)
    validation = pick_validation(val, eot := meta["eot"], cfg.eval_windows)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    torch.manual_seed(cfg.seed)
    model = GPT(model_cfg).to(device)
    model.attention = "fused" if compiled and device.type == "cuda" else "reference"
    print(f"device {device} ({why}), {cfg.dtype} ({reason}), ", end="")
    print(f"compile {'on' if compiled else 'off'}, attention {model.attention}")
    optimizer = make_optimizer(model, cfg)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    about = {"processes": world, "train_config": asdict(cfg), "tokenizer": meta["tokenizer"]}
    about |= {"data": cfg.data, "commit": git_commit()}
    step, best, seconds, skipped = 0, math.inf, 0.0, 0  # best: the lowest validation loss
    if saved is not None:
        resume(out, saved, model, optimizer, scaler, about)
        step, best, seconds, skipped = (saved[k] for k in ("step", "best", "seconds", "skipped"))
        del saved  # free its memory
    run = compile_model(model, next(batches(step)), autocast) if compiled else model
    if world > 1:  # around the compiled model, since a fused kernel needs the graph in one piece
        run = DistributedDataParallel(run, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if rank == 0:
        data.write_json(out / "config.json", {"model": asdict(model_cfg), "train": asdict(cfg)})
        # what a killed run logged after its checkpoint will be logged again
        log = [record for record in read_records(out / "log.jsonl") if record["step"] <= step]
        with data.replacing(out / "log.jsonl") as file:
            file.write("".join(json.dumps(record) + "\n" for record in log).encode())
    sizes = {k: sum(p.numel() for p in group) for k, group in model.parameter_groups().items()}
    parts = ", ".join(f"{kind} {n:,}" for kind, n in sizes.items())
    print(f"{sum(sizes.values()):,} parameters: {parts}")
    print(f"{len(train):,} windows of {T} tokens an epoch, {order.per_step} a step")

    # Three things stop the run after the current step: Ctrl-C (a second one ends it at once),
    # SIGTERM (from torchrun and job schedulers), and a reader that has gone (`| head`).
    stop = stopping = False

    def report(line: str) -> None:
        nonlocal stop
        stop = not say(line) or stop

    def interrupt(*_) -> None:
        nonlocal stop
        stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        report("stopping after this step (Ctrl-C again: at once)")

    def save(name: str) -> None:
        if cfg.shard_optimizer:  # all processes send their parts, and the first one writes
            optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            state = {"step": step, "best": best, "seconds": seconds, "skipped": skipped}
            state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            save_checkpoint(out / name, model.checkpoint() | state | about)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)

    logged, logged_step = time.perf_counter(), step  # of the last log line
    began = logged - seconds
    skipped_in_a_row = 0
    while step < cfg.max_steps and not stopping:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * learning_rate_factor(step, cfg)

        total = torch.zeros((), device=device)
        for i, batch in enumerate(batches(step)):
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

        step += 1
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            scaler.step(optimizer)
            model.constrain()
            skipped_in_a_row = 0
        else:
            skipped, skipped_in_a_row = skipped + 1, skipped_in_a_row + 1
            report(f"step {step}: loss {loss}, norm {norm}: skipped, {skipped} in all")
        if skipped_in_a_row == PATIENCE:
            why = f"{PATIENCE} steps in a row were skipped; use lower learning rates"
            print(f"error: {why}", file=sys.stderr)
            sys.exit(DIVERGED)
        scaler.update()  # lowers the scale if unscaling has met an infinite gradient
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began

        # A signal may have reached one process only: all of them must stop after the same step.
        stopping = processes.mean(torch.tensor(float(stop), device=device)).item() > 0
        validate = step % cfg.eval_interval == 0 or step == cfg.max_steps
        # A skipped step may mean ruined weights, unless the loss scaler is trying its scale.
        sound = finite or scaler.is_enabled()
        if stopping and sound:  # first: whoever stopped the run may not wait for validation
            save("last.pt")
        if not stopping and not validate and step % cfg.log_interval:
            continue

        rate = (step - logged_step) * cfg.tokens_per_step / (time.perf_counter() - logged)
        peak = peak_flops(device, dtype)
        record = {"step": step, "loss": loss, "grad_norm": norm, "skipped": skipped}
        record |= {"seconds": seconds, "tokens_per_second": round(rate)}
        record["mfu"] = rate * model.flops_per_token(T) / (peak * world) if peak else None
        record["peak_memory"] = peak_memory(device)
        if validate:
            record |= evaluate(model, validation, eot, cfg.batch_size * T, processes, autocast)
            sound = sound and math.isfinite(record["val"])
            if sound and record["val"] < best:
                best = record["val"]
                save("best.pt")  # before the last.pt that knows its loss
            if sound:
                save("last.pt")
        if not sound and (validate or stopping):
            report(f"step {step} has no finite loss, so no checkpoint is written")
        if rank == 0:
            numbers = {k: v if v is None or math.isfinite(v) else None for k, v in record.items()}
            with open(out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(numbers | model.prior_values()) + "\n")
        seconds_left = (cfg.max_steps - step) * cfg.tokens_per_step / rate
        report(format_line(record, cfg.max_steps, seconds_left))
        logged, logged_step = time.perf_counter(), step

    processes.leave()
    if stopping:
        say(f"stopped at step {step}; --resume continues from the last checkpoint")
        sys.exit(130)


if __name__ == "__main__":
    configurator.run(main)
