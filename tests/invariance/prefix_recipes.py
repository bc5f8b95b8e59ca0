"""Recipes about prefixes, run as they are by `test_prefix_recipes`, and with their faults, which the same
test wants to see fail. Each takes the T-model and its oracle.

Blocks are 4 tokens here, so that a prompt of a few tokens has several. What is in the tree is held against
the oracle as well: K and V by the logits of those who use them, checkpoints one by one (`audit`).
"""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.core.request import RequestStatus, SamplingParams
from tests.harness.engine import Guarded, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.core.prefix_nodes import Node
    from tests.harness.engine import Oracle

BLOCK = 4


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def cached(model: Path, **options: Any) -> Guarded:
    defaults = {"prefix_caching": True, "block_size": BLOCK, "checkpoint_interval": 8, "poison": "large"}
    return Guarded(model, **defaults | options)


def ask(engine: Guarded, name: str, prompt: list[int], max_tokens: int = 4) -> int:
    """Serve one request to its end; how many of its tokens were there."""
    engine.add(name, prompt, greedy(max_tokens))
    while engine.core.has_work:
        engine.step()
    metrics = engine.results[name, 0].metrics
    return metrics.num_cached_tokens


def counters(engine: Guarded) -> dict[str, Any]:
    return engine.core.gauges()


def num_computed(engine: Guarded, since: int = 0) -> int:
    return sum(int(step.query_start[-1]) for step in engine.executor.inputs[since:])


def index_nodes(engine: Guarded) -> list[Node]:
    nodes, todo = [], [engine.core.scheduler.cache.prefix.index._top]
    while todo:
        node = todo.pop()
        todo += node.children.values()
        nodes.append(node)
    return nodes


def path_tokens(node: Node) -> list[int]:
    """The token ids that a node stands for."""
    tokens: list[int] = []
    one: Node | None = node
    while one is not None and one.num_tokens:
        tokens = [*array("i", one.key), *tokens]
        one = one.parent
    return tokens


def audit(engine: Guarded, oracle: Oracle) -> int:
    """Every checkpoint is the state after its path's tokens, as the oracle has it. Returns how many there
    are."""
    found = 0
    for node in index_nodes(engine):
        checkpoint = node.checkpoint
        if checkpoint is None:
            continue
        tokens = path_tokens(node)
        assert len(tokens) == checkpoint.num_tokens == node.num_tokens
        _, expected = oracle.forward(tokens)
        mine = engine.checkpoint_states(checkpoint)
        assert len(mine) == len(expected)
        for state, other in zip(mine, expected, strict=True):
            assert (state - other).abs().max() <= 1e-4, f"a {checkpoint.cause} checkpoint of {len(tokens)}"
        found += 1
    return found


def drop_checkpoints(engine: Guarded, above: int = 0) -> int:
    """Take down those of more than so many tokens."""
    prefix = engine.core.scheduler.cache.prefix
    nodes = [node for node in index_nodes(engine) if node.checkpoint and node.num_tokens > above]
    for node in nodes:
        prefix.drop(node)
    return len(nodes)


def f005_kv_without_a_state(model: Path, oracle: Oracle) -> None:
    """The blocks of a prompt are there, its checkpoint is not: that is no hit; or one as far as an older
    checkpoint."""
    for above, expected in ((0, 0), (8, 8)):
        engine = cached(model)
        prompt = make_prompts([22])[0]
        assert ask(engine, "first", prompt) == 0
        assert drop_checkpoints(engine, above)
        assert ask(engine, "again", prompt) == expected
        assert counters(engine)["prefix_num_unreached_tokens"] == 20 - expected
        oracle.check_all(engine.run())


def f008_the_copy_fails(model: Path, oracle: Oracle) -> None:
    """The step that restores a checkpoint raises, before or after the copy: its request computes everything
    again, and no slot is lost."""
    for late in (False, True):
        engine = cached(model)
        prompt = make_prompts([22])[0]
        ask(engine, "first", prompt)
        plain = engine.executor.arena.copy_slots

        def copy(sources: Any, destinations: Any, plain: Any = plain, late: bool = late) -> None:
            if late:
                plain(sources, destinations)
            raise OSError("the copy engine is gone")

        engine.executor.arena.copy_slots = copy  # type: ignore[method-assign]
        engine.add("again", prompt, greedy(5))
        failed = False
        try:
            engine.step()
        except OSError:
            failed = True
        assert failed
        engine.executor.arena.copy_slots = plain  # type: ignore[method-assign]
        engine.executor.fill(engine.executor.arena.buffer)  # nobody knows what is in there
        oracle.check_all(engine.run())
        assert engine.core.scheduler.requests == {}


