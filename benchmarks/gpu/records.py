"""What a part has found so far: one JSON object a line, written at once, so that nothing of it is lost when
the part is killed. Knows no part."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder:
    """Writes the records of one part, and knows how long it has."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._end = time.monotonic() + seconds
        self.num_failures = 0

    @property
    def left(self) -> float:
        """Seconds until whoever began this part ends it."""
        return self._end - time.monotonic()

    def add(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"kind": kind, **facts})
        with self._path.open("ab", buffering=0) as file:  # in one call: others may write, too
            file.write(f"{line}\n".encode())
        print(line, flush=True)

    @contextmanager
    def piece(self, kind: str, seconds: float, **facts: Any) -> Iterator[dict[str, Any] | None]:
        """A record of one piece of work, with what is put into the dictionary that this yields.

        It yields None where less than `seconds` are left, and the record says so. An error of the piece is
        recorded, and the next one goes on.
        """
        if self.left < seconds:
            self.add(kind, **facts, skipped=f"{max(self.left, 0):.0f} s are left, it needs {seconds:g}")
            yield None
            return
        found: dict[str, Any] = {}
        try:
            yield found
        except Exception as error:
            self.num_failures += 1
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"[:2000]
        self.add(kind, **facts, **found)

    def exit_status(self) -> int:
        return 1 if self.num_failures else 0


def start_again_if_lost(recorder: Recorder) -> None:
    """After a failure: where it has left this process without its device, as an access to memory that there
    is not does, run the part anew in a fresh one, with `--again` and what time is left. Else return."""
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        part = sys.modules["__main__"].__spec__.name
        recorder.add("device lost", left=round(recorder.left, 1))
        arguments = [*sys.argv[1:], "--again", "--seconds", f"{recorder.left:.1f}"]
        os.execv(sys.executable, [sys.executable, "-m", part, *arguments])


def read(path: Path) -> list[dict[str, Any]]:
    """The records in a file, but for a last line that was cut off; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def part_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every part understands."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, required=True, help="file that records are added to")
    parser.add_argument("--seconds", type=float, required=True, help="after which the part is ended")
    parser.add_argument("--work", type=Path, required=True, help="directory that all parts share")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes: no speed is meant")
    parser.add_argument("--again", action="store_true", help="go on after what was recorded before")
    return parser


def device_of(dry: bool) -> str:
    """As torch calls it."""
    return "cpu" if dry else "cuda"
