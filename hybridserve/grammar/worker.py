"""The process that tries descriptions out, so that one that takes too long, or too much memory, harms nobody.

Run as `python -m hybridserve.grammar.worker TOKENIZER_JSON`. A line of JSON comes in, a description; a line
goes out, a `Verdict`. It ends when its input does. Where a description exceeds what it may use, the kernel
ends it without a word.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import time
from pathlib import Path

import msgspec

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.grammar.compiler import check, load_tokenizer

COMPILE_SECONDS = 2
"""Of a processor's time, for one description; an ordinary one takes milliseconds."""
COMPILE_BYTES = 2**30


class Verdict(msgspec.Struct, frozen=True):
    """`error`: why the description can't be used. `grammar`: what to use in place of its grammar."""

    error: str | None = None
    grammar: str | None = None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started this gets them, too, and ends it
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = None
    try:
        tokenizer = load_tokenizer(Path(sys.argv[1]))
    except ValueError as error:
        problem = f"structured_outputs: {error}"
    _limit_memory()
    for line in sys.stdin.buffer:
        if problem is not None:
            verdict = Verdict(problem)
        else:
            _limit_time()
            spec = msgspec.json.decode(line, type=StructuredOutputs)
            try:
                checked = check(tokenizer, spec)
                verdict = Verdict(grammar=None if checked is spec else checked.grammar)
            except ValueError as error:
                verdict = Verdict(str(error))
            except RecursionError:
                verdict = Verdict(f"structured_outputs.{spec.kind}: is nested too deep")
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """Beyond what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _set(resource.RLIMIT_AS, pages * resource.getpagesize() + COMPILE_BYTES)


def _limit_time() -> None:
    """Beyond what has passed. The kernel counts whole seconds."""
    _set(resource.RLIMIT_CPU, math.ceil(time.process_time()) + COMPILE_SECONDS)


def _set(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main()
