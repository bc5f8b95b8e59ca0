"""The command line, run in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hybridserve.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], arguments: Iterable[object]) -> tuple[int, str, str]:
    """A command's exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as status:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status.value.code, shown.out, shown.err


def imported_by(code: str) -> set[str]:
    """The modules that are there after one line of `code` has run, which may end with status 0."""
    code = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return set(done.stderr.split())
