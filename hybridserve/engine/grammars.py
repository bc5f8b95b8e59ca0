"""Grammars of requests, compiled beside the steps: a request that waits for its own holds up nobody.

Knows descriptions and the requests that came with them; does not know how tokens are drawn. Whoever sends a
request has seen that its description can be compiled (`grammar.checker`); here that has no limit in time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.engine.job_thread import JobThread
from hybridserve.grammar.compiler import compile_matcher, load_tokenizer, prepare, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from llguidance import LLMatcher, LLTokenizer

    from hybridserve.core.request import Request
    from hybridserve.core.structured_outputs import StructuredOutputs

MAX_GRAMMARS = 64
MAX_GRAMMAR_BYTES = 2 * 2**20
"""Of descriptions that are kept compiled. A compiled one takes some 50 times its length."""
WAIT_SECONDS = 0.01
CLOSE_SECONDS = 1.0


class Compiled(NamedTuple):
    """A request whose grammar is there, or why it is not."""

    request: Request
    grammar: LLMatcher | None
    error: str


class Grammars:
    """Of one engine. `tokenizer_file` None: there is no text, so nothing to describe."""

    def __init__(
        self, tokenizer_file: Path | None = None, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._thread: JobThread | None = None
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._num_bytes = 0
        self._num_compiled = self._num_failed = self._num_hits = 0
        self._compile_seconds = 0.0
        self.waiting: dict[str, tuple[Request, Future[LLMatcher]]] = {}
        """Requests whose grammars are being compiled, by id."""

    def check(self) -> None:
        """ValueError where no description can be used at all."""
        problem = "needs a tokenizer, and there is none" if self._file is None else why_not()
        if problem is not None:
            raise ValueError(f"structured_outputs: {problem}")

    def warm_up(self) -> None:
        """Do now what would hold up everybody when the first description comes: read the tokenizer."""
        if self._file is not None and why_not() is None:
            wait([self._jobs().submit(self._load)])

    def start(self, request: Request, spec: StructuredOutputs) -> None:
        """Compile; `take` says when that is done."""
        future = self._kept.get(spec)
        if future is None:
            future = self._keep(spec, self._jobs().submit(partial(self._compile, spec)))
        else:
            self._num_hits += 1
        self._kept.move_to_end(spec)
        self.waiting[request.id] = request, future

    def take(self) -> Iterator[Compiled]:
        """Requests that have waited long enough."""
        for request_id, (request, future) in list(self.waiting.items()):
            if future.done():
                del self.waiting[request_id]
                error = future.exception()
                yield Compiled(request, None if error else future.result(), str(error or ""))

    def cancel(self, request_id: str) -> Request | None:
        """Wait no longer; the request, if it did."""
        found = self.waiting.pop(request_id, None)
        return None if found is None else found[0]

    def wait(self) -> None:
        """Until `take` has something to give, or for a moment."""
        wait([future for _, future in self.waiting.values()], WAIT_SECONDS, FIRST_COMPLETED)

    def gauges(self) -> dict[str, float]:
        """Counters since the start, and what is kept now."""
        return {
            "num_compiled_grammars": self._num_compiled,
            "num_failed_grammars": self._num_failed,
            "num_grammar_hits": self._num_hits,
            "grammar_compile_seconds": self._compile_seconds,
            "num_cached_grammars": len(self._kept),
            "cached_grammar_bytes": self._num_bytes,
            "num_waiting_for_grammar": len(self.waiting),
        }

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close(CLOSE_SECONDS)

    def _jobs(self) -> JobThread:
        self._thread = self._thread or JobThread("hybridserve-grammars")
        return self._thread

    def _load(self) -> LLTokenizer:
        """In the thread."""
        assert self._file is not None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._file, self._vocab_size, self._eos_token_ids)
        return self._tokenizer

    def _compile(self, spec: StructuredOutputs) -> LLMatcher:
        """In the thread."""
        tokenizer = self._load()
        begin = time.perf_counter()
        try:
            matcher = compile_matcher(tokenizer, prepare(spec))
        except ValueError:
            self._num_failed += 1
            raise
        finally:
            self._compile_seconds += time.perf_counter() - begin
        self._num_compiled += 1
        return matcher

    def _keep(self, spec: StructuredOutputs, future: Future[LLMatcher]) -> Future[LLMatcher]:
        self._kept[spec] = future
        self._num_bytes += spec.num_bytes
        while len(self._kept) > MAX_GRAMMARS or (self._num_bytes > MAX_GRAMMAR_BYTES and len(self._kept) > 1):
            oldest, _ = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return future
