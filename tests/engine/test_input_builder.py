"""Steps as arrays, against what each array means."""

from __future__ import annotations

import numpy as np
import pytest

from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.step import ScheduledSequence, ScheduledStep, UnitCopies, UnitCopy
from hybridserve.engine.input_builder import InputBuilder
from hybridserve.engine.sampling_input import BANNED, Drawing


def make_request(request_id: str, num_prompt: int, output: tuple[int, ...] = (), **params: object) -> Request:
    request = Request(request_id, list(range(100, 100 + num_prompt)), SamplingParams(**params))
    request.output_ids.extend(output)
    return request


def make_step(*sequences: ScheduledSequence, **more: object) -> ScheduledStep:
    return ScheduledStep(0, sequences, **more)


def test_flat_arrays() -> None:
    decode, prefill = make_request("d", 5, (7, 8)), make_request("p", 9)
    step = make_step(
        ScheduledSequence("d", 6, 1, ("d",), True, (3, 4), 9),
        ScheduledSequence("p", 2, 4, (), True, (11, 12), 5),
        state_copies=(UnitCopy(1, 2),),
    )
    built = InputBuilder(block_size=4, seed=0).build(step, {"d": decode, "p": prefill})
    got = built.input
    assert got.input_ids.tolist() == [8, 102, 103, 104, 105]
    assert got.positions.tolist() == [6, 2, 3, 4, 5]
    assert got.slot_mapping.tolist() == [4 * 4 + 2, 11 * 4 + 2, 11 * 4 + 3, 12 * 4, 12 * 4 + 1]
    assert got.query_start.tolist() == [0, 1, 5]
    assert got.seq_lens.tolist() == [7, 6]
    assert got.block_table.tolist() == [[3, 4], [11, 12]]
    assert got.state_slots.tolist() == [9, 5]
    assert got.has_state.tolist() == [True, True]
    assert got.state_copies.tolist() == [[1, 2]]
    assert got.block_copies.shape == (0, 2)
    assert got.pending.shape == (0, 2)
    assert built.sample_ids == ["d"]
    assert got.sampling is not None
    assert got.sampling.rows.tolist() == [0]


def test_a_model_without_blocks() -> None:
    step = make_step(ScheduledSequence("d", 6, 1, ("d",), True, (), 9))
    got = InputBuilder(block_size=4, seed=0).build(step, {"d": make_request("d", 5, (7, 8))}).input
    assert got.block_table.shape == (1, 0)
    assert got.slot_mapping.tolist() == [0]


def test_padding_lives_in_the_null_units() -> None:
    step = make_step(ScheduledSequence("d", 6, 1, ("d",), True, (3, 4), 9))
    got = (
        InputBuilder(block_size=4, seed=0, buckets=(2, 4))
        .build(step, {"d": make_request("d", 5, (7, 8))})
        .input
    )
    assert got.query_start.tolist() == [0, 1, 2]
    assert got.state_slots.tolist() == [9, 0]
    assert got.has_state.tolist() == [True, False]
    assert got.block_table.tolist() == [[3, 4], [0, 0]]
    assert got.slot_mapping.tolist() == [18, 0]
    assert got.seq_lens.tolist() == [7, 1]


def test_a_token_that_is_not_known_yet_names_its_row() -> None:
    builder = InputBuilder(block_size=4, seed=0)
    a, b = make_request("a", 3), make_request("b", 3)
    requests = {"a": a, "b": b}
    prefills = [
        ScheduledSequence(name, 0, 3, (name,), False, (block,), block) for name, block in (("a", 1), ("b", 2))
    ]
    builder.build(make_step(*prefills), requests)
    decodes = [
        ScheduledSequence(name, 3, 1, (name,), True, (block,), block) for name, block in (("b", 2), ("a", 1))
    ]
    got = builder.build(make_step(*decodes), requests).input
    assert got.pending.tolist() == [[0, 1], [1, 0]]


