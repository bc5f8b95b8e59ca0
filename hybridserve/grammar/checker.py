"""Finds out whether a description of texts can be used, within bounds: the caller's side of
`hybridserve.grammar.worker`.

Knows the worker's process; knows no llguidance.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.grammar.compiler import why_not
from hybridserve.grammar.worker import COMPILE_SECONDS, Verdict

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_SECONDS = 60.0
"""For a worker that gets no processor; one that computes is ended long before."""
MAX_VERDICTS = 4096
MAX_VERDICT_BYTES = 8 * 2**20


class GrammarChecker:
    """For one tokenizer. Any thread may call it; one description is tried out at a time, and what was found
    of the last MAX_VERDICTS is remembered."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._file = tokenizer_file
        self._asking = threading.Lock()
        self._looking = threading.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._num_bytes = 0
        self._worker: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarChecker] | None = None

    def check(self, spec: StructuredOutputs) -> StructuredOutputs:
        """The description to use in its place. May take seconds, without the interpreter's lock. ValueError,
        naming the field, for one that is wrong, that can't be enforced or that is too complex, and where
        llguidance is missing."""
        if (problem := why_not()) is not None:
            raise ValueError(f"structured_outputs: {problem}")
        key = hashlib.sha256(f"{spec.kind} {spec.text}".encode()).digest()
        verdict = self._recall(key)
        if verdict is None:
            with self._asking:
                verdict = self._recall(key)
                if verdict is None:
                    verdict = self._ask(spec)
                    self._remember(key, verdict)
        if verdict.error is not None:
            raise ValueError(verdict.error)
        return spec if verdict.grammar is None else StructuredOutputs(grammar=verdict.grammar)

    def close(self) -> None:
        """End the worker, whatever it is doing; the next call starts another."""
        if self._end is not None:
            self._end()

    def _ask(self, spec: StructuredOutputs) -> Verdict:
        worker = self._worker
        if worker is None or worker.poll() is not None:
            worker = self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        patience = threading.Timer(ANSWER_SECONDS, worker.kill)
        patience.daemon = True
        patience.start()
        try:
            worker.stdin.write(msgspec.json.encode(spec) + b"\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            patience.cancel()
        if answer.endswith(b"\n"):
            return msgspec.json.decode(answer, type=Verdict)
        self.close()
        return Verdict(
            f"structured_outputs.{spec.kind}: is too complex (compiling takes more than {COMPILE_SECONDS} "
            "seconds, or too much memory)"
        )

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 - text, as the others
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "hybridserve.grammar.worker", str(self._file)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._worker = worker
        self._end = weakref.finalize(self, _end_worker, worker)
        return worker

    def _recall(self, key: bytes) -> Verdict | None:
        with self._looking:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        with self._looking:
            self._verdicts[key] = verdict
            self._num_bytes += _size(verdict)
            while len(self._verdicts) > MAX_VERDICTS or self._num_bytes > MAX_VERDICT_BYTES:
                self._num_bytes -= _size(self._verdicts.popitem(last=False)[1])


def _end_worker(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not sent is of no use to anybody
                pipe.close()


def _size(verdict: Verdict) -> int:
    return len(verdict.error or "") + len(verdict.grammar or "")
