"""What `hybridserve plan` says of Jamba-Large, from its config.json alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hybridserve.cli import main
from hybridserve.engine import arena_plan

if TYPE_CHECKING:
    from pathlib import Path

JAMBA_LARGE = {
    "architectures": ["JambaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 65536,
    "hidden_size": 8192,
    "intermediate_size": 24576,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 512,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
}
GB = 10**9
SETTINGS = ["--cache.memory_bytes", "2GiB", "--max_model_len", "1024", "--max_num_seqs", "1"]


def plan(model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    with pytest.raises(SystemExit) as status:
        main(["plan", str(model), "--json", *SETTINGS, *options])
    assert status.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that all of these weights fit into."""
    for name in ("total_memory", "available_memory"):
        monkeypatch.setattr(arena_plan, name, lambda: 1 << 41)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(JAMBA_LARGE))
    return tmp_path


@pytest.mark.parametrize(
    ("format_name", "targets", "gigabytes"),
    [
        ("none", None, 797),
        ("int8", "experts", 449),
        ("int8", "mlp", 427),
        ("int8", "all", 400.7 + 0.15),
        ("int8-w8a8", "all", 400.7 + 0.15),
        ("fp8", "all", 400.7 + 0.15),
    ],
)
def test_bytes_of_weights(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    format_name: str,
    targets: str | None,
    gigabytes: float,
) -> None:
    options = ["--quantization.format", format_name, *(["--targets", targets] if targets else [])]
    shown = plan(model, capsys, *options)
    assert shown["parameters_total"] == pytest.approx(398.56 * GB, rel=5e-4)
    assert shown["weight_bytes_per_gpu"] == pytest.approx(gigabytes * GB, rel=5e-3)
    if format_name == "none":
        assert shown["quantization"] is None
        return
    share = {"experts": 0.873, "mlp": 0.928, "all": 0.995}[targets or ""]
    assert shown["quantization"]["share"] == pytest.approx(share, abs=2e-3)
    assert shown["quantization"]["format"] == format_name


def test_nf4(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a byte an element, and a float32 scale for 64 of them: 396.5 G x (0.5 + 4 / 64) + 2.1 G x 2."""
    pytest.importorskip("bitsandbytes")
    shown = plan(model, capsys, "--format", "bnb-nf4")
    assert shown["weight_bytes_per_gpu"] == pytest.approx((396.5 * 0.5625 + 4.2) * GB, rel=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "int4"], "quantization.format"),
        (["--format", "int8", "--targets", "experts,dense"], "'dense' names no module"),
        (["--targets", "mlp"], "quantization.targets: has no effect without quantization.format"),
    ],
)
def test_refusals_are_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["plan", str(model), *SETTINGS, *options])
    shown = capsys.readouterr().err
    assert status.value.code == 2
    assert message in shown
    assert len(shown.splitlines()) == 1
    if "int4" in options:
        assert "bnb-nf4" in shown, "the formats are listed"


def test_a_quantized_checkpoint_is_planned_as_it_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hybridserve.quant.compressed_tensors import write_config

    quantization = write_config("fp8", ["lm_head", "re:.*(x_proj|dt_proj|router)"])
    (model / "config.json").write_text(json.dumps({**JAMBA_LARGE, "quantization_config": quantization}))
    shown = plan(model, capsys)
    assert shown["quantization"]["quantized_by"] == "the checkpoint"
    assert shown["weight_bytes_per_gpu"] == pytest.approx(400.85 * GB, rel=5e-3)
    with pytest.raises(SystemExit):
        main(["plan", str(model), *SETTINGS, "--format", "int8"])
    assert "int8, but the checkpoint is quantized already, as fp8" in capsys.readouterr().err
