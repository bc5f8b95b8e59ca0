"""What is generated end to end, by the engine and by transformers alike. Knows numbers; knows neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `decoded`: tokens of the shorter and the longer outputs."""

    batches: tuple[int, ...]
    prompt: int
    decoded: tuple[int, int]
    prefills: tuple[int, ...]
    adapted: int  # sequences of the batch that measures adapters
    options: dict[str, Any]  # of the engine


PLAN = Plan(
    batches=(1, 8, 64, 256),
    prompt=128,
    decoded=(16, 80),
    prefills=(128, 2048, 16383),
    adapted=64,
    options={"max_num_seqs": 256, "max_model_len": 16384, "memory_bytes": "24GiB"},
)

DRY_PLAN = Plan(
    batches=(1, 4),
    prompt=8,
    decoded=(2, 4),
    prefills=(8, 20),
    adapted=4,
    options={"max_num_seqs": 8, "max_model_len": 64, "memory_bytes": "32MiB"},
)


def rate(count: int, seconds: float) -> float | None:
    """None where the difference of two times is noise."""
    return count / seconds if seconds > 0 else None
