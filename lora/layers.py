"""Lays an adapter out for one rank: cut, cast and packed, and put into a slot of the model's tables.

Knows modules and this rank's share of them; knows no file, and not which requests use a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridserve.kernels.lora.interface import ALIGNMENT, LoraPair
from hybridserve.lora.loader import no_pause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hybridserve.distributed.tp import TPGroup
    from hybridserve.kernels.lora.interface import LoraTable
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter, ModuleDelta

NORM_ROWS = 256
"""Rows of a weight of which DoRA's norm is computed at a time."""


@dataclass(slots=True, eq=False)
class PlacedAdapter:
    """One rank's part of an adapter, on the device. `buffers` own all of it."""

    identity: str
    pairs: list[tuple[LoraTable, int, tuple[LoraPair, ...]]]  # table, group, what goes there
    num_bytes: int
    buffers: tuple[torch.Tensor, ...]

    def install(self, slot: int) -> None:
        """Put it into a slot that is empty. Raises RuntimeError if it isn't."""
        for table, group, pairs in self.pairs:
            if table.pairs(slot, group):
                raise RuntimeError(f"adapter slot {slot} still holds something of another adapter")
            table.put(slot, pairs, group)

    def poison(self) -> None:
        """Fill it with NaN, so that whoever still reads it is found out."""
        for buffer in self.buffers:
            buffer.fill_(torch.nan)


def remove(slot: int, tables: Iterable[LoraTable]) -> None:
    """Empty a slot, everywhere: the next adapter may leave alone what this one changed."""
    for table in tables:
        table.clear(slot)


def device_bytes(adapter: Adapter, modules: Mapping[str, AdaptableModule], dtype: torch.dtype) -> int:
    """What `place_adapter` will allocate, by the adapter's true ranks and modules: of the ranks whose modules
    these are, on the one where it is most."""
    homes: dict[tuple[int, int | None], dict[str, AdaptableModule]] = {}
    for name, module in modules.items():
        homes.setdefault((module.stage, module.rank), {})[name] = module
    sizes = {}
    for home, offered in homes.items():
        space = _Space()
        _plan(adapter, offered, dtype, space)
        sizes[home] = space.num_bytes
    on_every_rank = {stage: size for (stage, rank), size in sizes.items() if rank is None}
    return max(
        (
            size if rank is None else on_every_rank.get(stage, 0) + size
            for (stage, rank), size in sizes.items()
        ),
        default=0,
    )


def place_adapter(
    adapter: Adapter,
    modules: Mapping[str, AdaptableModule],
    dtype: torch.dtype,
    device: torch.device,
    tp: TPGroup,
    pause: Callable[[], None] = no_pause,
) -> PlacedAdapter:
    """This rank's part of an adapter in the model's dtype, in memory of its own: of the modules that it has,
    for other ranks may have other layers or other experts. `pause` is called between one pair and the next.

    DoRA's factor goes into B and into the pairs' gain; for it the ranks of a group meet in one collective.

    Raises ValueError, naming the module, for what `check_adapter` would have refused.
    """
    space = _Space()
    planned = _plan(adapter, modules, dtype, space)
    host = space.allocate(pin_memory=device.type == "cuda")
    _fill(adapter, planned, host, _dora_factors(adapter, modules, device, tp), pause)
    buffers = {kind: buffer.to(device) for kind, buffer in host.items()}
    places: dict[tuple[int, int], tuple[LoraTable, list[LoraPair]]] = {}
    for pair in planned:
        table, group = pair.pieces[0].module.table, pair.pieces[0].module.group
        places.setdefault((id(table), group), (table, []))[1].append(pair.build(buffers))
    pairs = [(table, group, tuple(found)) for (_, group), (table, found) in places.items()]
    return PlacedAdapter(adapter.identity, pairs, space.num_bytes, tuple(buffers.values()))


def check_adapter(
    adapter: Adapter,
    modules: Mapping[str, AdaptableModule],
    dtype: torch.dtype,
    device: torch.device,
    tp: TPGroup,
    pause: Callable[[], None] = no_pause,
) -> None:
    """Do what `place_adapter` does, on the host alone, and throw the result away.

    Raises ValueError, naming the module, for DoRA where a row of the adapted weight is zero, and for values
    that are too large for the dtype.
    """
    space = _Space()
    planned = _plan(adapter, modules, dtype, space)
    factors = _dora_factors(adapter, modules, device, tp)
    _fill(adapter, planned, space.allocate(pin_memory=False), factors, pause)


