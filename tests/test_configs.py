"""Every config's model is built on the meta device, and the numbers in the comments hold."""

import configurator

import re
from pathlib import Path

import pytest
import torch

from model import GPT, ModelConfig
from train import TrainConfig

CONFIGS = Path(__file__).resolve().parent.parent / "config"
PARAMETERS = {  # in all, in the prior, in s
    "ggd_bam_cpu": (558_244, 24, 12),
    "ggd_bam_40m": (41_491_232, 192, 96),
    "ggd_bam_85m": (85_832_832, 256, 128),
    "ggd_bam_120m": (109_432_128, 384, 192),
    "nope_120m": (109_431_552, 0, 0),
    "sinusoidal_120m": (109_431_552, 0, 0),
    "rope_120m": (109_431_552, 0, 0),
    "alibi_120m": (109_431_552, 0, 0),
    "ggd_bam_260m": (257_052_600, 720, 360),
    "ggd_bam_500m": (501_998_784, 1152, 576),
    "ggd_bam_1b": (1_109_760_512, 3072, 1536),
}


def load(name):
    (model_cfg, cfg), _ = configurator.parse(
        [ModelConfig, TrainConfig], [str(CONFIGS / f"{name}.py")], "", positional="config"
    )
    return model_cfg, cfg


def test_every_config_is_here():
    assert {path.stem for path in CONFIGS.glob("*.py")} >= set(PARAMETERS)  # and a user's own


@pytest.mark.parametrize("name", PARAMETERS)
def test_config(name):
    model_cfg, cfg = load(name)
    with torch.device("meta"):
        model = GPT(model_cfg)
    groups = {
        kind: sum(p.numel() for p in params) for kind, params in model.parameter_groups().items()
    }
    assert (sum(groups.values()), groups["theta"], groups["s"]) == PARAMETERS[name]
    text = (CONFIGS / f"{name}.py").read_text(encoding="utf-8")
    assert (
        f"{sum(groups.values()):,} parameters" in text
        or f"Parameters: {sum(groups.values()):,}" in text
    )
    assert cfg.out_dir == f"out/{name}" and model_cfg.padded_vocab in (257, 50304)
    if found := re.search(r"Work: +([\d,]+) MFLOP a token, ([\d.e]+) in all", text):
        per_token = model.flops_per_token(model_cfg.block_size)
        assert f"{per_token / 1e6:,.0f}" == found[1]
        assert per_token * cfg.max_steps * cfg.tokens_per_step == pytest.approx(
            float(found[2]), rel=0.02
        )


@pytest.mark.parametrize("name", [name for name in PARAMETERS if "cpu" not in name])
def test_runs_on_fineweb_are_the_same_on_every_number_of_gpus(name):
    model_cfg, cfg = load(name)
    assert (
        cfg.tokens_per_step == 589_824 and cfg.max_steps == 20_000 and cfg.data == "data/fineweb10B"
    )
    for gpus in (2, 4, 8, 16):
        assert cfg.tokens_per_step % (gpus * cfg.batch_size * model_cfg.block_size) == 0


def test_the_120m_model_has_the_blocks_of_the_paper():
    model_cfg, cfg = load("ggd_bam_120m")
    with torch.device("meta"):
        blocks = sum(p.numel() for p in GPT(model_cfg).blocks.parameters())
    assert round(blocks / 1e6, 1) == 70.8
    assert (cfg.optimizer, cfg.learning_rate, cfg.warmup_steps, cfg.beta1, cfg.beta2) == (
        "radam",
        1e-3,
        0,
        0.9,
        0.95,
    )
