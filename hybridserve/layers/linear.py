"""Projections: which rows of which checkpoint tensors make up a weight, and which of them this rank holds.

`OutputSlices` is the one description of a merged projection that loading, tensor parallelism and adapters
share. How a weight is stored and multiplied belongs to the weight format; what the rows mean, to the mixers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridserve.distributed.tp import TPGroup
from hybridserve.layers.lora import AdaptableModule, OutputPart
from hybridserve.quant.format import Shard, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext
    from hybridserve.layers.lora import LoraRegistry
    from hybridserve.quant.policy import Role

EVERYTHING = slice(None)


class OutputSlice(NamedTuple):
    """Rows of one checkpoint module. Slices of the same module take theirs one after the other."""

    module: str
    num_rows: int
    """Of the whole model."""
    unit: int = 1
    """Rows that stay together, such as those of a head."""
    replicated: bool = False
    """Whether several ranks may hold the same unit where there are fewer units than ranks."""


class Placement(NamedTuple):
    """Where this rank's rows of a slice come from in their module, and where they go in the merged weight."""

    module: str
    source: slice
    destination: slice


def cut(name: str, size: int, tp: TPGroup, *, unit: int = 1, replicated: bool = False) -> slice:
    """The part of an axis of `size` that this rank holds, in whole units.

    Raises ValueError, naming the axis, if the ranks can't have equal parts.
    """
    num_units = size // unit
    if num_units % tp.size == 0:
        local = num_units // tp.size
        return slice(tp.rank * local * unit, (tp.rank + 1) * local * unit)
    if replicated and tp.size % num_units == 0:
        first = tp.rank // (tp.size // num_units)
        return slice(first * unit, (first + 1) * unit)
    what = f"{size}" if unit == 1 else f"{num_units} units of {unit}"
    raise ValueError(f"{name}: {what} can't be divided evenly among {tp.size} tensor-parallel ranks")


class OutputSlices:
    """The output axis of a projection made of several slices, each cut alone over the ranks.

    placements: one for each slice, in order.
    sizes: local rows of each slice.
    module_rows: rows of each checkpoint module.
    """

    def __init__(self, name: str, slices: Sequence[OutputSlice], tp: TPGroup) -> None:
        self.module_rows: dict[str, int] = {}
        self.placements: list[Placement] = []
        self.sizes: list[int] = []
        end = 0
        for module, num_rows, unit, replicated in slices:
            offset = self.module_rows.get(module, 0)
            local = cut(f"{name}.{module}", num_rows, tp, unit=unit, replicated=replicated)
            size = local.stop - local.start
            source = slice(offset + local.start, offset + local.stop)
            self.placements.append(Placement(module, source, slice(end, end + size)))
            self.sizes.append(size)
            self.module_rows[module] = offset + num_rows
            end += size
        self.num_rows = end


