"""The recipes of faults that real engines had, as plain functions, so that `test_recipes` runs them as they
are and `test_mutations` runs them with the fault injected and wants to see them fail.

Each takes the T-model and its oracle. Numbers are those of the project's list of faults.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from hybridserve.core.request import RequestStatus, SamplingParams
from tests.harness.engine import Guarded, make_prompts
from tests.harness.siblings import SIBLINGS, sibling_engine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.engine import Oracle


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def start_decodes(engine: Guarded, lengths: list[int], max_tokens: int = 30) -> None:
    """Running sequences, past their prompts."""
    for index, prompt in enumerate(make_prompts(lengths, seed=10)):
        engine.add(f"decode{index}", prompt, greedy(max_tokens))
    while any(not r.output_ids for r in engine.core.scheduler.requests.values()):
        engine.step()


def f001_first_chunk_of_one_token(model: Path, oracle: Oracle) -> None:
    """A new request gets one token of the budget: it must not be taken for a decode with a state."""
    for poison in ("nan", "large"):
        engine = Guarded(model, chunk=4, poison=poison)
        start_decodes(engine, [3, 2, 4])
        engine.add("late", make_prompts([9])[0], greedy(8))
        engine.step()
        step = engine.executor.inputs[-1]
        assert (step.query_start[1:] - step.query_start[:-1]).tolist() == [1, 1, 1, 1]
        assert step.has_state.tolist() == [True, True, True, False]
        oracle.check_all(engine.run())


def f003_every_state_tensor_starts_clean(model: Path, oracle: Oracle) -> None:
    """Whatever a slot held, in any of its tensors, a new tenant does not see it."""
    for name in SIBLINGS:
        for poison in ("nan", "large"):
            engine, expected = sibling_engine(name, poison=poison)
            tensors = [tensor for view in engine.executor.arena.views for tensor in view]
            assert len(tensors) == SIBLINGS[name].num_tensors
            prompts = make_prompts([1, 4, 6, 3, 5, 2], vocab_size=expected.vocab_size)
            for index, prompt in enumerate(prompts):
                engine.add(f"r{index}", prompt, greedy(5))
                if index % 2:
                    engine.step()
            for result in engine.run().values():
                assert result.token_ids == expected.tokens(result.prompt_ids, 5)
    oracle.check_all(_served_twice(model))


def _served_twice(model: Path) -> dict:
    engine = Guarded(model, chunk=7, poison="large")
    for turn in range(2):
        for index, prompt in enumerate(make_prompts([3, 8, 5], seed=turn)):
            engine.add(f"t{turn}r{index}", prompt, greedy(4))
        engine.run()
    return engine.results


def f004_preempted_slot(model: Path, oracle: Oracle) -> None:
    """Preempted after five tokens, resumed in the same slot and in another."""
    for same_slot in (True, False):
        engine = Guarded(model, chunk=6)
        start_decodes(engine, [4, 6])
        victim = engine.core.scheduler.requests["decode1"]
        while len(victim.output_ids) < 5:
            engine.step()
        before = victim.state_slot
        in_use = engine.core.scheduler.cache.usage().num_slots
        if not same_slot:
            engine.add("taker", make_prompts([5])[0], greedy(30))
        engine.core.scheduler.preempt(victim)
        assert victim.state_slot == 0
        assert engine.core.scheduler.cache.usage().num_slots == in_use - 1
        if not same_slot:
            engine.core.scheduler.max_num_seqs = 2
            engine.core.scheduler.abort("decode0")
            engine.results.pop(("decode0", 0))
            engine.core._live.pop("decode0")
        while not victim.state_slot:
            engine.step()
        assert (victim.state_slot == before) == same_slot
        oracle.check_all(engine.run())


def f013_chunks_of_11_3_1_5(model: Path, oracle: Oracle) -> None:
    """A forward of several tokens that continues a sequence is neither a decode nor a start."""
    engine = Guarded(model)
    engine.add("r", make_prompts([20])[0], greedy(6))
    for chunk in (11, 3, 1, 5):
        engine.core.scheduler.max_num_batched_tokens = chunk
        engine.step()
        assert int(engine.executor.inputs[-1].query_start[-1]) == chunk
    oracle.check_all(engine.run())


def f014_every_split_of_a_prompt(model: Path, oracle: Oracle) -> None:
    """The convolution reaches over the border between two chunks, wherever it is; and over all borders at
    once."""
    prompt = make_prompts([24])[0]
    for split in (*range(1, 24), None):
        engine = Guarded(model, checksum=False)
        engine.add("r", prompt, greedy(2))
        engine.core.scheduler.max_num_batched_tokens = split or 1
        engine.step()
        if split is not None:
            engine.core.scheduler.max_num_batched_tokens = 64
        oracle.check_all(engine.run())


def f019_short_prompts(model: Path, oracle: Oracle) -> None:
    """Prompts around the width of the convolution, then four decodes."""
    engine = Guarded(model)
    for length in range(1, 6):
        engine.add(f"r{length}", make_prompts([length], seed=length)[0], greedy(5))
    conv = engine.layout.specs[0].tensors[0]
    assert conv.shape[-1] == 3
    oracle.check_all(engine.run())


def f021_interleavings(model: Path, oracle: Oracle) -> None:
    """Two decodes and two prefills, in all orders of rows."""
    for order in sorted(set(itertools.permutations("ddpp"))):
        engine = Guarded(model)
        start_decodes(engine, [3, 5], max_tokens=4)
        for index, prompt in enumerate(make_prompts([6, 9], seed=3)):
            engine.add(f"prefill{index}", prompt, greedy(3))
        engine.row_order = "".join(order)
        engine.step()
        lengths = engine.executor.inputs[-1].query_start[1:] - engine.executor.inputs[-1].query_start[:-1]
        assert ["d" if length == 1 else "p" for length in lengths] == list(order)
        engine.row_order = "forward"
        oracle.check_all(engine.run())


def f025_more_rows_than_the_budget(model: Path, oracle: Oracle) -> None:
    """Six sequences can run, a step has room for two."""
    engine = Guarded(model, chunk=2)
    for index, prompt in enumerate(make_prompts([1, 3, 2, 4, 1, 5])):
        engine.add(f"r{index}", prompt, greedy(4))
    oracle.check_all(engine.run())
    assert max(int(step.query_start[-1]) for step in engine.executor.inputs) == 2


def f026_padding_and_slot_0(model: Path, oracle: Oracle) -> None:
    """Padding rows live in the null slot and the null block, which nobody else can have."""
    engine = Guarded(model, buckets=(8,), memory="200KiB", max_num_seqs=3, max_model_len=32)
    pool = engine.core.scheduler.cache.slots
    for index, prompt in enumerate(make_prompts([4, 2, 3])):
        engine.add(f"r{index}", prompt, greedy(10))
    null_slots = engine.layout.slots_per_slab
    while engine.core.has_work:
        engine.step()
        held = [r.state_slot for r in engine.core.scheduler.requests.values() if r.state_slot]
        assert all(slot >= null_slots for slot in held)
        assert all(pool.owner(slot) is None for slot in range(null_slots))
        step = engine.executor.inputs[-1]
        if len(step.state_slots) == 8:
            assert (step.state_slots == 0).sum() >= 5
    assert any(len(step.state_slots) == 8 for step in engine.executor.inputs)
    oracle.check_all(engine.run())


def f027_padding_and_the_lowest_slot(model: Path, oracle: Oracle) -> None:
    """A live request in the lowest slot that can be handed out, beside padding rows."""
    engine = Guarded(model, buckets=(8,), poison="large")
    engine.add("lowest", make_prompts([5])[0], greedy(12))
    engine.step()
    lowest = engine.core.scheduler.requests["lowest"].state_slot
    assert lowest % engine.layout.slots_per_slab == 0  # of the only slab that holds slots
    oracle.check_all(engine.run())


def f029_scratch_memory_is_nan(model: Path, oracle: Oracle) -> None:
    """What `torch.empty` returns is NaN: nothing of it reaches a live row or slot, nor stays in the null
    slot."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        engine = Guarded(model, buckets=(8,), poison=None)
        engine.executor.arena.buffer.zero_()
        for index, prompt in enumerate(make_prompts([4, 7, 2])):
            engine.add(f"r{index}", prompt, greedy(50))
        results = engine.run()
        assert all(state.isfinite().all() for state in engine.slot_states(0))
    finally:
        torch.use_deterministic_algorithms(False)
    oracle.check_all(results)


