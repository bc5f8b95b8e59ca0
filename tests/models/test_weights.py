"""Loading: each tensor exactly once, nothing missing, nothing left over, one tensor of memory on top."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridserve.models.config import load_hf_config
from hybridserve.models.weights import load_model
from tests.harness.models import Backends, load_runner, oracle, random_ids, save_model

IDS = random_ids(0, 20)
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "model.layers.1.feed_forward.experts.2.gate_proj.weight"


@pytest.fixture
def jamba(tmp_path: Path) -> Path:
    save_model("jamba", tmp_path, 0, num_hidden_layers=4)
    return tmp_path


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


def load(path: Path):
    return load_model(path, Backends().context())


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    model = save_model("jamba", single, 0)
    save_model("jamba", sharded, 0, max_shard_size="300KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    want, _ = oracle(model, IDS)
    got = load_runner(sharded).run(IDS)
    assert torch.equal(got, load_runner(single).run(IDS))
    assert (got - want).abs().max() <= 1e-4


def test_stacked_experts_equal_separate_ones(jamba: Path) -> None:
    want = load_runner(jamba).run(IDS)

    def stack(tensors) -> None:
        for layer in (1, 3):
            name = f"model.layers.{layer}.feed_forward.experts"
            parts = {
                part: torch.stack([tensors.pop(f"{name}.{e}.{part}_proj.weight") for e in range(4)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{name}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
            tensors[f"{name}.down_proj"] = parts["down"]

    rewrite(jamba, stack)
    assert not any("experts.0" in name for name in load_file(jamba / FILE))
    assert torch.equal(load_runner(jamba).run(IDS), want)


def test_both_stacked_and_separate_experts_are_refused(jamba: Path) -> None:
    shape = (4, 64, 128)
    rewrite(jamba, lambda t: t.update({"model.layers.1.feed_forward.experts.down_proj": torch.zeros(shape)}))
    with pytest.raises(ValueError, match=r"experts\.\S*down_proj\S* loads '\S+' again"):
        load(jamba)


def test_missing_tensor(jamba: Path) -> None:
    rewrite(jamba, lambda tensors: tensors.pop(GATE))
    with pytest.raises(ValueError, match=rf"{jamba}: the tensor '{GATE}' \[128, 64\] is missing"):
        load(jamba)


def test_surplus_tensor(jamba: Path) -> None:
    rewrite(jamba, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(1)}))
    with pytest.raises(
        ValueError, match=r"model\.safetensors: the tensor 'model.extra.weight' belongs nowhere"
    ):
        load(jamba)


def test_misshapen_tensor(jamba: Path) -> None:
    rewrite(jamba, lambda tensors: tensors.update({GATE: torch.zeros(128, 63)}))
    message = rf"model\.safetensors: the tensor '{GATE}' is \[128, 63\], but .* \[128, 64\]"
    with pytest.raises(ValueError, match=message):
        load(jamba)


def test_integer_tensor(jamba: Path) -> None:
    rewrite(jamba, lambda tensors: tensors.update({GATE: torch.zeros(128, 64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=rf"'{GATE}' is quantized, but its scales '\S+_scale' are missing"):
        load(jamba)
    rewrite(jamba, lambda tensors: tensors.update({GATE: torch.zeros(128, 64, dtype=torch.int32)}))
    with pytest.raises(ValueError, match=rf"'{GATE}' is I32: not supported"):
        load(jamba)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(jamba: Path, keep: int) -> None:
    data = (jamba / FILE).read_bytes()
    (jamba / FILE).write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: cut short, or not a safetensors file"):
        load(jamba)


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04 this is a zip file that somebody renamed",
        (16).to_bytes(8, "little") + b"not JSON at all!",
        (2).to_bytes(8, "little") + b"[]",
        (11).to_bytes(8, "little") + b'{"a": true}',
        (65).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}   ',
    ],
)
def test_not_safetensors(jamba: Path, data: bytes) -> None:
    (jamba / FILE).write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: cut short, or not a safetensors file"):
        load(jamba)


def test_s027_a_name_that_occurs_twice(jamba: Path) -> None:
    data = (jamba / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    again = json.dumps({GATE: {**header[GATE], "shape": header[GATE]["shape"][::-1]}})
    text = f"{json.dumps(header)[:-1]}, {again[1:]}".encode()
    (jamba / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=rf"model\.safetensors: '{GATE}' occurs twice in the header"):
        load(jamba)


def test_only_pickles_there(jamba: Path) -> None:
    (jamba / FILE).rename(jamba / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors there, only pytorch_model\.bin: .* can run code"):
        load(jamba)


def test_no_weights_there(jamba: Path) -> None:
    (jamba / FILE).unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(jamba)


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        save_model("llama", tmp_path, 0, max_shard_size="300KB")
        return tmp_path

    def change(self, path: Path, change) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    @pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
    def test_may_not_lead_elsewhere(self, sharded: Path, name: str) -> None:
        self.change(sharded, lambda places: places.update({"model.norm.weight": name}))
        with pytest.raises(ValueError, match="is not the name of a file in the same directory"):
            load(sharded)

    def test_names_a_missing_file(self, sharded: Path) -> None:
        gone = sorted(sharded.glob("*.safetensors"))[0]
        gone.unlink()
        with pytest.raises(ValueError, match=rf"the file '{gone.name}' that it names is missing"):
            load(sharded)

    def test_names_a_tensor_that_its_file_lacks(self, sharded: Path) -> None:
        self.change(sharded, lambda places: places.update({"extra": places["model.norm.weight"]}))
        with pytest.raises(ValueError, match=r"names, but the file lacks 'extra'"):
            load(sharded)

    def test_misses_a_tensor_that_a_file_holds(self, sharded: Path) -> None:
        self.change(sharded, lambda places: places.pop("model.norm.weight"))
        with pytest.raises(ValueError, match=r"does not name, but the file holds, 'model.norm.weight'"):
            load(sharded)

    def test_is_no_map(self, sharded: Path) -> None:
        (sharded / INDEX).write_text('{"weight_map": [1]}')
        with pytest.raises(ValueError, match="weight_map does not map"):
            load(sharded)


def test_tied_head_may_be_in_the_file_too(tmp_path: Path) -> None:
    save_model("llama", tmp_path, 0, tie_word_embeddings=True)
    want = load_runner(tmp_path).run(IDS)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load_runner(tmp_path).run(IDS), want)
    rewrite(tmp_path, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the input embedding"):
        load(tmp_path)


def test_other_spellings(tmp_path: Path) -> None:
    mamba, llama = tmp_path / "mamba", tmp_path / "llama"
    save_model("mamba", mamba, 0)
    want = load_runner(mamba).run(IDS)
    rewrite(mamba, lambda t: t.update({"backbone.embedding.weight": t.pop("backbone.embeddings.weight")}))
    assert torch.equal(load_runner(mamba).run(IDS), want)
    save_model("llama", llama, 0)
    rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(llama)


PEAK = """
import sys
from pathlib import Path
from hybridserve.models.weights import load_model
from tests.harness.models import Backends
import torch

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

load_model(Path(sys.argv[1]), Backends().context(torch.bfloat16))
before = kilobytes("VmRSS")
model = load_model(Path(sys.argv[2]), Backends().context(torch.bfloat16))
print((kilobytes("VmHWM") - before) * 1024, model.weights.num_bytes)
"""


def test_peak_memory_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    save_model("llama", small, 0, dtype=torch.bfloat16)
    config = load_hf_config(small) | {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256}
    large.mkdir()
    (large / "config.json").write_text(json.dumps(config))
    from hybridserve.models.registry import build_model

    expected = build_model(config, Backends().context(torch.bfloat16, device="meta")).weights
    names = {name: t.shape for name, t in expected.tensors.items() if t.covers}
    save_file({name: torch.ones(shape).bfloat16() for name, shape in names.items()}, large / FILE)
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    peak, size = map(int, result.stdout.split())
    largest = 4096 * 1024 * 2
    assert size > 8 * largest, "too small a model to tell"
    assert peak <= size + largest + (4 << 20)
