"""The seeded requests of the benchmarks. Prompts are token ids: 1 first, the rest in 300 .. 8191.

| | prompts | output tokens (greedy, end of sequence ignored) | reported |
|---|---|---|---|
| W1 | one of 64 tokens | 128 | output tokens/s |
| W2 | 16 at once, 32 to 256 tokens | 16 to 128 | output tokens/s of the whole run |
| W3 | one of 2,048 tokens | 1 | prompt tokens/s |
| W4 | 32 at once, 512 shared tokens and 16 of their own | 16 | output tokens/s |
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Workload = list[tuple[list[int], int]]
"""(prompt ids, number of output tokens) of each request."""


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 8192) for _ in range(count)]


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [1, *_ids(rng, count - 1)]


def w1(repeat: int) -> Workload:
    return [(_prompt(random.Random(1000 + repeat), 64), 128)]


def w2(repeat: int) -> Workload:
    lengths = random.Random(7)  # the same in every repeat; the tokens are not
    sizes = [(lengths.randint(32, 256), lengths.randint(16, 128)) for _ in range(16)]
    rng = random.Random(2000 + repeat)
    return [(_prompt(rng, prompt), output) for prompt, output in sizes]


def w3(repeat: int) -> Workload:
    return [(_prompt(random.Random(3000 + repeat), 2048), 1)]


def w4(repeat: int) -> Workload:
    rng = random.Random(4000 + repeat)
    shared = _prompt(rng, 512)
    return [(shared + _ids(rng, 16), 16) for _ in range(32)]


WORKLOADS: dict[str, Callable[[int], Workload]] = {"W1": w1, "W2": w2, "W3": w3, "W4": w4}


def num_scored(name: str, workload: Workload) -> int:
    """Tokens that a workload's rate counts: the prompt's for W3, the output's for the others."""
    return sum(len(prompt) if name == "W3" else output for prompt, output in workload)
