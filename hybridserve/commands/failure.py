"""What a command's user is told when it ends in an error: one block, the root cause last.

A mistake of the user is a line for each thing that is wrong, and exit status 2; anything else is status 1.
Where in the program it was is for --verbose. Knows exceptions; imports no torch.
"""

from __future__ import annotations

import logging
import sys
import traceback

from hybridserve.distributed.failure import RankFailure
from hybridserve.frontend.errors import EngineDead

MISTAKE = 2
FAILED = 1
PREFIX = "hybridserve: "


class CommandFailed(Exception):
    """A command has not done what it was asked to, for a reason that is the message."""


def report(command: str, error: Exception, *, verbose: bool, as_json: bool = False) -> int:
    """Say on standard error what went wrong, or in a log that is JSON; returns the exit status."""
    status = MISTAKE if isinstance(error, ValueError | OSError) else FAILED
    lines = _lines(command, error)
    if as_json:
        text = "\n".join(line.removeprefix(PREFIX) for line in lines)
        logging.getLogger("hybridserve").error("%s", text, exc_info=error if verbose else None)
        return status
    if verbose and not isinstance(error, CommandFailed):
        traceback.print_exception(error)
        if isinstance(error, EngineDead) and error.details:
            sys.stderr.write(f"in the engine's process:\n{error.details}")
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return status


def _lines(command: str, error: Exception) -> list[str]:
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{PREFIX}{error.filename}: {error.strerror}"]
    if isinstance(error, ValueError | OSError):
        return [PREFIX + line for line in str(error).splitlines() or [type(error).__name__]]
    if isinstance(error, CommandFailed | EngineDead | RankFailure):  # these say all by themselves
        return [PREFIX + str(error)]
    chain: list[BaseException] = [error]
    while (cause := _cause(chain[-1])) is not None and cause not in chain:
        chain.append(cause)
    said = [f"{type(each).__name__}: {each}".removesuffix(": ") for each in chain]
    return [
        f"{PREFIX}{command} failed; --verbose shows where",
        f"    {_indented(said[0])}",
        *(f"    caused by {_indented(text)}" for text in said[1:]),
    ]


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