class Projection:
    """This rank's part of one projection, without any collective: what an adapter wraps (D10)."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        outputs: OutputSlices,
        num_inputs: int,
        inputs: slice,
        *,
        bias: bool = False,
        keep_bias: bool = True,
        partial_sum: bool = False,
        role: Role = "mixer",
    ) -> None:
        """`name` is that of the module which holds the checkpoint modules of `outputs`; `inputs` is this
        rank's part of the input axis. With `keep_bias` off the checkpoint's bias is read and dropped: another
        rank adds it. `partial_sum`: the ranks' results will be summed."""
        self.format = context.formats.linear([f"{name}.{module}" for module in outputs.module_rows], role)
        if partial_sum:
            context.divide_inputs(num_inputs, self.format)
        self.outputs = outputs
        self.bias = context.allocate(outputs.num_rows) if bias and keep_bias else None
        local_inputs = inputs.stop - inputs.start
        self.weights = self.format.create_linear(
            outputs.num_rows, local_inputs, context.dtype, context.device
        )
        context.hold(self.weights.values(), self.format)
        for module, num_rows in outputs.module_rows.items():
            load = partial(self._load, module, inputs)
            shape = (num_rows, num_inputs)
            context.weights.expect(f"{name}.{module}.weight", shape, load, load_scaled=load)
            if bias:
                context.weights.expect(f"{name}.{module}.bias", (num_rows,), partial(self._load_bias, module))
        context.weights.finishers.append(partial(self.format.finish_linear, self.weights))
        self.lora = context.lora
        if context.lora is not None:
            self.table = context.lora.create_table()
            self._offer(context.lora, name, num_inputs, inputs, partial_sum)

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, local inputs] -> [T, local rows]."""
        y = self.format.apply_linear(x, self.weights, self.bias)
        if lora is not None and self.lora is not None:
            self.lora.backend.add(y, x, self.table, lora, self.bias)
        return y

    def _offer(
        self, registry: LoraRegistry, name: str, num_inputs: int, inputs: slice, partial_sum: bool
    ) -> None:
        for module, num_rows in self.outputs.module_rows.items():
            mine = [place for place in self.outputs.placements if place.module == module]
            registry.offer(
                AdaptableModule(
                    name=f"{name}.{module}",
                    kind="linear",
                    out_features=num_rows,
                    in_features=num_inputs,
                    table=self.table,
                    outputs=tuple(OutputPart(place.source, place.destination.start) for place in mine),
                    inputs=inputs,
                    base=partial(self._base, [place.destination for place in mine]),
                    partial=partial_sum,
                )
            )

    def _base(self, rows: list[slice]) -> torch.Tensor:
        weight = self.format.dequantize_linear(self.weights)
        return torch.cat([weight[part] for part in rows])

    def _load(self, module: str, inputs: slice, tensor: Source) -> None:
        for name, source, destination in self.outputs.placements:
            if name == module:
                shard = Shard((source, inputs), (destination, EVERYTHING))
                self.format.load_linear(self.weights, tensor, shard)

    def _load_bias(self, module: str, tensor: torch.Tensor) -> None:
        if self.bias is None:
            return
        for name, source, destination in self.outputs.placements:
            if name == module:
                self.bias[destination].copy_(tensor[source])


class ReplicatedLinear(Projection):
    """A projection that every rank holds whole: a router is too small to cut."""

    def __init__(
        self, context: BuildContext, name: str, module: str, num_inputs: int, num_outputs: int
    ) -> None:
        outputs = OutputSlices(name, [OutputSlice(module, num_outputs)], TPGroup.single())
        super().__init__(context, name, outputs, num_inputs, slice(0, num_inputs), role="delicate")


class ColumnParallelLinear(Projection):
    """A projection whose outputs are divided among the ranks; the input is whole on each."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        slices: Sequence[OutputSlice],
        num_inputs: int,
        *,
        bias: bool = False,
        role: Role = "mixer",
    ) -> None:
        outputs = OutputSlices(name, slices, context.tp)
        super().__init__(context, name, outputs, num_inputs, slice(0, num_inputs), bias=bias, role=role)


class RowParallelLinear:
    """A projection whose inputs are divided among the ranks: all_reduce(projection(x)), bias added once."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        module: str,
        num_inputs: int,
        num_outputs: int,
        *,
        unit: int = 1,
        bias: bool = False,
        role: Role = "mixer",
    ) -> None:
        outputs = OutputSlices(name, [OutputSlice(module, num_outputs)], TPGroup.single())
        inputs = cut(f"{name}.{module}", num_inputs, context.tp, unit=unit)
        self.tp = context.tp
        context.footprint.reductions.append(num_outputs)
        self.projection = Projection(
            context,
            name,
            outputs,
            num_inputs,
            inputs,
            bias=bias,
            keep_bias=context.tp.rank == 0,
            partial_sum=True,
            role=role,
        )

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, local inputs] -> [T, outputs], the same on every rank."""
        return self.tp.all_reduce(self.projection(x, lora))
