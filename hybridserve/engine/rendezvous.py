"""Where the ranks of an engine meet: what rank 0 lays down there, and what the others report.

Knows names in a store; does not know who starts ranks, nor what a step is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from hybridserve.distributed.failure import PeerLost, RankDisagreement
from hybridserve.distributed.process_group import FOREVER
from hybridserve.distributed.topology import Topology
from hybridserve.engine.plan_codec import decode_plan, encode_plan
from hybridserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.distributed.process_group import Store
    from hybridserve.engine.plan import EnginePlan

VERSIONS = f"hybridserve {__version__}, torch {torch.__version__}"
"""All ranks compute the same only where these are equal."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank is told before it does anything."""

    model_path: Path
    plan: EnginePlan
    step_timeout: float
    interface: str

    def topology(self, rank: int) -> Topology:
        return Topology(self.plan.parallel.tensor, self.plan.parallel.pipeline, rank)


@dataclass(frozen=True, slots=True)
class Report:
    """Why a rank ends."""

    reason: str
    trace: str
    is_cause: bool
    """Not merely that it lost others."""


class Rendezvous:
    """A view of the store. Every thread needs one over a connection of its own: waiting blocks it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def assign(self, assignment: Assignment) -> None:
        """Rank 0: let the others begin."""
        encoded = msgspec.json.encode(
            {
                "versions": VERSIONS,
                "model_path": str(assignment.model_path),
                "plan": encode_plan(assignment.plan).decode(),
                "step_timeout": assignment.step_timeout,
                "interface": assignment.interface,
            }
        )
        self.store.set("assignment", encoded)

    def assignment(self) -> Assignment:
        """Wait for rank 0's. RankDisagreement if it runs another version."""
        try:
            found: dict[str, Any] = msgspec.json.decode(self.store.get("assignment"))
        except RuntimeError as error:
            raise PeerLost(f"rank 0 does not say what to do: {error}") from None
        if found["versions"] != VERSIONS:
            raise RankDisagreement(f"this rank runs {VERSIONS}, rank 0 {found['versions']}")
        return Assignment(
            Path(found["model_path"]),
            decode_plan(found["plan"].encode()),
            found["step_timeout"],
            found["interface"],
        )

    def arrive(self, place: str, rank: int) -> None:
        self.store.set(f"{place}/{rank}", b"")

    def missing(self, place: str, topology: Topology) -> list[int]:
        """Ranks but this one that have not arrived there."""
        ranks = [rank for rank in range(topology.size) if rank != topology.rank]
        return [rank for rank in ranks if not self.has_arrived(place, rank)]

    def has_arrived(self, place: str, rank: int) -> bool:
        return bool(self.store.check([f"{place}/{rank}"]))

    def advance(self, rank: int) -> None:
        """A rank got on with loading."""
        self.store.add(f"progress/{rank}", 1)

    def progress(self, rank: int) -> int:
        """How often it did."""
        return int(self.store.add(f"progress/{rank}", 0))

    def inquire(self) -> None:
        """Rank 0 has waited for too long: let those say so that wait, too."""
        self.store.set("inquiry", b"")

    def testify(self, rank: int, is_waiting: Callable[[], bool]) -> None:
        """Wait for the inquiry, and answer it. On a thread of its own, which a rank that is stopped or stuck
        doesn't give a turn."""
        self.store.wait(["inquiry"], FOREVER)
        if is_waiting():
            self.arrive("waiting", rank)

    def report(self, rank: int, error: BaseException, trace: str) -> None:
        """A rank's last words: returns when they have arrived."""
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, RankDisagreement) else str(error)
        is_cause = not isinstance(error, PeerLost)
        self.store.set(f"report/{rank}", msgspec.json.encode((reason, trace, is_cause)))
        self.store.add("num_reports", 1)

    @property
    def num_reports(self) -> int:
        return int(self.store.add("num_reports", 0))

    def reports(self, topology: Topology) -> dict[int, Report]:
        """By rank."""
        ranks = [rank for rank in range(topology.size) if self.store.check([f"report/{rank}"])]
        return {rank: Report(*msgspec.json.decode(self.store.get(f"report/{rank}"))) for rank in ranks}
