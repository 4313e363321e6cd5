"""A run on disk: its checkpoint, its records, and the frame of all evaluations.

python runs.py out/ggd_bam_cpu pretrained/ggd_bam_cpu    # copy a run without its optimizer's state
"""

import configurator
from configurator import check_folder, fail, user_errors

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

from data import get_tokenizer, replacing
from device import device_name, pick_device
from model import GPT, ModelConfig

# ---- checkpoint


def save_checkpoint(path: Path, state: dict) -> None:
    """Whatever happens, `path` holds the old checkpoint or the new one, whole."""
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch: RuntimeError, in the context of an OSError
        raise OSError(f"{path} cannot be written: {error.__context__ or error}") from error


def load_path(path: str | Path) -> Path:
    return Path(path) / "last.pt" if Path(path).is_dir() else Path(path)


def load_checkpoint(path: str | Path) -> dict:
    """What a checkpoint file, or last.pt in a run's folder, holds. Nothing in it is executed."""
    file = load_path(path)
    if not file.exists():
        raise FileNotFoundError(f"no checkpoint {file}; give a run's folder, or a .pt file in it")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        saved["model"], saved["model_config"]["block_size"]
    except OSError:  # such as a folder of another user; user_errors() names the file
        raise
    except Exception as error:  # torch raises many kinds for a file that is damaged or not its own
        kind = type(error).__name__
        raise ValueError(f"{file} is not a checkpoint ({kind}); give one of train.py") from error
    return saved


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, dict]:
    """A checkpoint's model, ready to evaluate, and all that was saved."""
    saved = load_checkpoint(path)
    try:
        config = saved["model_config"].items()
        config = {k: tuple(v) if isinstance(v, list) else v for k, v in config}
        model = GPT(ModelConfig(**config))
        model.load_state_dict(saved["model"])
    except Exception as error:  # a file may hold anything under these names
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{path} holds no model of this version: {reason}") from error
    return model.to(device).eval(), saved


# ---- run

PRETRAINED = Path(__file__).resolve().parent / "pretrained" / "ggd_bam_cpu"
LONGEST = 2**24  # tokens: up to here a float32 distance is exact


@dataclass
class EvalConfig:
    """What all evaluations can change about a trained model, and how they run."""

    window_attention: int = 0  # hide keys further away than this many tokens; 0: none are hidden.
    # RoPE with its training length is the paper's Local RoPE
    set: tuple[str, ...] = ()  # parameters of single heads, LAYER.HEAD.NAME=VALUE, counted from 0:
    # theta_alpha, theta_beta, theta_mu or s; such as 2.3.theta_beta=0,2.3.theta_alpha=0
    resume: bool = False  # take over what the records hold for these weights and options
    device: str = "auto"  # auto, cpu, cuda, ...

    def __post_init__(self):
        check_range("window_attention", 0, self.window_attention)


def check_range(name: str, least: int, *values: int) -> None:
    """ValueError for a value of an option, in tokens or counts, out of range."""
    for value in values:
        if not least <= value <= LONGEST:
            limits = f"at least {least} and at most {LONGEST:,}"
            raise ValueError(f"{name} is {value}; it must be {limits}")


class Run(NamedTuple):
    """A checkpoint, ready to evaluate."""

    path: str  # as the user gave it: a run's folder (last.pt) or a file
    model: GPT
    saved: dict  # what the checkpoint holds besides the states of model and optimizer
    enc: tiktoken.Encoding

    @property
    def trained(self) -> int:
        """Training length in tokens."""
        return self.model.cfg.block_size


def intervene(model: GPT, cfg: EvalConfig) -> None:
    model.window = cfg.window_attention or None
    for change in cfg.set:
        try:
            place, value = change.split("=")
            layer, head, name = place.split(".")
            if "-" in place or not math.isfinite(float(value)):
                raise ValueError
            model.head_values()[name][int(layer)].data[int(head)] = float(value)
        except (ValueError, KeyError, IndexError) as error:
            names = ", ".join(model.head_values()) or "no parameter of single heads"
            known = f"layers 0 to {model.cfg.n_layer - 1}, heads 0 to {model.cfg.n_head - 1}"
            known = f"the model has {known} and {names}"
            raise ValueError(f"set has {change}; {known}, as in 2.3.s=0.5") from error


def load_run(path: str, device: torch.device | str = "cpu", cfg: EvalConfig | None = None) -> Run:
    model, saved = load_model(path, device)
    if cfg is not None:
        intervene(model, cfg)
    if "tokenizer" not in saved:
        raise ValueError(f"{path} does not name its tokenizer; give a checkpoint of train.py")
    enc = get_tokenizer(saved["tokenizer"])
    if enc.n_vocab > model.cfg.vocab_size:
        sizes = f"{model.cfg.vocab_size:,}, its tokenizer {enc.n_vocab:,}"
        raise ValueError(f"{path} has a vocabulary of {sizes} tokens")
    check_folder(folder_of(path))
    return Run(path, model, {k: saved[k] for k in saved if k not in ("model", "optimizer")}, enc)


