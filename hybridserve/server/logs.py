"""How the server writes its log: one line a record on standard error, as text or as JSON.

What a client wrote is never in a record of level INFO or above, but for names, which `errors.shown` makes
harmless.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

LogFormat = Literal["text", "json"]
SLOW_SECONDS = 1.0
STILL_SLOW_SECONDS = 3.0
_CONTROLS = {code: f"\\x{code:02x}" for code in [*range(32), 127, *range(128, 160)] if code != 10}


class _Text(logging.Formatter):
    """Time, level, message. A record of several lines (the plan, a traceback) is the program's own."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:12]
        text = f"{moment} {record.levelname:<7} {record.getMessage()}".translate(_CONTROLS)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A part of starting up, and how long it took; while it takes long, a line each few seconds."""
    logger = logging.getLogger(__name__)
    begin = time.perf_counter()
    is_over = threading.Event()

    def tell() -> None:
        pause = SLOW_SECONDS
        while not is_over.wait(pause):
            logger.info("%s: %.0f s so far", name, time.perf_counter() - begin)
            pause = STILL_SLOW_SECONDS

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield
    finally:
        is_over.set()
        telling.join()
    logger.info("%s: %.2f s", name, time.perf_counter() - begin)


def set_up_logging(log_format: LogFormat, *, verbose: bool) -> None:
    """For the whole process. `verbose`: with a line for every request, and tracebacks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("hybridserve").setLevel(logging.DEBUG if verbose else logging.INFO)
    # A client's broken request is not worth a line; what an application does wrong is.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
