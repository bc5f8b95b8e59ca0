"""What is read from config.json, what is assumed where it is silent, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from hybridserve.models.config import checkpoint_dtype, eos_token_ids, load_hf_config
from hybridserve.models.jamba import JambaConfig
from hybridserve.models.llama import LlamaConfig, MistralConfig, Qwen2Config
from hybridserve.models.mamba import MambaConfig
from hybridserve.models.registry import ARCHITECTURES, build_model
from tests.harness.models import FAMILIES, Backends

if TYPE_CHECKING:
    from pathlib import Path

OURS = {
    "Jamba": JambaConfig,
    "Mamba": MambaConfig,
    "Llama": LlamaConfig,
    "Mistral": MistralConfig,
    "Qwen2": Qwen2Config,
}
CONFIGS = {
    name: {**FAMILIES[name.lower()], "architectures": [f"{name}ForCausalLM"], "hidden_act": "silu"}
    for name in OURS
}


@pytest.mark.parametrize("name", OURS)
def test_defaults_are_those_of_transformers(name: str) -> None:
    theirs = getattr(transformers, f"{name}Config")()
    without_one = {"attention_bias", "mlp_bias", "head_dim", "sliding_window", "layer_types"}
    derived = {"mamba_dt_rank": "dt_rank", "time_step_rank": "dt_rank"}
    required = {key: getattr(theirs, key) for key, f in OURS[name].model_fields.items() if f.is_required()}
    ours = OURS[name].parse(required)
    for field in type(ours).model_fields:
        if field in without_one and not hasattr(theirs, field):
            continue
        if (name, field) in {
            # transformers fills these in from other fields, after the fact.
            ("Llama", "num_key_value_heads"),
            ("Llama", "head_dim"),
            ("Mistral", "head_dim"),
            ("Qwen2", "sliding_window"),
            ("Qwen2", "layer_types"),
            ("Mistral", "layer_types"),
        }:
            continue
        assert getattr(ours, derived.get(field, field)) == getattr(theirs, field), field


@pytest.mark.parametrize("name", OURS)
def test_every_size_must_be_there(name: str) -> None:
    for field in ("vocab_size", "hidden_size", "num_hidden_layers"):
        config = {key: value for key, value in CONFIGS[name].items() if key != field}
        with pytest.raises(ValueError, match=rf"^config\.json: {field} is missing$"):
            build_model(config, Backends().context(device="meta"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Jamba", {"hidden_size": "64"}, "hidden_size: '64'"),
        ("Jamba", {"hidden_size": 0}, "hidden_size: 0: .* greater than 0"),
        ("Jamba", {"hidden_size": True}, "hidden_size: True"),
        ("Jamba", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("Jamba", {"attention_bias": True}, "attention_bias: True"),
        ("Jamba", {"sliding_window": 64}, "sliding_window: 64"),
        ("Jamba", {"attn_layer_offset": 4}, r"attn_layer_offset: 4 must be below attn_layer_period \(4\)"),
        ("Jamba", {"expert_layer_offset": 2}, r"expert_layer_offset: 2 must be below"),
        ("Jamba", {"num_experts_per_tok": 5}, "num_experts_per_tok: 5 of 4 experts"),
        ("Jamba", {"num_attention_heads": 5}, "hidden_size: 64 is no multiple of num_attention_heads"),
        ("Jamba", {"num_key_value_heads": 3}, "4 heads can't share 3 KV heads evenly"),
        ("Jamba", {"mamba_d_conv": 1}, "mamba_d_conv: 1"),
        ("Jamba", {"mamba_dt_rank": "big"}, "mamba_dt_rank"),
        ("Mamba", {"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ("Llama", {"mlp_bias": "no"}, "mlp_bias: 'no'"),
        ("Llama", {"rms_norm_eps": 0}, "rms_norm_eps: 0"),
        (
            "Llama",
            {"rope_scaling": {"rope_type": "spiral"}},
            r"rope_type: 'spiral' is not supported \(default",
        ),
        ("Llama", {"rope_scaling": {"type": "linear"}}, r"rope_parameters\.factor: None is not a number"),
        ("Llama", {"rope_parameters": {"full_attention": {}}}, "must be one set of numbers for all layers"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 2.0}}, "32 of the 16 dimensions"),
        ("Llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor: 0\.5: only 1 is supported"),
        (
            "Mistral",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            r"partial_rotary_factor: 0\.25: only 1",
        ),
        (
            "Qwen2",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.875}},
            r"partial_rotary_factor: 0\.875: only 1",
        ),
        ("Llama", {"rope_theta": -1}, "rope_theta: -1 is not a number above 0"),
        (
            "Llama",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "long_factor must be a list of 8",
        ),
        ("Mistral", {"attention_bias": True}, "attention_bias: True"),
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types: 1 for 4 layers"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types: sliding_attention without"),
        ("Qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(name: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_model({**CONFIGS[name], **change}, Backends().context(device="meta"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None, "JambaForCausalLM"])
def test_unsupported_architecture_lists_the_supported(architectures) -> None:
    with pytest.raises(ValueError, match="architectures") as caught:
        build_model({**CONFIGS["Jamba"], "architectures": architectures}, Backends().context(device="meta"))
    if isinstance(architectures, list):
        assert all(name in str(caught.value) for name in ARCHITECTURES)


@pytest.mark.parametrize("name", OURS)
def test_builds_on_meta(name: str) -> None:
    model = build_model(CONFIGS[name], Backends().context(torch.bfloat16, device="meta"))
    assert model.vocab_size == 512
    assert model.max_position_embeddings == (None if name == "Mamba" else 512)
    assert model.weights.num_bytes >= 2 * model.weights.num_parameters


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path}: no config\.json there"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: (not valid JSON|holds no JSON object)"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": [2]}, (2,)),
        (None, {"eos_token_id": None}, ()),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, (0,)),
    ],
)
def test_eos_token_ids(tmp_path: Path, generation, config, expected) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == expected


def test_eos_token_id_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="eos_token_id: '</s>' is neither"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "-1 is negative"), ([2, 100], r"100 is not below vocab_size \(100\)")],
)
def test_eos_token_id_that_the_vocabulary_has_not(tmp_path: Path, name, value, message) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    (tmp_path / name).write_text(json.dumps({"vocab_size": 100, "eos_token_id": value}))
    with pytest.raises(ValueError, match=f"{name}: eos_token_id: {message}"):
        eos_token_ids(tmp_path)


def test_checkpoint_dtype() -> None:
    assert checkpoint_dtype({"dtype": "bfloat16"}) == "bfloat16"
    assert checkpoint_dtype({"torch_dtype": "float16"}) == "float16"
    assert checkpoint_dtype({}) == "float32"
    with pytest.raises(ValueError, match="dtype: 'int8'"):
        checkpoint_dtype({"dtype": "int8"})
