"""Requests that wait for what others are computing. Knows trails and nodes; does not know memory, and of
steps only their numbers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hybridserve.core.prefix_nodes import Cause, Node
from hybridserve.core.prefix_trails import Cut, Trail
from hybridserve.core.slabs import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hybridserve.core.prefix_store import PrefixCounters
    from hybridserve.core.request import Request

MAX_WAIT_STEPS = 64

MAX_CUTS = 8
"""Of one prompt, those included that others ask for."""


class PrefixWaits:
    """Who computes which node, where a checkpoint is due, and who waits for it."""

    def __init__(self, counters: PrefixCounters, *, has_slots: bool) -> None:
        self._counters = counters
        self._has_slots = has_slots
        self._writers: dict[Node, Trail] = {}
        self._due: dict[Node, None] = {}
        self._waiters: dict[Node, list[Trail]] = {}
        self._held: deque[tuple[int, Trail, Node]] = deque()  # by the step that ends the wait
        self._woken: list[Request] = []

    # ---- those that compute

    def announce(self, trail: Trail, nodes: Iterable[Node]) -> None:
        """A running request is going to compute these, unless somebody else is."""
        for node in nodes:
            self._writers.setdefault(node, trail)

    def has_writer(self, node: Node) -> bool:
        """Whether a running request is going to compute it."""
        return node in self._writers

    def set_cuts(self, trail: Trail, cuts: list[Cut]) -> None:
        trail.cuts = cuts
        trail.request.next_cut = cuts[0].num_tokens if cuts else 0
        for cut in cuts:
            self._due[trail.nodes[cut.num_tokens // trail.size - 1]] = None

    def take_cut(self, trail: Trail, num_tokens: int) -> Cause | None:
        """A chunk ends after so many tokens: why a checkpoint is due there, if one is."""
        if num_tokens != trail.request.next_cut:
            return None
        cause = trail.cuts[0].cause
        trail.cuts = [cut for cut in trail.cuts if cut.num_tokens > num_tokens]
        trail.request.next_cut = trail.cuts[0].num_tokens if trail.cuts else 0
        return cause

    def computed(self, trail: Trail, nodes: Sequence[Node]) -> None:
        """The step that computed these has finished."""
        for node in nodes:
            self._due.pop(node, None)
            if self._writers.get(node) is trail:
                del self._writers[node]
                self._wake(node)

    def stop(self, trail: Trail) -> None:
        """It computes nothing any more."""
        for cut in trail.cuts:
            self._due.pop(trail.nodes[cut.num_tokens // trail.size - 1], None)
        trail.cuts = []
        trail.request.next_cut = 0
        if self._writers:
            for node in trail.nodes:
                if self._writers.get(node) is trail:
                    del self._writers[node]
                    self._wake(node)

    # ---- those that wait

    def find(self, trail: Trail, num_tokens: int) -> Node | None:
        """The last node of a path, after so many tokens, that a running request is going to compute, and with
        a checkpoint if there has to be one: if it isn't too late, it is asked for."""
        if not self._writers:
            return None
        for node in reversed(trail.nodes[num_tokens // trail.size : trail.limit]):
            writer = self._writers.get(node)
            if writer is not None and (not self._has_slots or self._will_checkpoint(writer, node)):
                return node
        return None

    def _will_checkpoint(self, writer: Trail, node: Node) -> bool:
        if node in self._due:
            return True
        if node.num_tokens <= writer.request.num_computed or len(writer.cuts) >= MAX_CUTS:
            return False
        self.set_cuts(writer, sorted([*writer.cuts, Cut(node.num_tokens, Cause.PARTING)]))
        return True

    def wait(self, trail: Trail, node: Node, step_id: int) -> None:
        self._counters.num_waits += 1
        trail.held_at = node
        self._waiters.setdefault(node, []).append(trail)
        self._held.append((step_id + MAX_WAIT_STEPS, trail, node))

    def holds(self, trail: Trail) -> bool:
        return trail.held_at is not None or trail.request in self._woken

    def take_woken(self, step_id: int) -> list[Request]:
        """Those that go on: what they waited for is there, or is not going to be, or it took too long."""
        while self._held and self._held[0][0] <= step_id:
            _, trail, node = self._held.popleft()
            if trail.held_at is node:
                trail.may_wait = False
                self._counters.num_waits_given_up += 1
                self.leave(trail)
                self._woken.append(trail.request)
        woken, self._woken = self._woken, []
        return woken

    def leave(self, trail: Trail) -> None:
        """It waits for nothing any more, and is not to be woken."""
        if trail.held_at is not None:
            self._waiters[trail.held_at].remove(trail)
            trail.held_at = None
        elif trail.request in self._woken:
            self._woken.remove(trail.request)

    def _wake(self, node: Node) -> None:
        for trail in self._waiters.pop(node, ()):
            trail.held_at = None
            self._woken.append(trail.request)

    def check_integrity(self, trails: Iterable[Trail]) -> None:
        """Raise IntegrityError unless those of all `trails` that wait do so for what somebody computes."""
        held = {trail for trail in trails if trail.held_at is not None}
        if held != {trail for group in self._waiters.values() for trail in group}:
            raise IntegrityError("a request waits for nothing, or has been forgotten")
        if any(group and node not in self._writers for node, group in self._waiters.items()):
            raise IntegrityError("a request waits for what nobody computes")
