"""How large the tiles of matrix products are: pure functions of shapes, so that a call always takes the same
path.

Knows shapes; knows no tensor and does not import Triton.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridserve.kernels.triton_support import cdiv, power_of_2

FEW_ROWS = 64
"""Up to here a product is bound by reading its weight, and outputs are too few to keep a GPU busy."""

PROGRAMS = 264
"""That keep any GPU busy: two for each of 132 multiprocessors."""

SPLIT_INPUTS = 1024
"""That a split has at least: fewer cost more to add up than they save."""


class Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int  # at once
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """As a kernel takes them."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.outputs,
            "BLOCK_K": self.inputs,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def tile_for(num_rows: int, element_bytes: int) -> Tile:
    """For products of `num_rows` rows of elements of so many bytes with a weight that all of them share.

    Few rows: narrow tiles, long runs of each output's inputs, and many stages of them in flight. Many: tiles
    that tensor cores can be kept busy with.
    """
    if num_rows <= FEW_ROWS:
        rows = power_of_2(num_rows, 16)
        return Tile(rows, 32, 128, 4, 4) if element_bytes <= 2 else Tile(rows, 32, 64, 4, 3)
    return Tile(128, 128, 64, 8, 3) if element_bytes <= 2 else Tile(64, 64, 32, 4, 3)


def num_splits(num_rows: int, num_outputs: int, num_inputs: int, tile: Tile) -> int:
    """Parts of the inputs that are summed side by side, where there would be too few programs otherwise."""
    if num_rows > FEW_ROWS:
        return 1
    return max(1, min(PROGRAMS // cdiv(num_outputs, tile.outputs), num_inputs // SPLIT_INPUTS))
