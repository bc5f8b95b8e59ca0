"""Steps and results as bytes: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.scheduler import Scheduler
from hybridserve.engine.input_builder import InputBuilder, PromptLogprobsInput, StepInput
from hybridserve.engine.job_thread import JobThread
from hybridserve.engine.model_runner import StepOutput
from hybridserve.engine.sampler import LogprobsOutput
from hybridserve.engine.sampling_input import PenaltyInput, SamplingInput
from hybridserve.engine.token_masks import AllowedInput
from hybridserve.engine.wire import WireError, decode_output, decode_step, encode_output, encode_step

counts = st.integers(0, 5)
ids = st.integers(-(2**63), 2**63 - 1)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, None where None is."""
    if isinstance(a, AllowedInput):
        return isinstance(b, AllowedInput) and same((a.rows, a.masks), (b.rows, b.masks))
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and (a == b or repr(a) == repr(b))


@st.composite
def steps(draw: st.DrawFn) -> StepInput:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def ints(*shape: int, dtype: str = "int64") -> np.ndarray:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)

    def floats(*shape: int, dtype: str = "float32") -> np.ndarray:
        return rng.choice([0.0, -0.0, 1.5, np.nan, -np.inf, 1e-40], shape).astype(dtype)

    def maybe(make: Any, *shape: int) -> Any:
        return make(*shape) if draw(st.booleans()) else None

    T, S, B, R, N, P = (draw(counts) for _ in range(6))
    sampling = None
    if draw(st.booleans()):
        sampling = SamplingInput(
            rows=ints(R),
            temperature=floats(R),
            uniform=floats(R, dtype="float64"),
            top_k=maybe(ints, R),
            top_p=maybe(floats, R),
            min_p=maybe(floats, R),
            num_logprobs=maybe(ints, R),
            bias=(ints(N), ints(N), floats(N)) if draw(st.booleans()) else None,
            penalties=PenaltyInput(ints(P), ints(P), floats(P), floats(R), floats(R), floats(R))
            if draw(st.booleans())
            else None,
            allowed=AllowedInput(ints(N), ints(N, B, dtype="int32")) if draw(st.booleans()) else None,
        )
    return StepInput(
        step_id=draw(ids),
        input_ids=ints(T),
        positions=ints(T),
        slot_mapping=ints(T),
        query_start=ints(S + 1),
        seq_lens=ints(S),
        block_table=ints(S, B, dtype="int32"),
        state_slots=ints(S),
        has_state=rng.integers(0, 2, S).astype(bool),
        adapter_slots=ints(S),
        adapter_start=ints(S),
        adapter_generations=ints(N, 2),
        pending=ints(R, 2),
        sampling=sampling,
        prompt_logprobs=PromptLogprobsInput(ints(P), ints(P), draw(counts)) if draw(st.booleans()) else None,
        state_copies=ints(P, 2),
        block_copies=ints(B, 2),
        state_saves=ints(B, 2),
        block_swaps_out=ints(N, 2),
        state_swaps_out=ints(P, 2),
        block_moves=ints(R, 2),
        state_moves=ints(T, 2),
        block_swaps_in=ints(S, 2),
        state_swaps_in=ints(B, 2),
    )


@st.composite
def outputs(draw: st.DrawFn) -> StepOutput:
    numbers = st.floats(allow_nan=False, allow_infinity=True, width=32)

    def scores() -> LogprobsOutput | None:
        if not draw(st.booleans()):
            return None
        num_rows, num_top = draw(counts), draw(counts)
        rows = st.lists(ids, min_size=num_rows, max_size=num_rows)
        tops = {"min_size": num_top, "max_size": num_top}
        return LogprobsOutput(
            rows=draw(rows),
            chosen=[draw(numbers) for _ in range(num_rows)],
            ranks=draw(rows),
            top_ids=[draw(st.lists(ids, **tops)) for _ in range(num_rows)],
            top_values=[draw(st.lists(numbers, **tops)) for _ in range(num_rows)],
        )

    return StepOutput(draw(ids), draw(st.lists(ids)), scores(), scores(), draw(numbers), draw(numbers))


@given(steps())
def test_a_step_comes_out_as_it_went_in(step: StepInput) -> None:
    encoded = encode_step(step)
    assert len(encoded) % 8 == 0
    decoded = decode_step(encoded)
    assert same(step, decoded)
    assert decoded.input_ids.flags.writeable  # a worker fills in tokens that were still pending


@given(outputs())
def test_a_result_comes_out_as_it_went_in(output: StepOutput) -> None:
    assert same(output, decode_output(encode_output(output)))


