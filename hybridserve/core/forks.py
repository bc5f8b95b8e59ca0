"""Who is about to fork from whom (params.n > 1). Knows requests; does not know memory or steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator


class Fork(NamedTuple):
    """Children that wait for the next step to copy what their parent has computed. If the parent ends before
    that, what it holds lives on until then."""

    parent: Request
    children: list[Request]


class Forks:
    """The forks that are due, by parent."""

    def __init__(self) -> None:
        self._forks: dict[str, Fork] = {}

    def __len__(self) -> int:
        return len(self._forks)

    @property
    def parent_ids(self) -> Iterator[str]:
        return iter(self._forks)

    @property
    def ended_parents(self) -> list[Request]:
        """Those that have finished, and still hold what their children need."""
        return [fork.parent for fork in self._forks.values() if fork.parent.status is RequestStatus.FINISHED]

    def add(self, parent: Request, children: list[Request]) -> None:
        self._forks[parent.id] = Fork(parent, children)

    def take(self) -> list[Fork]:
        """Those that can go on."""
        forks = [
            fork
            for fork in self._forks.values()
            # Else neither parent nor child can run before the tokens are known: no hurry.
            if not (fork.parent.num_pending and fork.parent.params.needs_last_token)
        ]
        for fork in forks:
            del self._forks[fork.parent.id]
        return forks

    def waits(self, child: Request) -> bool:
        fork = self._forks.get(child.parent_id or "")
        return fork is not None and child in fork.children

    def finish(self, request: Request) -> list[Request]:
        """A request, of any kind, has finished: those that may give up what they hold now."""
        fork = self._forks.get(request.parent_id or request.id)
        if fork is None or (request is not fork.parent and request not in fork.children):
            return [request]
        if request is fork.parent:
            return []  # its children still need what it holds
        fork.children.remove(request)
        if fork.children:
            return [request]
        del self._forks[fork.parent.id]
        return [request, fork.parent] if fork.parent.status is RequestStatus.FINISHED else [request]

    def clear(self) -> None:
        self._forks.clear()
