"""A configuration as a YAML file that has the origin of each value beside it, and loads back as the same.

Knows keys and values. A key of a server's clients is never written: where it came from the environment, its
${NAME} is; where not, a name that no environment has, so that who starts a server from the file is told.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hybridserve.config.settings import CLIENT_KEYS, Setting, config_keys
from hybridserve.config.yaml_file import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.config.loader import Configuration

_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n|~)$)[A-Za-z_./][\w./-]*", re.IGNORECASE)
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COMMENT_COLUMN = 48


def as_yaml(configuration: Configuration, *, with_defaults: bool) -> str:
    """Every key that was set, or with `with_defaults` every key that there is, in the schema's order."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key in config_keys():
        setting = configuration.settings.get(key)
        if setting is None and not with_defaults:
            continue
        *sections, name = key.split(".")
        common = 0
        while common < min(len(sections), len(open_sections)) and sections[common] == open_sections[common]:
            common += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(common, len(sections))]
        open_sections = sections
        text = f"{'  ' * len(sections)}{name}: {_written(key, _value(configuration, key), setting)}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {_origin(key, setting)}")
    return "\n".join(lines) + "\n"


def _value(configuration: Configuration, key: str) -> Any:
    value: Any = configuration.config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _origin(key: str, setting: Setting | None) -> str:
    if setting is None:
        return "default"
    origin = setting.origin
    if setting.variables:
        origin += ", environment " + " ".join(f"${{{name}}}" for name in setting.variables)
    if key in CLIENT_KEYS and any(not VARIABLE.fullmatch(text) for text in _secrets(setting)):
        origin += "; not shown"
    return origin


def _written(key: str, value: Any, setting: Setting | None) -> str:
    if key in CLIENT_KEYS:
        return _scalar([] if setting is None else list(_placeholders(key, setting)))
    if key.endswith("_bytes") and isinstance(value, int):
        return next((f"{value // size}{unit}" for unit, size in _UNITS if value % size == 0), str(value))
    return _scalar(value)


def _secrets(setting: Setting) -> list[str]:
    """As they were written, before the environment was looked at."""
    written = setting.value if setting.written is None else setting.written
    text = getattr(written, "text", written)
    if isinstance(text, str):
        return [part.strip() for part in text.split(",") if part.strip()]
    return [str(part) for part in text] if isinstance(text, list | tuple) else []


def _placeholders(key: str, setting: Setting) -> Iterator[str]:
    for number, text in enumerate(_secrets(setting), start=1):
        name = key.rpartition(".")[2].removesuffix("s").upper()
        yield text if VARIABLE.fullmatch(text) else f"${{NOT_SHOWN_{name}_{number}}}"


def _scalar(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(name)}: {_scalar(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else _quoted(value)
    return json.dumps(value)


def _quoted(text: str) -> str:
    """JSON's strings are YAML's, but for what a YAML file may not hold as it is."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", quoted)
