"""The whole engine with a seeded jamba-3b: decode and prefill tokens/s, time to the first token, with CUDA
graphs and without, what adapters cost, and the share of what the memory's bandwidth allows.

    python -m benchmarks.gpu.engine --weights int8 ...

A decode rate is the difference of two runs that differ in their outputs' length, so that neither prompts nor
starting count. Knows `LLM`; knows no kernel.
"""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import model, rates
from benchmarks.gpu.records import Recorder, device_of, part_arguments
from benchmarks.gpu.workload import DRY_PLAN, PLAN, Plan, rate
from hybridserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BFLOAT16 = "none"
"""The format of weights that are not quantized."""

PHASES = ("schedule", "build", "forward", "sample", "update")

LEAST_SECONDS = 4.0
"""That a measurement may take."""

START_SECONDS = 20.0
"""That an engine may need to load its weights and to capture graphs."""


def main() -> int:
    parser = part_arguments(__doc__)
    parser.add_argument("--weights", choices=(BFLOAT16, "int8"), required=True)
    arguments = parser.parse_args()
    recorder = Recorder(arguments.records, arguments.seconds)
    plan = DRY_PLAN if arguments.dry else PLAN
    options = plan.options | {
        "device": device_of(arguments.dry),
        "quantization": {"format": arguments.weights},
        "cache": {"prefix_caching": False, "host_swap_bytes": 0},
    }
    start = time.perf_counter()
    path = model.build(arguments.work, dry=arguments.dry)
    recorder.add("model", name=model.NAME, seconds=round(time.perf_counter() - start, 1))
    with_graphs, without = graphs(dry=arguments.dry)
    base(recorder, plan, path, options | with_graphs, arguments.work)
    if arguments.weights == BFLOAT16:
        adapters(recorder, plan, path, options | with_graphs, arguments.work)
        base(recorder, plan, path, options | without, arguments.work)
    return recorder.exit_status()


def graphs(*, dry: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options with CUDA graphs, which a CPU has none of, and without."""
    with_graphs, without = (
        {"kernels": {"graphs": value}} for value in ("auto" if dry else "always", "never")
    )
    return with_graphs, without


def base(recorder: Recorder, plan: Plan, path: Path, options: dict[str, Any], work: Path) -> None:
    way = options["kernels"]["graphs"]
    with recorder.piece("base", START_SECONDS, graphs=way) as found:
        if found is None:
            return
        with started(path, options, found) as llm:
            device = rates.load(work)
            for batch in plan.batches:
                with recorder.piece("decode", LEAST_SECONDS, batch=batch, graphs=way) as decoded:
                    if decoded is not None:
                        decoded |= decode(llm, plan, batch)
                        decoded |= roofline(llm, plan, batch, decoded["tokens_per_second"], device)
            for length in plan.prefills:
                with recorder.piece("prefill", LEAST_SECONDS, tokens=length, graphs=way) as filled:
                    if filled is not None:
                        filled |= prefill(llm, length)


def started(path: Path, options: dict[str, Any], found: dict[str, Any]) -> LLM:
    """An engine that has compiled what it needs; what it is, and how long that took."""
    start = time.perf_counter()
    llm = LLM(path, **options)
    found["load_seconds"] = round(time.perf_counter() - start, 1)
    generate(llm, [[5] * 24, [6] * 5], 3)
    found["start_seconds"] = round(time.perf_counter() - start, 1)
    found["backends"] = {operator: choice.name for operator, choice in llm.plan.backends.items()}
    return llm


def generate(
    llm: LLM, prompts: list[list[int]], count: int, names: Sequence[str | None] | None = None
) -> float:
    """Seconds. RuntimeError if there is not what was asked for."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, adapter=names, progress=False)
    seconds = time.perf_counter() - start
    if any(len(output.outputs[0].token_ids) != count for output in outputs):
        raise RuntimeError("the engine did not generate what it was asked for")
    return seconds


def random_prompts(llm: LLM, batch: int, length: int) -> list[list[int]]:
    rng = random.Random(length)
    return [[rng.randrange(3, llm.plan.vocab_size) for _ in range(length)] for _ in range(batch)]


def decode(llm: LLM, plan: Plan, batch: int, names: Sequence[str | None] | None = None) -> dict[str, Any]:
    prompts = random_prompts(llm, batch, plan.prompt)
    short, long = plan.decoded
    generate(llm, prompts, short, names)  # tiles of this size are compiled, adapters are there
    before_short = generate(llm, prompts, short, names)
    before = llm.stats()
    seconds = generate(llm, prompts, long, names)
    after = llm.stats()
    steps = seconds - before_short
    return {
        "tokens_per_second": rate(batch * (long - short), steps),
        "step_ms": 1000 * steps / (long - short),
        "phases": {phase: after[f"{phase}_seconds"] - before[f"{phase}_seconds"] for phase in PHASES},
    }


def roofline(
    llm: LLM, plan: Plan, batch: int, reached: float | None, device: rates.Rates | None
) -> dict[str, Any]:
    """What of the device's bandwidth a decode step needs that moves every byte once; nothing to compare with
    where the device's was not measured."""
    if device is None or reached is None:
        return {"roofline_share": None}
    context = plan.prompt + sum(plan.decoded) // 2
    num_bytes = llm.plan.decode_step(batch, context).bytes_moved
    most = batch / (num_bytes / max(device["memory"], device["read"]))
    return {"bytes_moved": num_bytes, "roofline": most, "roofline_share": reached / most}


def prefill(llm: LLM, length: int) -> dict[str, Any]:
    """Of one prompt alone, whose first token comes when all of it is computed."""
    prompts = random_prompts(llm, 1, length)
    generate(llm, prompts, 1)
    seconds = min(generate(llm, prompts, 1) for _ in range(2))
    return {"tokens_per_second": length / seconds, "ttft_ms": 1000 * seconds}


def adapters(recorder: Recorder, plan: Plan, path: Path, options: dict[str, Any], work: Path) -> None:
    """What a decode step costs more where every sequence has one of 8 adapters, beside the base model in the
    same engine."""
    with recorder.piece("adapters", START_SECONDS, batch=plan.adapted) as found:
        if found is None:
            return
        paths = model.build_adapters(work, path)
        with started(path, options | {"lora": {"adapters": paths}}, found) as llm:
            found["base"] = decode(llm, plan, plan.adapted)["tokens_per_second"]
            names = [list(paths)[i % len(paths)] for i in range(plan.adapted)]
            found["mixed"] = decode(llm, plan, plan.adapted, names)["tokens_per_second"]
            if found["base"] and found["mixed"]:
                found["share"] = found["mixed"] / found["base"]


if __name__ == "__main__":
    sys.exit(main())