def test_block_table_follows_a_request_that_starts_again_elsewhere() -> None:
    builder = InputBuilder(block_size=4, seed=0)
    request = make_request("r", 12)
    builder.build(make_step(ScheduledSequence("r", 0, 8, (), False, (1, 2), 1)), {"r": request})
    step = ScheduledStep(1, (ScheduledSequence("r", 0, 12, ("r",), False, (7, 8, 9), 4),), finished=("r",))
    assert builder.build(step, {"r": request}).input.block_table.tolist() == [[7, 8, 9]]


def test_a_request_that_is_back_with_fewer_blocks_leaves_none_behind() -> None:
    """Preempted and admitted again for the next step, beside one whose row stays."""
    builder = InputBuilder(block_size=4, seed=0)
    requests = {name: make_request(name, 12) for name in "ab"}
    b = ScheduledSequence("b", 0, 12, ("b",), False, (4, 5, 6), 2)
    builder.build(make_step(ScheduledSequence("a", 0, 12, ("a",), False, (1, 2, 3), 1), b), requests)
    back = ScheduledStep(1, (ScheduledSequence("a", 0, 4, (), False, (7,), 3), b), finished=("a",))
    assert builder.build(back, requests).input.block_table.tolist() == [[7, 0, 0], [4, 5, 6]]


def test_rows_of_a_moved_request_are_written_anew() -> None:
    """Blocks and slot have other numbers, no request has come or gone, and no row has grown."""
    builder = InputBuilder(block_size=4, seed=0)
    requests = {name: make_request(name, 6, (7, 8, 9)) for name in "ab"}

    def step(number: int, blocks: tuple[int, ...], slot: int, **more: object) -> ScheduledStep:
        start = 5 + number
        a = ScheduledSequence("a", start, 1, ("a",), True, blocks, slot)
        b = ScheduledSequence("b", start, 1, ("b",), True, (3, 4), 2)
        return ScheduledStep(number, (a, b), **more)

    builder.build(step(0, (1, 2), 1), requests)
    moves = UnitCopies((UnitCopy(1, 9), UnitCopy(2, 8)), (UnitCopy(1, 6),))
    got = builder.build(step(1, (9, 8), 6, moves=moves, moved=("a",)), requests).input
    assert got.block_table.tolist() == [[9, 8], [3, 4]]
    assert got.slot_mapping.tolist() == [8 * 4 + 2, 4 * 4 + 2]
    assert got.state_slots.tolist() == [6, 2]
    assert got.block_moves.tolist() == [[1, 9], [2, 8]]
    assert got.state_moves.tolist() == [[1, 6]]
    after = builder.build(step(2, (9, 8), 6), requests).input
    assert after.block_table.tolist() == [[9, 8], [3, 4]]
    assert after.block_moves.shape == (0, 2)


def test_swaps_are_told_apart() -> None:
    sequence = ScheduledSequence("d", 6, 1, ("d",), True, (3, 4), 9)
    out = UnitCopies((UnitCopy(1, 2),), (UnitCopy(3, 4),))
    back = UnitCopies((UnitCopy(5, 6), UnitCopy(7, 8)), (UnitCopy(9, 10),))
    step = make_step(sequence, swaps_out=out, swaps_in=back)
    got = InputBuilder(block_size=4, seed=0).build(step, {"d": make_request("d", 5, (7, 8))}).input
    assert got.block_swaps_out.tolist() == [[1, 2]]
    assert got.state_swaps_out.tolist() == [[3, 4]]
    assert got.block_swaps_in.tolist() == [[5, 6], [7, 8]]
    assert got.state_swaps_in.tolist() == [[9, 10]]


