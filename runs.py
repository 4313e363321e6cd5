"""Checkpoints: tensors and plain values in a file that is written whole or not at all.

python runs.py out/ggd_bam_cpu pretrained/ggd_bam_cpu    # the weights of a run without its optimizer's state
"""

import configurator
from configurator import check_folder, fail, user_errors

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tiktoken
import torch

from data import get_tokenizer, replacing
from device import device_name
from model import GPT, ModelConfig

# ---- checkpoint


def save_checkpoint(path: Path, state: dict) -> None:
    """Whatever happens, `path` is the old checkpoint or the new one, whole. OSError, in one
    sentence, if the new one cannot be written."""
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch: RuntimeError, in the context of an OSError
        raise OSError(f"{path} cannot be written: {error.__context__ or error}") from error


def load_path(path: str | Path) -> Path:
    """The file of a checkpoint: that file itself, or last.pt in a run's folder."""
    return Path(path) / "last.pt" if Path(path).is_dir() else Path(path)


def load_checkpoint(path: str | Path) -> dict:
    """What a checkpoint file, or last.pt in a run's folder, holds; tensors and plain values, nothing is executed."""
    file = load_path(path)
    if not file.exists():
        raise FileNotFoundError(
            f"no checkpoint {file}; give a run's folder with last.pt, or a .pt file, of train.py"
        )
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        saved["model"], saved["model_config"]["block_size"]
    except OSError:  # such as a folder of another user; user_errors() names the file
        raise
    except Exception as error:  # torch raises many kinds for a file that is damaged or not its own
        raise ValueError(
            f"{file} is not a checkpoint ({type(error).__name__}); give one of train.py"
        ) from error
    return saved


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, dict]:
    """The model of a checkpoint file, or of last.pt in a run folder, ready to evaluate, and all that was saved."""
    saved = load_checkpoint(path)
    try:
        config = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved["model_config"].items()
        }
        model = GPT(ModelConfig(**config))
        model.load_state_dict(saved["model"])
    except Exception as error:  # a file may hold anything under these names
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{path} holds no model of this version of the program: {reason}"
        ) from error
    return model.to(device).eval(), saved


# ---- records

BAR = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed} so far, {remaining} left {postfix}"  # of tqdm
PRETRAINED = (
    Path(__file__).resolve().parent / "pretrained" / "ggd_bam_cpu"
)  # the model that comes with the program
LONGEST = 2**24  # tokens: up to here a float32 distance is exact
STYLES = list(
    zip("osD^vP*X", ("-", "--", "-.", ":") * 2, strict=True)
)  # (marker, line) of the curves, told apart in grey


@dataclass
class Changes:
    """What every evaluation can change about a trained model; the options of each begin with these."""

    window_attention: int = (
        0  # hide keys further away than this many tokens (RoPE with the training length: the
    )
    # paper's Local RoPE); 0: none
    set: tuple[
        str, ...
    ] = ()  # parameters of single heads, LAYER.HEAD.NAME=VALUE, counted from 0: theta_alpha,
    # theta_beta, theta_mu or s; such as 2.3.theta_beta=0,2.3.theta_alpha=0

    def __post_init__(self):
        check_range("window_attention", 0, self.window_attention)


def check_range(name: str, least: int, *values: int) -> None:
    """ValueError unless all values of an option, in tokens or counts, lie from `least` to LONGEST."""
    for value in values:
        if not least <= value <= LONGEST:
            raise ValueError(
                f"{name} is {value}; it must be at least {least} and at most {LONGEST:,}"
            )


class Run(NamedTuple):
    """A checkpoint, ready to evaluate."""

    path: str  # as the user gave it: a run's folder (last.pt) or a file
    model: GPT
    saved: dict  # all that the checkpoint holds
    enc: tiktoken.Encoding

    @property
    def trained(self) -> int:
        """Training length in tokens."""
        return self.model.cfg.block_size


def intervene(model: GPT, changes: Changes) -> None:
    """Apply the changes. Raises ValueError for a head or a parameter that is not there."""
    model.window = changes.window_attention or None
    for change in changes.set:
        try:
            place, value = change.split("=")
            layer, head, name = place.split(".")
            if "-" in place or not math.isfinite(float(value)):
                raise ValueError
            model.head_values()[name][int(layer)].data[int(head)] = float(value)
        except (ValueError, KeyError, IndexError) as error:
            heads = f"layers 0 to {model.cfg.n_layer - 1}, heads 0 to {model.cfg.n_head - 1}"
            names = ", ".join(model.head_values()) or "no parameter of single heads"
            raise ValueError(
                f"set has {change}; the model has {heads} and {names}, as in 2.3.s=0.5"
            ) from error


def load_run(path: str, device: torch.device, changes: Changes | None = None) -> Run:
    """Raises ValueError or OSError, in one sentence, for a checkpoint that cannot be evaluated."""
    model, saved = load_model(path, device)
    if changes is not None:
        intervene(model, changes)
    if "tokenizer" not in saved:
        raise ValueError(
            f"{path} does not name its tokenizer; give a checkpoint that train.py made"
        )
    enc = get_tokenizer(saved["tokenizer"])
    if enc.n_vocab > model.cfg.vocab_size:
        raise ValueError(
            f"{path} has a vocabulary of {model.cfg.vocab_size}, its tokenizer one of {enc.n_vocab}"
        )
    check_folder(folder_of(path))
    return Run(path, model, saved, enc)


