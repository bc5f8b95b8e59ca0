"""W8A8 models whole, against transformers with rounded inputs: logits and states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from hybridserve.kernels.gemm import native as gemm_native
from hybridserve.kernels.gemm import reference as gemm_reference
from hybridserve.kernels.moe import native as moe_native
from tests.harness.adapters import backends_named
from tests.harness.models import Backends, oracle, random_ids, save_model
from tests.harness.quantized import QuantizedModel, dequantized_copy, everything
from tests.harness.w8a8 import Watched, absmax_127, absmax_255, w8a8_oracle
from tests.mutations import W8A8_MUTATIONS

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.harness.w8a8 import Rule

    Answer = tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]

TOLERANCE = 1e-4
PROMPTS = [random_ids(seed, 6) for seed in range(6)]
BACKENDS = ("reference", "native", "native_exact", "torch_native")


@dataclass
class Model:
    """A model, and what transformers makes of each prompt whose roundings are all beyond doubt."""

    path: Path
    plain: Path
    quantized: list[str]
    answers: dict[str, list[tuple[list[int], Answer]]] = field(default_factory=dict)

    def expected(self, rule: Rule) -> list[tuple[list[int], Answer]]:
        if rule.__name__ not in self.answers:
            watched = Watched(rule)
            model = w8a8_oracle(self.plain, self.quantized, watched)
            answers = []
            for ids in PROMPTS:
                watched.forget()
                answer = oracle(model, ids)
                assert watched.num_rounded
                if not watched.was_near_an_edge:
                    answers.append((ids, answer))
            self.answers[rule.__name__] = answers
        return self.answers[rule.__name__]


def made(path: Path, family: str) -> Model:
    save_model(family, path / "model", 0, num_hidden_layers=4)
    model = QuantizedModel(path / "model", everything("int8-w8a8"))
    quantized = [name for name, format_name in model.formats.items() if format_name != "none"]
    return Model(path / "model", dequantized_copy(model, path / "model", path / "plain"), quantized)


@pytest.fixture(scope="module")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With experts, a dense MLP, attention and Mamba."""
    return made(tmp_path_factory.mktemp("jamba"), "jamba")


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(tmp_path_factory.mktemp("bamba"), "bamba")


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(tmp_path_factory.mktemp("mamba"), "mamba")


def backends_of(name: str) -> Backends:
    """Of every operator that has one of this name; exact ones are gemm's and moe's."""
    if name != "native_exact":
        return backends_named(name)[0]
    return replace(backends_named("native")[0], gemm=gemm_native.NativeExact(), moe=moe_native.NativeExact())


def check(model: Model, backends: Backends, rule: Rule = absmax_127) -> None:
    """At every position, whole and token by token."""
    expected = model.expected(rule)
    assert len(expected) >= 2, "too few prompts to tell"
    runner = QuantizedModel(model.path, everything("int8-w8a8"), backends).runner
    for ids, (logits, states) in expected:
        for chunk in (None, 1):
            runner.sequences[0].num_computed = 0
            assert (runner.run(ids, chunk) - logits).abs().max() <= TOLERANCE
            for ours, theirs in zip(runner.states(), states, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert (one - other).abs().max() <= TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_jamba(jamba: Model, backend: str) -> None:
    check(jamba, backends_of(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mamba(mamba: Model, backend: str) -> None:
    check(mamba, backends_of(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bamba(bamba: Model, backend: str) -> None:
    check(bamba, backends_of(backend))


@pytest.mark.parametrize("name", W8A8_MUTATIONS)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_it_sees_products_that_round_nothing(
    jamba: Model, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jamba.expected(absmax_127)
    W8A8_MUTATIONS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check(jamba, backends_of(backend))


def test_compressed_tensors_rule_is_another(mamba: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that differs from what compressed-tensors computes is the rule: with its rule in place of ours,
    results are its."""
    with pytest.raises(AssertionError):
        check(mamba, Backends(), absmax_255)

    def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.float().abs().amax(-1, keepdim=True) * 2 / 255
        return (x / scales).round_().clamp_(-128, 127), scales

    monkeypatch.setattr(gemm_reference, "round_rows", round_rows)
    check(mamba, Backends(), absmax_255)