def _fill(
    adapter: Adapter,
    planned: Iterable[_PlannedPair],
    host: Mapping[torch.dtype, torch.Tensor],
    factors: Mapping[str, Sequence[torch.Tensor]],
    pause: Callable[[], None],
) -> None:
    for pair in planned:
        pair.fill(host, factors)
        if not all(region.of(host).isfinite().all() for region in pair.regions):
            name = pair.pieces[0].module.name
            raise ValueError(f"{adapter.path}: what it adds to {name} is too large for {pair.A.dtype}")
        pause()


class _Region(NamedTuple):
    """Where a tensor lies in the flat buffer of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def of(self, buffers: Mapping[torch.dtype, torch.Tensor]) -> torch.Tensor:
        flat = buffers[self.dtype]
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


class _Space:
    """Regions one after the other, in one flat buffer a dtype."""

    def __init__(self) -> None:
        self._sizes: dict[torch.dtype, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(size * dtype.itemsize for dtype, size in self._sizes.items())

    def reserve(self, dtype: torch.dtype, *shape: int) -> _Region:
        start, unit = self._sizes.get(dtype, 0), ALIGNMENT // dtype.itemsize
        self._sizes[dtype] = start + -(-math.prod(shape) // unit) * unit
        return _Region(dtype, shape, start)

    def allocate(self, *, pin_memory: bool) -> dict[torch.dtype, torch.Tensor]:
        return {
            dtype: torch.zeros(size, dtype=dtype, pin_memory=pin_memory)
            for dtype, size in self._sizes.items()
        }


class _Piece(NamedTuple):
    """One part of a module's output on this rank, and what the adapter adds there."""

    module: AdaptableModule
    delta: ModuleDelta
    part: int  # index of one of `module.outputs`

    @property
    def source(self) -> slice:
        return self.module.outputs[self.part].source

    @property
    def start(self) -> int:
        return self.module.outputs[self.part].start

    @property
    def num_rows(self) -> int:
        return int(self.source.stop - self.source.start)

    @property
    def biased(self) -> bool:
        """Of summands only the first rank's has the bias: that of the first inputs."""
        return self.delta.bias is not None and (not self.module.partial or self.module.inputs.start == 0)

    def continues(self, other: _Piece) -> bool:
        """Whether one product with the other's A serves both: their columns adjoin, all else is the same."""
        mine, theirs = self.delta, other.delta
        return (
            self.start == other.start + other.num_rows
            and self.module.inputs == other.module.inputs
            and (mine.A is theirs.A or _same_memory(mine.A, theirs.A))
            and mine.scale == theirs.scale
            and self.biased == other.biased
            and (mine.magnitude is None) == (theirs.magnitude is None)
        )