def f031_trailing_padding_changes_nothing(model: Path, oracle: Oracle) -> None:
    """The same packed batch with and without padding rows: the same logits, bit for bit."""
    seen = []
    for buckets in ((), (32,)):
        engine = Guarded(model, buckets=buckets, chunk=64)
        for index, prompt in enumerate(make_prompts([5, 7, 9])):
            engine.add(f"r{index}", prompt, greedy(1))
        seen.append(engine.run())
        oracle.check_all(seen[-1])
    for key, result in seen[0].items():
        assert torch.equal(result.logits[0], seen[1][key].logits[0])


def f032_padding_on_any_side(model: Path, oracle: Oracle) -> None:
    """Padding rows before, between and behind the live ones; the final state is that of the last real
    token."""
    for row_order in ("forward", "reverse", "shuffled"):
        for place in ("before", "between", "behind"):
            engine = Guarded(model, row_order=row_order, poison="large")
            engine.padding = place
            for index, prompt in enumerate(make_prompts([5, 1, 9])):
                engine.add(f"r{index}", prompt, greedy(4))
            oracle.check_all(engine.run())


def f033_more_sequences_allowed_than_slots(model: Path, oracle: Oracle) -> None:
    """Three slots, 64 sequences allowed, steps padded to 8: the engine starts and serves ten requests."""
    engine = Guarded(model, buckets=(8,), memory="220KiB", max_num_seqs=64, max_model_len=24)
    assert engine.core.scheduler.cache.slots.num_free < 10
    for index, prompt in enumerate(make_prompts(range(1, 11))):
        engine.add(f"r{index}", prompt, greedy(5))
    oracle.check_all(engine.run())


