"""What the tests share: the repository on the path, the ten encodings, a small model with no
start values left."""

import itertools
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "course"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Where torch is to play an older CPU, two parts must be told. The compiler would take kernels for
# another instruction set from its disk cache, with wrong numbers, so each CPU has its own, the
# native one too. oneDNN would ask for bfloat16 products that the kernels then lack.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
    Path(tempfile.gettempdir(), "nanobam_tests_" + os.environ.get("ATEN_CPU_CAPABILITY", "native"))
)
if "ATEN_CPU_CAPABILITY" in os.environ:
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"

from overlay import pytest_addoption, pytest_configure  # noqa: F401 -- --mine=mine.py

import pytest
import torch

from data import get_tokenizer
from model import ENCODINGS as KINDS
from model import GPT, ModelConfig
from runs import save_checkpoint

ENCODINGS = list(itertools.product(KINDS, [False, True]))


def make_model(pe, ssmax, **changes):
    """A byte-level model of 2 layers. Norms, theta and s are random (some s negative), unless a
    theta is given."""
    fixed = {"theta_alpha", "theta_beta", "theta_mu"} & set(changes)
    shape = {"vocab_size": 257, "vocab_multiple": 1, "n_layer": 2, "n_head": 4, "n_embd": 32}
    shape |= {"block_size": 64, "pe": pe, "ssmax": ssmax, "tie_embeddings": False}
    cfg = ModelConfig(**shape | changes)
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


@torch.no_grad()
def posteriors(model, idx, rows=None):
    """Theorem 1 in every layer for idx (B, T), at the places `rows` (R,) or at all of them."""
    positions = torch.arange(idx.shape[1])
    x, layout, found = model.embed(idx, positions[None]), model.layout(positions[None]), []
    for block in model.blocks:
        q, k, _ = block.attn.project(block.norm_attn(x), layout)
        rows = positions if rows is None else rows
        found.append(block.attn.posterior(q.float(), k.float(), layout, rows))
        x = block(x, layout)
    return found


@pytest.fixture(params=["bytes", "gpt2"])
def enc(request, monkeypatch):
    """Each tokenizer in turn."""
    if request.param == "gpt2":
        if "NANOBAM_TEST_DATA" not in os.environ:
            pytest.skip("NANOBAM_TEST_DATA is not set: no GPT-2 vocabulary without a network")
        monkeypatch.setenv(
            "TIKTOKEN_CACHE_DIR",
            str(Path(os.environ["NANOBAM_TEST_DATA"], "gpt2_bpe/tiktoken_cache")),
        )
    return get_tokenizer(request.param)


@pytest.fixture
def run(tmp_path):
    """The folder of a byte-level run with random weights."""
    folder = tmp_path / "run"
    folder.mkdir()
    model = make_model("ggd", True, block_size=128)
    save_checkpoint(folder / "last.pt", model.checkpoint() | {"tokenizer": "bytes", "step": 1})
    return folder


@pytest.fixture
def float64(monkeypatch):
    """Turns the model's own casts to float32 into casts to float64. With model.double() two routes
    to one result then agree to about 1e-14 on every CPU, where float32 sums differ."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; ask for it with -m slow"))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
