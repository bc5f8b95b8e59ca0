"""The same seeded model by transformers' `generate`, on the same device: what the engine's rates are held
against. Knows no engine."""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import model
from benchmarks.gpu.records import Recorder, device_of, part_arguments
from benchmarks.gpu.workload import DRY_PLAN, PLAN, rate

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.workload import Plan

BATCHES = (1, 8, 64)

LEAST_SECONDS = 8.0
"""That a measurement may take: it goes through a prompt token by token where mamba-ssm is missing."""


def main() -> int:
    arguments = part_arguments(__doc__).parse_args()
    recorder = Recorder(arguments.records, arguments.seconds)
    plan, device = (DRY_PLAN if arguments.dry else PLAN), device_of(arguments.dry)
    peer = None
    with recorder.piece("model", 0) as found:
        assert found is not None
        start = time.perf_counter()
        path = model.build(arguments.work, dry=arguments.dry)
        peer = load(path, device)
        found["load_seconds"] = round(time.perf_counter() - start, 1)
    if peer is None:
        return recorder.exit_status()
    generate(peer, 1, plan.prompt, 2)
    for batch in plan.batches if arguments.dry else BATCHES:
        with recorder.piece("decode", LEAST_SECONDS, batch=batch) as found:
            if found is not None:
                found |= decode(peer, plan, batch)
    for length in plan.prefills[:2]:
        with recorder.piece("prefill", LEAST_SECONDS, tokens=length) as found:
            if found is not None:
                seconds = generate(peer, 1, length, 1)
                found |= {"tokens_per_second": length / seconds, "ttft_ms": 1000 * seconds}
    return recorder.exit_status()


def load(path: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()


def decode(peer: Any, plan: Plan, batch: int) -> dict[str, Any]:
    """As the engine's: the difference of two lengths of outputs."""
    short, long = plan.decoded
    steps = generate(peer, batch, plan.prompt, long) - generate(peer, batch, plan.prompt, short)
    return {"tokens_per_second": rate(batch * (long - short), steps)}


def generate(peer: Any, batch: int, length: int, count: int) -> float:
    """Seconds, of prompts of one length: nothing is padded."""
    rng = random.Random(length)
    ids = [[rng.randrange(3, peer.config.vocab_size) for _ in range(length)] for _ in range(batch)]
    prompts = torch.tensor(ids, device=peer.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = peer.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    output.cpu()  # waits for the device
    if output.shape[1] != length + count:
        raise RuntimeError("transformers did not generate what it was asked for")
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