def place_of(path: str) -> Path:
    """A run's folder; or the file in it, if another than last.pt was given."""
    resolved = Path(path).resolve()
    return resolved.parent if resolved.name == "last.pt" else resolved


def name_of(path: str, among: Iterable[str] = ()) -> str:
    """A run's label: its folder, with the name of the file if another than last.pt was given, and with as many of the
    folders above as tell it from the other runs `among` which it is shown."""
    here, others = place_of(path), {place_of(p) for p in among} - {place_of(path)}
    least = 1 if here.is_dir() else 2
    sizes = range(least, len(here.parts))
    size = next(
        (k for k in sizes if all(p.parts[-k:] != here.parts[-k:] for p in others)), len(here.parts)
    )
    label = Path(*here.parts[-size:])
    return (label if here.is_dir() else label.with_suffix("")).as_posix()


def folder_of(path: str) -> Path:
    """out/<run>/eval, also where the file of a checkpoint in it was named."""
    return (Path(path) if Path(path).is_dir() else Path(path).parent) / "eval"


def distinct(paths: list[str]) -> list[str]:
    """Each run once, in the order given."""
    found: dict[Path, str] = {}
    for path in paths:
        found.setdefault(place_of(path), path)
    return list(found.values())


def digest(content: bytes) -> str:
    """12 digits that tell two texts, or two sets of questions, from one another."""
    return hashlib.sha256(content).hexdigest()[:12]


def fingerprint(model: GPT) -> str:
    """The first 12 digits of the sha256 of all weights: two checkpoints with it are the same model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def origin(run: Run) -> dict:
    """The part of a record that says what was evaluated, and on what."""
    saved, device = run.saved, run.model.embedding.weight.device
    return {
        "checkpoint": str(run.path),
        "weights": fingerprint(run.model),
        "step": saved.get("step"),
        "commit": saved.get("commit"),
        "tokenizer": saved["tokenizer"],
        "training_length": run.trained,
        "model_config": saved["model_config"],
        "train_config": saved.get("train_config"),
        "hardware": f"{device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }


def append_record(file: Path, record: dict) -> None:
    """One more line. A last line that a killed run left unfinished is ended first, so that it spoils no other."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    with open(file, "a", encoding="utf-8") as f:
        f.write("\n" * bool(unfinished) + json.dumps(record) + "\n")


def read_records(file: Path) -> list[dict]:
    """All whole records of a file, oldest first; none if there is no file."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # what a killed run left
            continue
    return found


def newest(records: Iterable[dict]) -> list[dict]:
    """Of the records with the same cell in every table, the last: who evaluates again wants it."""
    cells = {}
    names = "metric variant rate seed trained task subject way length context filler wording"
    names += " digits window window_attention set"
    for r in records:
        about = (r.get("config") or {}) | r | {"trained": (r.get("train_config") or {}).get("seed")}
        cells[json.dumps([about.get(name) for name in names.split()])] = r
    return list(cells.values())


def finished(file: Path, like: dict) -> dict | None:
    """The newest record of a file that has all of these values, for --resume; values as JSON has them."""
    like = json.loads(json.dumps(like))
    return next(
        (r for r in reversed(read_records(file)) if all(r.get(k) == v for k, v in like.items())),
        None,
    )


def collect(
    runs: list[str], evaluate: Callable[[str], Iterator[dict]]
) -> tuple[dict[str, list[dict]], bool]:
    """The records that evaluate(run) yields, for each run that has any, and whether Ctrl-C came before the end."""
    results: dict[str, list[dict]] = {}
    try:
        for run in runs:
            for record in evaluate(run):
                results.setdefault(run, []).append(record)
    except KeyboardInterrupt:
        print(
            "stopped; what was done is in the records, and the same command with --resume does the rest"
        )
        return results, True
    return results, False


def wilson(correct: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson 1927): sensible also at 0 and n of n."""
    p, shrink = correct / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    center = (p + z * z / (2 * n)) / shrink
    return max(0.0, center - half), min(1.0, center + half)


def aligned(rows: Iterable[Iterable[str]]) -> str:
    """Rows of cells -> a table with columns to the right, two spaces apart."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in rows
    )


def main() -> None:
    _, words = configurator.parse([], sys.argv[1:], __doc__, positional="runs")
    if len(words) != 2:
        fail(
            f"got {len(words)} words, expected two: a run, and the folder of its copy without the optimizer"
        )
    source, target = words[0], Path(words[1])
    with user_errors():
        saved = load_checkpoint(source)
        if (target / "last.pt").exists() and (target / "last.pt").samefile(load_path(source)):
            raise ValueError(
                f"{target} is the run itself; name another folder, or its optimizer would be lost"
            )
        target.mkdir(parents=True, exist_ok=True)
        kept = ("model", "model_config", "train_config", "tokenizer", "data", "step", "commit")
        save_checkpoint(target / "last.pt", {name: saved[name] for name in kept if name in saved})
    print(f"saved {target / 'last.pt'}: {(target / 'last.pt').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    configurator.run(main)
