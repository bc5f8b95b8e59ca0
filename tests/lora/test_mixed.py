"""Steps in which several adapters and the base model meet: each row is what it would be alone.

With the kernels of every kind; the faults of the recipes, put into the code, must be seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve.core.request import SamplingParams
from hybridserve.engine import model_runner
from hybridserve.kernels import lora
from hybridserve.kernels.lora.interface import LoraTable
from tests.harness import models
from tests.harness.adapter_engine import AdapterEngine
from tests.harness.adapters import (
    ATTENTION,
    DENSE,
    ENDS,
    MAMBA,
    AdaptedRunner,
    AdapterSpec,
    Kit,
    backends_named,
)
from tests.harness.models import load_runner, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOLERANCE = 1e-4
NAMES = (None, "A", "B", "C", "E")
"""In the slots 0 to 4."""

LINEAR = (*ATTENTION, *MAMBA, *DENSE, *ENDS)
IDS = [random_ids(seed, 12, 128) for seed in range(5)]


@pytest.fixture(scope="module", params=[backend.name for backend in lora.BACKENDS])
def runner(kit: Kit, request: pytest.FixtureRequest) -> AdaptedRunner:
    made, kernel = backends_named(request.param)
    adapted = AdaptedRunner(kit.base, made, lora=kernel, num_slots=4)
    for slot, name in enumerate(NAMES):
        if name is not None:
            adapted.install(slot, kit.adapter(name))
    return adapted


def run_together(
    runner: AdaptedRunner, slots: Sequence[int], chunks: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits of sequences IDS[i] with the adapters in `slots`; chunks[i]: how many tokens at each step."""
    plain = runner.runner
    for sequence, slot in zip(plain.sequences, slots, strict=False):
        sequence.num_computed, sequence.adapter_slot, sequence.adapter_start = 0, slot, 0
    parts: list[list[torch.Tensor]] = [[] for _ in slots]
    for sizes in zip(*chunks, strict=True):
        work = []
        for index, size in enumerate(sizes):
            done = plain.sequences[index].num_computed
            if size:
                work.append((index, IDS[index][done : done + size]))
        if work:
            for (index, _), logits in zip(work, plain.step(work), strict=True):
                parts[index].append(logits)
    return [torch.cat(part) for part in parts]


STEPS = {
    "prefills": [[12], [12], [12], [12]],
    "chunks beside decodes": [
        [1] * 12,
        [5, 5, 2] + [0] * 9,
        [0, 0, 12] + [0] * 9,
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2],
    ],
    "in and out": [[4, 0, 4, 0, 4], [0, 6, 0, 6, 0], [1, 1, 1, 1, 8], [0, 0, 11, 0, 1]],
}


