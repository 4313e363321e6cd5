"""Passkey retrieval: is a five-digit key, told once at some depth of a long text, still found at the end of it?

python eval_passkey.py                                       # the model that comes with the program
python eval_passkey.py out/ggd_bam_cpu                       # 1x to 16x the training length
python eval_passkey.py out/a out/b --lengths=256,4096,16384  # one curve each
python eval_passkey.py out/a --lengths=262144,1048576        # hours; after Ctrl-C the same with --resume goes on

For every length and depth the answer is right only if each of its tokens is the most likely one, given the true ones
before it (the same as greedy decoding of the whole answer). Prints a table, saves curves and depth x length pictures,
appends a record. The prompts of a length come in the order of their depths, and what a prompt shares with the one
before it, the filler up to that one's needle, is not computed again: half of the work.
"""

import configurator
from configurator import user_errors

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from data import read_text
from device import pick_device
from model import GPT
from needles import DESCRIPTION, FILLERS, WORDINGS, Prompt, passkey_prompt
from runs import (
    BAR,
    PRETRAINED,
    STYLES,
    Changes,
    Run,
    aligned,
    append_record,
    check_range,
    collect,
    digest,
    distinct,
    finished,
    folder_of,
    load_checkpoint,
    load_run,
    name_of,
    origin,
    wilson,
)
from streaming import KVCache, prefill, require_memory, score

MULTIPLES = (1, 2, 4, 8, 16)  # default lengths, in units of the training length
PIECE = 2**14  # tokens between two updates of the time left


