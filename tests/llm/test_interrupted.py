"""Ctrl-C at any moment: what it ended is gone, everything else is as it was."""

from __future__ import annotations

import itertools
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.core.lazy_heap import LazyHeap
from hybridserve.lora import store as store_module
from hybridserve.models.hub import bundled_adapters
from tests.harness.interrupts import InterruptAt, Interrupter, lost_in_collection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# a file whose opening was interrupted is closed by the collector, which tells so
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _lost_in_collection() -> Iterator[None]:
    with lost_in_collection():
        yield


ROOT = next(iter(bundled_adapters("demo").values())).parent
NAMES = ("python", "scripture", "shakespeare")
PROMPT = "The people"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def demo(**lora: Any) -> LLM:
    settings = {"adapters": {}, "allow_runtime_loading": True, "roots": [ROOT], **lora}
    return LLM(
        "demo",
        dtype="float32",
        memory_bytes="16MiB",
        max_model_len=128,
        max_num_seqs=4,
        check_integrity=True,
        lora=settings,
    )


def text(llm: LLM, adapter: str | None = None) -> str:
    return llm.generate(PROMPT, GREEDY, adapter=adapter)[0].outputs[0].text


@pytest.fixture(scope="module")
def expected() -> dict[str | None, str]:
    with demo(adapters={name: ROOT / name for name in NAMES}) as llm:
        return {name: text(llm, name) for name in (None, *NAMES)}


def interrupt_once(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int = 1) -> None:
    """Let a call raise KeyboardInterrupt before it does anything."""
    plain, calls = getattr(owner, name), []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(*args)

    patch.setattr(owner, name, interrupted)


def assert_nothing_is_left(llm: LLM) -> None:
    core, store = llm._core, llm._core.adapters.store
    assert llm.generate("x", SamplingParams(max_tokens=1))
    while store.loader.num_pending:
        core.adapters.wait()
        core._finish_loads()
    assert all(info.num_refs == 0 for info in llm.list_adapters())
    for name in list(store.names):
        assert llm.unload_adapter(name)
    stats = llm.stats()
    held = ("num_adapters", "adapter_device_bytes", "adapter_host_bytes", "num_running", "num_waiting")
    assert [stats[name] for name in held] == [0] * len(held)
    assert store.versions == {}
    assert not core.has_work
    assert not core._live
    assert not llm._outputs
    assert not llm._streams
    assert not llm._open
    assert not llm._finished
    assert not llm._processor._tracked
    core.scheduler.check_integrity()


# ---- one moment at a time


@pytest.mark.parametrize("adapter", ["n", None])
def test_while_a_request_is_added(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str | None, str], adapter: str | None
) -> None:
    with demo() as llm:
        llm.load_adapter("n", "python")
        for owner, name in ((llm._core.adapters, "acquire"), (llm._core.scheduler, "add")):
            interrupt_once(monkeypatch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                text(llm, adapter)
            assert all(info.num_refs == 0 for info in llm.list_adapters())
            assert text(llm, adapter) == expected["python" if adapter else None]
        assert_nothing_is_left(llm)


@pytest.mark.parametrize("call", [1, 2])
def test_while_whose_turn_it_is_is_noted(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str | None, str], call: int
) -> None:
    """From the moment on when an adapter is ready: its requests move from one queue to another."""
    with demo(max_loaded=1) as llm:
        for name, path in (("n", "python"), ("m", "scripture")):
            llm.load_adapter(name, path)
        text(llm, "n")
        plain = llm._core.scheduler.adapter_loaded

        def loaded(slot: int) -> None:
            plain(slot)
            interrupt_once(monkeypatch, LazyHeap, "put", call)

        llm._core.scheduler.adapter_loaded = loaded  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 3, GREEDY, adapter=["m", "m", None])
        llm._core.scheduler.adapter_loaded = plain  # type: ignore[method-assign]
        assert [text(llm, name) for name in ("m", "n", None)] == [
            expected[name] for name in ("scripture", "python", None)
        ]
        assert_nothing_is_left(llm)


def test_loads_that_are_interrupted_are_not_counted_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """After more of them than may be on their way, the next one works, and none of them has done anything."""
    monkeypatch.setattr(store_module, "MAX_PENDING_REGISTRATIONS", 5)
    with demo() as llm:
        store = llm._core.adapters.store
        for count in range(9):
            with monkeypatch.context() as patch:
                # before it is handed to the loader, while it is waited for, when it has come
                where = [(store.loader, "submit"), (store.loader, "wait"), (store, "_take")][count % 3]
                interrupt_once(patch, *where)
                with pytest.raises(KeyboardInterrupt):
                    llm.load_adapter("n", "python")
        assert llm.list_adapters() == []
        assert llm.load_adapter("n", "python").name == "n"
        assert_nothing_is_left(llm)


def test_the_text_of_others_has_no_gaps(expected: dict[str | None, str]) -> None:
    """What comes while books are kept is raised later, and what a step brought is not lost."""
    with demo() as llm:
        stream = llm.stream(PROMPT, GREEDY)
        pieces = [next(stream)]
        plain = llm._processor.process

        def process(outputs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return plain(outputs)

        llm._processor.process = process  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                text(llm)
        llm._processor.process = plain  # type: ignore[method-assign]
        assert "".join([*pieces, *stream]) == expected[None]
        assert llm.stats()["num_preemptions"] == 0, "nothing had to be computed again"
        assert_nothing_is_left(llm)


def test_a_caller_s_function_is_interrupted_at_once() -> None:
    seen = []

    def watch(index: int, piece: str) -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append(piece)

    with demo() as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY, watch=watch)
        assert seen == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert_nothing_is_left(llm)


