"""`hybridserve chat`: a conversation in a terminal, or line by line through a pipe.

Knows a terminal, commands and messages; the model is a target of `bench`, on this machine or behind a URL.
The terminal has the main thread, so that Ctrl-C means what it should; the target's event loop has another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hybridserve.bench.connect import make_target
from hybridserve.bench.record import Record
from hybridserve.bench.target import Arrival, RequestFailed, TargetRequest
from hybridserve.config.spelling import nearest
from hybridserve.core.request import SamplingParams
from hybridserve.interrupt import interrupt_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine, Iterator, Mapping

    from hybridserve.bench.target import Message, Target

T = TypeVar("T")

PROMPT = "> "
BASE = "base"
NONE = "none"
PARAMETERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "seed",
)
HELP = f"""\
/reset              forget the conversation
/adapter [NAME]     answer with this adapter from now on ({BASE}: without); alone, list them
/system [TEXT]      what the model is told first ({NONE}: nothing); alone, show it
/params [NAME=X]    set sampling parameters (NAME= takes one back); alone, show them
/exit               leave, as Ctrl-D does; Ctrl-C stops an answer
"""


def run(args: argparse.Namespace, engine_options: Mapping[str, Any], sampling: Mapping[str, Any]) -> str:
    """Until its user leaves. Returns why it ended before, or nothing. ValueError for a user's mistake."""
    SamplingParams(**sampling)  # or it says what is wrong
    target = make_target(args, engine_options)
    with _interruptible(), _event_loop() as call:
        call(target.__aenter__())
        try:
            chat = Chat(target, call, dict(sampling), args.system)
            if args.adapter is not None:
                chat.choose_adapter(args.adapter)
            return chat.converse() if sys.stdin.isatty() else chat.read_lines()
        finally:
            call(target.__aexit__(None, None, None))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt that may be caught for good."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    with interrupt_calls(signal.default_int_handler):
        yield


class _Call:
    """Runs coroutines in the event loop of another thread. One that is interrupted by Ctrl-C is cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@contextlib.contextmanager
def _event_loop() -> Iterator[_Call]:
    """In a thread; what still runs there at the end is cancelled."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def live() -> None:
        over = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), over))
        await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="hybridserve-chat", daemon=True)
    thread.start()
    loop, over = started.result()
    try:
        yield _Call(loop)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


