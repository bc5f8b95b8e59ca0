"""Chooses one backend an operator, once, and can say why not the others. Knows no operator by content."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

AUTO = "auto"

EXACT = "exact"
"""Like AUTO, among the backends that take activations as they are."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the machine offers, as far as backends care."""

    device: str  # "cpu" | "cuda"
    dtype: str  # of the model's activations: "float32" | "bfloat16" | "float16"
    weights: str = "none"  # format of those that are quantized
    block_size: int = 16  # tokens of K and V in a block


class Backend(ABC):
    """One implementation of one operator's interface. Constructed without arguments, once an engine."""

    name: ClassVar[str]

    rounding: ClassVar[str] = ""
    """How it rounds the activations that meet one-byte weights, where the format does not ask for it; empty:
    not at all."""

    copies_codes: ClassVar[str] = ""
    """What of a one-byte weight it writes to memory as plain numbers in every product; empty: nothing."""

    depends_on_threads: ClassVar[bool] = True
    """Whether a result's last bits may be others with another number of threads."""

    can_be_recorded: ClassVar[bool] = False
    """Whether, in a step of one token a sequence, what it launches depends on nothing but shapes and the
    metadata's lists, whose `context_lens` are upper bounds then, and all else is read on the device when it
    runs, also what `prepare` was given: such a step may be recorded and run again over other numbers."""

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        """Why this backend can't run here, or None if it can."""
        return None

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        """The C sources whose libraries it would run here, which `native.prepare` can build ahead."""
        return ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that an engine uses for one operator, and why it does not use the others."""

    op: str
    name: str
    backend: Backend
    rejected: tuple[tuple[str, str], ...]
    """(name, reason) of every other candidate, in preference order."""
    obstacles: tuple[tuple[str, str], ...]
    """Those of them that would have been preferred and could not be taken."""


def candidates(op: str) -> tuple[type[Backend], ...]:
    """The backends of an operator, most preferred first. ValueError if there is no such operator."""
    module = f"hybridserve.kernels.{op}"
    try:
        table = importlib.import_module(module).BACKENDS
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(f"there is no operator {op!r}") from None
    return cast("tuple[type[Backend], ...]", table)


def sources(ops: Iterable[str], capabilities: Capabilities) -> set[Path]:
    """The C sources of all backends of some operators but those that only who asks for them gets."""
    tables = [candidates(op) for op in ops]
    taken = {backend for table in tables for backend in table if _base(backend, table) is None}
    return {source for backend in taken for source in backend.sources(capabilities)}


def _base(backend: type[Backend], table: Sequence[type[Backend]]) -> type[Backend] | None:
    """The preferred one that it is a variant of: it runs where that one runs, so "auto" never takes it."""
    before = itertools.takewhile(lambda other: other is not backend, table)
    return next((other for other in before if issubclass(backend, other)), None)


def select(
    op: str, wanted: str, capabilities: Capabilities, among: Sequence[type[Backend]] | None = None
) -> Choice:
    """Choose a backend for `op` by name or, with "auto", the first in preference order that runs here.

    "exact" is "auto" among those that round no activations. `among` replaces the operator's own table.
    ValueError, with every candidate's reason, if what is wanted does not exist or can't run here: another
    backend is never taken in its place.
    """
    table = candidates(op) if among is None else among
    obstacles: dict[str, str | None] = {}
    for backend in table:
        base = _base(backend, table) if wanted == AUTO else None  # nothing is built for it then
        obstacles[backend.name] = backend.why_not(capabilities) if base is None else obstacles[base.name]
    if wanted == EXACT:
        for backend in table:
            if capabilities.weights != "none" and backend.rounding and obstacles[backend.name] is None:
                obstacles[backend.name] = f"rounds activations {backend.rounding}"
    is_open = wanted in (AUTO, EXACT)
    chosen = next((b for b in table if (is_open or wanted == b.name) and obstacles[b.name] is None), None)
    if chosen is None:
        if is_open:
            problem = f"no {op} backend can run"
        elif wanted in obstacles:
            problem = f"{op} backend {wanted!r} can't run"
        else:
            problem = f"there is no {op} backend {wanted!r}"
        listed = "; ".join(f"{name}: {obstacle or 'can run'}" for name, obstacle in obstacles.items())
        where = f"on {capabilities.device} with {capabilities.dtype}"
        raise ValueError(f"{problem} {where} ({listed or 'none known'})")
    passed_over = f"{chosen.name} " + ("is preferred" if is_open else "was asked for")
    rejected = tuple((name, why or passed_over) for name, why in obstacles.items() if name != chosen.name)
    preferred = itertools.takewhile(lambda backend: backend is not chosen, table)
    could_not = tuple((b.name, why) for b in preferred if (why := obstacles[b.name]) is not None)
    return Choice(op, chosen.name, chosen(), rejected, could_not)
