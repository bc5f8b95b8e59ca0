"""Frequencies and whole models against transformers, for every way of stretching them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridserve.kernels.pointwise import Reference
from hybridserve.layers.rotary import FREQUENCIES, RopeScaling, RotaryEmbedding
from tests.harness.models import load_runner, oracle, random_ids, save_model

if TYPE_CHECKING:
    from pathlib import Path

HALF = 8  # of a head of 16
LONG = [1.0 + 0.5 * i for i in range(HALF)]
SHORT = [1.0 + 0.1 * i for i in range(HALF)]
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "long_factor": LONG,
        "short_factor": SHORT,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def parse(config: dict, head_dim: int = 2 * HALF, longest: int = 512, served: int = 512) -> RopeScaling:
    return RopeScaling.from_config(config, head_dim, longest, served)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
def test_frequencies(name: str, partial: float) -> None:
    parameters = {**SCALINGS[name], "rope_theta": 5000.0, "partial_rotary_factor": partial}
    if name == "longrope":
        count = int(HALF * partial)
        parameters |= {"long_factor": LONG[:count], "short_factor": SHORT[:count]}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(parameters)
    )
    want, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=512)
    rotary = RotaryEmbedding(parse({"rope_parameters": parameters}), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(rotary.frequencies, want, rtol=1e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", SCALINGS)
def test_whole_model(name: str, tmp_path: Path) -> None:
    parameters = {**SCALINGS[name], "rope_theta": 1000.0}
    model = save_model("llama", tmp_path, 0, rope_parameters=parameters)
    ids = random_ids(0, 90)
    want, _ = oracle(model, ids)
    assert (load_runner(tmp_path).run(ids, chunk=40) - want).abs().max() <= 1e-4


def test_length_that_is_served_chooses_the_frequencies(tmp_path: Path) -> None:
    """longrope's short factors where nothing longer than the trained length is served."""
    model = save_model("llama", tmp_path, 0, rope_parameters={**SCALINGS["longrope"], "rope_theta": 1000.0})
    ids = random_ids(0, 30)
    want, _ = oracle(model, ids)
    assert (load_runner(tmp_path, max_model_len=32).run(ids) - want).abs().max() <= 1e-4
    assert (load_runner(tmp_path, max_model_len=33).run(ids) - want).abs().max() > 1e-2


def test_old_spelling_means_the_same() -> None:
    old = {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}
    frequencies = [FREQUENCIES["linear"](parse(config))[0] for config in (old, new)]
    assert torch.equal(*frequencies)


def test_defaults() -> None:
    scaling = parse({})
    assert (scaling.type, scaling.theta, scaling.rotary_dim) == ("default", 10_000.0, 2 * HALF)


def test_rotation_turns_pairs_and_leaves_the_rest() -> None:
    rotary = RotaryEmbedding(
        parse({"partial_rotary_factor": 0.5, "rope_theta": 100.0}), torch.float32, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 2 * HALF, generator=generator)
    positions = torch.tensor([0, 5, 1000])
    out = Reference().rotate(x, *rotary(positions))
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            for i in range(4):
                turn = torch.polar(torch.tensor(1.0), torch.tensor(position * 100.0 ** (-i / 4)))
                pair = torch.complex(x[t, head, i], x[t, head, i + 4]) * turn
                got = torch.complex(out[t, head, i], out[t, head, i + 4])
                torch.testing.assert_close(got, pair, rtol=1e-4, atol=1e-4)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[0], x[0])
