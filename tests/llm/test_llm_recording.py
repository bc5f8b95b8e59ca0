"""Engines of one process record decode steps, each its own, while the others run."""

from __future__ import annotations

import threading

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.engine import graphs
from hybridserve.kernels import native

PROMPTS = ("The people of the", "The king", "In the year", "And it came")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def engine(graphs: str, dtype: str) -> LLM:
    return LLM("demo", memory_bytes="32MiB", check_integrity=True, dtype=dtype, kernels={"graphs": graphs})


def test_two_engines_in_two_threads() -> None:
    """Made there too, so that one loads while the other records: both have the tokens of engines that do
    not record."""
    dtypes = ("float32", "bfloat16")
    expected = {
        dtype: [each.outputs[0].token_ids for each in engine("never", dtype).generate(PROMPTS, PARAMS)]
        for dtype in dtypes
    }
    seen: dict[str, list[list[int]]] = {}
    num_recorded: dict[str, int] = {}

    def serve(dtype: str) -> None:
        llm = engine("auto", dtype)
        for _ in range(3):
            outputs = llm.generate(PROMPTS, PARAMS)
            seen.setdefault(dtype, []).extend(each.outputs[0].token_ids for each in outputs)
        num_recorded[dtype] = len(llm._core.executor.worker.runner.graphs._graphs)

    threads = [threading.Thread(target=serve, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dtype in dtypes:
        assert seen[dtype] == 3 * expected[dtype]
        assert num_recorded[dtype] or any(isinstance(each, str) for each in native._known().values())


def test_as_many_recordings_as_may_be_are_kept_the_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if any(isinstance(each, str) for each in native._known().values()):
        pytest.skip("no library, nothing is recorded")
    monkeypatch.setattr(graphs, "MOST_ON_DEMAND", 2)
    monkeypatch.setattr(graphs, "SEEN_BEFORE", 1)
    llm = engine("auto", "float32")
    expected = [each.outputs[0].token_ids for each in engine("never", "float32").generate(PROMPTS, PARAMS)]

    def sizes_after(num_seqs: int) -> list[int]:
        outputs = llm.generate(PROMPTS[:num_seqs], PARAMS)
        assert [each.outputs[0].token_ids for each in outputs] == expected[:num_seqs]
        return [key.size for key in llm._core.executor.worker.runner.graphs._graphs]

    assert sizes_after(1) == [1]
    assert sizes_after(2) == [1, 2]
    assert sizes_after(1) == [2, 1]
    assert sizes_after(3) == [1, 3]
    assert sizes_after(2) == [3, 2]
