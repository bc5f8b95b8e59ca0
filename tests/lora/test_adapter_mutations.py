"""A check that was never seen red proves nothing: with its fault injected, each must fail."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.distributed.tp import TPGroup
from hybridserve.layers.lora import OutputPart
from hybridserve.lora import adapter, layers, peft_config
from hybridserve.lora.adapter import ModuleDelta
from tests.harness import adapters
from tests.harness.adapters import AdaptedRunner, AdapterSpec, Kit
from tests.harness.models import random_ids
from tests.harness.tp import ThreadTPGroup, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    Check = Callable[[Kit], None]
    Fault = Callable[[pytest.MonkeyPatch], None]

TOLERANCE = 1e-4
IDS = random_ids(2, 20, 128)


def equals_oracle(name: str) -> Check:
    def check(kit: Kit) -> None:
        kit.adapter(name, SPECS.get(name))
        runner = AdaptedRunner(kit.base)
        runner.install(1, kit.root / name)
        assert (runner.logits(IDS, 1) - kit.logits(name, IDS)).abs().max() <= TOLERANCE

    return check


def equals_oracle_on(size: int, name: str) -> Check:
    def check(kit: Kit) -> None:
        kit.adapter(name, SPECS.get(name))
        want = kit.logits(name, IDS)

        def rank(tp: TPGroup) -> torch.Tensor:
            runner = AdaptedRunner(kit.base, tp=tp)
            runner.install(1, kit.root / name)
            return runner.logits(IDS, 1)

        assert (run_ranks(size, rank)[0] - want).abs().max() <= TOLERANCE  # rank 0 has all of them

    return check


def leaves_no_trace(kit: Kit) -> None:
    runner = AdaptedRunner(kit.base)
    for name in "BE":  # the second leaves alone what the first changed
        runner.install(1, kit.adapter(name))
    assert (runner.logits(IDS, 1) - kit.logits("E", IDS)).abs().max() <= TOLERANCE


SPECS = {
    "rslora-experts": AdapterSpec(
        51, 4, (), ("experts.down_proj",), config={"use_rslora": True, "alpha_pattern": {"down_proj": 20}}
    )
}


def around_split(change: Callable[[str, ModuleDelta], tuple[str, ModuleDelta]]) -> Fault:
    """Let `change` spoil what each module gets."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        plain = adapter._split

        def split(*args: Any) -> Iterator[tuple[str, ModuleDelta]]:
            for name, delta in plain(*args):
                yield change(name, delta)

        patch.setattr(adapter, "_split", split)

    return inject


def changed_module(change: Callable[[Any], dict[str, Any]]) -> Fault:
    """Let `change` spoil what placing is told of each module."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        plain = layers._plan

        def plan(found: Any, modules: Any, *args: Any) -> Any:
            spoiled = {name: replace(module, **change(module)) for name, module in modules.items()}
            return plain(found, spoiled, *args)

        patch.setattr(layers, "_plan", plan)

    return inject


def swap_gate_and_up(name: str, delta: ModuleDelta) -> tuple[str, ModuleDelta]:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    module, dot, part = name.rpartition(".")
    return f"{module}{dot}{other.get(part, part)}", delta


def without_dora(name: str, delta: ModuleDelta) -> tuple[str, ModuleDelta]:
    return name, ModuleDelta(delta.A, delta.B, delta.scale)


def experts_are_slow_in_B(patch: pytest.MonkeyPatch) -> None:
    plain = adapter._split

    def split(tensors: Any, loaded: Any, scale: float) -> Any:
        if tensors.stack is not None:
            B = loaded["B"]
            turned = B.view(len(B), tensors.stack.num_experts, -1).transpose(1, 2).reshape(B.shape)
            loaded = {**loaded, "B": turned}
        return plain(tensors, loaded, scale)

    patch.setattr(adapter, "_split", split)


def rslora_is_ignored(patch: pytest.MonkeyPatch) -> None:
    plain = peft_config.Scaling.__init__

    def init(self: Any, config: Any) -> None:
        plain(self, config.model_copy(update={"use_rslora": False}))

    patch.setattr(peft_config.Scaling, "__init__", init)


def alpha_patterns_are_ignored(patch: pytest.MonkeyPatch) -> None:
    plain = peft_config.Scaling.__init__

    def init(self: Any, config: Any) -> None:
        plain(self, config.model_copy(update={"alpha_pattern": {}}))

    patch.setattr(peft_config.Scaling, "__init__", init)


def one_block(module: Any) -> dict[str, Any]:
    """in_proj cut as if it were not two halves."""
    if len(module.outputs) == 1:
        return {}
    local = sum(part.source.stop - part.source.start for part in module.outputs)
    first = module.outputs[0].source.start * 2
    return {"outputs": (OutputPart(slice(first, first + local), 0),)}


def shared_heads_are_cut(module: Any) -> dict[str, Any]:
    """The rows of a KV head that ranks share taken from the rank's place among all rows."""
    if not module.name.endswith(("k_proj", "v_proj")):
        return {}
    part = module.outputs[0]
    start = part.source.start // 2
    return {"outputs": (OutputPart(slice(start, start + 8), part.start),)}


def inputs_are_those_of_the_first_rank(module: Any) -> dict[str, Any]:
    return {"inputs": slice(0, module.inputs.stop - module.inputs.start)}


def norms_are_of_a_rank_alone(patch: pytest.MonkeyPatch) -> None:
    plain = layers._dora_factors

    def factors(found: Any, modules: Any, device: Any, tp: ThreadTPGroup) -> Any:
        return plain(found, modules, device, TPGroup.single())

    patch.setattr(layers, "_dora_factors", factors)


def slots_are_not_cleared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapters, "remove", lambda slot, tables: None)


FAULTS: dict[str, tuple[Fault, Check]] = {
    "l034_gate_and_up_swapped": (around_split(swap_gate_and_up), equals_oracle("A")),
    "l040_experts_slow_in_b": (experts_are_slow_in_B, equals_oracle("E")),
    "l035_rslora_ignored": (rslora_is_ignored, equals_oracle("D")),
    "l036_rslora_ignored_in_experts": (rslora_is_ignored, equals_oracle("rslora-experts")),
    "l036_alpha_pattern_ignored_in_experts": (alpha_patterns_are_ignored, equals_oracle("rslora-experts")),
    "dora_ignored": (around_split(without_dora), equals_oracle("dora")),
    "l025_in_proj_is_one_block": (changed_module(one_block), equals_oracle_on(2, "C")),
    "l029_shared_kv_heads_are_cut": (changed_module(shared_heads_are_cut), equals_oracle_on(4, "D")),
    "inputs_of_the_first_rank": (
        changed_module(inputs_are_those_of_the_first_rank),
        equals_oracle_on(2, "C"),
    ),
    "dora_norms_of_one_rank": (norms_are_of_a_rank_alone, equals_oracle_on(2, "dora")),
    "l004_slots_are_not_cleared": (slots_are_not_cleared, leaves_no_trace),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_sees_its_fault(name: str, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, check = FAULTS[name]
    check(kit)
    inject(monkeypatch)
    with pytest.raises(AssertionError):
        check(kit)