def test_what_is_kept_of_those_who_draw_is_of_them() -> None:
    """Another request may have the id of one that ended; the same ones may come in another order."""

    def columns(*requests: Request) -> tuple[list[float], list[int] | None, list[str], list[float] | None]:
        sequences = [
            ScheduledSequence(r.id, 0, r.num_known, (r.id,), False, (i,), i)
            for i, r in enumerate(requests, start=1)
        ]
        built = builder.build(make_step(*sequences), {r.id: r for r in requests})
        sampling = built.input.sampling
        assert sampling is not None
        top_k = None if sampling.top_k is None else sampling.top_k.tolist()
        bias = None if sampling.bias is None else sampling.bias[2].tolist()
        return sampling.temperature.tolist(), top_k, built.sample_ids, bias

    builder = InputBuilder(block_size=4, seed=3)
    a, b = make_request("a", 3, temperature=0.5), make_request("b", 3, temperature=0.25, top_k=4)
    assert columns(a, b) == ([0.5, 0.25], [0, 4], ["a", "b"], None)
    assert columns(a, b) == ([0.5, 0.25], [0, 4], ["a", "b"], None)
    assert columns(b, a) == ([0.25, 0.5], [4, 0], ["b", "a"], None)
    assert columns(a) == ([0.5], None, ["a"], None)
    again = make_request("a", 3, temperature=2.0, logit_bias={5: 1.5})
    assert columns(again) == ([2.0], None, ["a"], [1.5])


def test_draws_depend_on_seed_continuation_and_position_alone() -> None:
    def uniform(builder: InputBuilder, *requests: Request) -> list[float]:
        sequences = [
            ScheduledSequence(r.id, 0, r.num_known, (r.id,), False, (i, i + 20, i + 40), i)
            for i, r in enumerate(requests, start=1)
        ]
        sampling = builder.build(make_step(*sequences), {r.id: r for r in requests}).input.sampling
        assert sampling is not None
        return sampling.uniform.tolist()

    builder = InputBuilder(block_size=4, seed=3)
    seeded = make_request("r", 3, seed=11)
    alone = uniform(builder, seeded)
    assert uniform(builder, make_request("other", 9), seeded)[1] == alone[0]
    assert uniform(InputBuilder(block_size=16, seed=99), seeded) == alone
    later = make_request("r", 3, (5,), seed=11)
    sibling = make_request("r#1", 3, seed=11)
    sibling.index = 1
    unseeded = make_request("u", 3)
    other = make_request("v", 3)
    other.arrival_seq = 1
    values = [
        alone[0],
        *uniform(builder, later),
        *uniform(builder, sibling),
        *uniform(builder, unseeded, other),
    ]
    assert len(set(values)) == len(values)


def test_draws_are_uniform() -> None:
    drawing = Drawing.of([make_request("r", 3, seed=seed) for seed in range(100)], 0)
    drawn = np.concatenate([drawing.uniform(np.full(100, position)) for position in range(50)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    histogram = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert abs(histogram - 250).max() < 5 * 250**0.5


def test_bans_last_until_min_tokens() -> None:
    builder = InputBuilder(block_size=4, seed=0, eos_token_ids=(2,))
    params = {"min_tokens": 2, "max_tokens": 5, "stop_token_ids": (9,), "logit_bias": {4: -1.5}}
    for output, expected in (((), {2, 4, 9}), ((5,), {2, 4, 9}), ((5, 6), {4})):
        request = make_request("r", 3, output, **params)
        step = make_step(ScheduledSequence("r", 0, request.num_known, ("r",), False, (1, 2), 1))
        sampling = builder.build(step, {"r": request}).input.sampling
        assert sampling is not None
        assert sampling.bias is not None
        values = dict(zip(sampling.bias[1].tolist(), sampling.bias[2].tolist(), strict=True))
        assert values.keys() == expected
        assert values[4] == -1.5
        assert all(value == pytest.approx(BANNED) for token, value in values.items() if token != 4)


def test_prompt_logprobs_are_asked_for_once() -> None:
    builder = InputBuilder(block_size=4, seed=0)
    request = make_request("r", 6, prompt_logprobs=2)
    spans = []
    for start, length in ((0, 4), (0, 4), (4, 2)):  # the second is a recomputation
        step = make_step(ScheduledSequence("r", start, length, (), start > 0, (1, 2), 1))
        built = builder.build(step, {"r": request})
        if built.input.prompt_logprobs is not None:
            spans.append(
                (built.input.prompt_logprobs.rows.tolist(), built.input.prompt_logprobs.targets.tolist())
            )
    assert spans == [([0, 1, 2, 3], [101, 102, 103, 104]), ([0], [105])]
