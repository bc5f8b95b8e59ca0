"""What an adapter may be called, and which directories may be read for one.

Names and paths can come from whoever talks to a server, so what is refused here is never opened. Knows names
and directories; knows no adapter format beyond the names of its two files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_PATH = 4096


def check_name(name: object, reserved: Collection[str] = ()) -> str:
    """The name, if it may be an adapter's; `reserved` are the base model's. ValueError for any other."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"adapter: {shown(name)} can't be a name; 1 to 64 of the characters A-Z a-z 0-9 . _ - can, "
            "a letter or a digit first"
        )
    if name in reserved:
        raise ValueError(f"adapter: {name!r} is a name of the base model")
    return name


def shown(value: object) -> str:
    """A value of anybody's making for an error message: one line, escaped, and not long."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A directory to read an adapter from. With a root, neither it nor its files may lie outside of that."""

    path: Path
    root: Path | None = None
    """None: the operator named the path himself."""

    def check(self) -> None:
        """ValueError if links lead out of the root. Called before every read and after it: links can be
        changed at any time."""
        if self.root is None:
            return
        root = os.path.realpath(self.root)
        for path in (self.path, self.path / CONFIG_FILE, self.path / WEIGHTS_FILE):
            if not _is_under(os.path.realpath(path), root):
                raise ValueError(_outside(self.path))


def runtime_source(path: object, roots: Sequence[Path]) -> AdapterSource:
    """Where a path that came at run time points: absolute and under one of `roots`, or relative to one.

    ValueError for everything else, and the same one whether there is something at the path or not.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or len(text) > MAX_PATH or "\0" in text or not _encodable(text):
        raise ValueError(f"path: {shown(path)} is not a directory's name")
    if not roots:
        raise ValueError("path: nothing may be loaded, lora.roots is empty")
    candidates = []
    for root in roots:
        candidate = root / text  # an absolute path stays what it is
        real, real_root = os.path.realpath(candidate), os.path.realpath(root)
        if real != real_root and _is_under(real, real_root):
            candidates.append(AdapterSource(Path(real), Path(real_root)))
    if not candidates:
        raise ValueError(_outside(text))
    source = next((source for source in candidates if os.path.isdir(source.path)), None)  # noqa: PTH112 - Path.is_dir() raises for names that are too long
    if source is None:
        raise ValueError(f"path: {shown(text)}: there is no such directory under lora.roots")
    source.check()
    return source


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_under(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def _outside(path: str | Path) -> str:
    return f"path: {shown(str(path))} is not under one of lora.roots"
