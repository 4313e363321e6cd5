"""Passkey retrieval: is a key, told once somewhere in a long text, still found at the end of it?

python eval_passkey.py                                       # the pretrained model
python eval_passkey.py out/ggd_bam_cpu                       # 1x to 16x the training length
python eval_passkey.py out/a out/b --lengths=256,4096,16384  # one curve each
python eval_passkey.py out/a --lengths=262144,1048576        # long; after Ctrl-C, --resume

An answer is right only if each of its tokens is the most likely one, given the true ones before it:
the same as greedy decoding of the whole answer. Prints a table, saves curves and depth x length
pictures, appends records. Prompts come in the order of their depths, and what a prompt shares with
the one before it, the filler up to that one's needle, is not computed again: half of the work.
"""

import configurator
from configurator import user_errors

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

import runs
from data import read_text
from device import pick_device
from needles import FILLERS, Prompt, describe, make_prompts
from runs import Cell, EvalConfig, Run, cost
from streaming import Reader, require_memory


@dataclass
class PasskeyConfig(EvalConfig):
    """What to ask."""

    lengths: tuple[int, ...] = ()  # in tokens, <|endoftext|> and answer included; none given: 1x,
    # 2x, 4x, 8x and 16x the training length of the first run
    depths: int = 20  # needles per length, equidistant from the beginning to the end of the filler
    seeds: tuple[int, ...] = (1,)  # each draws another set of keys; n = seeds x depths per length
    wording: Literal["passkey", "reworded", "vault"] = "passkey"  # of needle and question; reworded
    # has a frame of the exercises with other words, vault a frame that is in none
    digits: int = 5  # of a key
    filler: str = "passkey"  # passkey, unseen (is in no exercise), or a text file
    description: Literal["auto", "true", "false"] = "auto"  # begin with the paper's task
    # description; auto: unless tokens are bytes, where it takes 167 of them
    exact: bool = False  # also compute blocks of keys that the prior makes too small to matter in
    # float32

    def __post_init__(self):
        super().__post_init__()
        runs.check_range("depths", 1, self.depths)
        runs.check_range("lengths", 1, *self.lengths)
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds must be different numbers from 0, at least one of them")
        if not 1 <= self.digits <= 18:
            raise ValueError(f"digits is {self.digits}; it must be from 1 to 18")


# ---- score


def find_answers(scorer: Callable[[list[int], int], Tensor], prompts: list[Prompt]) -> list[bool]:
    """Is each token of an answer the most likely one? scorer(tokens, n_last) gives the most likely
    tokens at the last n_last places, (n_last,)."""
    return [scorer(p.tokens, p.answer).tolist() == p.tokens[-p.answer :] for p in prompts]


# ---- cells


def measure(
    run: Run, cfg: PasskeyConfig, make: Callable[[int], list[Prompt]], length: int, advance, earlier
) -> dict:
    with user_errors():
        prompts = make(length)
    reader = Reader(run.model, length - 1, exact=cfg.exact)

    def work(begin: int, end: int) -> None:
        advance(cost(end) - cost(begin))

    answers = find_answers(lambda tokens, n: reader.score(tokens, n, work)[1], prompts)
    skipped = reader.cache.skipped().round(decimals=4).tolist()
    return count_answers(answers, cfg) | {"skipped_blocks": skipped}


def count_answers(answers: list[bool], cfg: PasskeyConfig) -> dict:
    by_depth = np.reshape(answers, (cfg.depths, len(cfg.seeds))).mean(1)
    return {
        "correct": sum(answers),
        "n": len(answers),
        "interval_95": [round(x, 4) for x in runs.wilson(sum(answers), len(answers))],
        "by_depth": by_depth.round(4).tolist(),
    }


def make_cells(run: Run, cfg: PasskeyConfig, lengths: list[int]) -> list[Cell]:
    """A cell a length; what cannot work shows here, before hours of work."""
    filler = FILLERS[cfg.filler] if cfg.filler in FILLERS else read_text(cfg.filler)
    names = ("depths", "seeds", "digits", "wording", "description")
    options = {name: getattr(cfg, name) for name in names}
    make = partial(make_prompts, run.enc, filler=filler, **options)
    make(lengths[0])
    require_memory(run.model.cfg, 1, lengths[-1], pick_device(cfg.device)[0])
    free = ("lengths", "resume", "device")  # no answer depends on them
    config = {k: v for k, v in asdict(cfg).items() if k not in free}
    config["description"] = bool(describe(run.enc, cfg.description))
    if cfg.filler not in FILLERS:  # a file, which may change
        config["filler"] += f", sha256 {runs.digest(filler.encode())}"
    return [
        Cell(
            {"metric": "passkey", "length": length, "config": config},
            f"{length:,} tokens",
            cfg.depths * len(cfg.seeds) * cost(length),
            partial(measure, run, cfg, make, length),
        )
        for length in lengths
    ]


# ---- report


def draw(results: dict[str, list[dict]], folder: Path) -> list[Path]:
    """passkey.png: accuracy by length, a curve a run; passkey_depth.png: also by depth, a panel a
    run."""
    from matplotlib.figure import Figure

    files = [folder / "passkey.png", folder / "passkey_depth.png"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.add_subplot(
        xlabel="length of the prompt in tokens (grey: training length)", ylabel="passkey found (%)"
    )
    runs.draw_shares(axis, results)
    axis.set_title(f"n = {next(iter(results.values()))[0]['n']} a point, bars: 95% intervals")
    figure.legend(loc="outside right center")
    figure.savefig(files[0], dpi=150)

    figure = Figure(figsize=(1 + 4 * len(results), 4), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (run, records) in zip(axes, results.items(), strict=True):
        image = 100 * np.array([r["by_depth"] for r in records]).T
        style = {"cmap": "cividis", "edgecolors": "white", "linewidth": 0.5}
        colors = axis.pcolormesh(image, vmin=0, vmax=100, **style)
        axis.invert_yaxis()
        ticks = np.arange(len(records)) + 0.5
        axis.set_xticks(ticks, [f"{r['length']:,}" for r in records], rotation=30)
        last = len(image) - 1
        rows = np.linspace(0, last, min(5, len(image)))
        axis.set_yticks(rows + 0.5, [f"{100 * row / max(1, last):.0f}" for row in rows])
        axis.set(title=runs.name_of(run, results), xlabel="length of the prompt in tokens")
        axis.set_ylabel("depth of the needle (% of the filler)")
    figure.colorbar(colors, label="passkey found (%)", ax=axes)
    figure.savefig(files[1], dpi=150)
    return files


def report(results: dict[str, list[dict]]) -> None:
    rows = {runs.name_of(run, results): records for run, records in results.items()}
    print(runs.format_by_length("run", rows, runs.format_share))
    files = draw(results, runs.folder_of(next(iter(results))))
    print("saved " + ", ".join(map(str, files)))


def main() -> None:
    (cfg,), paths = configurator.parse([PasskeyConfig], sys.argv[1:], __doc__, positional="runs")
    with user_errors():
        loaded = runs.load_runs(paths, cfg)
        lengths = sorted(set(cfg.lengths)) or [m * loaded[0].trained for m in runs.MULTIPLES]
        plan = [(run, make_cells(run, cfg, lengths)) for run in loaded]
    runs.evaluate(plan, cfg, report)


if __name__ == "__main__":
    configurator.run(main)