class Chat:
    """One conversation."""

    def __init__(self, target: Target, call: _Call, params: dict[str, Any], system: str | None) -> None:
        self._target = target
        self._call = call
        self._params = params
        self._system = system
        self._adapter: str | None = None
        self._messages: list[Message] = []

    # ---- the two ways in

    def converse(self) -> str:
        """On a terminal: until /exit or Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then has a history and can be edited
        sys.stderr.write(f"{self._target.name}; /help tells what can be said\n")
        while True:
            try:
                line = input(PROMPT).strip()
            except EOFError:
                sys.stdout.write("\n")
                return ""
            except KeyboardInterrupt:
                sys.stdout.write("\n(Ctrl-D leaves)\n")
                continue
            try:
                if not line:
                    continue
                if line.startswith("/"):
                    if self.command(line) is None:
                        return ""
                else:
                    self._show_speed(self.answer(line))
            except ValueError as error:
                sys.stderr.write(f"{error}\n")
            except RequestFailed as error:
                sys.stderr.write(f"\n{error}\n")

    def read_lines(self) -> str:
        """Through a pipe: an answer for each line, until the last or one that fails."""
        for line in sys.stdin:
            line = line.strip()
            if line.startswith("/"):
                if self.command(line) is None:
                    break
            elif line:
                try:
                    self.answer(line)
                except RequestFailed as error:
                    return str(error)
        return ""

    # ---- an answer

    def answer(self, text: str) -> Record:
        """Says it to the model, and shows what comes as it comes. Ctrl-C stops an answer on a terminal; what
        came until then is part of the conversation. RequestFailed: then nothing is."""
        said: list[Message] = [*self._messages, {"role": "user", "content": text}]
        first: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        sampling = {name: value for name, value in self._params.items() if name != "max_tokens"}
        request = TargetRequest(
            [*first, *said], self._params.get("max_tokens"), self._adapter, sampling=sampling
        )
        arrivals: queue.SimpleQueue[tuple[float, Arrival] | Exception | None] = queue.SimpleQueue()
        record = Record(0.0, 0.0)
        pump = self._call.start(_pump(self._target, request, arrivals))
        try:
            while (item := arrivals.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                record.add(*item)
                sys.stdout.write(item[1].text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pump.cancel()
            if not sys.stdin.isatty():
                raise
            sys.stdout.write(" (stopped)")
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._messages = [*said, {"role": "assistant", "content": "".join(record.text)}]
        return record

    def _show_speed(self, record: Record) -> None:
        if not sys.stdout.isatty() or not record.times:
            return
        shown = f"first after {record.times[0] * 1000:,.0f} ms"
        if record.usage is not None:
            shown = f"{record.num_output_tokens:,} tokens, {shown}"
            if record.mean_itl:
                shown += f", then {1 / record.mean_itl:,.1f} a second"
        sys.stdout.write(f"\x1b[2m({shown})\x1b[0m\n")

    # ---- commands

    def command(self, line: str) -> str | None:
        """Does what a line that begins with / says, and returns its name; None for /exit. ValueError for one
        that is unknown or has no sense."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "exit" | "quit":
                return None
            case "help":
                sys.stderr.write(HELP)
            case "reset":
                self._messages = []
            case "adapter":
                self.choose_adapter(rest) if rest else self._list_adapters()
            case "system":
                if rest:
                    self._system = None if rest == NONE else rest
                sys.stderr.write(f"{self._system or '(nothing)'}\n")
            case "params":
                self._set_params(rest)
            case _:
                near = nearest(name, ("exit", "help", "reset", "adapter", "system", "params"))
                hint = f"did you mean /{near}?" if near else "see /help"
                raise ValueError(f"/{name}: unknown; {hint}")
        return name

    def choose_adapter(self, name: str) -> None:
        """Answer with it from now on. ValueError for one that isn't there."""
        there = self._call(self._target.adapters())
        if name not in there and name != BASE:
            known = f"there is {', '.join(there)}" if there else "there is none"
            raise ValueError(f"adapter: {name!r} is unknown; {known}")
        self._adapter = name if name in there else None

    def _list_adapters(self) -> None:
        there = self._call(self._target.adapters())
        for name in [BASE, *there]:
            mark = "*" if (name if name in there else None) == self._adapter else " "
            sys.stderr.write(f"{mark} {name}\n")

    def _set_params(self, text: str) -> None:
        """`NAME=X NAME=X`, all or none of them."""
        params = dict(self._params)
        for part in text.split():
            name, equals, value = part.partition("=")
            name = name.replace("-", "_")
            if name not in PARAMETERS or not equals:
                near = nearest(name, PARAMETERS)
                hint = f"did you mean {near}=?" if near else f"there is {', '.join(PARAMETERS)}"
                raise ValueError(f"params: {part!r} is no NAME=X; {hint}")
            if value:
                params[name] = _value(value)
            else:
                params.pop(name, None)
        SamplingParams(**params)
        self._params = params
        shown = " ".join(f"{name}={value}" for name, value in params.items())
        sys.stderr.write(f"{shown or '(all as the model has them)'}\n")


async def _pump(
    target: Target,
    request: TargetRequest,
    arrivals: queue.SimpleQueue[tuple[float, Arrival] | Exception | None],
) -> None:
    """Hands on what comes, with the seconds since it was asked for; None when all has come."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    try:
        async with contextlib.aclosing(target.stream(request)) as stream:
            async for arrival in stream:
                arrivals.put((clock() - begin, arrival))
    except Exception as error:
        arrivals.put(error)
    else:
        arrivals.put(None)


def _value(text: str) -> Any:
    """A number, or what it says."""
    try:
        return json.loads(text)
    except ValueError:
        return text
