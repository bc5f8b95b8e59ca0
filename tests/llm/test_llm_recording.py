"""Engines of one process record decode steps, each its own, while the others run."""

from __future__ import annotations

import threading

from hybridserve import LLM, SamplingParams
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