def place_of(path: str) -> Path:
    """A run's folder, or the file in it if another than last.pt was given."""
    resolved = Path(path).resolve()
    return resolved.parent if resolved.name == "last.pt" else resolved


def name_of(path: str, among: Iterable[str] = ()) -> str:
    """A run's label: its folder, with the name of the file if another than last.pt was given, and
    with as many of the folders above as tell it from the other runs `among` which it is shown."""
    here, others = place_of(path), {place_of(p) for p in among} - {place_of(path)}
    size = 1 if here.is_dir() else 2
    while size < len(here.parts) and any(p.parts[-size:] == here.parts[-size:] for p in others):
        size += 1
    label = Path(*here.parts[-size:])
    return (label if here.is_dir() else label.with_suffix("")).as_posix()


def folder_of(path: str) -> Path:
    """out/<run>/eval, also where the file of a checkpoint in it was named."""
    return (Path(path) if Path(path).is_dir() else Path(path).parent) / "eval"


# ---- records


def digest(content: bytes) -> str:
    """12 digits that tell two texts, or two sets of questions, from one another."""
    return hashlib.sha256(content).hexdigest()[:12]


def fingerprint(model: GPT) -> str:
    """Two checkpoints with the same digits are the same model."""
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return weights.hexdigest()[:12]


def origin(run: Run) -> dict:
    """The part of a record that says what was evaluated, and on what."""
    saved, device = run.saved, device_name(run.model.embedding.weight.device)
    return {
        "checkpoint": str(run.path),
        "weights": fingerprint(run.model),
        "step": saved.get("step"),
        "commit": saved.get("commit"),
        "tokenizer": saved["tokenizer"],
        "training_length": run.trained,
        "model_config": saved["model_config"],
        "train_config": saved.get("train_config"),
        "hardware": f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }


def append_record(file: Path, record: dict) -> None:
    """One more line. A last line that a killed run left unfinished is ended first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    with open(file, "a", encoding="utf-8") as f:
        f.write("\n" * bool(unfinished) + json.dumps(record) + "\n")


def read_records(file: Path) -> list[dict]:
    """All whole records of a file, oldest first. There are none if there is no file."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:  # what a killed run left
            continue
    return records


def newest(records: Iterable[dict]) -> list[dict]:
    """The last of the records that have the same cell in every table."""
    cells = {}
    names = "metric variant rate seed trained task subject way length context filler wording"
    names += " digits window window_attention set"
    for r in records:
        about = (r.get("config") or {}) | r | {"trained": (r.get("train_config") or {}).get("seed")}
        cells[json.dumps([about.get(name) for name in names.split()])] = r
    return list(cells.values())


def finished(file: Path, like: dict) -> dict | None:
    """The newest record of a file that has all of these values, which are compared as JSON."""
    like = json.loads(json.dumps(like))
    records = reversed(read_records(file))
    return next((r for r in records if all(r.get(k) == v for k, v in like.items())), None)


# ---- evaluation

MULTIPLES = (1, 2, 4, 8, 16)  # default lengths, in units of the training length
BAR = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed} so far, {remaining} left{postfix}"  # of tqdm
STYLES = list(zip("osD^vP*X", ("-", "--", "-.", ":") * 2, strict=True))  # told apart in grey


class Cell(NamedTuple):
    """What becomes one record of an evaluation."""

    identity: dict  # metric, config, ...: all that decides the numbers besides the weights; with
    # these, --resume finds the record in eval/<metric>.jsonl
    label: str  # shown while it is measured
    work: float  # in a unit that all cells share
    measure: Callable[[Callable[[float], object], list[dict]], dict]
    # measure(advance, earlier) -> numbers; it calls advance(work done), and may read the run's
    # records of the cells before this one


def load_runs(paths: list[str], cfg: EvalConfig) -> list[Run]:
    """All runs on the CPU, where they wait for their turn; with no path the pretrained model."""
    pick_device(cfg.device)  # refuses one that cannot be used
    once: dict[Path, str] = {}
    for path in paths or [str(PRETRAINED)]:
        once.setdefault(place_of(path), path)
    return [load_run(path, "cpu", cfg) for path in once.values()]


