"""Structured outputs: what a JSON schema costs a batch, and how long one mask takes.

    python benchmarks/structured.py --json benchmarks/results/structured.json

The same prompts and numbers of tokens, with a schema, with a list of allowed tokens, and without either, in
turn; tokens/s are the median of the repeats. Masks are measured alone, on a text as it is written, for the
demo's tokenizer; with --vocabulary N for one of so many tokens, which is trained on the standard library.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from models import build

from hybridserve import LLM, SamplingParams, StructuredOutputs
from hybridserve.grammar.compiler import compile_matcher, load_tokenizer
from hybridserve.models.hub import resolve_model

ENDLESS = StructuredOutputs(
    json={
        "type": "array",
        "items": {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}},
        "minItems": 1000,
    }
)
"""No text of it is complete before the tokens are used up."""


def tokens_a_second(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if set(counts) != {params.max_tokens}:
        raise RuntimeError(f"not every request has {params.max_tokens} tokens")
    return sum(counts) / seconds


def mask_seconds(file: Path, num_tokens: int) -> list[float]:
    """Of each mask of a text that follows ENDLESS, drawn at random."""
    tokenizer = load_tokenizer(file)
    matcher = compile_matcher(tokenizer, ENDLESS)
    rng = random.Random(0)
    times = []
    for _ in range(num_tokens):
        start = time.perf_counter()
        mask = matcher.compute_bitmask()
        times.append(time.perf_counter() - start)
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little").nonzero()[0]
        matcher.consume_token(int(rng.choice(allowed)))
    return times


def trained(vocab_size: int) -> Path:
    """A byte-level tokenizer in the benchmarks' cache; made on first use."""
    import tokenizers

    file = build("jamba-tiny", "float32").parent / f"tokenizer-{vocab_size}.json"
    if not file.exists():
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "test", "tests"}  # differ from place to place, or are no text
        files = [path for path in library.glob("**/*.py") if left_out.isdisjoint(path.parts)]
        backend.train(sorted(map(str, files)), trainer)
        backend.save(str(file))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="jamba-100m")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, help="of the tokenizer whose masks are measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = resolve_model("demo")
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 4000) for _ in range(32)] for _ in range(args.requests)]
    common: dict[str, Any] = {"max_tokens": args.tokens, "seed": 1}
    kinds = {
        "free": SamplingParams(ignore_eos=True, **common),
        "list": SamplingParams(allowed_token_ids=tuple(range(10, 4000)), **common),
        "schema": SamplingParams(structured_outputs=ENDLESS, **common),
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    path = build(args.model, args.dtype)
    options = {"max_num_seqs": args.requests, "memory_bytes": "1GiB", "max_model_len": 1024}
    with LLM(path, tokenizer=str(tokenizer), **options) as llm:
        for params in kinds.values():
            tokens_a_second(llm, prompts[:2], params)
        for _ in range(args.repeats):
            for kind, params in kinds.items():
                speeds[kind].append(tokens_a_second(llm, prompts, params))
    medians = {kind: statistics.median(values) for kind, values in speeds.items()}
    print(f"{args.model} {args.dtype}, {args.requests} requests, {torch.get_num_threads()} threads")
    for kind, median in medians.items():
        print(f"{kind:8} {median:9.1f} tokens/s {median / medians['free']:6.1%}")
    file = trained(args.vocabulary) if args.vocabulary else tokenizer / "tokenizer.json"
    times = sorted(mask_seconds(file, 2000))
    p50, p99 = (times[len(times) * percent // 100] for percent in (50, 99))
    masks = {"mean": statistics.fmean(times), "p50": p50, "p99": p99}
    print("masks   ", ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in masks.items()))
    if args.json:
        results = {"tokens_a_second": speeds, "masks": {"vocabulary": args.vocabulary or 4096, **masks}}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        described = describe(args) | {"benchmark": "structured"} | results
        args.json.write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    main()
