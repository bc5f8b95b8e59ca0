"""What is read of an adapter: scales as peft has them, both generations of names, identity, report."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.harness.adapters import (
    EXPERTS,
    ROUTER,
    AdaptedRunner,
    AdapterSpec,
    Kit,
    edit_config,
    edit_tensors,
)
from tests.harness.models import random_ids
from tools import make_transformers4_adapter as old

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.lora.adapter import Adapter

TOLERANCE = 1e-4
IDS = random_ids(0, 16, 128)
P = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def runner(kit: Kit) -> AdaptedRunner:
    return AdaptedRunner(kit.base)


def effective(adapter: Adapter) -> dict[str, torch.Tensor]:
    """What is added to each module's weight."""
    return {name: delta.scale * (delta.B.float() @ delta.A.float()) for name, delta in adapter.deltas.items()}


def peft_scaling(kit: Kit, path: Path) -> dict[str, float]:
    """Scale by module, as peft itself computes it. Stacked experts by the name of the stacked tensor."""
    import peft
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(kit.base), path)
    scaling = {}
    for name, module in model.named_modules():
        if hasattr(module, "scaling") and hasattr(module, "lora_A"):
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            parameter = getattr(module, "parameter_name", None)
            scaling[f"{plain}.{parameter}" if parameter else plain] = module.scaling["default"]
    return scaling


# ---- scale


def test_l035_rslora(kit: Kit, runner: AdaptedRunner) -> None:
    plain = kit.adapter("plain-16", AdapterSpec(1, 16, ("q_proj",), alpha=16))
    rank_stabilized = kit.adapter("rs-16", AdapterSpec(1, 16, ("q_proj",), (), 16, {"use_rslora": True}))
    before, after = effective(runner.read(plain)), effective(runner.read(rank_stabilized))
    for name, delta in after.items():
        assert torch.allclose(delta, 4 * before[name])


@pytest.mark.parametrize("rslora", [False, True])
def test_l036_patterns_as_peft_applies_them(kit: Kit, runner: AdaptedRunner, rslora: bool) -> None:
    config = {
        "use_rslora": rslora,
        "rank_pattern": {
            "experts.gate_up_proj": 6,
            r"layers\.3\..*\.down_proj": 5,
            "^model.layers.0.mamba.in_proj": 3,
        },
        "alpha_pattern": {
            "router.weight": 24,
            "down_proj": 3,
            r"layers\.(1|3)\.feed_forward\.experts\.gate_up_proj": 12,
            "embed_tokens": 5.5,
            "experts.gate_up_proj": 1000,
        },
    }
    name = f"patterns-{rslora}"
    path = kit.adapter(
        name,
        AdapterSpec(2, 4, ("in_proj", "q_proj", "down_proj", "embed_tokens"), (*EXPERTS, *ROUTER), 8, config),
    )
    want = peft_scaling(kit, path)
    adapter = runner.read(path)
    got: dict[str, set[float]] = {}
    for module, delta in adapter.deltas.items():
        layer, stacked, part = module.partition(".experts.")
        part = "down_proj" if part.endswith("down_proj") else "gate_up_proj"
        got.setdefault(f"{layer}.experts.{part}" if stacked else module, set()).add(delta.scale)
    assert got == {name.removesuffix(".weight"): {scale} for name, scale in want.items()}
    assert adapter.deltas["model.layers.3.feed_forward.experts.2.up_proj"].rank == 6
    assert adapter.max_rank == 6


def test_l038_equal_scales_whatever_else_is_loaded(kit: Kit, runner: AdaptedRunner) -> None:
    path = kit.adapter(
        "rank-3", AdapterSpec(3, 3, ("q_proj", "in_proj", "embed_tokens", "down_proj"), EXPERTS)
    )
    for _ in range(2):
        assert {delta.scale for delta in runner.read(path).deltas.values()} == {8 / 3}
        runner.read(kit.adapter("A"))


# ---- keys


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_l041_with_and_without_the_prefix(
    kit: Kit, runner: AdaptedRunner, prefix: str, tmp_path: Path
) -> None:
    path = kit.copy("A", tmp_path / "adapter")
    edit_tensors(
        path, lambda tensors: {prefix + k.removeprefix("base_model.model."): t for k, t in tensors.items()}
    )
    adapter = runner.read(path)
    assert adapter.deltas.keys() == runner.modules.keys(), "A changes every module that the model offers"
    assert adapter.identity == runner.read(kit.adapter("A")).identity


