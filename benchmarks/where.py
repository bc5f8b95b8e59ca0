"""Where an engine's time goes: inside each operator, in the layers around them, and in the host's work.

Operators' methods are replaced by ones that look at the clock before any engine is made, which costs a
microsecond a call: no speed is measured in a process that does this.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from limits import Step
from runs import PHASES

from hybridserve.engine import sampler
from hybridserve.engine.arena import Arena
from hybridserve.engine.planner import OPERATORS
from hybridserve.kernels.registry import Backend, candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve import LLM

UNTIMED = ("__init__", "pack", "pack_scaled", "unpack", "unpack_scaled")
"""Methods that no step calls."""


class Clock:
    """Seconds by operator and method. What one calls of another counts as the other's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]  # of calls that are under way, what was spent in others

    def watch_all(self) -> None:
        """Every method of every backend, draws and copies of states; once a process."""
        for operator in OPERATORS:
            for backend in candidates(operator):
                for owner in backend.__mro__[: backend.__mro__.index(Backend)]:
                    self._watch(owner, operator)
        vars(sampler)["sample"] = self._timed("sampler.sample", sampler.sample)
        self._watch(Arena, "arena")

    def _watch(self, owner: type[Any], operator: str) -> None:
        for name, method in list(vars(owner).items()):
            if inspect.isfunction(method) and not hasattr(method, "timed") and not name.startswith("_"):
                if name in UNTIMED or getattr(method, "__isabstractmethod__", False):
                    continue
                setattr(owner, name, self._timed(f"{operator}.{name}", method))

    def _timed(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[label] += seconds - self._inside.pop()
                self._inside[-1] += seconds

        vars(call)["timed"] = True
        return call


class Recorded(NamedTuple):
    """A step, and the seconds of each of its phases and of all operators in it."""

    step: Step
    phases: dict[str, float]
    operators: float
    host: float
    """Of the CPU, in the thread that drives the engine, outside of the executor: what a neighbour that takes
    the core adds to the others is not in it."""


class Recorder:
    """Keeps what every step of an engine computed, while it is entered."""

    def __init__(self, llm: LLM, clock: Clock | None = None) -> None:
        self._core = llm._core
        self._clock = clock
        self._executing = 0.0
        self.recorded: list[Recorded] = []

    def __enter__(self) -> Recorder:
        step, stats, executor = self._core.step, self._core.stats, self._core.executor
        vars(executor)["submit"] = self._executed(executor.submit)
        vars(executor)["collect"] = self._executed(executor.collect)

        def recording() -> Any:
            tokens, draws = stats.num_computed_tokens, stats.num_generated_tokens
            phases, operators = dict(stats.seconds), self._operators()
            executing, cpu = self._executing, time.thread_time()
            start = time.perf_counter()
            outputs = step()
            seconds = time.perf_counter() - start
            host = time.thread_time() - cpu - (self._executing - executing)
            now = Step(stats.num_computed_tokens - tokens, stats.num_generated_tokens - draws, seconds)
            taken = {name: stats.seconds[name] - phases[name] for name in PHASES}
            self.recorded.append(Recorded(now, taken, self._operators() - operators, host))
            return outputs

        vars(self._core)["step"] = recording
        return self

    def __exit__(self, *_: object) -> None:
        del vars(self._core)["step"]
        for name in ("submit", "collect"):
            del vars(self._core.executor)[name]

    def _executed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*args)
            finally:
                self._executing += time.thread_time() - start

        return call

    @property
    def steps(self) -> list[Step]:
        return [each.step for each in self.recorded]

    def _operators(self) -> float:
        return sum(self._clock.seconds.values()) if self._clock else 0.0


def shares(seconds: float, recorded: list[Recorded], operators: dict[str, float]) -> dict[str, float]:
    """Of `seconds`, by operator and then what is none: `layers` is what a forward pass and the output head
    spend around their operators, `text` what is outside of steps, mostly turning ids to text."""
    phases = {name: sum(each.phases[name] for each in recorded) for name in PHASES}
    in_steps = sum(each.step.seconds for each in recorded)
    parts = dict(operators)
    parts["layers"] = phases.pop("forward") + phases.pop("sample") - sum(operators.values())
    parts |= phases
    parts["text"] = seconds - in_steps
    parts["rest of steps"] = seconds - sum(parts.values())
    return {name: part / seconds for name, part in sorted(parts.items(), key=lambda item: -item[1])}


def host_work(recorded: list[Recorded], batch: int) -> dict[str, float]:
    """Medians in milliseconds over the steps of one token for each of `batch` sequences. `host` is the CPU
    time of all of a step but its forward pass and draws; `layers` is what of those is no operator."""
    steps = [each for each in recorded if each.step.num_tokens == each.step.num_draws == batch]
    if not steps:
        raise RuntimeError(f"no step had one token for each of {batch} sequences")
    parts: dict[str, list[float]] = {name: [each.phases[name] for each in steps] for name in PHASES}
    computed = [each.phases["forward"] + each.phases["sample"] for each in steps]
    parts["operators"] = [each.operators for each in steps]
    parts["layers"] = [total - each.operators for total, each in zip(computed, steps, strict=True)]
    parts["step"] = [each.step.seconds for each in steps]
    parts["host"] = [each.host for each in steps]
    return {name: round(statistics.median(values) * 1e3, 3) for name, values in parts.items()}
