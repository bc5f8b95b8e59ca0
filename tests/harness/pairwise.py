"""Few cells of a matrix that still bring every pair of values together."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise(axes: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cells in which every pair of values of two axes stands together at least once."""
    rng = random.Random(seed)
    pairs = {
        (one, a, other, b)
        for one, other in itertools.combinations(axes, 2)
        for a in range(len(axes[one]))
        for b in range(len(axes[other]))
    }
    cells = []
    while pairs:
        best: tuple[int, dict[str, int]] = (-1, {})
        for _ in range(60):
            cell = {name: rng.randrange(len(values)) for name, values in axes.items()}
            covered = sum(
                (one, cell[one], other, cell[other]) in pairs
                for one, other in itertools.combinations(axes, 2)
            )
            best = max(best, (covered, cell), key=lambda found: found[0])
        cell = best[1]
        pairs -= {(one, cell[one], other, cell[other]) for one, other in itertools.combinations(axes, 2)}
        cells.append({name: axes[name][index] for name, index in cell.items()})
    return cells
