"""C kernels are called once a layer and operator, whatever the rows, and hold up no other Python thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve import LLM, SamplingParams
from hybridserve.kernels import native
from hybridserve.kernels.gemm.native import SOURCE, Native
from tests.harness.required import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


@pytest.fixture(scope="module")
def llm() -> LLM:
    reason = native.obstacle(SOURCE)
    need(reason is None, str(reason))
    with LLM("demo", **{"kernels.graphs": "never", "cache.memory_bytes": 1 << 27}) as engine:
        yield engine


def calls_of_a_step(llm: LLM, num_seqs: int) -> Counter[str]:
    """By function: of decode steps only, so many a step."""
    calls: Counter[str] = Counter()

    def note(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        calls[function.__name__] += 1

    def run(num_tokens: int) -> Counter[str]:
        calls.clear()
        with native.noting(note):
            params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
            llm.generate([f"{chr(97 + row)}" for row in range(num_seqs)], params)
        return Counter(calls)

    longer, shorter = run(5), run(4)
    return longer - shorter


def test_a_step_makes_as_many_calls_for_many_sequences_as_for_one(llm):
    """Neither rows nor experts are gone through in Python."""
    alone = calls_of_a_step(llm, 1)
    assert alone["gemm"] > 0
    assert alone["experts"] > 0
    assert calls_of_a_step(llm, 7) == alone


def test_a_call_leaves_the_interpreter_to_other_threads():
    need(native.obstacle(SOURCE) is None, "no library")
    backend = Native()
    x, weight = torch.randn(256, 2048), backend.pack(torch.randn(8192, 2048))
    backend.linear(x[:1], weight, None)
    spans, stamps = [], []

    def work() -> None:
        begin = time.perf_counter()
        backend.linear(x, weight, None)
        spans.append((begin, time.perf_counter()))

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        stamps.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    ((begin, end),) = spans
    inside = [stamp for stamp in stamps if begin + 0.2 * (end - begin) < stamp < end - 0.2 * (end - begin)]
    assert len(inside) >= 2, f"{end - begin:.3f} s"
