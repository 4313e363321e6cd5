"""Checkpoints: tensors and plain values in a file that is written whole or not at all.

python checkpoint.py out/ggd_bam_cpu pretrained/ggd_bam_cpu    # the weights of a run without its optimizer's state
"""

import configurator
from configurator import fail, user_errors

import sys
from pathlib import Path

import torch

from model import GPT, ModelConfig
from shards import replacing


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
        raise FileNotFoundError(f"no checkpoint {file}; give a run's folder with last.pt, or a .pt file, of train.py")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        saved["model"], saved["model_config"]["block_size"]
    except OSError:  # such as a folder of another user; user_errors() names the file
        raise
    except Exception as error:  # torch raises many kinds for a file that is damaged or not its own
        raise ValueError(f"{file} is not a checkpoint ({type(error).__name__}); give one of train.py") from error
    return saved


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, dict]:
    """The model of a checkpoint file, or of last.pt in a run folder, ready to evaluate, and all that was saved."""
    saved = load_checkpoint(path)
    try:
        config = {k: tuple(v) if isinstance(v, list) else v for k, v in saved["model_config"].items()}
        model = GPT(ModelConfig(**config))
        model.load_state_dict(saved["model"])
    except Exception as error:  # a file may hold anything under these names
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{path} holds no model of this version of the program: {reason}") from error
    return model.to(device).eval(), saved


def main() -> None:
    _, words = configurator.parse([], sys.argv[1:], __doc__, positional="runs")
    if len(words) != 2:
        fail(f"got {len(words)} words, expected two: a run, and the folder of its copy without the optimizer")
    source, target = words[0], Path(words[1])
    with user_errors():
        saved = load_checkpoint(source)
        if (target / "last.pt").exists() and (target / "last.pt").samefile(load_path(source)):
            raise ValueError(f"{target} is the run itself; name another folder, or its optimizer would be lost")
        target.mkdir(parents=True, exist_ok=True)
        kept = ("model", "model_config", "train_config", "tokenizer", "data", "step", "commit")
        save_checkpoint(target / "last.pt", {name: saved[name] for name in kept if name in saved})
    print(f"saved {target / 'last.pt'}: {(target / 'last.pt').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    configurator.run(main)
