"""The name that somebody may have meant. Knows text only: asking it does not bring the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST_LIKENESS = 0.8
"""Of 0 to 1, as difflib counts: one wrong letter in five. With less, `moe` is what `model` should be."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is a slip of the keyboard away from, or None.

    Dotted names are compared part by part: two keys of one section are not alike for their section's sake.
    """
    parts = name.lower().split(".")

    def likeness(candidate: str) -> float:
        others = candidate.lower().split(".")
        if len(others) != len(parts):
            return 0.0
        return min(_likeness(*pair) for pair in zip(parts, others, strict=True))

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= LEAST_LIKENESS else None


def _likeness(one: str, other: str) -> float:
    """Of 0 to 1. Two neighbouring letters in the wrong order are one mistake, and not two."""
    from difflib import SequenceMatcher  # only a mistake needs it

    ratio = SequenceMatcher(None, one, other).ratio()
    swaps = (one[:i] + one[i + 1] + one[i] + one[i + 2 :] for i in range(len(one) - 1))
    return max(ratio, LEAST_LIKENESS) if other in swaps else ratio
