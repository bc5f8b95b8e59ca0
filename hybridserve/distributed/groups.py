"""All groups of one rank of an engine, connected in the same order everywhere.

Knows who talks to whom; does not know what about.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from hybridserve.distributed.pipeline import PipelineStage, ProcessGroupStage
from hybridserve.distributed.process_group import FOREVER, Connection, make_device_group, make_group
from hybridserve.distributed.tp import ProcessGroupTP, TPGroup

if TYPE_CHECKING:
    import torch

    from hybridserve.distributed.process_group import ProcessGroup, Store
    from hybridserve.distributed.topology import Topology


_CONNECTED = (ProcessGroupTP, ProcessGroupStage)


@dataclass(frozen=True, slots=True)
class Groups:
    """One rank's connections.

    control, adapters: all ranks, for what rank 0 tells them; over gloo, whatever the device. adapters and
    adapter_tp are for the thread that loads adapters beside steps: a group serves one thread.
    """

    control: ProcessGroup
    adapters: ProcessGroup | None
    tp: TPGroup
    adapter_tp: TPGroup
    pipeline: PipelineStage

    @classmethod
    def connect(
        cls,
        store: Store,
        topology: Topology,
        address: str,
        device: torch.device,
        step_timeout: float,
        *,
        has_adapters: bool,
    ) -> Groups:
        """Every rank calls this, and it returns when all have. PeerLost if one doesn't come."""
        timeout = timedelta(seconds=step_timeout)
        everyone = range(topology.size)
        first = topology.stage * topology.tensor
        stage = range(first, first + topology.tensor)
        line = range(topology.tensor_rank, topology.size, topology.tensor)

        def tensor_group(name: str) -> TPGroup:
            if topology.tensor == 1:
                return TPGroup.single()
            group = make_device_group(
                store, f"{name}/{topology.stage}", stage, topology.rank, address, timeout, device
            )
            return ProcessGroupTP(topology.tensor_rank, topology.tensor, Connection(group))

        control = make_group(store, "control", everyone, topology.rank, address, FOREVER)
        adapters = (
            make_group(store, "adapters", everyone, topology.rank, address, FOREVER) if has_adapters else None
        )
        tp = tensor_group("tensor")
        adapter_tp = tensor_group("adapter-tensor") if has_adapters else TPGroup.single()
        pipeline = PipelineStage.single()
        if topology.pipeline > 1:
            name = f"pipeline/{topology.tensor_rank}"
            group = make_device_group(store, name, line, topology.rank, address, timeout, device)
            pipeline = ProcessGroupStage(topology.stage, topology.pipeline, Connection(group))
        return cls(control, adapters, tp, adapter_tp, pipeline)

    def hand_over(self, other: Groups) -> Groups:
        """The groups of fresh ranks, under the objects that this rank's model holds already."""
        for old, new in (
            (self.tp, other.tp),
            (self.adapter_tp, other.adapter_tp),
            (self.pipeline, other.pipeline),
        ):
            if isinstance(old, _CONNECTED):
                assert isinstance(new, _CONNECTED)
                assert old.connection is not None
                assert new.connection is not None
                old.connection.group = new.connection.group
        return replace(other, tp=self.tp, adapter_tp=self.adapter_tp, pipeline=self.pipeline)

    def abort(self) -> None:
        """Break off what is being exchanged, here and, as connections close, elsewhere."""
        groups = [self.control, self.adapters]
        for holder in (self.tp, self.adapter_tp, self.pipeline):
            if isinstance(holder, _CONNECTED) and holder.connection is not None:
                groups.append(holder.connection.group)
        for group in groups:
            if group is not None:
                with contextlib.suppress(RuntimeError):  # a backend that can't
                    group.abort()
