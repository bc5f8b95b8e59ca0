"""`hybridserve quantize`: a checkpoint that loads back as what quantizing while loading makes, or nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridserve.cli import main
from hybridserve.engine import convert
from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.models import hub
from hybridserve.models.hub import resolve_model
from hybridserve.models.safetensors_file import Entry, SafetensorsFile, SafetensorsWriter
from hybridserve.quant.policy import Quantization
from tests.harness.models import oracle, random_ids, save_model
from tests.harness.quantized import SCALED, QuantizedModel, edit_tensors
from tests.harness.w8a8 import Watched, absmax_127, w8a8_oracle

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


@pytest.mark.parametrize("family", ["bamba", "mamba", "llama"])
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


@pytest.mark.parametrize("format_name", SCALED)
def test_another_reader_of_the_layout_agrees(format_name: str, tmp_path: Path) -> None:
    """Written down here from compressed-tensors' documents: it takes files and config for what they are."""
    save_model("mamba", tmp_path / "model", 0)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", format_name, None)
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["quantization_status"]) == ("compressed-tensors", "compressed")
    (scheme,) = found["config_groups"].values()
    weights, inputs = scheme["weights"], scheme["input_activations"]
    assert (weights["num_bits"], weights["symmetric"], weights["strategy"]) == (8, True, "channel")
    assert weights["type"] == ("float" if format_name == "fp8" else "int")
    assert found["format"] == scheme["format"] == f"{weights['type']}-quantized"
    assert (inputs is not None) == (format_name == "int8-w8a8")
    if inputs is not None:
        assert (inputs["num_bits"], inputs["type"], inputs["symmetric"]) == (8, "int", True)
        assert (inputs["strategy"], inputs["dynamic"]) == ("token", True)

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert scheme["targets"] == ["Linear"]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in found["ignore"]:
            scale = stored.pop(f"{name}.weight_scale")
            assert scale.shape == (module.out_features, 1)
            dequantized = stored.pop(f"{name}.weight").float() * scale
            assert (dequantized - module.weight).abs().max() <= scale.max() * (
                16 if format_name == "fp8" else 0.51
            )
            module.weight.data = dequantized
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in stored.items()), "else as it was"
    rounding = Watched(absmax_127)
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in found["ignore"]
    ]
    model.save_pretrained(tmp_path / "dequantized")
    other = w8a8_oracle(tmp_path / "dequantized", linears, (lambda x: x) if inputs is None else rounding)
    ours, checked = QuantizedModel(tmp_path / "out").runner, 0
    for ids in (random_ids(seed, 5) for seed in range(4)):
        rounding.forget()
        logits, _ = oracle(other, ids)
        ours.sequences[0].num_computed = 0
        if not rounding.was_near_an_edge:
            assert (ours.run(ids) - logits).abs().max() <= 1e-4
            checked += 1
    assert checked


class TestPlaces:
    """Where it may be written: decided before any work, and nothing but the result is left there."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        save_model("llama", tmp_path / "model", 0)
        return tmp_path / "model"

    def test_an_empty_directory_is_filled_from_inside(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its parent may be another file system, or not ours to write to."""
        out = tmp_path / "parent" / "out"
        out.mkdir(parents=True)
        inode = out.stat().st_ino
        seen = []
        plain = os.mkdir
        monkeypatch.setattr(os, "mkdir", lambda path, *more: (seen.append(path), plain(path, *more))[1])
        quantize_checkpoint(model, out, "int8", None)
        assert seen
        assert {Path(path).parent for path in seen} == {out}
        assert out.stat().st_ino == inode
        assert list(out.parent.iterdir()) == [out]
        assert not [file for file in out.iterdir() if file.name.startswith(".")]
        QuantizedModel(out)

    def test_a_link_to_an_empty_directory_stays(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        quantize_checkpoint(model, tmp_path / "link", "int8", None)
        assert (tmp_path / "link").is_symlink()
        QuantizedModel(tmp_path / "real")

    def test_a_link_to_what_is_not_there_yet(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("later")
        quantize_checkpoint(model, tmp_path / "link", "int8", None)
        assert (tmp_path / "link").is_symlink()
        QuantizedModel(tmp_path / "later")

    def test_here(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        quantize_checkpoint(model, Path(), "int8", None)
        QuantizedModel(tmp_path / "here")

    def test_a_failure_leaves_an_empty_directory_empty(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one while files are moved; and no parents that were made for it."""
        (tmp_path / "out").mkdir()
        plain = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.name == "config.json":
                raise OSError("full")
            return plain(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="full"):
            quantize_checkpoint(model, tmp_path / "out", "int8", None)
        assert not list((tmp_path / "out").iterdir())
        monkeypatch.setattr(convert, "_copy_small_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize_checkpoint(model, tmp_path / "a" / "b" / "out", "int8", None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
    def test_where_nothing_can_be_written(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0o500)
        for out in ("closed", "closed/out", "closed/deep/out"):
            with pytest.raises(PermissionError):
                quantize_checkpoint(model, tmp_path / out, "int8", None)

    def test_the_place_is_looked_at_first(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before a model is fetched."""
        monkeypatch.setattr(hub, "resolve_model", lambda name: pytest.fail("fetched"))
        (tmp_path / "file").write_text("mine")
        (tmp_path / "circle").symlink_to("circle")
        for out, message in {
            "file": "file: exists, and is not an empty directory",
            "file/out": "Not a directory",
            "circle": "circle: a link that leads in a circle",
        }.items():
            with pytest.raises(SystemExit) as status:
                main(["quantize", "somebody/something", str(tmp_path / out), "--format", "int8"])
            shown = capsys.readouterr().err
            assert status.value.code == 2
            assert message in shown
            assert len(shown.splitlines()) == 1

    @pytest.mark.parametrize("exists", [False, True], ids=["new", "empty"])
    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name
    )
    def test_ended_from_outside(
        self, model: Path, tmp_path: Path, number: signal.Signals, exists: bool
    ) -> None:
        """Nothing is left, but by SIGKILL; and that is named by the next run."""
        out = tmp_path / "out"
        if exists:
            out.mkdir()
        command = [sys.executable, "-c", SLOW, "quantize", str(model), str(out), "--format", "int8"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            process.send_signal(number)
            status = process.wait(30)
        left = [path for folder in (tmp_path, out) if folder.exists() for path in folder.glob(".*")]
        if number != signal.SIGKILL:
            assert status == 128 + number
            assert not left
            assert out.exists() == exists
            return
        (leftover,) = left
        assert leftover.parent == (out if exists else tmp_path)
        command = [sys.executable, "-m", "hybridserve", *command[3:]]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stderr == f"hybridserve: {leftover}: of a run that was killed, or has not ended\n"
        QuantizedModel(out)


SLOW = """
import sys, time
from hybridserve.engine import convert
from hybridserve.cli import main

def wait(*_):
    print("writing", flush=True)
    for _ in range(6000):  # not one sleep: a signal just before it would be looked at after it
        time.sleep(0.01)

convert._copy_small_files = wait
main(sys.argv[1:])
"""


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
            "re:(": "quantization.targets: 're:(': a ( without its ), at character 2, is not understood",
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
