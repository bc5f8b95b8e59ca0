"""Fields of adapter_config.json that are refused, and those that change nothing."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, MAX_PATTERN_COST, _cost
from tests.harness.adapters import ATTENTION, AdaptedRunner, Kit, edit_config, refused

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def runner(kit: Kit) -> AdaptedRunner:
    return AdaptedRunner(kit.base)


@pytest.fixture
def path(kit: Kit, tmp_path: Path) -> Path:
    """Adapter B: q_proj alone, rank 2."""
    return kit.copy("B", tmp_path / "adapter")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": ...}, ("peft_type is missing",)),
        ({"peft_type": "LOHA"}, ("peft_type", "'LOHA'")),
        ({"r": ...}, ("r is missing",)),
        ({"r": 0}, ("r: 0",)),
        ({"r": "2"}, ("r: '2'",)),
        ({"r": True}, ("r: True",)),
        ({"lora_alpha": float("nan")}, ("lora_alpha",)),
        ({"lora_alpha": float("inf")}, ("lora_alpha",)),
        ({"lora_alpha": None}, ("lora_alpha",)),
        ({"lora_alpha": 10**400}, ("lora_alpha",)),
        ({"lora_alpha": 1e300}, ("lora_alpha",)),
        ({"use_rslora": "yes"}, ("use_rslora",)),
        ({"rank_pattern": ["q_proj"]}, ("rank_pattern",)),
        ({"rank_pattern": {"q_proj": 0}}, ("rank_pattern", "0")),
        ({"alpha_pattern": {"q_proj": float("inf")}}, ("alpha_pattern",)),
        ({"modules_to_save": ["lm_head"]}, ("modules_to_save", "lm_head")),
        ({"trainable_token_indices": [1, 2]}, ("trainable_token_indices",)),
        ({"layer_replication": [[0, 2], [1, 3]]}, ("layer_replication",)),
        ({"use_qalora": True}, ("use_qalora",)),
        ({"use_bdlora": {"nblocks": 2}}, ("use_bdlora",)),
        ({"kasa_config": {"beta": 1e-4}}, ("kasa_config",)),
        ({"arrow_config": {"top_k": 2}}, ("arrow_config",)),
        ({"monteclora_config": {"num_samples": 8}}, ("monteclora_config",)),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights", "'pissa'", "path_initial_model")),
        ({"init_lora_weights": "pissa_niter_4"}, ("init_lora_weights",)),
        ({"init_lora_weights": "olora"}, ("init_lora_weights",)),
        ({"init_lora_weights": "corda"}, ("init_lora_weights",)),
        ({"init_lora_weights": "loftq"}, ("init_lora_weights",)),
        ({"init_lora_weights": "lora_ga"}, ("init_lora_weights",)),
        ({"some_new_variant": {"strength": 2}}, ("some_new_variant", "not a field of LoRA")),
        ({"use_dora": True}, ("use_dora is true", "has no lora_magnitude_vector")),
        ({"lora_bias": True}, ("lora_bias is true", "has no lora_B.bias")),
        ({"use_dora": True, "lora_bias": True}, ("use_dora together with lora_bias",)),
        ({"alora_invocation_tokens": [5, 128]}, ("alora_invocation_tokens", "128")),
        ({"alora_invocation_tokens": [-1]}, ("alora_invocation_tokens",)),
        ({"alora_invocation_tokens": "hi"}, ("alora_invocation_tokens",)),
        ({"alora_invocation_tokens": [1] * 5000}, ("alora_invocation_tokens", "4096")),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:30].strip() if isinstance(value, dict) else "",
)
def test_fields_that_can_not_be_served(
    runner: AdaptedRunner, path: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    edit_config(path, **fields)
    refused(runner, path, *words)


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False},
        {"modules_to_save": [], "layer_replication": None, "some_new_variant": None, "another": False},
        {"rank_pattern": None, "alpha_pattern": None},
        {"bias": "lora_only", "lora_dropout": 0.1, "fan_in_fan_out": True, "base_model_name_or_path": None},
        {"velora_config": {"num_groups": 4}, "corda_config": {"corda_method": "ipm"}},
    ],
    ids=lambda value: next(iter(value)),
)
def test_fields_that_change_nothing(
    kit: Kit, runner: AdaptedRunner, path: Path, fields: dict[str, Any]
) -> None:
    edit_config(path, **fields)
    assert runner.read(path).identity == runner.read(kit.adapter("B")).identity


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"peft_type": "LORA", "r": 2, "r": 4}', "'r' occurs twice"),
        (b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"{" + b" " * MAX_CONFIG_BYTES + b"}", str(MAX_CONFIG_BYTES)),
    ],
    ids=["empty", "utf-16", "list", "deep", "twice", "long number", "large"],
)
def test_l060_config_files_that_are_none(runner: AdaptedRunner, path: Path, text: bytes, word: str) -> None:
    (path / CONFIG_FILE).write_bytes(text)
    refused(runner, path, CONFIG_FILE, word)


def test_config_is_read_before_the_weights(runner: AdaptedRunner, path: Path) -> None:
    (path / CONFIG_FILE).write_text(json.dumps({"peft_type": "IA3"}))
    (path / WEIGHTS).write_bytes(b"")
    refused(runner, path, "IA3")


# ---- patterns


@pytest.mark.parametrize(
    "pattern",
    [
        *("q_proj", r"^model\.layers\.0\.mamba\.in_proj", r".*layers\.[0-9]+\..*q_proj"),
        *(r"layers\.(0|1|12|31)\.self_attn\.[qkv]_proj", r"(?:.*\.)?experts\.down_proj", r"(q|k|v)_proj"),
    ],
)
def test_ordinary_patterns_are_cheap(pattern: str) -> None:
    assert 8 * _cost(pattern) <= MAX_PATTERN_COST


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+b", "(a|a)*c", "(.*)*", "(x){9,}", "a(b(c)*)*"),
        *(".*.*.*.*.*x", "a?" * 30 + "a" * 30, "(m|m)(o|o)(d|d)(e|e)(l|l)" * 8, "x" * 1000),
        *("(", "[", "*", "a{2", "\\", "(?i)q_proj", "a)(b"),
    ],
)
def test_patterns_that_may_take_for_ever(
    kit: Kit, runner: AdaptedRunner, pattern: str, tmp_path: Path
) -> None:
    path = kit.copy("B", tmp_path / "adapter")
    edit_config(path, alpha_pattern={pattern: 4})
    if pattern == "a{2":
        runner.read(path)  # literal to Python
        return
    with pytest.raises(ValueError, match=r"adapter_config.json: alpha_pattern: .*pattern"):
        runner.read(path)


def test_many_patterns_one_for_each_module(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    path = kit.copy("D", tmp_path / "adapter")
    names = {f"model.layers.{layer}.self_attn.{name}": 4 for layer in range(1000) for name in ATTENTION}
    edit_config(path, alpha_pattern=names, use_rslora=False)
    assert {delta.scale for delta in runner.read(path).deltas.values()} == {4 / 3}


# ---- wording


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r: 0: should be greater than or equal to 1"),
        ({"r": 10**400}, "r: a number of 401 digits: should be less than or equal to 1048576"),
        ({"use_rslora": "yes"}, "use_rslora: 'yes': should be a valid boolean"),
        ({"init_lora_weights": None}, "init_lora_weights: None: unknown initialisation"),
        ({"init_lora_weights": "garbage"}, "init_lora_weights: 'garbage': unknown initialisation"),
    ],
    ids=["r", "huge r", "boolean", "init none", "init unknown"],
)
def test_mistakes_are_told_in_plain_words(
    runner: AdaptedRunner, path: Path, fields: dict[str, Any], message: str
) -> None:
    edit_config(path, **fields)
    with pytest.raises(ValueError, match=r"adapter_config\.json: ") as caught:
        runner.read(path)
    assert str(caught.value) == f"{path / CONFIG_FILE}: {message}"
