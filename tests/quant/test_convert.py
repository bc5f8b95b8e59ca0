"""`hybridserve quantize`: a checkpoint that loads back as what quantizing while loading makes, or nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from hybridserve.cli import main
from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.models.hub import resolve_model
from hybridserve.models.safetensors_file import Entry, SafetensorsFile, SafetensorsWriter
from hybridserve.quant.policy import Quantization
from tests.harness.models import random_ids, save_model
from tests.harness.quantized import SCALED, QuantizedModel, edit_tensors

if TYPE_CHECKING:
    from pathlib import Path

IDS = random_ids(0, 20)


def same(path: Path, online: QuantizedModel, dtype: torch.dtype = torch.float32) -> None:
    """Bit for bit: what every module multiplies by, its format, and logits."""
    offline = QuantizedModel(path, dtype=dtype)
    assert offline.formats == online.formats
    for name, base in online.bases.items():
        assert torch.equal(offline.bases[name](), base()), name
    assert torch.equal(offline.runner.run(IDS), online.runner.run(IDS))


@pytest.mark.parametrize("format_name", SCALED)
@pytest.mark.parametrize("targets", [None, ("mlp",), ("experts", "mamba.x_proj", "lm_head")], ids=str)
def test_loads_back_bit_for_bit(format_name: str, targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    save_model("jamba", tmp_path / "model", 0, num_hidden_layers=4)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", format_name, targets)
    online = QuantizedModel(tmp_path / "model", Quantization(format_name, targets or ("all",)))
    same(tmp_path / "out", online)


@pytest.mark.parametrize("family", ["mamba", "llama"])
def test_other_families(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model", 0, dtype=torch.bfloat16, tie_word_embeddings=True)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8", None)
    online = QuantizedModel(tmp_path / "model", Quantization("int8", ("all",)), dtype=torch.bfloat16)
    same(tmp_path / "out", online, torch.bfloat16)


def test_shards_keep_their_files(tmp_path: Path) -> None:
    save_model("jamba", tmp_path / "model", 0, max_shard_size="300KB")
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8", None)
    same(tmp_path / "out", QuantizedModel(tmp_path / "model", Quantization("int8", ("all",))))
    names = {path.name for path in (tmp_path / "model").glob("*.safetensors")}
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == names
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes_after
    assert {index["weight_map"][name] for name in index["weight_map"]} == names


def test_stacked_experts_are_written_one_by_one(tmp_path: Path) -> None:
    save_model("jamba", tmp_path / "model", 0, num_hidden_layers=4)
    online = QuantizedModel(tmp_path / "model", Quantization("int8", ("all",)))

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.feed_forward.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{name}.{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{name}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{name}.down_proj"] = parts["down"]

    edit_tensors(tmp_path / "model", stack)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8", None)
    same(tmp_path / "out", online)
    quantize_checkpoint(tmp_path / "model", tmp_path / "kept", "int8", ("in_proj",))
    same(tmp_path / "kept", QuantizedModel(tmp_path / "model", Quantization("int8", ("in_proj",))))


def test_the_directory_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokenizer and template go along; what was done is said, in the output and in the directory."""
    out = tmp_path / "deep" / "out"
    with pytest.raises(SystemExit) as status:
        main(["quantize", "demo", str(out), "--format", "int8"])
    assert status.value.code == 0
    shown = capsys.readouterr().out
    assert "int8, 76.6% of the parameters" in shown
    assert "activations" not in shown  # how products are computed is not in the files
    assert "kept: dt_proj, router, x_proj" in shown
    source = resolve_model("demo")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    report = json.loads((out / "quantization.json").read_text())
    tensors, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert report["bytes_after"] == sum(tensor.nbytes for tensor in tensors.values())
    assert report["bytes_before"] == sum(tensor.nbytes for tensor in before.values())
    for module in report["quantized"]:
        assert tensors[f"{module}.weight"].dtype == torch.int8
        assert tensors[f"{module}.weight_scale"].dtype == torch.float32
    kept = {name for name in tensors if name.removesuffix(".weight") in report["kept"]}
    assert all(torch.equal(tensors[name], before[name]) for name in kept)
    assert len(tensors) == len(kept) + 2 * len(report["quantized"])
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    same(out, QuantizedModel(source, Quantization("int8", ("all",)), dtype=torch.bfloat16), torch.bfloat16)


