"""A directory that is written whole or not at all.

Knows files; does not know what is in them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_SUFFIX = ".unfinished"


def check_new(out: Path) -> None:
    """ValueError or OSError unless `new_directory` could begin: for whoever has much to do before."""
    with new_directory(out):
        raise _OnlyChecking


@contextlib.contextmanager
def new_directory(out: Path, last: str = "") -> Iterator[Path]:
    """A directory to write into, whose files are in `out` when the block ends; if it raises, nothing is.

    `out` is empty, or not there; a link to a directory stays one. What is written lies in a hidden directory
    before: in `out` if that is there, for its parent may be another file system, or not ours to write to;
    else beside it. Where `out` was there, files are moved into it one by one, the one named `last` as the
    last. Raises ValueError if something is in `out`, OSError where it can't be written.
    """
    target = Path(os.path.realpath(out))
    if target.is_symlink():
        raise ValueError(f"{out}: a link that leads in a circle")
    is_there = target.exists()
    if is_there:
        _check_empty(out, target)
    missing = [parent for parent in target.parents if not parent.exists()]
    name = f"{_prefix(target)}{os.getpid()}{_SUFFIX}"
    unfinished = target / name if is_there else target.with_name(name)
    moved: list[Path] = []
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if is_there:
            for file in sorted(unfinished.iterdir(), key=lambda file: file.name == last):
                moved.append(target / file.name)
                file.rename(moved[-1])
        else:
            unfinished.rename(target)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        for file in moved:
            file.unlink(missing_ok=True)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if not isinstance(error, _OnlyChecking):
            raise
    shutil.rmtree(unfinished, ignore_errors=True)


class _OnlyChecking(Exception):
    """Ends the block of `check_new`."""


def leftovers(out: Path) -> list[Path]:
    """What runs that were killed have left of `out`, or others still write."""
    target = Path(os.path.realpath(out))
    found: list[Path] = []
    for folder in (target, target.parent):
        with contextlib.suppress(OSError):
            found += sorted(file for file in folder.iterdir() if _is_unfinished(file.name, target))
    return found


def _prefix(target: Path) -> str:
    return f".{target.name}."


def _is_unfinished(name: str, target: Path) -> bool:
    number = name.removeprefix(_prefix(target)).removesuffix(_SUFFIX)
    return number.isdigit() and name == f"{_prefix(target)}{number}{_SUFFIX}"


def _check_empty(out: Path, target: Path) -> None:
    if not target.is_dir():
        raise ValueError(f"{out}: exists, and is not an empty directory")
    if found := [file for file in target.iterdir() if not _is_unfinished(file.name, target)]:
        raise ValueError(f"{out}: exists, and is not an empty directory: {found[0].name} is in it")