def assert_each_is_its_oracle(kit: Kit, logits: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
    for index, slot in enumerate(slots):
        want = kit.logits(NAMES[slot], IDS[index])
        assert (logits[index] - want).abs().max() <= TOLERANCE, f"sequence {index}, slot {slot}"


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("slots", [(1, 2, 0, 4), (3, 3, 1, 0), (2, 0, 2, 1), (0, 0, 0, 4), (4, 3, 2, 1)])
def test_l011_mixed_steps(
    kit: Kit, runner: AdaptedRunner, slots: Sequence[int], steps: Sequence[Sequence[int]]
) -> None:
    assert_each_is_its_oracle(kit, run_together(runner, slots, steps), slots)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """A model without experts."""
    return Kit(tmp_path_factory.mktemp("dense"), num_experts=1)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_base_rows_have_the_bits_of_the_same_step_without_lora(
    kit: Kit, dense: Kit, runner: AdaptedRunner, steps: Sequence[Sequence[int]]
) -> None:
    """With torch's products only where there are no experts: adapters send their rows to other experts, and
    a product's bits depend on how many rows it has."""
    made = runner.runner.backends
    if runner.registry.backend.name == "torch_native":
        runner = AdaptedRunner(dense.base, made, lora=runner.registry.backend)
        for slot in (1, 3):
            runner.install(slot, dense.adapter(f"all-{slot}", AdapterSpec(slot, 4, LINEAR)))
        kit = dense
    plain = AdaptedRunner(kit.base, made)
    plain.runner = load_runner(kit.base, made)  # the same steps, of a model that offers nothing to adapters
    mixed, base = run_together(runner, (1, 0, 3, 0), steps), run_together(plain, (0, 0, 0, 0), steps)
    for index in (1, 3):
        assert torch.equal(mixed[index], base[index])
    for index in (0, 2):
        assert (mixed[index] - base[index]).abs().mean() > 0.05


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_base_rows_beside_experts_adapters_differ_by_rounding_at_most(
    kit: Kit, runner: AdaptedRunner, steps: Sequence[Sequence[int]]
) -> None:
    """A far tighter bound than the oracle's."""
    plain = AdaptedRunner(kit.base, runner.runner.backends)
    mixed, base = run_together(runner, (1, 0, 4, 0), steps), run_together(plain, (0, 0, 0, 0), steps)
    for index in (1, 3):
        assert (mixed[index] - base[index]).abs().max() <= 2e-6 * base[index].abs().max()


def test_l003_base_steps_after_adapters_and_with_fewer_rows(kit: Kit, runner: AdaptedRunner) -> None:
    plain = load_runner(kit.base, runner.runner.backends)
    for length in (12, 12, 7, 1):
        run_together(runner, (1, 4, 3, 2), STEPS["prefills"])
        want = plain.run(IDS[0][:length])
        plain.sequences[0].num_computed = 0
        assert torch.equal(runner.logits(IDS[0][:length]), want)


@pytest.mark.parametrize("seed", range(3))
def test_l014_batches_that_grow_and_shrink(kit: Kit, runner: AdaptedRunner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(5)[:4].tolist()
    steps = []
    for _ in range(4):  # each sequence in a few pieces, at random steps
        cuts = np.sort(rng.choice(np.arange(1, 12), 3, replace=False))
        sizes = np.diff([0, *cuts, 12])
        row = np.zeros(8, dtype=int)
        row[np.sort(rng.choice(8, len(sizes), replace=False))] = sizes
        steps.append(row.tolist())
    assert_each_is_its_oracle(kit, run_together(runner, slots, steps), slots)


def test_l015_each_row_has_its_own_head(kit: Kit, runner: AdaptedRunner) -> None:
    """Two adapters on lm_head alone, and one on embed_tokens alone, in one step."""
    names = ("head-1", "head-2", "embedding")
    for seed, name in enumerate(names):
        modules = ("embed_tokens",) if name == "embedding" else ("lm_head",)
        kit.adapter(name, AdapterSpec(20 + seed, 2 + seed, modules))
    other = AdaptedRunner(kit.base, runner.runner.backends, lora=runner.registry.backend, num_slots=4)
    for slot, name in enumerate(names, start=1):
        other.install(slot, kit.root / name)
    logits = run_together(other, (1, 2, 3, 0), STEPS["chunks beside decodes"])
    for index, name in enumerate((*names, None)):
        want = kit.logits(name, IDS[index])
        assert (logits[index] - want).abs().max() <= TOLERANCE
        if name is not None:
            assert (want - kit.logits(None, IDS[index])).abs().mean() > 0.01


def test_l012_prompt_logprobs_in_pieces_with_adapters_on_the_head(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces are smaller than a prompt and cut across the requests of a step."""
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROBS_ROWS", 5)
    names = ("head-1", "head-2", None)
    for seed, name in enumerate(names[:2]):
        kit.adapter(name, AdapterSpec(20 + seed, 2 + seed, ("lm_head",)))
    engine = AdapterEngine(kit, names[:2])
    for index, name in enumerate(names):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
        engine.add(f"r{index}", IDS[index], params, adapter=name)
    results = engine.run()
    for index, name in enumerate(names):
        want = kit.logits(name, IDS[index]).log_softmax(-1)
        found = results[f"r{index}", 0].prompt_logprobs
        assert len(found) == len(IDS[index]) - 1
        for position, entry in enumerate(found):
            token = IDS[index][position + 1]
            assert entry.token_ids[0] == token
            assert entry.logprobs[0] == pytest.approx(want[position, token].item(), abs=TOLERANCE)


def wrong_order(patch: pytest.MonkeyPatch) -> None:
    """Rows take the adapters of their neighbours."""
    plain = models.rows_with_adapters
    patch.setattr(models, "rows_with_adapters", lambda slots, *rest: plain(np.roll(slots, 1), *rest))


def wrong_row(patch: pytest.MonkeyPatch) -> None:
    """A chunk's rows are counted as if every sequence had one."""
    plain = models.rows_with_adapters

    def rows(slots, starts, query_start, positions):
        row_slots = plain(slots, starts, query_start, positions)
        return None if row_slots is None else np.resize(slots, len(positions))

    patch.setattr(models, "rows_with_adapters", rows)


def without_scale(patch: pytest.MonkeyPatch) -> None:
    plain = LoraTable.put

    def put(self, slot, pairs, group=0):
        plain(self, slot, tuple(replace(pair, scale=1.0) for pair in pairs), group)

    patch.setattr(LoraTable, "put", put)


@pytest.mark.parametrize("fault", [wrong_order, wrong_row, without_scale])
def test_faults_are_seen(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    slots, steps = (1, 2, 0, 4), STEPS["in and out"]
    fault(monkeypatch)
    spoiled = AdaptedRunner(kit.base, num_slots=4)
    for slot, name in enumerate(NAMES):
        if name is not None:
            spoiled.install(slot, kit.adapter(name))
    with pytest.raises(AssertionError, match="sequence"):
        assert_each_is_its_oracle(kit, run_together(spoiled, slots, steps), slots)