@given(steps(), st.data())
def test_broken_bytes_are_refused(step: StepInput, data: st.DataObject) -> None:
    """Cut off anywhere, or longer than it says. Bytes that were changed are refused or are another step, but
    nothing else happens."""
    encoded = encode_step(step)
    with pytest.raises(WireError):
        decode_step(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(WireError):
        decode_step(encoded + bytes(8))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        decode_step(encoded)


def a_step() -> StepInput:
    zeros = np.zeros(0, dtype=np.int64)
    return StepInput(
        step_id=7,
        input_ids=np.arange(3),
        positions=np.arange(3),
        slot_mapping=np.arange(3),
        query_start=np.array([0, 3]),
        seq_lens=np.array([3]),
        block_table=np.ones((1, 2), dtype=np.int32),
        state_slots=np.array([1]),
        has_state=np.array([False]),
        adapter_slots=np.array([0]),
        adapter_start=np.array([0]),
        adapter_generations=zeros.reshape(0, 2),
        pending=zeros.reshape(0, 2),
        sampling=None,
        prompt_logprobs=None,
        state_copies=zeros.reshape(0, 2),
        block_copies=zeros.reshape(0, 2),
        state_saves=zeros.reshape(0, 2),
        block_swaps_out=zeros.reshape(0, 2),
        state_swaps_out=zeros.reshape(0, 2),
        block_moves=zeros.reshape(0, 2),
        state_moves=zeros.reshape(0, 2),
        block_swaps_in=zeros.reshape(0, 2),
        state_swaps_in=zeros.reshape(0, 2),
    )


@pytest.mark.parametrize(
    ("column", "array", "message"),
    [
        ("positions", np.arange(4), r"positions: shape \(4,\), not 3 where there is 4"),
        ("query_start", np.array([0, 1, 3]), r"query_start: shape \(3,\), not 2 where there is 3"),
        ("block_table", np.ones((1, 2)), "block_table: float64, not int32"),
        ("block_table", np.ones(2, dtype=np.int32), "block_table: 1 axes, not 2"),
        ("has_state", None, "has_state: is missing"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(column: str, array: Any, message: str) -> None:
    encode_step(a_step())
    step = dataclasses.replace(a_step(), **{column: array})
    with pytest.raises(WireError, match=message):
        encode_step(step)


def test_what_is_another_message_is_refused() -> None:
    encoded = encode_step(a_step())
    with pytest.raises(WireError, match="a message of"):
        decode_output(encoded)
    encoded[4] += 1  # version
    with pytest.raises(WireError, match="a message of"):
        decode_step(encoded)
    with pytest.raises(WireError, match="too few for a header"):
        decode_step(bytearray(3))


def test_64_sequences_of_4096_tokens_are_less_than_96_kib() -> None:
    """Of Jamba Large on one of eight ranks: a step in which all of them decode."""
    kv = PagedKVSpec(num_kv_heads=1, head_dim=128, dtype="bfloat16")
    state = StateSpec((StateTensor("conv", (2048, 3), "bfloat16"), StateTensor("ssm", (2048, 16), "float32")))
    layout = CacheLayout.build([kv if i % 8 == 4 else state for i in range(72)], 16, 16 << 30)
    scheduler = Scheduler(layout, max_num_seqs=64, max_num_batched_tokens=65536 * 4, max_model_len=8192)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, ignore_eos=True)
    for index in range(64):
        scheduler.add(Request(f"r{index}", list(range(4096)), params))
    builder = InputBuilder(block_size=16, seed=0)
    for _ in range(3):
        step = scheduler.schedule()
        built = builder.build(step, scheduler.requests)
        sampled = {name: 7 for sequence in step.sequences for name in sequence.samples}
        scheduler.update(step.step_id, sampled)
    assert step.num_tokens == 64
    assert built.input.block_table.shape == (64, 257)
    assert len(encode_step(built.input)) < 96 << 10


def test_a_mask_that_is_being_computed_is_waited_for() -> None:
    sampling = SamplingInput(np.zeros(1, "i8"), np.zeros(1, "f4"), np.zeros(1))
    masks, computed = np.zeros((1, 2), dtype=np.int32), threading.Event()
    jobs = JobThread("test-masks")

    def compute() -> None:
        assert computed.wait(60)
        masks[:] = 7

    sampling.allowed = AllowedInput(np.zeros(1, "i8"), masks, jobs.submit(compute))
    step = a_step()
    step.sampling = sampling
    threading.Timer(0.05, computed.set).start()
    decoded = decode_step(encode_step(step))
    assert decoded.sampling is not None
    assert decoded.sampling.allowed is not None
    assert decoded.sampling.allowed.masks.tolist() == [[7, 7]]
    jobs.close(1)