def f009_what_a_tenant_left(model: Path, oracle: Oracle) -> None:
    """Infinity in all that a finished request held and gave back: the next three are clean, also those that
    begin with its prompt, which was kept."""
    engine = cached(model)
    prompts = make_prompts([21, 13, 9], seed=1)
    prompts[1][:8] = prompts[0][:8]
    ask(engine, "first", prompts[0])
    cache, arena = engine.core.scheduler.cache, engine.executor.arena
    infinity = torch.tensor([float("inf")]).view(torch.uint8)
    for pool, memory in ((cache.slots, arena.slots), (cache.blocks, arena.blocks)):
        free = [unit for units in pool._free.values() for unit in units]
        free += [
            unit
            for slab in range(1, cache.slabs.num_slabs)
            if not (slab in cache.slots._free or slab in cache.blocks._free)
            for unit in range(slab * pool.units_per_slab, (slab + 1) * pool.units_per_slab)
        ]
        for unit in free:
            memory[unit] = infinity.repeat(memory.shape[1] // 4)
    hits = [ask(engine, f"tenant{index}", prompt) for index, prompt in enumerate(prompts)]
    assert hits[0] == 20
    oracle.check_all(engine.run())


def f011_short_chunks_after_a_hit(model: Path, oracle: Oracle) -> None:
    """Chunks that are shorter than the convolution, from a checkpoint on: it stays what it was."""
    prompt = make_prompts([20])[0]
    for chunk in (1, 2, 3):
        engine = cached(model)
        ask(engine, "first", prompt)
        node = next(node for node in index_nodes(engine) if node.num_tokens == 16)
        before = engine.slot_states(node.checkpoint.slot)
        engine.core.scheduler.max_num_batched_tokens = chunk
        for name, more in (("second", 7), ("third", 8)):
            longer = prompt[:17] + make_prompts([6], seed=more)[0]
            assert ask(engine, name, longer) == 16
            after = engine.slot_states(node.checkpoint.slot)
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        audit(engine, oracle)
        oracle.check_all(engine.run())


def f015_checkpoints_of_a_batch(model: Path, oracle: Oracle) -> None:
    """Several prompts of one step: the checkpoint of each is its own."""
    for lengths in itertools.permutations((5, 7, 9)):
        engine = cached(model)
        for index, prompt in enumerate(make_prompts(lengths)):
            engine.add(f"r{index}", prompt, greedy(3))
        engine.step()
        assert len(engine.executor.inputs[0].state_saves) == 3
        assert audit(engine, oracle) == 3
        while engine.core.has_work:
            engine.step()
        audit(engine, oracle)
        oracle.check_all(engine.run())


def f016_chunks_smaller_than_the_interval(model: Path, oracle: Oracle) -> None:
    """Two tokens a step, a checkpoint every eight: the second turn of a chat finds one, and a right one."""
    engine = cached(model, chunk=2)
    prompt = make_prompts([21])[0]
    ask(engine, "turn1", prompt)
    assert audit(engine, oracle) >= 2
    second = [*prompt, *engine.results["turn1", 0].token_ids, *make_prompts([5], seed=2)[0]]
    assert ask(engine, "turn2", second) >= 20
    oracle.check_all(engine.run())


def f022_a_checkpoint_beside_decodes(model: Path, oracle: Oracle) -> None:
    """A prompt crosses a checkpoint in a step with three decodes: what it leaves is right, or can't be
    found."""
    engine = cached(model, chunk=9)
    for index, prompt in enumerate(make_prompts([3, 5, 6], seed=10)):
        engine.add(f"decode{index}", prompt, greedy(30))
    while any(not r.output_ids for r in engine.core.scheduler.requests.values()):
        engine.step()
    prompt = make_prompts([22])[0]
    engine.add("first", prompt, greedy(3))
    while ("first", 0) in engine.results and engine.results["first", 0].metrics is None:
        engine.step()
    mixed = [step for step in engine.executor.inputs if len(step.query_start) == 5 and len(step.state_saves)]
    assert mixed
    audit(engine, oracle)
    engine.add("again", prompt, greedy(3))
    engine.step()
    assert engine.core.scheduler.requests["again"].num_cached == 20
    oracle.check_all(engine.run())


def f036_abort_with_a_hit(model: Path, oracle: Oracle) -> None:
    """Aborted while it waits for another, just matched, in the middle of the rest, generating, preempted, as
    it finishes, twice: all comes back, and nothing stays for somebody who is gone."""
    prompt = make_prompts([30])[0]
    longer = prompt[:26] + make_prompts([20], seed=1)[0]
    for delay in (0, 1):
        for state in ("held", "queued", "matched", "mid-chunk", "decoding", "preempted", "done"):
            engine = cached(model, chunk=12, delay=delay)
            scheduler = engine.core.scheduler
            engine.add("first", prompt, greedy(2))
            if state != "held":
                while engine.core.has_work:
                    engine.step()
            engine.add("x", longer, greedy(6))
            request = scheduler.requests["x"]
            if state == "held":
                engine.step()
                assert scheduler.cache.prefix.holds(request)
            elif state != "queued":
                engine.step()
                assert request.num_cached == 24
            if state in ("decoding", "preempted", "done"):
                while len(request.output_ids) < (6 if state == "done" else 2):
                    engine.step()
            elif state == "mid-chunk":
                engine.step()
                assert 24 < request.num_computed < request.num_prompt
            if state == "preempted":
                scheduler.preempt(request)
            for _ in range(2):
                engine.core.abort("x")
            engine.add("next", longer, greedy(3))
            engine.run()  # and all memory is back
            for name in ("first", "next"):
                oracle.check(engine.results[name, 0])


def f037_no_checkpoint_can_go(model: Path, oracle: Oracle) -> None:
    """All slots but one are checkpoints that a step reads: of two requests one runs, the other waits, and
    holds nothing meanwhile."""
    engine = cached(model, memory="420KiB", max_model_len=48)
    cache = engine.core.scheduler.cache
    prompts = make_prompts([9] * 20, seed=4)
    index = 0
    while cache.slots.num_free > 1:
        before = cache.slots.num_free
        ask(engine, f"fill{index}", prompts[index], 1)
        index += 1
        assert cache.slots.num_free < before, "nothing is kept any more"
    held = [node for node in index_nodes(engine) if node.checkpoint]
    for node in held:
        cache.prefix.index.hold(node.checkpoint, node)
    for name in ("runs", "waits"):
        engine.add(name, make_prompts([6], seed=9)[0] + [len(name)], greedy(4))
    engine.step()
    requests = engine.core.scheduler.requests
    assert requests["runs"].state_slot
    assert not requests["waits"].state_slot
    assert not requests["waits"].block_ids
    free = cache.blocks.num_used
    while "runs" in requests:
        engine.step()
        cache.check_integrity([r for r in requests.values() if r.block_ids])
    assert cache.blocks.num_used <= free + 3
    for node in held:
        cache.prefix.index.let_go(node.checkpoint, node)
    oracle.check_all(engine.run())


def f038_no_slot_for_a_checkpoint(model: Path, oracle: Oracle) -> None:
    """A checkpoint is due while a sequence generates and all slots are live: it is left out."""
    engine = cached(model, memory="420KiB", max_model_len=28, max_num_seqs=64)
    num_slots = engine.core.scheduler.cache.slots.num_free
    for index, prompt in enumerate(make_prompts([5] * num_slots, seed=6)):
        engine.add(f"r{index}", prompt, greedy(12))
    oracle.check_all(engine.run())
    assert counters(engine)["prefix_num_skipped_checkpoints"] > 0
    assert counters(engine)["num_preemptions"] == 0


def f040_hits_are_held_before_room_is_made(model: Path, oracle: Oracle) -> None:
    """A request hits blocks and a checkpoint, and needs more than is free: what it hit is not what goes."""
    engine = cached(model, memory="420KiB", max_model_len=256, chunk=256)
    cache = engine.core.scheduler.cache
    prompt = make_prompts([17], seed=7)[0]
    ask(engine, "first", prompt, 1)
    for index in range(2):
        ask(engine, f"fill{index}", make_prompts([18], seed=20 + index)[0], 1)
    num_own = cache.blocks.num_free - cache.layout.blocks_per_slab + 2  # more than are free beside a slot
    # of all that is kept, what it is about to hit is the next to go
    for node in index_nodes(engine):
        if path_tokens(node) == prompt[: node.num_tokens]:
            node.last_used -= 1000
            if node.checkpoint is not None:
                node.checkpoint.last_used -= 1000
            cache.prefix.index._file_leaf(node)
            cache.prefix.index._file_checkpoint(node)
    before = counters(engine)
    longer = prompt[:16] + make_prompts([num_own * BLOCK - 1], seed=8)[0]
    assert ask(engine, "longer", longer, 1) >= 8
    after = counters(engine)
    evicted = ("prefix_num_evicted_blocks", "prefix_num_vanished_checkpoints")
    assert sum(after[name] - before[name] for name in evicted) > 0
    audit(engine, oracle)
    oracle.check_all(engine.run())


def f044_where_requests_part(model: Path, oracle: Oracle) -> None:
    """A shared beginning that ends anywhere, and an own part each: from the third on there is a checkpoint
    where they part, not only in somebody's own part."""
    for interval in (0, 4):
        engine = cached(model, checkpoint_interval=interval)
        shared = make_prompts([20], seed=5)[0]
        own = make_prompts([7] * 5, seed=6)
        lengths = [15, 14, 16, 20, 15]
        hits = [
            ask(engine, f"r{index}", shared[:length] + own[index]) for index, length in enumerate(lengths)
        ]
        common = [
            max((min(length, other) for other in lengths[:at]), default=0) // BLOCK * BLOCK
            for at, length in enumerate(lengths)
        ]
        # the first to part somewhere computes that far, and leaves a checkpoint
        at_least = [0, 0, 12, 12 if interval == 0 else common[3], common[4]]
        assert all(hit >= least for hit, least in zip(hits, at_least, strict=True)), (hits, at_least)
        assert all(hit <= most for hit, most in zip(hits, common, strict=True))
        audit(engine, oracle)
        oracle.check_all(engine.run())


def f045_a_short_prompt_is_reused(model: Path, oracle: Oracle) -> None:
    """A prompt of 20 tokens, sent again, with blocks of the usual size."""
    engine = cached(model, block_size=16, checkpoint_interval="auto")
    prompt = make_prompts([20])[0]
    assert [ask(engine, f"r{index}", prompt) for index in range(2)] == [0, 16]
    oracle.check_all(engine.run())


def f047_a_boundary_inside_the_answer(model: Path, oracle: Oracle) -> None:
    """A sequence crosses a block boundary while it generates; whoever continues from its answer hits it."""
    for length in range(9, 14):
        engine = cached(model)
        prompt = make_prompts([length], seed=length)[0]
        ask(engine, "turn1", prompt, 9)
        said = [*prompt, *engine.results["turn1", 0].token_ids]
        audit(engine, oracle)
        assert ask(engine, "turn2", [*said, 5, 6, 7]) == (len(said) - 1) // BLOCK * BLOCK
        audit(engine, oracle)
        oracle.check_all(engine.run())


def f050_an_interval_between_blocks(model: Path, oracle: Oracle) -> None:
    """An interval that is no multiple of a block is refused when the engine starts; any other is right."""
    refused = False
    try:
        cached(model, checkpoint_interval=6)
    except ValueError as error:
        refused = "cache.checkpoint_interval: 6" in str(error)
    assert refused
    for interval in (4, 12, 20):
        engine = cached(model, checkpoint_interval=interval)
        prompt = make_prompts([45])[0]
        ask(engine, "first", prompt)
        assert audit(engine, oracle) >= 3
        oracle.check_all(engine.run())


def f051_checkpoints_are_what_they_say(model: Path, oracle: Oracle) -> None:
    """All checkpoints of a crowd, recomputed; and each says which step wrote it into which tenancy of its
    slot."""
    engine = cached(model, chunk=13, delay=1, row_order="shuffled", slot_order="shuffled")
    shared = make_prompts([18], seed=1)[0]
    for index, own in enumerate(make_prompts([3, 9, 14, 6, 1], seed=2)):
        engine.add(f"r{index}", shared[: 18 - 2 * index] + own, greedy(7))
        engine.step()
    while engine.core.has_work:
        engine.step()
    cache = engine.core.scheduler.cache
    for checkpoint in cache.prefix.index.checkpoints:
        assert 0 <= checkpoint.step_id <= cache.finished_step
        assert checkpoint.generation == cache.slots.generation(checkpoint.slot)
        saves = [step.state_saves for step in engine.executor.inputs if step.step_id == checkpoint.step_id]
        assert checkpoint.slot in saves[0][:, 1]
    assert audit(engine, oracle) >= 5
    oracle.check_all(engine.run())


def _chat(engine: Guarded, num_turns: int, length: int = 9, answer: int = 6) -> tuple[list[int], list[int]]:
    """All that was said, and what was computed in each turn."""
    said: list[int] = []
    computed = []
    for turn in range(num_turns):
        said = said + make_prompts([length], seed=100 + turn)[0]
        begun = len(engine.executor.inputs)
        ask(engine, f"turn{turn}", said, answer)
        computed.append(num_computed(engine, begun))
        said = said + engine.results[f"turn{turn}", 0].token_ids
    return said, computed


def f052_one_thing_is_evicted(model: Path, oracle: Oracle) -> None:
    """After six turns one thing goes, whatever is next to: the seventh computes an interval and the last turn
    again at most."""
    for which in ("evict_block", "evict_checkpoint"):
        engine = cached(model)
        said, _ = _chat(engine, 6)
        assert getattr(engine.core.scheduler.cache.prefix, which)()
        begun = len(engine.executor.inputs)
        ask(engine, "turn6", [*said, *make_prompts([9], seed=106)[0]], 6)
        assert num_computed(engine, begun) <= 9 + 6 + (9 + 6) + 8
        oracle.check_all(engine.run())


def f053_saved_after_the_step(model: Path, oracle: Oracle) -> None:
    """With a step in flight while the next one is planned: what was saved is the state after its step, and is
    found only then."""
    engine = cached(model, delay=1)
    prompt = make_prompts([30])[0]
    engine.add("first", prompt, greedy(8))
    engine.core._start_step()
    assert not any(node.block or node.checkpoint for node in index_nodes(engine))
    while engine.core.has_work:
        engine.step()
        audit(engine, oracle)
    assert ask(engine, "again", prompt) == 28
    audit(engine, oracle)
    oracle.check_all(engine.run())


def f055_only_what_is_new_is_computed(model: Path, oracle: Oracle) -> None:
    """A chat of five turns; then somebody says the last thing in other words."""
    engine = cached(model)
    said, computed = _chat(engine, 5)
    assert all(count <= 9 + 6 + BLOCK + 8 for count in computed), computed
    before_last = said[: 4 * 15]
    begun = len(engine.executor.inputs)
    ask(engine, "edited", [*before_last, *said[60:63], *make_prompts([6], seed=200)[0]], 6)
    assert num_computed(engine, begun) <= 9 + 6 + BLOCK + 8
    audit(engine, oracle)
    oracle.check_all(engine.run())


def f057_kept_while_a_step_runs(model: Path, oracle: Oracle) -> None:
    """A step is in flight when a sequence stops: what it left is right, and what it held has no new tenant
    yet."""
    for way in ("stop", "abort", "preempt"):
        engine = cached(model, delay=1, memory="420KiB", max_model_len=40, max_num_seqs=2)
        prompt = make_prompts([6])[0]
        stop = oracle.greedy(prompt, 4)[3]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
        engine.add("leaver", prompt, params if way == "stop" else greedy(20))
        engine.add("stayer", make_prompts([5], seed=4)[0], greedy(14))
        leaver = engine.core.scheduler.requests["leaver"]
        while len(leaver.output_ids) < 3:
            engine.step()
        for index in range(3):
            engine.add(f"tenant{index}", make_prompts([9], seed=5 + index)[0], greedy(8))
        if way == "abort":
            engine.core.abort("leaver")
        elif way == "preempt":
            engine.core.scheduler.preempt(leaver)
        while engine.core.has_work:
            engine.step()
            audit(engine, oracle)
        for name, result in engine.run().items():
            if name[0] != "leaver" or way == "preempt":
                oracle.check(result)
        again = [*prompt, *engine.results["leaver", 0].token_ids, 9, 9]
        ask(engine, "again", again)
        oracle.check(engine.results["again", 0])


def f059_retracted_every_three_steps(model: Path, oracle: Oracle) -> None:
    """All that runs is preempted every three steps: everybody goes on from blocks and state, never from one
    of them."""
    engine = cached(model, chunk=16)
    for index, prompt in enumerate(make_prompts([9, 14, 22])):
        engine.add(f"r{index}", prompt, greedy(16))
    drawn: dict[str, int] = {}
    for step in itertools.count(1):
        if not engine.core.has_work:
            break
        engine.step()
        if step % 3 == 0:
            for request in list(engine.core.scheduler.requests.values()):
                is_running = request.status is RequestStatus.RUNNING
                if is_running and drawn.get(request.id, -1) < len(request.output_ids):
                    drawn[request.id] = len(request.output_ids)
                    engine.core.scheduler.preempt(request)
    assert counters(engine)["num_preemptions"] >= 9
    assert counters(engine)["prefix_num_resumed_tokens"] > 0
    audit(engine, oracle)
    oracle.check_all(engine.run())


def f061_no_feature_turns_another_off(model: Path, oracle: Oracle) -> None:
    """Beside each other feature, prefixes are reused, or the engine says why not."""
    features: dict[str, dict[str, Any]] = {
        "nothing": {},
        "priorities": {"policy": "priority"},
        "padding": {"buckets": (8, 16)},
        "a step ahead": {"delay": 1},
        "adapters": {"lora": {"allow_runtime_loading": True, "roots": ["/"]}},
        "int8": {"quantization.format": "int8", "kernels.gemm": "exact"},
        "chunks": {"chunk": 3},
    }
    for name, options in features.items():
        engine = cached(model, **options)
        prompt = make_prompts([22])[0]
        hits = [ask(engine, f"r{index}", prompt) for index in range(2)]
        assert hits == [0, 20], name
        if name != "int8":
            oracle.check_all(engine.run())


def b010_abort_at_every_boundary(model: Path, oracle: Oracle) -> None:
    """A prompt is given up after each of its chunks: whoever sends it again is answered as from nothing."""
    prompt = make_prompts([26])[0]
    for num_steps, delay in itertools.product(range(1, 8), (0, 1)):
        engine = cached(model, chunk=5, delay=delay)
        engine.add("given up", prompt, greedy(4))
        for _ in range(num_steps):
            engine.step()
        engine.core.abort("given up")
        engine.step()
        audit(engine, oracle)
        hit = ask(engine, "again", prompt)
        assert hit >= min(24, max(0, num_steps - 2) * 5 // 8 * 8)
        assert ask(engine, "once more", prompt) == 24
        engine.run()
        for name in ("again", "once more"):
            oracle.check(engine.results[name, 0])


def b042_as_much_as_is_shared(model: Path, oracle: Oracle) -> None:
    """Two requests that share 60, 95 and 100 % of 100 tokens: the hit is what checkpoints allow (four of
    intervals and one at the end), and what they don't is counted as that."""
    for shared, expected in ((60, 60), (95, 80), (100, 96)):
        engine = cached(model, checkpoint_interval=8)
        prompt = make_prompts([100])[0]
        ask(engine, "first", prompt)
        before = counters(engine)["prefix_num_unreached_tokens"]
        hit = ask(engine, "second", prompt[:shared] + make_prompts([100 - shared], seed=1)[0])
        unreached = counters(engine)["prefix_num_unreached_tokens"] - before
        limit = min(shared, 99) // BLOCK * BLOCK
        assert hit == expected <= limit
        assert hit + unreached == limit
        third = ask(engine, "third", prompt[:shared] + make_prompts([100 - shared], seed=2)[0])
        assert third == limit  # somebody has parted there now
        audit(engine, oracle)
        oracle.check_all(engine.run())


def b043_every_offset(model: Path, oracle: Oracle) -> None:
    """Whatever a prompt shares with another, and however its chunks fall: as from nothing."""
    prompt = make_prompts([26])[0]
    for chunk in (3, 8, 64):
        engine = cached(model, chunk=chunk)
        ask(engine, "first", prompt)
        for shared in range(1, 26):
            own = make_prompts([5], seed=300 + shared)[0]
            ask(engine, f"r{shared}", prompt[:shared] + own, 2)
        assert counters(engine)["prefix_num_hits"] > 15
        audit(engine, oracle)
        oracle.check_all(engine.run())


def together_they_compute_it_once(model: Path, oracle: Oracle) -> None:
    """32 requests that arrive together and share a beginning: it is computed once, however chunks fall."""
    shared = make_prompts([40], seed=1)[0]
    for chunk, delay in ((16, 0), (128, 0), (128, 1)):
        engine = cached(model, chunk=chunk, delay=delay, max_num_seqs=32, memory="4MiB")
        for index, own in enumerate(make_prompts([3] * 32, seed=2)):
            engine.add(f"r{index}", shared + own, greedy(2))
        oracle.check_all(engine.run())
        assert num_computed(engine) == 40 + 32 * 3 + 32
        assert counters(engine)["prefix_num_waits"] >= 31
        assert counters(engine)["prefix_num_hit_tokens"] == 31 * 40