def test_the_other_reader_of_the_layout_agrees(tmp_path: Path) -> None:
    """compressed-tensors itself, where it is installed, takes the config for what it is."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    save_model("llama", tmp_path / "model", 0)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8-w8a8", None)
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = QuantizationConfig.model_validate(found).config_groups.values()
    assert (group.weights.strategy, group.input_activations.strategy) == ("channel", "token")


class TestRefused:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        save_model("llama", tmp_path / "model", 0)
        return tmp_path / "model"

    def refused(self, message: str, *arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as status:
            main(["quantize", *map(str, arguments)])
        shown = capsys.readouterr()
        assert status.value.code == 2
        assert message in shown.err
        assert len(shown.err.splitlines()) == 1

    def test_what_is_there_is_not_touched(self, model: Path, tmp_path: Path, capsys) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_text("mine")
        for name in ("file", "full", "model"):
            message = f"{tmp_path / name}: exists, and is not an empty directory"
            self.refused(message, model, tmp_path / name, "--format", "int8", capsys=capsys)
        (tmp_path / "empty").mkdir()
        quantize_checkpoint(model, tmp_path / "empty", "int8", None)
        QuantizedModel(tmp_path / "empty")

    def test_nothing_half_written_is_left(self, model: Path, tmp_path: Path, capsys) -> None:
        name = "model.layers.3.mlp.up_proj.weight"
        edit_tensors(model, lambda tensors: tensors[name][0].fill_(float("nan")))
        message = f"the tensor '{name}' holds NaN or infinity"
        self.refused(message, model, tmp_path / "out", "--format", "int8", capsys=capsys)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    @pytest.mark.parametrize("name", ["int4", "bnb-nf4", "none"])
    def test_formats_that_can_not_be_written(self, model: Path, tmp_path: Path, name: str, capsys) -> None:
        message = f"--format: '{name}' can't be written to a checkpoint (can: int8, int8-w8a8, fp8)"
        self.refused(message, model, tmp_path / "out", "--format", name, capsys=capsys)

    def test_targets(self, model: Path, tmp_path: Path, capsys) -> None:
        out = tmp_path / "out"
        for targets, message in {
            "experts": "has nothing that experts means",
            "norm": "'norm' is never quantized",
            "up": "'up' names no module",
            " , ": "--targets: names nothing",
        }.items():
            self.refused(message, model, out, "--format", "int8", "--targets", targets, capsys=capsys)

    def test_twice(self, model: Path, tmp_path: Path, capsys) -> None:
        quantize_checkpoint(model, tmp_path / "out", "int8", None)
        message = "is quantized already"
        self.refused(message, tmp_path / "out", tmp_path / "again", "--format", "fp8", capsys=capsys)

    def test_a_missing_tensor_before_anything_is_written(self, model: Path, tmp_path: Path, capsys) -> None:
        edit_tensors(model, lambda tensors: tensors.pop("model.norm.weight"))
        message = "'model.norm.weight' [64] is missing"
        self.refused(message, model, tmp_path / "out", "--format", "int8", capsys=capsys)


def test_writer_aligns_and_checks(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.int8),
        "b": torch.arange(6.0).reshape(2, 3),
        "c": torch.tensor(2.5).bfloat16(),
        "d": torch.empty(0, 4),
        "e": torch.randn(4, 3).t().half(),
    }
    spelled = {torch.int8: "I8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    entries = {name: Entry(spelled[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with SafetensorsWriter(tmp_path / "file", entries) as writer:
        for name, tensor in reversed(tensors.items()):
            writer.write(name, tensor)
    for name, tensor in load_file(tmp_path / "file").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    assert SafetensorsFile(tmp_path / "file").entries == entries
    with (
        pytest.raises(ValueError, match="a: was announced and not written"),
        SafetensorsWriter(tmp_path / "short", {"a": entries["a"]}),
    ):
        pass
    writer = SafetensorsWriter(tmp_path / "other", {"a": entries["a"]})
    with pytest.raises(ValueError, match=r"a: .* is not what was announced"), writer:
        writer.write("a", tensors["b"])
