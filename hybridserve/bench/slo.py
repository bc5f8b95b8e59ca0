"""What a request must meet to be a good one: bounds on its latencies."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from hybridserve.config.spelling import nearest

if TYPE_CHECKING:
    from hybridserve.bench.record import Record

_VALUE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds; None is no bound. itl bounds the mean of a request's times between tokens."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """`ttft=500ms,itl=50ms,e2e=2s`. Raises ValueError."""
        names = [each.name for each in fields(cls)]
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = (each.strip() for each in part.partition("="))
            if name not in names:
                near = nearest(name, names)
                hint = f"did you mean {near}?" if near else f"there is {', '.join(names)}"
                raise ValueError(f"--slo: {name!r} is unknown; {hint}")
            match = _VALUE.fullmatch(value)
            if not equals or match is None:
                raise ValueError(f"--slo: {name}: {value!r} is no time such as 500ms or 2s")
            if name in bounds:
                raise ValueError(f"--slo: {name} is given twice")
            bounds[name] = float(match[1]) / (1000 if match[2] == "ms" else 1)
        return cls(**bounds)

    def is_met_by(self, record: Record) -> bool:
        """A request that failed meets none; a latency that it doesn't have (one token has no time between
        tokens) meets all."""
        found = {"ttft": record.ttft, "itl": record.mean_itl, "e2e": record.e2e}
        return record.is_ok and all(
            bound is None or seconds is None or seconds <= bound
            for bound, seconds in ((getattr(self, name), seconds) for name, seconds in found.items())
        )

    def __str__(self) -> str:
        bounds = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{name} <= {bound * 1000:g} ms" for name, bound in bounds if bound is not None)
