"""What the tests share: the repository on the path, the ten encodings, a small model with no start values left."""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

from model import GPT, ModelConfig

ENCODINGS = list(itertools.product(["nope", "sinusoidal", "rope", "alibi", "ggd"], [False, True]))


def make_model(pe, ssmax, **changes):
    """A byte-level model of 2 layers. Norms, theta and s are random (some s negative), unless a theta is given."""
    fixed = [name for name in changes if name.startswith("theta_") and name != "theta_learned"]
    shape = {"vocab_size": 257, "vocab_multiple": 1, "n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64}
    cfg = ModelConfig(**{**shape, "pe": pe, "ssmax": ssmax, "tie_embeddings": False, **changes})
    generator = torch.Generator().manual_seed(1)
    model = GPT(cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            last = name.split(".")[-1]
            if p.dim() == 2:
                p.normal_(0, cfg.n_embd**-0.5, generator=generator)
            elif "norm" in name:
                p.uniform_(0.5, 1.5, generator=generator)
            elif last == "s":
                p.uniform_(-0.5, 1.0, generator=generator)
            elif not fixed:
                p.uniform_(-1.0, 1.0, generator=generator)
    return model


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; ask for it with -m slow"))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
