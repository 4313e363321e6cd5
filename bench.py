"""Speed and memory of training steps and of very long texts, as ratios to plain causal attention in the same run.

python bench.py                                            # a training step at the 120M shape, 512 tokens
python bench.py config/ggd_bam_120m.py config/ggd_bam_1b.py         # the shapes of configs
python bench.py --streaming out/ggd_bam_cpu --lengths=8192,32768    # scoring one answer at the end of a long text

A training step is the forward and the backward pass of a whole model on random tokens. "plain" is the model without a
prior on torch's own causal attention: what attention costs at least. It is timed first and last; if the two differ, the
machine was busy with something else, and the ratios are worth as little.
"""

import configurator
from configurator import check_folder, fail, user_errors

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import model as M
from device import device_name, peak_flops, peak_memory, pick_device, pick_dtype
from needles import make_prompts
from runs import aligned, append_record, load_run, origin
from streaming import KVCache, score
from train import TrainConfig

ENCODINGS = tuple(pe + s for pe in M.ENCODINGS for s in ("", "-ssmax"))


@dataclass
class BenchConfig:
    """What to time. Raises ValueError, in one sentence, if it makes no sense."""

    streaming: bool = False  # time a run on long texts instead of training steps
    lengths: tuple[int, ...] = (
        2048,
        8192,
        32_768,
    )  # streaming: tokens of the text, a passkey prompt
    ways: tuple[str, ...] = (
        "plain",
        "dense",
        "exact",
        "skipping",
    )  # streaming: plain is causal attention without a
    # prior, dense explicit scores with a power for each; exact and skipping are streaming.py without and with skipping
    encodings: tuple[str, ...] = ENCODINGS  # training: which rows; -ssmax after a name: with
    # Scalable-Softmax
    batch_size: int = 0  # training: windows a step; 0: the batch_size of the config
    steps: int = 10  # training: timed steps a row; their median is reported
    warmup: int = 3  # training: steps before them, the compilation included
    device: str = "auto"  # auto, cpu, cuda, ...
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # autocast
    records: str = "out/bench.jsonl"  # file to which the table is appended as records

    def __post_init__(self):
        for name, least in (("batch_size", 0), ("steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.lengths or min(self.lengths) < 256:
            raise ValueError(f"lengths is {self.lengths}; it must hold numbers from 256")
        for name, known in (("encodings", ENCODINGS), ("ways", BenchConfig.ways)):
            if (unknown := set(getattr(self, name)) - set(known)) or not getattr(self, name):
                raise ValueError(
                    f"{name} names {', '.join(sorted(unknown)) or 'none'}; choose from {', '.join(known)}"
                )


class Case(NamedTuple):
    """One row of the table."""

    encoding: str
    attention: Literal["plain", "fused", "reference"]
    compiled: bool
    packed: bool = False  # several documents in a window

    def __str__(self) -> str:
        how = ("compiled " if self.compiled else "eager ") + self.attention
        return f"{how}, {self.encoding}{', packed documents' if self.packed else ''}"


def cases(cfg: BenchConfig, cuda: bool) -> list[Case]:
    """The rows: plain, every encoding by the fastest way the device has, and the other ways for the last encoding."""
    plain, last = Case("nope", "plain", compiled=cuda), cfg.encodings[-1]
    rows = [Case(name, "fused" if cuda else "reference", compiled=cuda) for name in cfg.encodings]
    if cuda:
        rows += [
            Case(last, "fused", True, packed=True),
            Case(last, "reference", True),
            Case(last, "reference", False),
        ]
    return [plain, *rows, plain]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, log_prior: None, row_scale: Tensor, layout: M.Layout
) -> Tensor:
    """torch's causal attention, which knows no prior."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


M.ATTENTIONS["plain"] = plain_attention


@contextmanager
def attention_of(model: M.GPT, case: Case) -> Iterator[None]:
    model.attention = case.attention
    try:
        yield
    finally:
        model.attention = "reference"


def measure(
    case: Case, model_cfg: M.ModelConfig, cfg: BenchConfig, device: torch.device, dtype: torch.dtype
) -> dict:
    """Median seconds of a step and, on CUDA, the most bytes held by tensors."""
    pe, _, ssmax = case.encoding.partition("-")
    torch.manual_seed(0)
    torch.compiler.reset()
    model = M.GPT(replace(model_cfg, pe=pe, ssmax=bool(ssmax))).to(device).train()
    batch = torch.randint(
        1, model_cfg.vocab_size, (cfg.batch_size, model_cfg.block_size + 1), device=device
    )
    if case.packed:  # documents of 150 tokens, begun elsewhere in every window
        place = (
            torch.arange(batch.shape[1], device=device)
            + 37 * torch.arange(len(batch), device=device)[:, None]
        )
        batch[place % 150 == 0] = 0
    idx, targets = batch[:, :-1], batch[:, 1:]
    doc_ids = M.documents(idx, 0) if case.packed else None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    with attention_of(model, case):
        run = torch.compile(model, dynamic=False) if case.compiled else model
        for _ in range(cfg.warmup + cfg.steps):
            began = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = run(idx, targets, doc_ids)
            loss.backward()
            model.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    seconds = max(statistics.median(times[cfg.warmup :]), 1e-9)  # a slow clock may not have moved
    tokens = idx.numel() / seconds
    peak = peak_flops(device, dtype)
    return {
        "case": str(case),
        "tokens_per_second": tokens,
        "bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "mfu": model.flops_per_token(model_cfg.block_size) * tokens / peak if peak else None,
    }


def attempt(case: Case, *arguments) -> dict:
    """`measure`, or why it was not possible, so that one row does not cost the others."""
    try:
        return measure(case, *arguments)
    except torch.OutOfMemoryError:
        return {"case": str(case), "error": "out of memory"}
    except Exception as error:  # a compiler has many ways to fail
        return {
            "case": str(case),
            "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}",
        }


def row_of(record: dict, plain: dict) -> list[str]:
    """Cells of the table; a ratio is to the first row."""
    if "error" in record:
        return [record["case"], record["error"], "", "", "", ""]
    speed, memory = record["tokens_per_second"], record["bytes"]
    known = memory and plain.get("bytes")
    return [
        record["case"],
        f"{speed:,.0f}",
        f"{speed / plain['tokens_per_second']:.2f}" if "error" not in plain else "",
        f"{memory / 1e9:.2f}" if memory else "n/a",
        f"{memory / plain['bytes']:.2f}" if known else "n/a",
        f"{100 * record['mfu']:.0f}%" if record["mfu"] else "n/a",
    ]


def bench_training(
    words: list[str], cfg: BenchConfig, device: torch.device, dtype: torch.dtype
) -> None:
    kinds = [M.ModelConfig, TrainConfig]
    (model_cfg, trained), _ = configurator.parse(kinds, words, None, positional="config")
    cfg = replace(cfg, batch_size=cfg.batch_size or trained.batch_size)
    print(
        f"{model_cfg.n_layer} layers of {model_cfg.n_embd}, {cfg.batch_size} x {model_cfg.block_size} tokens a step"
    )
    about = {
        "metric": "training step",
        "hardware": device_name(device),
        "torch": torch.__version__,
        "dtype": str(dtype),
    }
    about |= {"config": asdict(cfg), "model_config": asdict(model_cfg)}
    found = []
    for case in cases(cfg, device.type == "cuda"):
        found.append(attempt(case, model_cfg, cfg, device, dtype))
        print(f"{case}: {'  '.join(row_of(found[-1], found[0])[1:])}", flush=True)
        append_record(Path(cfg.records), found[-1] | about)
    header = ["case", "tokens/s", "of plain", "GB", "of plain", "MFU"]
    print("\n" + aligned([header, *(row_of(record, found[0]) for record in found)]))


# Long texts. Each way of scoring the answer at the end of a passkey prompt runs in a process of its own, whose peak
# memory is then that of this way.


def score_skipping(model: M.GPT, idx: Tensor, n_last: int) -> tuple[Tensor, Tensor]:
    cache = KVCache(model, 1, idx.shape[1] - 1)
    return score(model, idx, n_last, cache)[1], cache.skipped()


def score_exactly(model: M.GPT, idx: Tensor, n_last: int) -> tuple[Tensor, None]:
    return score(model, idx, n_last, KVCache(model, 1, idx.shape[1] - 1, exact=True))[1], None


@torch.no_grad()
def score_by(
    attention: Callable[..., Tensor], model: M.GPT, idx: Tensor, n_last: int
) -> tuple[Tensor, None]:
    """Every layer and the output layer for all positions, without a cache."""
    positions = torch.arange(idx.shape[1] - 1, device=idx.device)[None]
    x, layout = model.embed(idx[:, :-1], positions), model.layout(positions)
    for block in model.blocks:
        q, k, v = block.attn.project(block.norm_attn(x), layout)
        x = x + block.attn.merge(attention(block.attn, q, k, v, layout))
        x = x + block.mlp(block.norm_mlp(x))
    return model.logits(x)[:, -n_last:].argmax(-1), None


def dense_attention(
    attn: M.CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, layout: M.Layout
) -> Tensor:
    """As it is written on paper: explicit float32 scores in blocks of 256 queries, and a power for each of them."""
    T, out = q.shape[2], []
    for begin in range(0, T, 256):
        i, j = (
            torch.arange(begin, min(begin + 256, T), device=q.device)[:, None],
            torch.arange(T, device=q.device),
        )
        scores = q[:, :, begin : begin + 256] @ k.transpose(-2, -1)
        if attn.cfg.pe == "ggd":
            theta_alpha, theta_beta = (
                t[:, None, None] for t in (attn.prior.theta_alpha, attn.prior.theta_beta)
            )
            mu = 2 * torch.sinh(attn.prior.theta_mu)[:, None, None]
            base = (j - i - mu).abs() + M.EPSILON
            bias = -torch.exp(
                (theta_alpha + theta_beta * base.log()).clamp(max=M.MAX_EXPONENT)
            )  # (H, 256, T)
            scale = (
                attn.s[:, None, None] * layout.log_n[0, 0, begin : begin + 256]
                if attn.cfg.ssmax
                else 1.0
            )
            scores = scores + bias * scale
        elif attn.cfg.pe == "alibi":
            scores = scores - attn.prior.slopes[:, None, None] * (i - j)
        out.append(scores.masked_fill(j > i, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, dim=2)


def causal_attention(
    attn: M.CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, layout: M.Layout
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=1.0
    )  # the answer is not the model's


WAYS = {
    "plain": partial(score_by, causal_attention),
    "dense": partial(score_by, dense_attention),
    "exact": score_exactly,
    "skipping": score_skipping,
}


def time_way(way: str, path: str, length: int, device: torch.device) -> dict:
    """Seconds and bytes above the loaded model for scoring one answer; whether it is right; what was skipped."""
    run = load_run(path, device)
    times = []
    for tokens in (512, length):  # the short one starts threads and kernels
        prompt = make_prompts(run.enc, tokens, depths=3)[1]  # the needle in the middle
        idx, before = torch.tensor([prompt.tokens], device=device), peak_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        began = time.perf_counter()
        best, skipped = WAYS[way](run.model, idx, prompt.answer)
        right = bool((best == idx[:, -prompt.answer :]).all())  # this waits for the device
        times.append(time.perf_counter() - began)
    found = {"way": way, "length": length, "seconds": times[-1], "right": right}
    found["bytes"] = None if before is None else peak_memory(device) - before
    return found | {"skipped_blocks": None if skipped is None else skipped.tolist()}


def in_a_process(*arguments) -> dict:
    """`time_way` in a new process, or why it was not possible."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(time_way, *arguments).result()
        except Exception as error:  # above all memory
            return {"way": arguments[0], "length": arguments[2], "error": type(error).__name__}


def streaming_row(record: dict, plain: dict) -> list[str]:
    if "error" in record:
        return [f"{record['length']:,}", record["way"], record["error"], "", "", "", ""]
    seconds, memory = record["seconds"], record["bytes"]
    skipped = record["skipped_blocks"]
    return [
        f"{record['length']:,}",
        record["way"],
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
    about, found = {"metric": "streaming"} | origin(run), []
    for length in sorted(set(cfg.lengths)):
        plain = {}
        for way in cfg.ways:
            record = in_a_process(way, path, length, device)
            plain = record if way == "plain" else plain
            found.append(streaming_row(record, plain))
            print("  ".join(found[-1]), flush=True)
            append_record(Path(cfg.records), record | about)
    header = ["tokens", "way", "seconds", "s per 1,000", "of plain", "MB", "skipped"]
    print("\n" + aligned([header, *found]))
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
        fail(
            f"{folders[0]} is a folder; --streaming times a run, and training steps are timed for config files"
        )
    if Path(cfg.records).is_dir():
        fail(f"records is {cfg.records}, a folder; name a file in it")
    with user_errors():
        check_folder(Path(cfg.records).parent)
        device, why = pick_device(cfg.device)
        dtype, reason = pick_dtype(cfg.dtype, device)
    number = "" if cfg.streaming else f", {str(dtype).removeprefix('torch.')} ({reason})"
    print(
        f"{device_name(device)} ({why}){number}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    if cfg.streaming:
        return bench_streaming(words[0], cfg, device)
    for config in [[word] for word in words] or [[]]:
        bench_training(config, cfg, device, dtype)


if __name__ == "__main__":
    configurator.run(main)
