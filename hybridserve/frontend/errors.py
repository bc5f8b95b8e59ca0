"""How an engine that can't serve says so."""

from __future__ import annotations

import enum


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # what was submitted runs on, nothing new is taken
    DEAD = "dead"  # or closed: the process has ended


class EngineUnavailable(RuntimeError):
    """The engine takes no requests now: it is starting, draining or closed."""


class EngineDead(EngineUnavailable):
    """The engine's process has ended, or had to be. The message is one text with the root cause last."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details
        """The traceback in the engine's process, where there is one."""

    def copy(self) -> EngineDead:
        """For another one who is to be told: a traceback grows where an exception is raised again."""
        return type(self)(str(self), self.details)


class EngineClosed(EngineDead):
    """It was closed by its user: nothing has failed."""