def test_l042_targets_that_the_file_lacks(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    path = kit.copy("B", tmp_path / "adapter")
    edit_config(
        path, target_modules=["gate_proj", "q_proj"], layers_to_transform=[2], layers_pattern="layers"
    )
    assert runner.read(path).identity == runner.read(kit.adapter("B")).identity


@pytest.mark.parametrize(
    "names", [("gate_proj",), ("down_proj",), ("gate_proj", "up_proj", "down_proj")], ids="-".join
)
@pytest.mark.parametrize("experts", [(0, 2), (0, 1, 2, 3)], ids=str)
def test_l040_experts_one_by_one(
    kit: Kit, runner: AdaptedRunner, names: tuple[str, ...], experts: tuple[int, ...], tmp_path: Path
) -> None:
    """Names of transformers 4, made from those of 5: gate and up with an A of their own."""
    adapter = runner.read(kit.adapter("E"))
    path = kit.copy("E", tmp_path / "adapter")
    keys = {}
    for name, delta in adapter.deltas.items():
        expert, _, part = name.rpartition(".experts.")[2].partition(".")
        if int(expert) in experts and part in names:
            keys[f"base_model.model.{name}.lora_A.weight"] = delta.A
            keys[f"base_model.model.{name}.lora_B.weight"] = delta.B
    edit_tensors(path, lambda _: keys)
    edit_config(path, target_parameters=None)
    one_by_one = runner.read(path)
    assert len(one_by_one.deltas) == 2 * len(experts) * len(names)
    want = effective(adapter)
    for name, delta in effective(one_by_one).items():
        assert torch.equal(delta, want[name])
    layers = {name.split(".")[2] for name in one_by_one.report.applied}
    assert layers == {"1", "3"}
    runner.install(1, path)
    assert (runner.logits(IDS, 1) - runner.logits(IDS)).abs().mean() > 0.01
    if len(names) == 3 and len(experts) == 4:
        assert (runner.logits(IDS, 1) - kit.logits("E", IDS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("intermediate_size", [64, 32, 16])
@pytest.mark.parametrize("version", ["0.18.1", "0.19.0.dev0"])
def test_stacked_experts_of_peft_before_0_19_1(intermediate_size: int, version: str, tmp_path: Path) -> None:
    """It took the first axis of an expert's weight for the inputs. With intermediate sizes of 1 and 1/2 of
    the hidden size the shapes alone do not tell; checked once against peft 0.18.0 itself."""
    kit = Kit(tmp_path, intermediate_size=intermediate_size)
    runner = AdaptedRunner(kit.base)
    upright, path = kit.adapter("E"), kit.copy("E", tmp_path / "adapter")

    def turn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        turned = {}
        for key, tensor in tensors.items():
            if "lora_A" in key:
                B = tensors[key.replace("lora_A", "lora_B")]
                rows = B.view(B.shape[0], -1, 4).permute(2, 1, 0)  # [expert, rank, out]
                turned[key] = rows.reshape(-1, B.shape[0])
                turned[key.replace("lora_A", "lora_B")] = (
                    tensor.view(4, -1, tensor.shape[1]).permute(2, 1, 0).reshape(tensor.shape[1], -1)
                )
        return turned

    edit_tensors(path, turn)
    edit_config(path, peft_version=version)
    want, got = effective(runner.read(upright)), effective(runner.read(path))
    assert got.keys() == want.keys()
    assert all(torch.allclose(got[name], want[name]) for name in want)
    edit_config(path, peft_version=None)
    if intermediate_size == 64:
        assert effective(runner.read(path)).keys() == want.keys()
    else:
        with pytest.raises(ValueError, match="depends on the version of peft"):
            runner.read(path)


def test_l047_harmless_extras(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    """Copies of the base model's embeddings, and files of a tokenizer."""
    path = kit.copy("A", tmp_path / "adapter")
    (path / "added_tokens.json").write_text('{"<extra>": 127}')
    (path / "tokenizer_config.json").write_text("not even JSON")
    (path / "checkpoint-10").mkdir()
    adapter = runner.read(path)
    assert adapter.report.unused == {
        "base_model.model.lm_head.base_layer.weight": "a copy of the base model's weight",
        "base_model.model.model.embed_tokens.base_layer.weight": "a copy of the base model's weight",
    }


# ---- what was read


def test_report_and_bytes(kit: Kit, runner: AdaptedRunner) -> None:
    for name in ("A", "B", "E", "dora"):
        adapter = runner.read(kit.adapter(name))
        tensors = load_file(kit.root / name / "adapter_model.safetensors")
        total = sum(t.nbytes for key, t in tensors.items() if key not in adapter.report.unused)
        assert adapter.num_bytes == adapter.report.num_bytes == total
        assert adapter.report.applied.keys() == adapter.deltas.keys()
        assert all(num_bytes > 0 for num_bytes in adapter.report.applied.values())


def test_l064_costs_its_true_rank(kit: Kit, runner: AdaptedRunner) -> None:
    path = kit.adapter("B")
    few, many = runner.read(path, max_rank=4), runner.read(path, max_rank=64)
    assert few.num_bytes == many.num_bytes == 4 * 2 * (32 + 32)


def test_l034_gate_and_up_are_not_confused(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    path = kit.copy("A", tmp_path / "adapter")
    values = {
        "gate_proj.lora_A": 0.25,
        "gate_proj.lora_B": 0.5,
        "up_proj.lora_A": 0.75,
        "up_proj.lora_B": 1.0,
    }

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            for end, value in values.items():
                if f"{end}.weight" in key:
                    tensor.fill_(value)

    edit_tensors(path, fill)
    runner.install(2, path)
    gate, up = runner.modules["model.layers.0.feed_forward.gate_proj"].table.pairs(2)
    assert (gate.start, up.start) == (0, 64)
    for tensor, value in zip((gate.A, gate.B, up.A, up.B), values.values(), strict=True):
        assert torch.equal(tensor, torch.full_like(tensor, value))


# ---- identity


def test_identity_is_that_of_the_content(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    original = runner.read(kit.adapter("alora"))
    path = kit.copy("alora", tmp_path / "elsewhere")
    assert runner.read(path).identity == original.identity, "another path"
    tensors = load_file(path / "adapter_model.safetensors")
    header = dict(reversed(tensors.items()))
    (path / "adapter_model.safetensors").write_bytes(save(header, {"made": "later"}))
    edit_config(path, base_model_name_or_path="/somewhere/else", r=4, revision=None, task_type=None)
    assert runner.read(path).identity == original.identity, "what does not change the result"


@pytest.mark.parametrize("field", [{"lora_alpha": 9}, {"use_rslora": True}, {"alora_invocation_tokens": [7]}])
def test_identity_sees_fields(
    kit: Kit, runner: AdaptedRunner, field: dict[str, object], tmp_path: Path
) -> None:
    path = kit.copy("alora", tmp_path / "adapter")
    edit_config(path, **field)
    assert runner.read(path).identity != runner.read(kit.adapter("alora")).identity


def test_identity_sees_every_tensor(kit: Kit, runner: AdaptedRunner, tmp_path: Path) -> None:
    identities = {runner.read(kit.adapter("dora")).identity}
    keys = [key for key in load_file(kit.root / "dora" / "adapter_model.safetensors") if "layers.2" in key]
    for number, key in enumerate([*keys, "base_model.model.lm_head.lora_A.weight"]):
        path = kit.copy("dora", tmp_path / str(number))

        def nudge(tensors: dict[str, torch.Tensor], key: str = key) -> None:
            flat = tensors[key].view(-1).view(torch.int32)
            flat[-1] ^= 1  # the last bit of the last number

        edit_tensors(path, nudge)
        identities.add(runner.read(path).identity)
    assert len(identities) == 2 + len(keys)


# ---- transformers 4


@pytest.fixture(scope="module")
def old_runner(tmp_path_factory: pytest.TempPathFactory) -> AdaptedRunner:
    """The base model of tests/data/transformers4."""
    import transformers

    base = tmp_path_factory.mktemp("transformers4")
    transformers.JambaForCausalLM(transformers.JambaConfig(**old.CONFIG)).save_pretrained(base)
    file = base / "model.safetensors"
    names = {name: tensor.shape for name, tensor in load_file(file).items()}
    save_file({name: torch.from_numpy(old.base_tensor(name, shape)) for name, shape in names.items()}, file)
    return AdaptedRunner(base)


@pytest.mark.parametrize("name", old.ADAPTERS)
def test_l044_adapters_of_transformers_4(
    old_runner: AdaptedRunner, name: str, request: pytest.FixtureRequest
) -> None:
    data = request.config.rootpath / "tests/data/transformers4"
    want = load_file(data / "logits.safetensors")[name]
    old_runner.install(1, data / name)
    for chunk in (None, 5):
        got = old_runner.logits(old.IDS, 1, chunk=chunk)
        assert (got - want).abs().max() <= TOLERANCE
    assert (want - old_runner.logits(old.IDS)).abs().mean() > 0.05


def test_l044_subset_patterns_and_scales(old_runner: AdaptedRunner, request: pytest.FixtureRequest) -> None:
    adapter = old_runner.read(request.config.rootpath / "tests/data/transformers4/some-experts")
    scales = {name.partition(".experts.")[2]: (d.rank, d.scale) for name, d in adapter.deltas.items()}
    assert scales["0.gate_proj"] == (2, 6 / math.sqrt(2))
    assert scales["0.down_proj"] == (2, 3 / math.sqrt(2))
    assert scales["2.up_proj"] == (3, 6 / math.sqrt(3))
    assert len(scales) == 6
