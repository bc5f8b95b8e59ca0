"""Runs a workload through an engine, and through transformers' `generate`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from hybridserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from workloads import Workload

PHASES = ("schedule", "build", "forward", "sample", "update")
"""Of a step, as an engine's statistics have them."""

OPTIONS = {"max_num_seqs": 64, "memory_bytes": "1GiB", "max_model_len": 4096}
"""Of an engine that any workload fits."""

WARM_UP: Workload = [([1] * 32, 4)] * 2


def load_engine(path: Path, **options: Any) -> LLM:
    """An engine that any workload fits, warmed up."""
    llm = LLM(path, **OPTIONS, **options)
    run_engine(llm, WARM_UP)
    return llm


def run_engine(
    llm: LLM, workload: Workload, adapters: Sequence[str | None] | None = None
) -> tuple[float, dict[str, float]]:
    """Seconds of the whole run, and of each phase of its steps; `adapters` has one for each request."""
    prompts = [prompt for prompt, _ in workload]
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in workload]
    before = llm.stats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, adapter=adapters, progress=False)
    seconds = time.perf_counter() - start
    for output, (_, wanted) in zip(outputs, workload, strict=True):
        if len(output.outputs[0].token_ids) != wanted:
            raise RuntimeError("the engine did not generate what the workload asks for")
    after = llm.stats()
    return seconds, {phase: after[f"{phase}_seconds"] - before[f"{phase}_seconds"] for phase in PHASES}


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a directory, warmed up."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    run_transformers(model, WARM_UP)
    return model


def run_transformers(model: Any, workload: Workload) -> float:
    """Seconds of one static batch, padded on the left, to the longest output."""
    longest = max(len(prompt) for prompt, _ in workload)
    ids = torch.zeros(len(workload), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(workload):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    count = max(output for _, output in workload)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start
