"""Speed and memory of training steps and of very long texts, as ratios to plain causal attention.

python bench.py                                               # a training step at the 120M shape
python bench.py config/ggd_bam_120m.py config/ggd_bam_1b.py   # at the shapes of configs
python bench.py --streaming out/ggd_bam_cpu --lengths=8192,32768    # the answer after a long text

A training step is the forward and the backward pass of a whole model on random tokens. "plain" is
the model without a prior on torch's own causal attention: what attention costs at least. It is
timed first and last. If the two differ, the machine was busy: do not trust the ratios.
"""

import configurator
from configurator import check_folder, fail, user_errors

import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import model as M
from device import device_name, peak_flops, peak_memory, pick_device, pick_dtype, set_up_cpu
from needles import make_prompts
from runs import aligned, append_record, load_run, origin
from streaming import KVCache, score
from train import TrainConfig

ENCODINGS = tuple(pe + s for pe in M.ENCODINGS for s in ("", "-ssmax"))
WAYS = ("plain", "dense", "exact", "skipping")


@dataclass
class BenchConfig:
    streaming: bool = False  # time a run on long texts instead of training steps
    lengths: tuple[int, ...] = (2048, 8192, 32_768)  # streaming: tokens of a passkey prompt
    ways: tuple[str, ...] = WAYS  # streaming: plain is causal attention without a prior, dense the
    # model's own forward with explicit scores; exact and skipping are streaming.py without and with
    # skipping
    encodings: tuple[str, ...] = ENCODINGS  # training: which rows; -ssmax after a name: with
    # Scalable-Softmax
    batch_size: int = 0  # training: windows a step; 0: the batch_size of the config
    steps: int = 10  # training: timed steps a row; their median is reported
    warmup: int = 3  # training: steps before them, the compilation included
    device: str = "auto"  # auto, cpu, cuda, ...
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # training: autocast
    records: str = "out/bench.jsonl"  # file to which the table is appended as records

    def __post_init__(self):
        for name, least in (("batch_size", 0), ("steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.lengths or min(self.lengths) < 256:
            raise ValueError(f"lengths is {self.lengths}; it must hold numbers from 256")
        for name, known in (("encodings", ENCODINGS), ("ways", WAYS)):
            names = set(getattr(self, name))
            if not names or names - set(known):
                unknown = ", ".join(sorted(names - set(known))) or "none"
                raise ValueError(f"{name} names {unknown}; choose from {', '.join(known)}")


# ---- training steps


class Case(NamedTuple):
    """One row of the table."""

    encoding: str
    attention: Literal["plain", "fused", "reference"]
    compiled: bool
    packed: bool = False  # several documents in a window

    def __str__(self) -> str:
        how = ("compiled " if self.compiled else "eager ") + self.attention
        return f"{how}, {self.encoding}{', packed documents' if self.packed else ''}"


def list_cases(cfg: BenchConfig, cuda: bool) -> list[Case]:
    """Plain, every encoding by the device's fastest way, the last one by the other ways, plain."""
    plain, last = Case("nope", "plain", cuda), cfg.encodings[-1]
    rows = [Case(name, "fused" if cuda else "reference", cuda) for name in cfg.encodings]
    if cuda:
        rows.append(Case(last, "fused", True, packed=True))
        rows += [Case(last, "reference", compiled) for compiled in (True, False)]
    return [plain, *rows, plain]


def plain_attention(q, k, v, log_prior, row_scale, layout: M.Layout) -> Tensor:
    """torch's causal attention, which knows no prior."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


M.ATTENTIONS["plain"] = plain_attention


def measure(
    case: Case, model_cfg: M.ModelConfig, cfg: BenchConfig, device: torch.device, dtype: torch.dtype
) -> dict:
    """Median seconds of a step and, on CUDA, the most bytes held by tensors."""
    pe, _, ssmax = case.encoding.partition("-")
    shape = {"pe": pe, "ssmax": bool(ssmax), "virtual_length": 1.0}  # which costs no time
    B, T, cuda = cfg.batch_size, model_cfg.block_size, device.type == "cuda"
    torch.manual_seed(0)
    torch.compiler.reset()
    model = M.GPT(replace(model_cfg, **shape)).to(device).train()
    model.attention = case.attention
    batch = torch.randint(1, model_cfg.vocab_size, (B, T + 1), device=device)
    if case.packed:  # documents of 150 tokens, which begin elsewhere in every window
        place = torch.arange(T + 1, device=device) + 37 * torch.arange(B, device=device)[:, None]
        batch[place % 150 == 0] = 0
    idx, targets = batch[:, :-1], batch[:, 1:]
    doc_ids = M.documents(idx, 0) if case.packed else None
    run = torch.compile(model, dynamic=False) if case.compiled else model
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(cfg.warmup + cfg.steps):
        began = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = run(idx, targets, doc_ids)
        loss.backward()
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    seconds = max(statistics.median(times[cfg.warmup :]), 1e-9)  # a slow clock may not have moved
    tokens, peak = idx.numel() / seconds, peak_flops(device, dtype)
    return {
        "case": str(case),
        "tokens_per_second": tokens,
        "bytes": peak_memory(device) if cuda else None,
        "mfu": model.flops_per_token(T) * tokens / peak if peak else None,
    }


def format_step(record: dict, plain: dict) -> list[str]:
    """Cells of the table; a ratio is to the first row."""
    if "error" in record:
        return [record["case"], record["error"], "", "", "", ""]
    speed, memory = record["tokens_per_second"], record["bytes"]
    return [
        record["case"],
        f"{speed:,.0f}",
        f"{speed / plain['tokens_per_second']:.2f}" if "error" not in plain else "",
        f"{memory / 1e9:.2f}" if memory else "n/a",
        f"{memory / plain['bytes']:.2f}" if memory and plain.get("bytes") else "n/a",
        f"{100 * record['mfu']:.0f}%" if record["mfu"] else "n/a",
    ]


def bench_training(
    words: list[str], cfg: BenchConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """`words`: the config file, or none for the defaults, the 120M model."""
    kinds = [M.ModelConfig, TrainConfig]
    (model_cfg, trained), _ = configurator.parse(kinds, words, None, positional="config")
    cfg = replace(cfg, batch_size=cfg.batch_size or trained.batch_size)
    shape = f"{model_cfg.n_layer} layers of {model_cfg.n_embd}"
    print(f"{shape}, {cfg.batch_size} x {model_cfg.block_size} tokens a step")
    about = {"metric": "training step", "hardware": device_name(device)}
    about |= {"torch": torch.__version__, "dtype": str(dtype)}
    about |= {"config": asdict(cfg), "model_config": asdict(model_cfg)}
    records = []
    for case in list_cases(cfg, device.type == "cuda"):
        try:
            record = measure(case, model_cfg, cfg, device, dtype)
        except Exception as error:  # memory or the compiler: one row must not cost the others
            reason = str(error).partition("\n")[0][:80]
            record = {"case": str(case), "error": f"{type(error).__name__}: {reason}"}
        records.append(record)
        print(f"{case}: {'  '.join(format_step(record, records[0])[1:])}", flush=True)
        append_record(Path(cfg.records), record | about)
    header = ["case", "tokens/s", "of plain", "GB", "of plain", "MFU"]
    print("\n" + aligned([header, *(format_step(record, records[0]) for record in records)]))


# ---- long texts


@torch.no_grad()
def answer(way: str, model: M.GPT, idx: Tensor, n_last: int) -> tuple[Tensor, Tensor | None]:
    """The most likely tokens at the last n_last places of idx, and the blocks of keys skipped."""
    if way in ("exact", "skipping"):
        cache = KVCache(model, 1, idx.shape[1] - 1, exact=way == "exact")
        best = score(model, idx, n_last, cache)[1]
        return best, cache.skipped() if way == "skipping" else None
    model.train()  # in eval mode attention is always the reference
    model.attention = "reference" if way == "dense" else way
    return model(idx[:, :-1])[:, -n_last:].argmax(-1), None


def time_way(way: str, path: str, length: int, device: torch.device) -> dict:
    """Seconds and bytes above the loaded model for the answer to a passkey prompt."""
    run = load_run(path, device)
    for tokens in (512, length):  # the short one starts threads and kernels
        prompt = make_prompts(run.enc, tokens, depths=3)[1]  # the needle in the middle
        idx = torch.tensor([prompt.tokens], device=device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before, began = peak_memory(device), time.perf_counter()
        best, skipped = answer(way, run.model, idx, prompt.answer)
        right = bool((best == idx[:, -prompt.answer :]).all())  # this waits for the device
        seconds = time.perf_counter() - began
    return {
        "way": way,
        "length": length,
        "seconds": seconds,
        "right": right,
        "bytes": None if before is None else peak_memory(device) - before,
        "skipped_blocks": None if skipped is None else skipped.tolist(),
    }


def in_a_process(*arguments) -> dict:
    """`time_way` in a new process, whose peak memory is then this way's, or the error's name."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(time_way, *arguments).result()
        except Exception as error:  # above all memory
            return {"way": arguments[0], "length": arguments[2], "error": type(error).__name__}


def format_way(record: dict, plain: dict) -> list[str]:
    """Cells of the table; a ratio is to the way without a prior at the same length."""
    cells = [f"{record['length']:,}", record["way"]]
    if "error" in record:
        return [*cells, record["error"], "", "", "", ""]
    seconds, memory, skipped = record["seconds"], record["bytes"], record["skipped_blocks"]
    return [
        *cells,
        f"{seconds:.2f}",
        f"{1000 * seconds / record['length']:.4f}",
        f"{seconds / plain['seconds']:.2f}" if plain.get("seconds") else "",
        f"{memory / 1e6:.0f}" if memory is not None else "n/a",
        f"{100 * np.mean(skipped):.0f}%" if skipped else "",
    ]


def bench_streaming(path: str, cfg: BenchConfig, device: torch.device) -> None:
    with user_errors():
        run = load_run(path, device)
        make_prompts(run.enc, min(cfg.lengths))
    about, rows = {"metric": "streaming"} | origin(run), []
    for length in sorted(set(cfg.lengths)):
        plain = {}
        for way in cfg.ways:
            record = in_a_process(way, path, length, device)
            plain = record if way == "plain" else plain
            rows.append(format_way(record, plain))
            print("  ".join(rows[-1]), flush=True)
            append_record(Path(cfg.records), record | about)
    header = ["tokens", "way", "seconds", "s per 1,000", "of plain", "MB", "skipped"]
    print("\n" + aligned([header, *rows]))
    if record.get("skipped_blocks"):
        print("\nshare of blocks skipped, head by head, at the longest text:")
        for layer, shares in enumerate(record["skipped_blocks"]):
            print(f"layer {layer}: " + "  ".join(f"{100 * share:.0f}%" for share in shares))


def main() -> None:
    (cfg,), words = configurator.parse(
        [BenchConfig], sys.argv[1:], __doc__, positional="configs or run"
    )
    if cfg.streaming and len(words) != 1:
        fail("--streaming times one run; name its folder, such as out/ggd_bam_cpu")
    if not cfg.streaming and (folders := [word for word in words if Path(word).is_dir()]):
        fail(f"{folders[0]} is no config file; to time a run on long texts, add --streaming")
    with user_errors():
        check_folder(Path(cfg.records).parent)
        device, why = pick_device(cfg.device)
        dtype, reason = pick_dtype(cfg.dtype, device)
    number = "" if cfg.streaming else f", {str(dtype).removeprefix('torch.')} ({reason})"
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{device_name(device)} ({why}){number}, {threads}")
    if cfg.streaming:
        return bench_streaming(words[0], cfg, device)
    if device.type == "cpu":
        set_up_cpu()  # as train.py does
    for config in [[word] for word in words] or [[]]:
        bench_training(config, cfg, device, dtype)


if __name__ == "__main__":
    configurator.run(main)
