"""What there is to be set, as a command line lists it: read from a file, since building the schema takes
longer than all else that `--help` does.

`python -m hybridserve.config.keys` writes that file anew from the schema; a test says when it has to be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("keys.json")


class Key(NamedTuple):
    """`choices`: all values that it may have, where they are few."""

    name: str
    default: Any
    about: str
    choices: tuple[str, ...]


def known_keys() -> dict[str, Key]:
    """Every key but `model`, which is required, dotted, in the schema's order."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    keys = (
        Key(entry["name"], entry["default"], entry["about"], tuple(entry["choices"])) for entry in entries
    )
    return {key.name: key for key in keys}


def described() -> str:
    """The file's text as the schema would have it."""
    from hybridserve.config.settings import config_keys

    entries = [
        {
            "name": name,
            "default": info.default,
            "about": info.description,
            "choices": _choices(info.annotation),
        }
        for name, info in config_keys().items()
        if not info.is_required()
    ]
    return "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n"


def _choices(annotation: Any) -> list[str]:
    from typing import Literal, get_args, get_origin

    if annotation is bool:
        return ["true", "false"]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


if __name__ == "__main__":
    FILE.write_text(described(), encoding="utf-8")
