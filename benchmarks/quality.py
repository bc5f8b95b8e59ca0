"""What a format of the weights costs in quality: a model's predictions on a text, against those of bfloat16.

    python benchmarks/quality.py --model demo --text tests/data/heldout.txt --json results.json

Perplexity; the divergence KL(bf16 || format), in nats a token; how often the most likely token is the same.
All on the engine's default path, a window of the text at a time.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WINDOW = 1024

CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, exact": {"kernels.gemm": "exact"},
    "int8 experts": {"quantization": {"format": "int8", "targets": "experts"}},
    "int8 mlp": {"quantization": {"format": "int8", "targets": "mlp"}},
    "int8": {"quantization": {"format": "int8"}},
    "int8, exact": {"quantization": {"format": "int8"}, "kernels.gemm": "exact"},
    "int8, also x_proj and dt_proj": {
        "quantization": {"format": "int8", "targets": ["all", "x_proj", "dt_proj"]}
    },
    "int8-w8a8": {"quantization": {"format": "int8-w8a8"}},
    "fp8": {"quantization": {"format": "fp8"}},
    "bnb-int8": {"quantization": {"format": "bnb-int8"}},
    "bnb-nf4": {"quantization": {"format": "bnb-nf4"}},
}
"""Name -> options of LLM; the first is what the others are held against."""


@dataclass(slots=True)
class Quality:
    """Sums over predicted tokens."""

    num_tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    weight_bytes: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    def add(self, logits: torch.Tensor, base: torch.Tensor, targets: torch.Tensor) -> None:
        """logits of a format and of the base [T, V], and the tokens that come next [T]."""
        mine, theirs = logits.log_softmax(-1), base.log_softmax(-1)
        self.num_tokens += len(targets)
        self.nll -= float(mine.gather(1, targets[:, None]).sum())
        self.kl += float((theirs.exp() * (theirs - mine)).sum())
        self.agreed += int((mine.argmax(-1) == theirs.argmax(-1)).sum())


class Predictions:
    """The logits that an engine computes for a prompt."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.llm = LLM(model, memory_bytes="256MiB", max_model_len=2 * WINDOW, **options)
        self._seen: list[torch.Tensor] = []
        network = self.llm._core.executor.worker.runner.model  # type: ignore[attr-defined]
        plain = network.logits

        def recorded(*arguments: Any) -> torch.Tensor:
            logits: torch.Tensor = plain(*arguments)
            self._seen.append(logits.clone())
            return logits

        network.logits = recorded

    def of(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens - 1, V]: what comes after each but the last."""
        self._seen.clear()
        self.llm.generate([list(ids)], SamplingParams(max_tokens=0, prompt_logprobs=0), progress=False)
        return torch.cat(self._seen)[: len(ids) - 1]


def windows(llm: LLM, text: str, size: int) -> Iterator[list[int]]:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    first, rest = ids[0], ids[1:]
    for start in range(0, len(rest) - 1, size):
        yield [first, *rest[start : start + size]]


def measure(
    model: str, text: str, cases: Mapping[str, Mapping[str, Any]], window: int = WINDOW
) -> dict[str, Quality]:
    engines = {name: Predictions(model, options) for name, options in cases.items()}
    results = {name: Quality(weight_bytes=engine.llm.plan.weight_bytes) for name, engine in engines.items()}
    base = next(iter(engines.values()))
    for ids in windows(base.llm, text, window):
        targets = torch.tensor(ids[1:])
        expected = base.of(ids)
        for name, engine in engines.items():
            results[name].add(expected if engine is base else engine.of(ids), expected, targets)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=Path("tests/data/heldout.txt"))
    parser.add_argument("--cases", default="; ".join(CASES), help="names, separated by semicolons")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [next(iter(CASES)), *(name.strip() for name in args.cases.split(";"))]
    cases = {name: CASES[name] for name in names}
    results = measure(args.model, args.text.read_text(encoding="utf-8"), cases)
    base = next(iter(results.values()))
    print(f"{'':30} {'bytes':>10} {'perplexity':>10} {'change':>8} {'KL':>9} {'top-1':>7}")
    for name, found in results.items():
        print(
            f"{name:30} {found.weight_bytes:10,} {found.perplexity:10.3f} "
            f"{found.perplexity / base.perplexity - 1:+8.3%} {found.kl / found.num_tokens:9.6f} "
            f"{found.agreed / found.num_tokens:7.2%}"
        )
    if args.json:
        args.json.write_text(json.dumps({name: asdict(found) for name, found in results.items()}, indent=2))


if __name__ == "__main__":
    main()