def f034_twice_as_many_requests_as_slots(model: Path, oracle: Oracle) -> None:
    """Running sequences are capped by slots, however much room there is for blocks."""
    engine = Guarded(model, memory="300KiB", max_model_len=24)
    num_slots = engine.core.scheduler.cache.slots.num_free
    for index, prompt in enumerate(make_prompts([2] * (2 * num_slots))):
        engine.add(f"r{index}", prompt, greedy(3))
    oracle.check_all(engine.run())


def f036_abort_in_every_state(model: Path, oracle: Oracle) -> None:
    """Aborted while waiting, in the middle of a prompt, decoding, preempted, twice, and in the step that ends
    it."""
    for delay in (0, 1):
        engine = Guarded(model, chunk=5, delay=delay, max_num_seqs=3)
        core = engine.core
        for index, prompt in enumerate(make_prompts([4, 12, 3, 6, 5])):
            engine.add(f"r{index}", prompt, greedy(12))
        core.abort("r4")
        core.abort("r4")
        engine.step()
        core.abort("r1")
        while len(core.scheduler.requests["r2"].output_ids) < 2:
            engine.step()
        core.abort("r2")
        core.scheduler.preempt(core.scheduler.requests["r0"])
        core.abort("r0")
        core.abort("nobody")
        while len(core.scheduler.requests["r3"].output_ids) < 11:
            engine.step()
        core.abort("r3")
        core.abort("r3")
        engine.add("last", make_prompts([7])[0], greedy(4))
        results = engine.run()
        assert all(results[f"r{index}", 0].finish_reason == "abort" for index in range(5))
        oracle.check(results["last", 0])


def f041_every_step_advances(model: Path, oracle: Oracle) -> None:
    """Budgets of 1 to 9, prompts of 1 to 20: no step is empty, and the number of steps is bounded."""
    for budget in (1, 2, 3, 5, 9):
        engine = Guarded(model, chunk=budget, checksum=False)
        lengths = list(range(1, 21, 3))
        for index, prompt in enumerate(make_prompts(lengths)):
            engine.add(f"r{index}", prompt, greedy(2))
        results = engine.run(limit=sum(lengths) + 2 * len(lengths) + 2)
        assert all(int(step.query_start[-1]) >= 1 for step in engine.executor.inputs)
        oracle.check_all(results)


def f057_freed_under_a_running_step(model: Path, oracle: Oracle) -> None:
    """One step is in flight when a sequence ends, is aborted or preempted: it may still write what it
    holds."""
    for way in ("stop", "abort", "preempt"):
        engine = Guarded(model, delay=1, poison="large", memory="200KiB", max_model_len=40, max_num_seqs=2)
        prompt = make_prompts([6])[0]
        stop = oracle.greedy(prompt, 4)[3]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
        engine.add("leaver", prompt, params if way == "stop" else greedy(20))
        engine.add("stayer", make_prompts([5], seed=4)[0], greedy(14))
        leaver = engine.core.scheduler.requests["leaver"]
        while len(leaver.output_ids) < 3:
            engine.step()
        engine.add("tenant", make_prompts([9], seed=5)[0], greedy(8))
        if way == "abort":
            engine.core.abort("leaver")
        elif way == "preempt":
            engine.core.scheduler.preempt(leaver)
        results = engine.run()
        for name, result in results.items():
            if name[0] != "leaver" or way == "preempt":
                oracle.check(result)
        if way == "stop":
            assert results["leaver", 0].finish_reason == "stop"
            assert results["leaver", 0].token_ids[-1] == stop


def fork_n(model: Path, oracle: Oracle) -> None:
    """n > 1: continuations share the prompt's blocks, and each goes its own way from the prompt's state."""
    for length in (3, 16, 21):
        for delay in (0, 1):
            engine = Guarded(model, delay=delay, poison="large")
            prompt = make_prompts([length])[0]
            params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=7, ignore_eos=True)
            engine.add("r", prompt, params)
            results = engine.run()
            assert len({tuple(result.token_ids) for result in results.values()}) == 3
            for result in results.values():
                fed = [*prompt, *result.token_ids[:-1]]
                logits, states = oracle.forward(fed)
                assert (torch.stack(result.logits) - logits[length - 1 :]).abs().max() <= 1e-4
                for mine, theirs in zip(result.states, states, strict=True):
                    assert (mine - theirs).abs().max() <= 1e-4
            computed = sum(int(step.query_start[-1]) for step in engine.executor.inputs)
            assert computed <= length + 3 * 7
            assert all(r.status is RequestStatus.FINISHED for r in engine.core.scheduler.requests.values())
