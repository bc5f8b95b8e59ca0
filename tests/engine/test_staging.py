"""What steps put reaches the device, in one copy, however late the device does what it was told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve import LLM, SamplingParams
from hybridserve.engine.device_queue import CPUQueue, DeviceQueue, Mark
from hybridserve.engine.staging import ALIGNMENT, NoStaging, PinnedStaging

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (np.int64, np.int32, np.float32, np.float64, np.bool_, np.uint8)


class LateQueue(DeviceQueue):
    """A device that does nothing until somebody waits for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.todo: list[Callable[[], object]] = []
        self.num_waits = 0

    def mark(self) -> Mark:
        return _Place(self, len(self.todo))

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Place(Mark):
    def __init__(self, queue: LateQueue, num_before: int) -> None:
        self.queue = queue
        self.num_before = num_before

    def wait(self) -> None:
        self.queue.num_waits += 1
        for index in range(self.num_before):
            work, self.queue.todo[index] = self.queue.todo[index], lambda: None
            work()

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0


class LateStaging(PinnedStaging):
    """Its copies are done when the device gets to them."""

    def flush(self) -> None:
        half = self._halves[self._turn]
        part = slice(half.sent, half.used)
        if half.sent < half.used:
            half.sent = half.used
            assert isinstance(self._queue, LateQueue)
            self._queue.todo.append(lambda: half.device[part].copy_(half.host[part]))
            half.done = self._queue.mark()


def arrays(seed: int, scale: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(3,), (0, 2), (5, 2), (1,), (7 * scale, 3), ()]
    return [rng.integers(0, 2, shape).astype(dtype) for shape, dtype in zip(shapes, DTYPES, strict=True)]


def assert_same(tensors: list[torch.Tensor], expected: list[np.ndarray]) -> None:
    for tensor, array in zip(tensors, expected, strict=True):
        assert tensor.dtype == torch.from_numpy(np.zeros(0, array.dtype)).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("num_bytes", [16, 64, 1 << 12])
def test_steps_find_what_they_put(num_bytes: int) -> None:
    """Also where a step does not fit into the buffers, or brings more than once; all of it aligned."""
    staging = PinnedStaging(CPUQueue(), num_bytes)
    for seed in range(6):
        staging.begin()
        first, more = arrays(seed, 1 + 10 * (seed % 2)), arrays(seed + 100)
        tensors = [staging.put(array) for array in first]
        staging.flush()
        late = [staging.send(array) for array in more]
        assert_same([*tensors, *late], [*first, *more])
        assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors if tensor.numel())


def test_rows_of_another_order_arrive() -> None:
    for staging in (NoStaging(), PinnedStaging(CPUQueue())):
        staging.begin()
        pairs = np.arange(8).reshape(2, 4).T
        tensor = staging.put(pairs)
        staging.flush()
        np.testing.assert_array_equal(tensor.numpy(), pairs)


def test_the_next_step_is_put_while_one_waits() -> None:
    """With two steps that have not run nothing is waited for, and nothing of the first is overwritten; the
    third waits for the first."""
    queue = LateQueue()
    staging = LateStaging(queue)
    kept = []
    for seed in range(5):
        staging.begin()
        assert queue.num_waits == max(0, seed - 1)
        mine = arrays(seed)
        tensors = [staging.put(array) for array in mine]
        staging.flush()
        queue.todo.append(lambda tensors=tensors, mine=mine: assert_same(tensors, mine))
        kept.append(tensors)
    queue.mark().wait()


def test_a_buffer_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Place, "wait", lambda self: None)
    queue = LateQueue()
    staging = LateStaging(queue)
    for seed in range(4):
        staging.begin()
        mine = arrays(seed)
        tensors = [staging.put(array) for array in mine]
        staging.flush()
        queue.todo.append(lambda tensors=tensors, mine=mine: assert_same(tensors, mine))

    def run() -> None:
        for work in queue.todo:
            work()

    with pytest.raises(AssertionError):
        run()


def test_an_engine_whose_arrays_are_staged_two_steps_in_flight() -> None:
    """As on a GPU: everything goes through the buffers, and a step is submitted before the one before it was
    collected."""
    prompts = ["The people of the", "It", "In the year", "A"]
    params = [
        SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=1, top_p=0.9),
        SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=1, repetition_penalty=1.2),
        SamplingParams(max_tokens=3, temperature=0, logit_bias={5: 2.0}),
        SamplingParams(max_tokens=7, temperature=1, seed=1, allowed_token_ids=list(range(200)), n=2),
    ]
    options = {"memory_bytes": "16MiB", "max_model_len": 64, "max_num_batched_tokens": 8}
    answers = []
    for num_in_flight in (1, 2):
        with LLM("demo", check_integrity=True, **options) as llm:
            executor = llm._core.executor
            executor.max_in_flight = num_in_flight
            runner = executor.worker.runner
            if num_in_flight == 2:
                runner._staging = PinnedStaging(runner._queue, 256)
            answers.append(llm.generate(prompts, params))
    for one, two in zip(*answers, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in two.outputs]
        assert [each.logprobs for each in one.outputs] == [each.logprobs for each in two.outputs]
        assert one.prompt_logprobs == two.prompt_logprobs
