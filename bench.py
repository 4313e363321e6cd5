"""Speed and memory of a training step, as ratios to plain causal attention without any prior, in one run.

python bench.py                                  # the 120M shape at 512 tokens
python bench.py config/ggd_bam_cpu.py --steps=3  # the shape of a config

Every row is the forward and the backward pass of a whole model on the same random tokens. "plain" is the model without
a prior on torch's own causal attention: what attention costs at least. It is timed first and last; if the two differ,
the machine was busy with something else, and the ratios are worth as little.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import configurator
import model as M
from configurator import fail, user_errors
from device import device_name, peak_flops, pick_device, pick_dtype
from records import aligned, append_record
from train import TrainConfig, documents

ENCODINGS = tuple(pe + s for pe in ("nope", "sinusoidal", "rope", "alibi", "ggd") for s in ("", "-ssmax"))


@dataclass
class BenchConfig:
    """What to time. Raises ValueError, in one sentence, if it makes no sense."""

    encodings: tuple[str, ...] = ENCODINGS  # which rows; -ssmax behind a name: with Scalable-Softmax
    batch_size: int = 0  # windows a step; 0: the batch_size of the config
    steps: int = 10  # timed steps a row; their median is reported
    warmup: int = 3  # steps before them, the compilation included
    device: str = "auto"  # auto, cpu, cuda, ...
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # autocast; the weights stay float32
    records: str = "out/bench.jsonl"  # file to which the table is appended as records

    def __post_init__(self):
        for name, least in (("batch_size", 0), ("steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if unknown := set(self.encodings) - set(ENCODINGS):
            raise ValueError(f"encodings names {', '.join(sorted(unknown))}; it may hold {', '.join(ENCODINGS)}")


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
        rows += [Case(last, "fused", True, packed=True), Case(last, "reference", True), Case(last, "reference", False)]
    return [plain, *rows, plain]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, prior: None, prior_scale: None, mask: Tensor) -> Tensor:
    """In the place of `model.reference_attention`: torch's causal attention, which knows no prior."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


@contextmanager
def attention_of(model: M.GPT, case: Case) -> Iterator[None]:
    original = M.reference_attention
    model.attention = "fused" if case.attention == "fused" else "reference"
    M.reference_attention = plain_attention if case.attention == "plain" else original
    try:
        yield
    finally:
        M.reference_attention = original


def measure(case: Case, model_cfg: M.ModelConfig, cfg: BenchConfig, device: torch.device, dtype: torch.dtype) -> dict:
    """Median seconds of a step and, on CUDA, the most bytes held by tensors."""
    pe, _, ssmax = case.encoding.partition("-")
    torch.manual_seed(0)
    torch.compiler.reset()
    model = M.GPT(replace(model_cfg, pe=pe, ssmax=bool(ssmax))).to(device).train()
    batch = torch.randint(1, model_cfg.vocab_size, (cfg.batch_size, model_cfg.block_size + 1), device=device)
    if case.packed:  # documents of 150 tokens, begun elsewhere in every window
        place = torch.arange(batch.shape[1], device=device) + 37 * torch.arange(len(batch), device=device)[:, None]
        batch[place % 150 == 0] = 0
    idx, targets = batch[:, :-1], batch[:, 1:]
    doc_ids = documents(idx, 0) if case.packed else None
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
    tokens = idx.numel() / statistics.median(times[cfg.warmup :])
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
        return {"case": str(case), "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"}


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


def shape_of(config: str | None) -> tuple[M.ModelConfig, int]:
    """Model and batch size of a config file; without one, of the defaults, the 120M model."""
    kinds = configurator.field_types([M.ModelConfig, TrainConfig])
    values = configurator.load_file(Path(config), kinds) if config else {}
    shape = {k: v for k, v in values.items() if k in M.ModelConfig.__dataclass_fields__}
    return M.ModelConfig(**shape), values.get("batch_size", TrainConfig.batch_size)


def main() -> None:
    (cfg,), configs = configurator.parse([BenchConfig], sys.argv[1:], __doc__, positional="configs")
    if len(configs) > 1:
        fail(f"{' '.join(configs)}: expected one config file at most")
    with user_errors():
        device, why = pick_device(cfg.device)
        dtype, reason = pick_dtype(cfg.dtype, device)
        model_cfg, batch_size = shape_of(configs[0] if configs else None)
    cfg = replace(cfg, batch_size=cfg.batch_size or batch_size)
    print(f"{device_name(device)} ({why}), {str(dtype).removeprefix('torch.')} ({reason}), torch {torch.__version__}")
    print(f"{model_cfg.n_layer} layers of {model_cfg.n_embd}, {cfg.batch_size} x {model_cfg.block_size} tokens a step")
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


if __name__ == "__main__":
    configurator.run(main)