@dataclass
class PasskeyConfig(Changes):
    """What to ask. Raises ValueError, in one sentence, if it makes no sense."""

    lengths: tuple[
        int, ...
    ] = ()  # in tokens, <|endoftext|> and answer included; none given: 1x, 2x, 4x, 8x and
    # 16x the training length of the first run
    depths: int = (
        20  # needles per length, at equidistant depths from the beginning to the end of the filler
    )
    seeds: tuple[int, ...] = (
        1,
    )  # each seed draws another set of keys; n = seeds x depths per length
    wording: Literal["passkey", "reworded", "vault"] = (
        "passkey"  # how needle and question are put; reworded has a
    )
    # frame of the exercises with other words, vault a frame that is in none
    digits: int = 5  # of a key
    filler: str = "passkey"  # passkey, unseen (is in no exercise), or a text file
    description: Literal["auto", "true", "false"] = (
        "auto"  # begin with the paper's task description; auto: unless
    )
    # tokens are bytes, where it takes 167 of them
    exact: bool = False  # compute also the blocks of keys that the prior makes too small to change a float32 result
    resume: bool = (
        False  # take over the lengths that the records already have for these weights and options
    )
    batch_tokens: int = 16_384  # prompts are scored together up to this many tokens
    device: str = "auto"  # auto, cpu, cuda, ...

    def __post_init__(self):
        for name in ("depths", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds must be different numbers from 0, at least one of them")
        if not 1 <= self.digits <= 18:
            raise ValueError(f"digits is {self.digits}; it must be from 1 to 18")
        super().__post_init__()
        check_range("lengths", 1, *self.lengths)
        check_range("depths", 1, self.depths)


class Texts(NamedTuple):
    """What stands around the needle."""

    filler: str
    description: str


def make_prompts(
    enc: tiktoken.Encoding, texts: Texts, cfg: PasskeyConfig, length: int
) -> list[Prompt]:
    """The prompts of one length, depth by depth and seed by seed: a pure function of its arguments."""
    least = 10 ** (cfg.digits - 1)
    keys = [
        np.random.default_rng((s, length)).integers(least, 10 * least, size=cfg.depths)
        for s in cfg.seeds
    ]
    return [
        passkey_prompt(enc, length, depth, int(key), WORDINGS[cfg.wording], *texts)
        for depth, row in zip(np.linspace(0, 1, cfg.depths), np.transpose(keys), strict=True)
        for key in row
    ]


def batches(prompts: list[Prompt], batch_tokens: int) -> Iterator[tuple[list[Prompt], Tensor, int]]:
    """Prompts that are scored together, their tokens (B, T), and the tokens of the longest answer."""
    size = max(1, batch_tokens // len(prompts[0].tokens))
    for begin in range(0, len(prompts), size):
        batch = prompts[begin : begin + size]
        yield batch, torch.tensor([p.tokens for p in batch]), max(p.answer for p in batch)


def retrieved(
    scorer: Callable[[Tensor, int], Tensor], prompts: list[Prompt], batch_tokens: int
) -> list[bool]:
    """Is every token of a prompt's answer the most likely one? scorer(idx (B, T), n_last) -> argmax (B, n_last)."""
    found = []
    for batch, idx, n_last in batches(prompts, batch_tokens):
        right = scorer(idx, n_last).cpu() == idx[:, -n_last:]
        found += [bool(row[n_last - p.answer :].all()) for row, p in zip(right, batch, strict=True)]
    return found


def shared_beginning(before: Tensor | None, idx: Tensor, n_last: int) -> int:
    """How many of the first tokens each row of idx (B, T) has in common with the same row of `before`, a batch of any
    shape or none. At least the last n_last + 2 do not count: the answer and the query that predicts it are computed."""
    if before is None or before.shape != idx.shape:
        return 0
    kept = idx.shape[1] - n_last - 2
    differs = (before[:, :kept] != idx[:, :kept]).any(0).nonzero()
    return int(differs[0]) if len(differs) else kept


class SharingScorer:
    """A scorer for `retrieved` that keeps the keys and values of what a batch shares with the one before it.

    advance(work) is called as the work, in the units of `cost`, is done.
    """

    def __init__(self, model: GPT, cfg: PasskeyConfig, advance: Callable[[int], object]):
        self.model, self.exact, self.advance = model, cfg.exact, advance
        self.before: Tensor | None = None  # the last batch, which the cache holds

    def __call__(self, idx: Tensor, n_last: int) -> Tensor:
        B, T = idx.shape
        if self.before is None or self.before.shape != idx.shape:
            self.before, self.cache = None, KVCache(self.model, B, T - 1, exact=self.exact)
        self.cache.rewind(shared_beginning(self.before, idx, n_last))
        self.before = idx
        rest = idx[:, self.cache.used :].to(self.model.embedding.weight.device)
        for piece in rest[:, : -n_last - 1].split(max(1, PIECE // B), dim=1):
            prefill(self.model, piece, self.cache)
            self.advance(B * (cost(self.cache.used) - cost(self.cache.used - piece.shape[1])))
        return score(self.model, rest[:, -n_last - 1 :], n_last, self.cache)[1]


def cost(length: int) -> int:
    """Work of one prompt in arbitrary units, for the time left: matrix products per token, attention per pair."""
    return length * (length + 2_000)


def work(prompts: list[Prompt], batch_tokens: int) -> int:
    """What a SharingScorer will have to do, in the units of `cost`."""
    total, before = 0, None
    for _, idx, n_last in batches(prompts, batch_tokens):
        B, T = idx.shape
        total += B * (cost(T - n_last - 1) - cost(shared_beginning(before, idx, n_last)))
        before = idx
    return total


def texts_for(run: Run, cfg: PasskeyConfig) -> Texts:
    """Filler and description for a run. Raises ValueError or OSError, in one sentence, for an unusable file."""
    filler = FILLERS[cfg.filler] if cfg.filler in FILLERS else read_text(cfg.filler)
    described = cfg.description == "true" or (
        cfg.description == "auto" and run.saved["tokenizer"] != "bytes"
    )
    return Texts(filler, DESCRIPTION if described else "")


def check(path: str, cfg: PasskeyConfig, lengths: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError or OSError, in one sentence, for all that cannot work: it shows before hours of work."""
    run = load_run(path, torch.device("cpu"), cfg)
    make_prompts(run.enc, texts_for(run, cfg), cfg, min(lengths))
    require_memory(run.model.cfg, 1, max(lengths), device)


def evaluate(
    path: str, cfg: PasskeyConfig, lengths: tuple[int, ...], device: torch.device
) -> Iterator[dict]:
    """One run at all lengths: a record per length, appended to the run's eval/passkey.jsonl as soon as it is there."""
    with user_errors():
        run = load_run(path, device, cfg)
        texts = texts_for(run, cfg)
    file, about = folder_of(path) / "passkey.jsonl", origin(run)
    for length in lengths:
        cell = {"metric": "passkey", "length": length, "config": identity(cfg, texts)}
        if cfg.resume and (record := finished(file, cell | {"weights": about["weights"]})):
            yield record
            continue
        began = time.perf_counter()
        with user_errors():
            prompts = make_prompts(run.enc, texts, cfg, length)
        label, total = f"{name_of(path)}, {length:,} tokens", work(prompts, cfg.batch_tokens)
        with tqdm(total=total, desc=label, bar_format=BAR, disable=None) as bar:
            scorer = SharingScorer(run.model, cfg, bar.update)
            found = retrieved(scorer, prompts, cfg.batch_tokens)
        seconds, skipped = (
            round(time.perf_counter() - began, 2),
            scorer.cache.skipped().round(decimals=4).tolist(),
        )
        record = cell | result(found, cfg) | {"seconds": seconds, "skipped_blocks": skipped} | about
        append_record(file, record)
        yield record


def identity(cfg: PasskeyConfig, texts: Texts) -> dict:
    """The options that the answers depend on: with the weights and the length, what tells records apart."""
    free = ("lengths", "resume", "batch_tokens", "device")
    own = {k: v for k, v in asdict(cfg).items() if k not in free} | {
        "description": bool(texts.description)
    }
    if cfg.filler not in FILLERS:  # a file, which may change
        own["filler"] += f", sha256 {digest(texts.filler.encode())}"
    return own


def result(found: list[bool], cfg: PasskeyConfig) -> dict:
    """The numbers of one length."""
    return {
        "correct": sum(found),
        "n": len(found),
        "interval_95": [round(x, 4) for x in wilson(sum(found), len(found))],
        "by_depth": np.reshape(found, (cfg.depths, len(cfg.seeds))).mean(1).round(4).tolist(),
    }


def table(results: dict[str, list[dict]]) -> str:
    """Accuracy in percent with its 95% interval: a row a run, a column a length."""
    lengths = sorted({r["length"] for records in results.values() for r in records})
    rows = [["run", *(f"{n:,}" for n in lengths)]]
    for run, records in results.items():
        cells = {r["length"]: r for r in records}
        rows.append(
            [name_of(run, results), *(cell(cells[n]) if n in cells else "" for n in lengths)]
        )
    return aligned(rows)


def cell(record: dict) -> str:
    low, high = (round(100 * x) for x in record["interval_95"])
    return f"{100 * record['correct'] / record['n']:.0f}% [{low}, {high}]"


def draw(results: dict[str, list[dict]], folder: Path) -> list[Path]:
    """passkey.png: accuracy by length, one curve a run; passkey_depth.png: by depth and length, one panel a run."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for (run, records), (marker, line) in zip(results.items(), STYLES * len(results), strict=False):
        x, y = [r["length"] for r in records], [100 * r["correct"] / r["n"] for r in records]
        bars = np.abs(100 * np.array([r["interval_95"] for r in records]).T - y)
        axis.errorbar(
            x, y, bars, marker=marker, linestyle=line, capsize=3, label=name_of(run, results)
        )
    first = next(iter(results.values()))[0]
    trained = first["training_length"]
    axis.axvline(trained, color="grey", linewidth=1)
    axis.annotate(
        " training length", (trained, 50), rotation=90, ha="right", va="center", color="grey"
    )
    axis.set(
        xscale="log",
        xlabel="length of the prompt in tokens",
        ylabel="passkey found (%)",
        ylim=(-4, 104),
    )
    ticks = sorted({r["length"] for records in results.values() for r in records})
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    axis.minorticks_off()
    axis.set_title(f"n = {first['n']} a point, bars: 95% intervals")
    figure.legend(loc="outside right center")
    figure.savefig(folder / "passkey.png", dpi=150)
    plt.close(figure)

    figure, axes = plt.subplots(
        1, len(results), figsize=(1 + 4 * len(results), 4), squeeze=False, layout="constrained"
    )
    for axis, (run, records) in zip(axes[0], results.items(), strict=True):
        image = np.array([r["by_depth"] for r in records]).T
        shown = axis.pcolormesh(
            100 * image, vmin=0, vmax=100, cmap="cividis", edgecolors="white", linewidth=0.5
        )
        axis.invert_yaxis()
        axis.set_xticks(
            np.arange(len(records)) + 0.5, [f"{r['length']:,}" for r in records], rotation=30
        )
        places = np.linspace(0, len(image) - 1, min(5, len(image)))
        axis.set_yticks(places + 0.5, [f"{100 * p / max(1, len(image) - 1):.0f}" for p in places])
        axis.set(
            xlabel="length of the prompt in tokens", ylabel="depth of the needle (% of the filler)"
        )
        axis.set_title(name_of(run, results))
    figure.colorbar(shown, label="passkey found (%)")
    figure.savefig(folder / "passkey_depth.png", dpi=150)
    plt.close(figure)
    return [folder / "passkey.png", folder / "passkey_depth.png"]


def main() -> None:
    (cfg,), runs = configurator.parse([PasskeyConfig], sys.argv[1:], __doc__, positional="runs")
    runs = distinct(runs or [str(PRETRAINED)])
    with user_errors():
        device, _ = pick_device(cfg.device)
        block_size = load_checkpoint(runs[0])["model_config"]["block_size"]
        lengths = tuple(sorted(set(cfg.lengths))) or tuple(m * block_size for m in MULTIPLES)
        for run in runs:
            check(run, cfg, lengths, device)
    results, stopped = collect(runs, lambda run: evaluate(run, cfg, lengths, device))
    if results:
        print(table(results))
        print("saved " + ", ".join(map(str, draw(results, folder_of(runs[0])))))
        print("records in " + ", ".join(str(folder_of(run) / "passkey.jsonl") for run in results))
    if stopped:
        sys.exit(130)


if __name__ == "__main__":
    configurator.run(main)