# ---- at points that chance chooses


BOOKS = "|".join(
    [
        r"hybridserve/(llm|outputs|core/\w+|engine/(core|adapters|input_builder|sampling_input|interrupts))\.py$",
        r"lora/(store|loader)\.py$",
    ]
)


def scenario(llm: LLM, content: str) -> list[tuple[str, str]]:
    """A bit of everything. Returns (adapter's content, text) of each request."""
    llm.load_adapter("n", content)
    stream = llm.stream(PROMPT, GREEDY, adapter="n")
    next(stream)
    llm.load_adapter("m", "scripture")
    outputs = llm.generate([PROMPT] * 3, GREEDY, adapter=["n", None, "m"])
    stream.close()
    llm.unload_adapter("n")
    who = (content, None, "scripture")
    return [(name, output.outputs[0].text) for name, output in zip(who, outputs, strict=True)]


def interrupt_at_points(seed: int, num_points: int, expected: dict[str | None, str]) -> None:
    """One run of the scenario for each of some points among all that there are."""
    rng = random.Random(seed)
    with demo(max_loaded=1, host_bytes=rng.choice([1, 10**9])) as llm:
        with InterruptAt(0, BOOKS) as counting:
            scenario(llm, "python")
        assert counting.count > 5000
        for content in itertools.islice(itertools.cycle(NAMES), num_points):
            number = rng.randrange(1, counting.count)
            other = llm.stream(PROMPT, GREEDY)
            begin = next(other)
            with InterruptAt(number, BOOKS) as point:
                for name, text_of_it in scenario(llm, content):
                    assert text_of_it == expected[name], (number, name)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            llm._core.scheduler.check_integrity()
            assert begin + "".join(other) == expected[None], (number, point.has_raised)
            assert_nothing_is_left(llm)


def test_at_some_points_of_all(expected: dict[str | None, str]) -> None:
    interrupt_at_points(0, 12, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_at_many_points_of_all(expected: dict[str | None, str], seed: int) -> None:
    interrupt_at_points(seed, 200, expected)


def test_an_interrupt_lost_in_collection_keeps_no_stream() -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def leave_a_stream(llm: LLM) -> None:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        Interrupted()

    with demo() as llm:
        leave_a_stream(llm)
        assert_nothing_is_left(llm)


# ---- at random times


class Hammer:
    """Does one thing after the other with an LLM, of which any may be interrupted."""

    def __init__(self, llm: LLM, rng: random.Random, expected: dict[str | None, str]) -> None:
        self.llm = llm
        self.rng = rng
        self.expected = expected
        self.actions: list[Callable[[], None]] = [
            *(self.load, self.run, self.run, self.stream, self.unload, self.pin)
        ]

    def content(self) -> dict[str | None, str | None]:
        return {None: None} | {i.name: i.path.name for i in self.llm.list_adapters() if i.state != "draining"}

    def load(self) -> None:
        self.llm.load_adapter(self.rng.choice("xyz"), self.rng.choice(NAMES))

    def unload(self) -> None:
        if name := self.rng.choice(list(self.content())):
            self.llm.unload_adapter(name)

    def run(self) -> None:
        content = self.content()
        who = self.rng.choices(list(content), k=self.rng.randint(1, 5))
        outputs = self.llm.generate([PROMPT] * len(who), GREEDY, adapter=who)
        assert [o.outputs[0].text for o in outputs] == [self.expected[content[name]] for name in who]

    def stream(self) -> None:
        content = self.content()
        name = self.rng.choice(list(content))
        stream = self.llm.stream(PROMPT, GREEDY, adapter=name)
        if self.rng.random() < 0.5:
            assert "".join(stream) == self.expected[content[name]]
        else:
            next(stream)

    def pin(self) -> None:
        name = self.rng.choice(list(self.content()))
        if name and self.llm._core.scheduler.adapters.num_slots > 1:
            self.llm.pin_adapter(name)
            self.llm.unpin_adapter(name)


def hammer(seed: int, seconds: float, expected: dict[str | None, str]) -> int:
    """Returns how many actions were interrupted."""
    rng = random.Random(seed)
    max_loaded, host_bytes = rng.choice([1, 2]), rng.choice([1, 2_000_000, 10**9])
    with demo(max_loaded=max_loaded, host_bytes=host_bytes) as llm, Interrupter() as interrupter:
        work = Hammer(llm, rng, expected)
        refusals: list[str] = []
        slowest = 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            action = rng.choice(work.actions)
            begin = time.monotonic()
            with interrupter.after(rng.uniform(0, max(0.002, slowest))):
                try:
                    action()
                except ValueError as error:
                    refusals.append(str(error))
            slowest = 0.9 * slowest + 0.1 * (time.monotonic() - begin)
            llm._core.scheduler.check_integrity()
            for name in work.content():
                if name and llm._core.scheduler.adapters.is_pinned(llm._core.adapters.info(name).identity):
                    llm.unpin_adapter(name)
        assert all("pinned" in refusal for refusal in refusals), refusals  # others were in use then
        assert_nothing_is_left(llm)
        return interrupter.num_raised


def test_at_random_moments(expected: dict[str | None, str]) -> None:
    assert hammer(seed=5, seconds=4, expected=expected) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 4, 5])
def test_at_many_random_moments(expected: dict[str | None, str], seed: int) -> None:
    assert hammer(seed, seconds=25, expected=expected) > 50