@dataclass(slots=True)
class _PlannedPair:
    """A pair to be, and where its tensors go."""

    pieces: list[_Piece]
    A: _Region
    B: _Region
    bias: _Region | None
    gain: _Region | None

    @property
    def regions(self) -> list[_Region]:
        return [region for region in (self.A, self.B, self.bias, self.gain) if region is not None]

    def fill(
        self, host: Mapping[torch.dtype, torch.Tensor], factors: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        module, delta, _ = self.pieces[0]
        A = delta.A[:, module.inputs]
        self.A.of(host).copy_(A.T if module.kind == "embedding" else A)
        start = 0
        for module, delta, part in self.pieces:
            rows = module.outputs[part].source
            place = slice(start, start + rows.stop - rows.start)
            B = self.B.of(host)[:, place]
            if self.gain is None:
                B.copy_(delta.B[rows].T)
            else:
                factor = factors[module.name][part]
                B.copy_((delta.B[rows].float() * factor.unsqueeze(1)).T)
                torch.sub(factor, 1, out=self.gain.of(host)[place])
            if self.bias is not None and delta.bias is not None:
                torch.mul(delta.bias[rows].float(), delta.scale, out=self.bias.of(host)[place])
            start = place.stop

    def build(self, buffers: Mapping[torch.dtype, torch.Tensor]) -> LoraPair:
        bias, gain = (region and region.of(buffers) for region in (self.bias, self.gain))
        first = self.pieces[0]
        return LoraPair(self.A.of(buffers), self.B.of(buffers), first.delta.scale, first.start, bias, gain)


def _plan(
    adapter: Adapter, modules: Mapping[str, AdaptableModule], dtype: torch.dtype, space: _Space
) -> list[_PlannedPair]:
    """The pairs of an adapter, those of one place in the order of their columns."""
    places: dict[tuple[int, int], list[_Piece]] = {}
    for name, delta in sorted(adapter.deltas.items()):
        if name not in modules:
            continue
        module = modules[name]
        pieces = [_Piece(module, delta, part) for part in range(len(module.outputs))]
        places.setdefault((id(module.table), module.group), []).extend(pieces)
    planned = []
    for pieces in places.values():
        pieces.sort(key=lambda piece: piece.start)
        for run in _runs(piece for piece in pieces if piece.num_rows):
            planned.append(_plan_pair(run, dtype, space))
    return planned


def _runs(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    runs: list[list[_Piece]] = []
    for piece in pieces:
        if runs and piece.continues(runs[-1][-1]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _plan_pair(pieces: list[_Piece], dtype: torch.dtype, space: _Space) -> _PlannedPair:
    module, delta, _ = pieces[0]
    rank, inputs = delta.rank, module.inputs.stop - module.inputs.start
    num_rows = sum(piece.num_rows for piece in pieces)
    return _PlannedPair(
        pieces,
        A=space.reserve(dtype, *((inputs, rank) if module.kind == "embedding" else (rank, inputs))),
        B=space.reserve(dtype, rank, num_rows),
        bias=space.reserve(torch.float32, num_rows) if pieces[0].biased else None,
        gain=None if delta.magnitude is None else space.reserve(torch.float32, num_rows),
    )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _dora_factors(
    adapter: Adapter, modules: Mapping[str, AdaptableModule], device: torch.device, tp: TPGroup
) -> dict[str, list[torch.Tensor]]:
    """g = magnitude / |W + scale B A|, the norm over a row of the whole model (arXiv 2402.09353, section 4).

    By module, for each of its `outputs`: [rows] float32 on the host. Where the inputs are cut, the squares
    are summed over the ranks. ValueError for a norm of zero: peft would compute NaN.
    """
    squares: dict[str, torch.Tensor] = {}
    for name, delta in sorted(adapter.deltas.items()):
        if delta.magnitude is not None and name in modules:
            squares[name] = _row_squares(modules[name], delta, device)
    cut = [name for name in squares if modules[name].partial]
    if cut:
        sums = tp.all_reduce(torch.cat([squares[name] for name in cut]))
        parts = torch.split_with_sizes(sums, [len(squares[name]) for name in cut])
        squares.update(zip(cut, parts, strict=True))
    factors: dict[str, list[torch.Tensor]] = {}
    for name, values in squares.items():
        magnitude = adapter.deltas[name].magnitude
        assert magnitude is not None
        rows = [part.source for part in modules[name].outputs]
        norms = torch.split_with_sizes(values.sqrt().cpu(), [part.stop - part.start for part in rows])
        for part, norm in zip(rows, norms, strict=True):
            factor = magnitude[part].float() / norm
            wrong = (~factor.isfinite() | ~norm.isfinite()).nonzero()
            if len(wrong):
                row = int(wrong[0])
                raise ValueError(
                    f"{adapter.path}: lora_magnitude_vector of {name}: with the adapter, row "
                    f"{part.start + row} of the weight has the norm {norm[row].item():g}, so it can't be "
                    "scaled to a magnitude"
                )
            factors.setdefault(name, []).append(factor)
    return factors


def _row_squares(module: AdaptableModule, delta: ModuleDelta, device: torch.device) -> torch.Tensor:
    """Sums of squares of W + scale B A over this rank's inputs: [local rows] float32 on the device."""
    weight = module.base()
    A = delta.A[:, module.inputs].to(device, torch.float32)
    B = torch.cat([delta.B[part.source] for part in module.outputs]).to(device, torch.float32)
    chunks = zip(torch.split(weight, NORM_ROWS), torch.split(B, NORM_ROWS), strict=True)
    return torch.cat(
        [torch.addmm(rows.float(), part, A, alpha=delta.scale).square().sum(1) for rows, part in chunks]
    )