def measure_cells(run: Run, cells: list[Cell], cfg: EvalConfig) -> Iterator[dict]:
    """A record per cell, appended to its file as soon as it is there, or taken over from it."""
    run.model.to(pick_device(cfg.device)[0])
    about, earlier = origin(run), []
    files = [folder_of(run.path) / f"{cell.identity['metric']}.jsonl" for cell in cells]
    known: list[dict | None] = [None] * len(cells)
    if cfg.resume:
        likes = [cell.identity | {"weights": about["weights"]} for cell in cells]
        known = list(map(finished, files, likes))
    total = sum(cell.work for cell, record in zip(cells, known, strict=True) if not record)
    with tqdm(total=total, desc=name_of(run.path), bar_format=BAR, disable=None) as bar:
        for cell, file, record in zip(cells, files, known, strict=True):
            if not record:
                bar.set_postfix_str(cell.label)
                began = time.perf_counter()
                numbers = cell.measure(bar.update, earlier)
                seconds = round(time.perf_counter() - began, 2)
                record = cell.identity | numbers | {"seconds": seconds} | about
                append_record(file, record)
            earlier.append(record)
            yield record
    run.model.cpu()


def evaluate(
    plan: list[tuple[Run, list[Cell]]],
    cfg: EvalConfig,
    report: Callable[[dict[str, list[dict]]], None],
) -> None:
    """Measure all cells and report the records by run: after Ctrl-C, those that are there."""
    results: dict[str, list[dict]] = {}
    stopped = False
    try:
        for run, cells in plan:
            for record in measure_cells(run, cells, cfg):
                results.setdefault(run.path, []).append(record)
    except KeyboardInterrupt:
        stopped = True
        print("stopped; what is done is recorded, and the same command with --resume does the rest")
    if results:
        report(results)
        files = [folder_of(p) / f"{r['metric']}.jsonl" for p, rs in results.items() for r in rs]
        print("records in " + ", ".join(map(str, dict.fromkeys(files))))
    if stopped:
        sys.exit(130)


def cost(length: int) -> int:
    """Work of one prompt, in arbitrary units: matrix products per token, attention per pair."""
    return length * (length + 2_000)


def wilson(correct: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson 1927): sensible also at 0 and n of n."""
    p, shrink = correct / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    center = (p + z * z / (2 * n)) / shrink
    return max(0.0, center - half), min(1.0, center + half)


def format_share(record: dict) -> str:
    """Per cent with its 95% interval."""
    low, high = (round(100 * x) for x in record["interval_95"])
    return f"{100 * record['correct'] / record['n']:.0f}% [{low}, {high}]"


def aligned(rows: Iterable[Iterable[str]]) -> str:
    """Rows of cells -> a table with columns to the right, two spaces apart."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in rows
    )


def format_by_length(
    corner: str, rows: dict[str, list[dict]], format_cell: Callable[[dict], str]
) -> str:
    """A table of records: the names of rows on the left, a column a length."""
    lengths = sorted({r["length"] for records in rows.values() for r in records})
    lines = [[corner, *(f"{n:,}" for n in lengths)]]
    for name, records in rows.items():
        cells = {r["length"]: format_cell(r) for r in records}
        lines.append([name, *(cells.get(n, "") for n in lengths)])
    return aligned(lines)


def draw_curves(axis, curves: dict[str, list[tuple]], trained: int) -> None:
    """{label: [(length, value, low, high), ...]} on a logarithmic axis of lengths, and a line at
    the training length."""
    for (label, points), (marker, line) in zip(curves.items(), itertools.cycle(STYLES)):
        x, y, low, high = np.reshape(points, (-1, 4)).T
        style = {"marker": marker, "linestyle": line, "capsize": 3, "label": label}
        axis.errorbar(x, y, np.abs([low - y, high - y]), **style)
    axis.axvline(trained, color="grey", linewidth=1)
    ticks = sorted({point[0] for points in curves.values() for point in points})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    axis.xaxis.minorticks_off()


def draw_shares(axis, results: dict[str, list[dict]]) -> None:
    """The shares of right answers in per cent by length, a curve a run."""
    curves: dict[str, list[tuple]] = {name_of(run, results): [] for run in results}
    for points, records in zip(curves.values(), results.values(), strict=True):
        for r in (r for r in records if r["n"]):
            shares = 100 * np.array([r["correct"] / r["n"], *r["interval_95"]])
            points.append((r["length"], *shares))
    trained = next(r["training_length"] for records in results.values() for r in records)
    draw_curves(axis, curves, trained)
    axis.set_ylim(-4, 104)


def main() -> None:
    _, words = configurator.parse([], sys.argv[1:], __doc__, positional="runs")
    if len(words) != 2:
        fail(f"got {len(words)} words, expected two: a run, and the folder of its copy")
    source, target = load_path(words[0]), Path(words[1]) / "last.pt"
    with user_errors():
        saved = load_checkpoint(source)
        if target.exists() and target.samefile(source):
            advice = "name another folder, or its optimizer would be lost"
            raise ValueError(f"{target.parent} is the run itself; {advice}")
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = ("model", "model_config", "train_config", "tokenizer", "data", "step", "commit")
        save_checkpoint(target, {name: saved[name] for name in kept if name in saved})
    print(f"saved {target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    configurator.run(main)
