"""Jamba-Large's and -Mini's checkpoints as they are published, mapped and cut for one rank of eight; and a
narrow model of 72 layers that eight ranks really load."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hybridserve.cli import main
from hybridserve.distributed.tp import TPGroup
from hybridserve.engine import arena_plan
from hybridserve.engine.planner import bare_context
from hybridserve.models.mapping import mapping, numbers_text
from hybridserve.models.registry import build_model
from hybridserve.models.shapes import load_shape
from hybridserve.models.weights import check_weights
from hybridserve.quant.policy import Quantization
from tests.harness.models import load_runner, oracle, random_ids, save_model
from tests.harness.published import disk_bytes, jamba_tensors, write_outline
from tests.harness.tp import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hybridserve.layers.context import BuildContext
    from hybridserve.models.base import CausalLM
    from tests.harness.published import Tensors

INT8 = Quantization("int8", ("all",))
QUERY = "model.layers.4.self_attn.q_proj.weight"
GATE = "model.layers.71.feed_forward.experts.15.gate_proj.weight"


def build(shape: str, quantization: Quantization, rank: int, size: int = 8) -> tuple[CausalLM, BuildContext]:
    context = replace(bare_context("bfloat16", quantization), tp=TPGroup(rank, size))
    return build_model(load_shape(shape), context), context


def publish(path: Path, shape: str, tensors: Tensors) -> None:
    write_outline(path, load_shape(shape), tensors)


@pytest.mark.parametrize("quantization", [Quantization(), INT8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize(("shape", "gigabytes"), [("jamba-large", 797), ("jamba-mini", 103)])
def test_every_tensor_lands_once(
    shape: str, gigabytes: int, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = jamba_tensors(load_shape(shape))
    publish(tmp_path, shape, tensors)
    apparent = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert apparent == pytest.approx(gigabytes * 1e9, rel=5e-3)
    assert disk_bytes(tmp_path) < 4 * 2**20
    model, _ = build(shape, quantization, rank=3)
    landed: Counter[str] = Counter()
    for name, expected in model.weights.tensors.items():

        def spy(tensor: torch.Tensor, name=name, load=expected.load) -> None:
            landed[name] += 1
            load(tensor)

        model.weights.tensors[name] = expected._replace(load=spy)
    check_weights(model, tmp_path)
    assert landed == Counter(dict.fromkeys(tensors, 1))


def test_the_first_and_the_last_rank_are_cut_alike(tmp_path: Path) -> None:
    publish(tmp_path, "jamba-large", jamba_tensors(load_shape("jamba-large")))
    for rank in (0, 7):
        check_weights(build("jamba-large", Quantization(), rank)[0], tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE), rf"the tensor '{GATE}' \[24576, 8192\] is missing"),
        (
            lambda t: t.update({GATE: ("BF16", (24576, 4096))}),
            rf"'{GATE}' is \[24576, 4096\], but the model's",
        ),
        (lambda t: t.update({GATE: ("I64", (24576, 8192))}), rf"'{GATE}' is I64: not supported"),
        (
            lambda t: t.update({"model.layers.72.input_layernorm.weight": ("BF16", (8192,))}),
            "'model.layers.72.input_layernorm.weight' belongs nowhere in this model",
        ),
        (
            lambda t: t.update(
                {"model.layers.4.self_attn.q_proj.weight": t.pop("model.layers.4.self_attn.v_proj.weight")}
            ),
            r"'model.layers.4.self_attn.q_proj.weight' is \[1024, 8192\]",
        ),
    ],
    ids=["missing", "shape", "dtype", "one more", "another's"],
)
def test_what_does_not_land_is_named(change, message: str, tmp_path: Path) -> None:
    tensors = jamba_tensors(load_shape("jamba-large"))
    change(tensors)
    publish(tmp_path, "jamba-large", tensors)
    model, _ = build("jamba-large", INT8, rank=5)
    with pytest.raises(ValueError, match=message):
        check_weights(model, tmp_path)


def test_a_cut_that_does_not_fit_its_place_is_named(tmp_path: Path) -> None:
    """Names and shapes agree, and yet this rank's weights have no room for its share."""
    publish(tmp_path, "jamba-mini", jamba_tensors(load_shape("jamba-mini")))
    model, _ = build("jamba-mini", Quantization(), rank=1)
    other, _ = build("jamba-mini", Quantization(), rank=1, size=4)
    name = "model.layers.3.mamba.out_proj.weight"
    sound, broken = model.weights.tensors[name], other.weights.tensors[name]
    weights = sound.load.func.__self__.weights  # the projection that loads it
    weights["weight"] = broken.load.func.__self__.weights["weight"]
    with pytest.raises((ValueError, RuntimeError), match="size"):
        check_weights(model, tmp_path)


