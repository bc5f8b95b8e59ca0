"""Files and tensors that are refused: the message names the file, the tensor and the limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridserve.lora.adapter import AdapterError
from hybridserve.lora.layers import check_adapter, place_adapter
from hybridserve.lora.peft_config import CONFIG_FILE
from hybridserve.lora.tensor_file import MAX_HEADER_BYTES, MAX_TENSORS, TensorFile
from tests.harness.adapters import (
    AdaptedRunner,
    AdapterSpec,
    Kit,
    edit_config,
    edit_tensors,
    refused,
    save_zero_row,
)
from tests.harness.models import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHTS = "adapter_model.safetensors"
M = "base_model.model.model"
Q = f"{M}.layers.2.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runner(kit: Kit) -> AdaptedRunner:
    return AdaptedRunner(kit.base)


@pytest.fixture
def path(kit: Kit, tmp_path: Path) -> Path:
    """Adapter B: q_proj alone, rank 2."""
    return kit.copy("B", tmp_path / "adapter")


def drop(key: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != key}


def put(
    key: str, *shape: int, value: float = 1, dtype: torch.dtype = torch.float32
) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: torch.full(shape, value, dtype=dtype)})


def test_l056_the_next_good_one_loads(kit: Kit, runner: AdaptedRunner, path: Path) -> None:
    """And whoever uses another adapter notices nothing."""
    ids = random_ids(1, 12, 128)
    runner.install(1, kit.adapter("A"))
    before = runner.logits(ids, 1)
    (path / WEIGHTS).write_bytes(b"broken")
    refused(runner, path, WEIGHTS)
    assert torch.equal(runner.logits(ids, 1), before)
    runner.install(1, kit.adapter("B"))
    assert (runner.logits(ids, 1) - kit.logits("B", ids)).abs().max() <= 1e-4


# ---- files


def test_no_adapter_there(runner: AdaptedRunner, path: Path, tmp_path: Path) -> None:
    refused(runner, tmp_path / "nowhere", "no such directory")
    with pytest.raises(ValueError, match="File name too long"):
        runner.read(tmp_path / ("x" * 5000))
    (path / CONFIG_FILE).unlink()
    refused(runner, path, CONFIG_FILE)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_l060_pickles_are_not_read(runner: AdaptedRunner, path: Path, name: str) -> None:
    (path / WEIGHTS).rename(path / name)
    refused(runner, path, name, "can run code")
    (path / name).unlink()
    refused(runner, path, f"no {WEIGHTS} there")


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS])
def test_what_is_no_file(runner: AdaptedRunner, path: Path, file: str) -> None:
    (path / file).unlink()
    os.mkfifo(path / file)  # to open it would wait for ever
    refused(runner, path, file)


@pytest.mark.parametrize("size", [0, 7, 8, 20, -1, -100])
def test_l056_cut_short(runner: AdaptedRunner, path: Path, size: int) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[:size])
    refused(runner, path, WEIGHTS, "cut short")


def test_more_bytes_than_tensors(runner: AdaptedRunner, path: Path) -> None:
    with (path / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 64)
    refused(runner, path, WEIGHTS, "more bytes than tensors")


def test_a_huge_header_is_not_read(runner: AdaptedRunner, path: Path) -> None:
    with (path / WEIGHTS).open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
    refused(runner, path, "cut short")
    with (path / WEIGHTS).open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    refused(runner, path, str(MAX_HEADER_BYTES))


def write_header(path: Path, header: str, data: bytes = b"") -> None:
    text = header.encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


ENTRY = '{"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}'


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (f'{{"a": {ENTRY}, "a": {ENTRY}}}', "'a' occurs twice"),
        (f'{{"a": {ENTRY}, "b": {ENTRY}}}', "does not begin where"),
        ('{"a": {"dtype": "F32", "dtype": "F32"}}', "'dtype' occurs twice"),
        ('{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]}}', "does not fit its shape"),
        ('{"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}', "makes no sense"),
        ('{"a": {"dtype": "F32", "shape": [true, 4], "data_offsets": [0, 16]}}', "makes no sense"),
        ('{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]}}', "makes no sense"),
        ('{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]}}', "makes no sense"),
        ('{"a": 5}', "makes no sense"),
        ("[]", "no JSON object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": "\ud800"}'.encode("utf-8", "surrogatepass").decode("latin1"), "makes no sense"),
    ],
)
def test_headers_that_lie(runner: AdaptedRunner, path: Path, header: str, word: str) -> None:
    write_header(path, header, b"\0" * 16)
    refused(runner, path, WEIGHTS, word)


def test_a_file_that_shrinks_while_it_is_read(path: Path) -> None:
    """Mapped, it would end the process."""
    save_file({"large": torch.ones(1 << 20)}, path / WEIGHTS)
    with TensorFile(path / WEIGHTS) as file:
        os.truncate(path / WEIGHTS, 1 << 20)
        with pytest.raises(ValueError, match="cut short while it was read"):
            file.read("large")


# ---- tensors


def test_l056_not_finite(runner: AdaptedRunner, path: Path) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        edit_tensors(path, put(f"{Q}.lora_B.weight", 32, 2, value=value))
        refused(runner, path, WEIGHTS, f"{Q}.lora_B.weight", "not finite")


def test_l008_rank_above_the_limit(kit: Kit, runner: AdaptedRunner, path: Path) -> None:
    refused(runner, path, "rank 2", "model.layers.2.self_attn.q_proj", "max_rank (1)", max_rank=1)
    assert runner.read(path, max_rank=2).max_rank == 2


def test_one_module_above_the_limit(kit: Kit, runner: AdaptedRunner) -> None:
    config = {"rank_pattern": {r"layers\.3\..*experts\.down_proj": 9}}
    path = kit.adapter("one-high", AdapterSpec(1, 2, ("q_proj",), ("experts.down_proj",), config=config))
    name = "model.layers.3.feed_forward.experts.down_proj"
    refused(runner, path, "rank 9", name, "max_rank (8)", max_rank=8)


def test_rank_of_config_and_tensors(runner: AdaptedRunner, path: Path) -> None:
    """peft could not load it; and with the wrong rank the scale would be wrong."""
    edit_config(path, r=4)
    refused(runner, path, "model.layers.2.self_attn.q_proj", "have rank 2", "it is 4")
    edit_config(path, rank_pattern={"q_proj": 2})
    runner.read(path)
    edit_config(path, rank_pattern={"q_proj": 3})
    refused(runner, path, "have rank 2", "it is 3")


CASES: dict[str, tuple[Callable[[Tensors], Any], tuple[str, ...]]] = {
    "A without B": (drop(f"{Q}.lora_B.weight"), (f"{Q}.lora_A.weight", "lora_B of the module is missing")),
    "B without A": (drop(f"{Q}.lora_A.weight"), ("lora_A of the module is missing",)),
    "wrong hidden size": (put(f"{Q}.lora_A.weight", 2, 33), ("[2, 33]", "[2, 32]", f"{Q}.lora_A.weight")),
    "wrong outputs": (put(f"{Q}.lora_B.weight", 31, 2), ("[31, 2]", "[32, 2]")),
    "ranks differ": (put(f"{Q}.lora_B.weight", 32, 3), ("[32, 3]", "[32, 2]")),
    "rank 0": (
        lambda t: {k: x[:0] if "lora_A" in k else x[:, :0] for k, x in t.items()},
        ("model.layers.2.self_attn.q_proj have rank 0",),
    ),
    "int8": (put(f"{Q}.lora_A.weight", 2, 32, dtype=torch.int8), ("I8", f"{Q}.lora_A.weight")),
    "no tensors": (lambda tensors: tensors.clear(), ("no low-rank tensors",)),
    "same module twice": (
        lambda t: t.update({k.removeprefix("base_model.model."): x.clone() for k, x in t.items()}),
        ("the same as",),
    ),
    "l041 another prefix": (
        lambda t: {k.replace("model.layers", "language_model.layers"): x for k, x in t.items()},
        ("language_model.layers.2.self_attn.q_proj.lora_A.weight", "no such module"),
    ),
    "l041 one typo": (
        lambda t: t.update({f"{M}.layers.2.self_attn.o_porj.lora_A.weight": torch.ones(2, 32)}),
        ("o_porj", "no such module"),
    ),
    "layer that is none": (put(f"{M}.layers.9.mamba.in_proj.lora_A.weight", 2, 32), ("layers.9", "no such")),
    "adapter name in the key": (
        lambda t: {k.replace(".weight", ".default.weight"): x for k, x in t.items()},
        ("lora_A.default.weight", "not a tensor of LoRA"),
    ),
    "l043 conv1d": (
        lambda t: t.update(
            {
                f"{M}.layers.0.mamba.conv1d.lora_A.weight": torch.ones(64, 64, 4),
                f"{M}.layers.0.mamba.conv1d.lora_B.weight": torch.ones(64, 1, 1),
            }
        ),
        ("conv1d", "convolutions"),
    ),
    "A_log": (
        lambda t: t.update(
            {
                f"{M}.layers.0.mamba.lora_A.weight": torch.ones(64, 8),
                f"{M}.layers.0.mamba.lora_B.weight": torch.ones(64, 64),
            }
        ),
        ("mamba.lora_A.weight", "A_log"),
    ),
    "l047 modules_to_save": (
        put("base_model.model.lm_head.weight", 128, 32),
        ("lm_head.weight", "modules_to_save"),
    ),
    "norm": (put(f"{M}.final_layernorm.weight", 32), ("final_layernorm.weight", "modules_to_save")),
    "bias": (put(f"{M}.layers.0.mamba.conv1d.bias", 64), ("conv1d.bias", "bias: all")),
    "trainable tokens": (
        put(f"{M}.embed_tokens.token_adapter.trainable_tokens_delta", 2, 32),
        ("trainable_tokens_delta", "rows of the embedding"),
    ),
    "KaSA": (put(f"{Q}.lora_diag", 2), ("lora_diag", "not a tensor of LoRA")),
    "copy of another size": (
        put("base_model.model.lm_head.base_layer.weight", 136, 32),
        ("[136, 32]", "[128, 32]"),
    ),
    "copy of another model": (
        put("base_model.model.lm_head.base_layer.weight", 128, 32),
        ("lm_head.base_layer.weight", "not this model's weight"),
    ),
    "l047 resized vocabulary": (
        lambda t: t.update(
            {
                f"{M}.embed_tokens.lora_embedding_A": torch.ones(2, 136),
                f"{M}.embed_tokens.lora_embedding_B": torch.ones(32, 2),
            }
        ),
        ("[2, 136]", "[2, 128]"),
    ),
    "embedding as Linear": (
        lambda t: t.update(
            {
                f"{M}.embed_tokens.lora_A.weight": torch.ones(2, 128),
                f"{M}.embed_tokens.lora_B.weight": torch.ones(32, 2),
            }
        ),
        ("model.embed_tokens is an embedding",),
    ),
    "magnitude without DoRA": (put(f"{Q}.lora_magnitude_vector", 32), ("use_dora is false", "has a")),
    "bias of B without lora_bias": (put(f"{Q}.lora_B.bias", 32), ("lora_bias is false", "has a")),
    "experts of another number": (
        lambda t: t.update(
            {
                f"{M}.layers.1.feed_forward.experts.lora_A.weight": torch.ones(10, 64),
                f"{M}.layers.1.feed_forward.experts.lora_B.weight": torch.ones(32, 10),
            }
        ),
        ("[10, 64]", "4 experts"),
    ),
    "experts of another size": (
        lambda t: t.update(
            {
                f"{M}.layers.1.feed_forward.experts.lora_A.weight": torch.ones(8, 60),
                f"{M}.layers.1.feed_forward.experts.lora_B.weight": torch.ones(32, 8),
            }
        ),
        ("layers.1.feed_forward.experts", "intermediate size 64"),
    ),
    "experts in a layer without": (
        put(f"{M}.layers.0.feed_forward.experts.lora_A.weight", 8, 32),
        ("layers.0.feed_forward.experts", "no such module"),
    ),
    "a long key": (put(f"{'x' * 5000}.lora_A.weight", 2, 2), ("xxx...", "no such module")),
    "a long shape": (put(f"{Q}.lora_A.weight", *[1] * 60), ("[1, 1, 1, ", "1, ..., but")),
    "expert too many": (
        put(f"{M}.layers.1.feed_forward.experts.4.up_proj.lora_A.weight", 2, 32),
        ("experts.4.up_proj", "no such module"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_l056_tensors_that_do_not_fit(runner: AdaptedRunner, path: Path, case: str) -> None:
    change, words = CASES[case]

    def apply(tensors: Tensors) -> Tensors:
        changed = change(tensors)
        return tensors if changed is None else changed

    tensors = load_file(path / WEIGHTS)
    save_file(apply(tensors), path / WEIGHTS)
    refused(runner, path, WEIGHTS, *words)


def test_all_keys_of_one_kind_are_told_together(runner: AdaptedRunner, path: Path) -> None:
    names = [f"{M}.layers.{n}.mlp.up_proj.lora_{part}.weight" for n in range(100) for part in "AB"]
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(2, 2) for name in names}))
    refused(runner, path, "'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'", "and 195 more")


def test_adapter_of_another_family(kit: Kit, tmp_path: Path) -> None:
    llama = AdaptedRunner(Kit(tmp_path, "llama").base)
    refused(llama, kit.adapter("A"), "no such module")


@pytest.mark.parametrize("role", ["A", "B"])
@pytest.mark.parametrize("shape", [(2, 32, 1), (64,), (), (1, 1, 1)], ids=str)
def test_what_is_no_matrix_says_nothing_of_the_other(
    runner: AdaptedRunner, path: Path, role: str, shape: tuple[int, ...]
) -> None:
    key = f"{Q}.lora_{role}.weight"
    edit_tensors(path, put(key, *shape))
    refused(runner, path, key)
    expected = {"A": "[2, 32]", "B": "[32, 2]"}[role]
    assert unsupported(runner, path) == {key: f"{list(shape)}, but the base model makes it {expected}"}


def test_two_that_are_no_matrices(runner: AdaptedRunner, path: Path) -> None:
    for role in "AB":
        edit_tensors(path, put(f"{Q}.lora_{role}.weight", 64))
    assert unsupported(runner, path) == {
        f"{Q}.lora_A.weight": "[64], but the base model makes it [r, 32]",
        f"{Q}.lora_B.weight": "[64], but the base model makes it [32, r]",
    }


def unsupported(runner: AdaptedRunner, path: Path) -> Any:
    with pytest.raises(AdapterError) as caught:
        runner.read(path)
    return caught.value.report.unsupported


def test_l041_another_prefix_is_the_only_reason(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    """Also for the copies of base weights that peft puts beside embeddings."""
    path = kit.copy("A", tmp_path / "all")
    prefix = "base_model.model."
    edit_tensors(path, lambda tensors: {k.replace(prefix, f"{prefix}vlm."): x for k, x in tensors.items()})
    reasons = unsupported(runner, path)
    assert f"{prefix}vlm.lm_head.base_layer.weight" in reasons
    assert set(reasons.values()) == {"this model has no such module"}
    refused(runner, path, "no such module")


LARGE = {torch.float16: 1e6, torch.bfloat16: 3.4e38, torch.float32: 1e39}


@pytest.mark.parametrize("dtype", LARGE, ids=str)
@pytest.mark.parametrize("role", ["A", "B"])
def test_values_too_large_for_the_dtype(kit: Kit, path: Path, role: str, dtype: torch.dtype) -> None:
    key = f"{Q}.lora_{role}.weight"

    def enlarge(tensors: Tensors) -> None:
        tensors[key] = tensors[key].double()
        tensors[key][1, 1] = -LARGE[dtype]

    edit_tensors(path, enlarge)
    runner = AdaptedRunner(kit.base, dtype=dtype)
    refused(runner, path, WEIGHTS, key, f"{LARGE[dtype]:.4g}", f"too large for {dtype}")
    edit_tensors(path, lambda tensors: tensors.update({key: tensors[key] * 1e-3}))
    runner.install(1, path)


def test_a_bias_too_large_for_its_scale(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    kit.adapter("biased", AdapterSpec(3, 2, ("q_proj",), config={"lora_bias": True}))
    path = kit.copy("biased", tmp_path / "biased")
    edit_tensors(path, put(f"{Q}.lora_B.bias", 32, value=1e38))
    edit_config(path, lora_alpha=200)
    refused(runner, path, f"{Q}.lora_B.bias", "1e+38", "too large for torch.float32")


def test_dora_of_a_row_of_zeros(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    """peft would compute NaN. Only the base weights tell, so reading it does not."""
    name = "model.layers.1.mamba.out_proj"
    path = save_zero_row(kit.base, tmp_path / "zero", name, row=5)
    adapter = runner.read(path)
    assert adapter.needs_base
    arguments = (adapter, runner.modules, torch.float32, torch.device("cpu"), runner.tp)
    for action in (check_adapter, place_adapter):
        with pytest.raises(ValueError, match=rf"{path}: lora_magnitude_vector of {name}: .* row 5 .*norm 0"):
            action(*arguments)
    assert not runner.read(kit.adapter("A")).needs_base


def test_s004_a_pickle_beside_the_tensors_is_never_read(
    runner: AdaptedRunner, path: Path, tmp_path: Path
) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "marker"),)

    before = runner.read(path)
    for name in ("adapter_model.bin", "adapter_model.pt"):
        torch.save(Malicious(), path / name)
    adapter = runner.read(path)
    assert adapter.report.unused.keys() == {"adapter_model.bin", "adapter_model.pt"}
    assert all("never read" in reason for reason in adapter.report.unused.values())
    assert (adapter.identity, adapter.report.applied) == (before.identity, before.report.applied)
    (path / WEIGHTS).unlink()
    refused(runner, path, "adapter_model.bin", "can run code", "convert it to safetensors")
    assert not (tmp_path / "marker").exists()


# ---- limits and reports


def test_many_tensors_are_refused_and_time_is_left_to_others(path: Path) -> None:
    def header(count: int) -> str:
        entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        return "{" + ",".join(f'"{number:x}":{entry}' for number in range(count)) + "}"

    write_header(path, header(MAX_TENSORS + 1))
    with pytest.raises(ValueError, match=f"{MAX_TENSORS + 1} tensors, and the limit is {MAX_TENSORS}"):
        TensorFile(path / WEIGHTS)
    write_header(path, header(2000))
    pauses: list[int] = []
    with TensorFile(path / WEIGHTS, lambda: pauses.append(1)) as file:
        assert len(file.entries) == 2000
    assert len(pauses) > 2000 // 256


def test_the_names_of_the_largest_models_experts_fit(path: Path) -> None:
    entry = '{"dtype": "BF16", "shape": [16, 24576], "data_offsets": [1000000000, 1000000000]}'
    names = [
        f"base_model.model.model.layers.{layer}.feed_forward.experts.{expert}.{part}_proj.lora_{side}.weight"
        for layer in range(72)
        for expert in range(16 if layer % 2 else 1)
        for part in ("gate", "up", "down")
        for side in "AB"
    ]
    names += [
        f"{M}.layers.{layer}.mamba.{part}_proj.lora_A.weight" for layer in range(72) for part in range(10)
    ]
    assert sum(len(f'"{name}": {entry}, ') for name in names) < MAX_HEADER_BYTES * 0.6
    assert len(names) < MAX_TENSORS / 2


def test_a_report_of_what_is_unsupported_comes_with_the_error(runner: AdaptedRunner, path: Path) -> None:
    edit_tensors(path, put("base_model.model.nobody.lora_A.weight", 2, 4))
    edit_tensors(path, put(f"{M}.layers.2.x.bias", 4))
    with pytest.raises(AdapterError, match="nobody") as caught:
        runner.read(path)
    report = caught.value.report
    assert report.unsupported == {
        "base_model.model.nobody.lora_A.weight": "this model has no such module",
        f"{M}.layers.2.x.bias": "trained biases of the base model (bias: all, lora_only) are not supported",
    }
    assert (report.applied, report.unused) == ({}, {})