def test_the_mapping_is_a_page(tmp_path: Path) -> None:
    publish(tmp_path, "jamba-large", jamba_tensors(load_shape("jamba-large")))
    model, context = build("jamba-large", INT8, rank=0)
    rows = dict(mapping(check_weights(model, tmp_path), context.formats))
    assert len(rows) < 40
    experts = "model.layers.{1,3..71}.feed_forward.experts.{0-15}.gate_proj.weight"
    assert rows[experts] == "576 x [24576, 8192] BF16 -> int8"
    mixers = "model.layers.{0-71 without 4,12..68}.mamba.x_proj.weight"
    assert rows[mixers] == "63 x [544, 16384] BF16"
    assert rows["model.layers.{4,12..68}.self_attn.k_proj.weight"] == "9 x [1024, 8192] BF16 -> int8"
    assert rows["lm_head.weight"] == "[65536, 8192] BF16"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([5], "5"),
        ([0, 5], "{0,5}"),
        (range(8), "{0-7}"),
        ([0, 1, 3, 4], "{0,1,3,4}"),
        (range(1, 9, 2), "{1,3..7}"),
        ([i for i in range(32) if i % 8 != 4], "{0-31 without 4,12..28}"),
        ([i for i in range(23) if i not in (4, 5, 21)], "{0-22 without 4,5,21}"),
    ],
)
def test_numbers(numbers, text: str) -> None:
    assert numbers_text(numbers) == text


@pytest.mark.slow
def test_72_narrow_layers_are_loaded_by_eight_ranks(tmp_path: Path) -> None:
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    large = load_shape("jamba-large")
    periods = {name: large[name] for name in large if name.endswith(("_period", "_offset", "per_tok"))}
    layers = {"num_hidden_layers": 72, "num_experts": 16, "mamba_dt_rank": 8, "vocab_size": 509}
    want, _ = oracle(save_model("jamba", tmp_path, 0, **narrow, **periods, **layers), random_ids(0, 6, 509))

    def rank(tp: TPGroup) -> torch.Tensor | None:
        return load_runner(tmp_path, tp=tp).run(random_ids(0, 6, 509))

    got = run_ranks(8, rank)[0]
    scale = want.abs().max()
    assert (got - want).abs().max() <= 1e-4 * scale


def test_inspect_shows_it_on_a_machine_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_plan, "available_memory", lambda: 8 << 30)
    tensors = jamba_tensors(load_shape("jamba-mini"))
    publish(tmp_path, "jamba-mini", tensors)
    with pytest.raises(SystemExit) as status:
        main(["inspect", str(tmp_path)])
    shown = capsys.readouterr()
    assert f"{len(tensors):,} tensors, 96.1 GiB; each has its place" in shown.out
    assert "model.layers.{1,3..31}.feed_forward.experts.{0-15}.up_proj.weight" in shown.out
    assert status.value.code == 0, shown.err
    why = (
        "does not fit  model: 96.1 GiB of weights don't fit into the 8.0 GiB of memory that this machine has"
    )
    assert why in shown.out


def test_shards_without_an_index_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, "jamba-mini", jamba_tensors(load_shape("jamba-mini")))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(SystemExit) as status:
        main(["inspect", str(tmp_path)])
    shown = capsys.readouterr()
    assert status.value.code == 2
    (line,) = shown.err.splitlines()
    assert "model.safetensors.index.json is missing beside model-00001-of-" in line


def test_inspect_says_that_there_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_shape("jamba-3b")))
    with pytest.raises(SystemExit) as status:
        main(["inspect", str(tmp_path)])
    assert status.value.code == 0
    assert "checkpoint  config.json alone" in capsys.readouterr().out
