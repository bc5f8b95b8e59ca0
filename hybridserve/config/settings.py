"""One key's value and where it stands, and what is said of a value that can't be used.

Knows keys by the schema alone; reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hybridserve.config.schema import EngineConfig
from hybridserve.config.spelling import nearest

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

CLIENT_KEYS = ("server.api_keys", "server.admin_keys")
"""What no message and no listing may show."""


class ConfigError(ValueError):
    """Settings that cannot be used, and why: a line each."""


@dataclass(frozen=True, slots=True)
class TextValue:
    """A value typed on a command line: its type is that of its key."""

    text: str


@dataclass(frozen=True, slots=True)
class Setting:
    """`written` is the value before `variables` of the environment were put in."""

    key: str
    value: object
    origin: str
    written: object = None
    variables: tuple[str, ...] = ()


@cache
def config_keys() -> dict[str, FieldInfo]:
    """Every key that holds a value, dotted, in the schema's order."""
    return dict(_leaves(EngineConfig, ""))


def _leaves(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


@cache
def sections() -> frozenset[str]:
    """Dotted names of everything that holds keys, at any depth."""
    parts = [key.split(".") for key in config_keys()]
    return frozenset(".".join(part[:depth]) for part in parts for depth in range(1, len(part)))


def resolve(name: str, value: object, origin: str) -> str:
    """The dotted key, or section, that an option's name means. ConfigError."""
    keys = config_keys()
    if name in keys or name in sections():
        return name
    matches = [key for key in keys if key.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    raise ConfigError(unknown(name, value, origin))


def flatten(
    key: str,
    value: object,
    origin: str,
    problems: list[str],
    origin_of: Callable[[object, object], str] | None = None,
) -> Iterator[Setting]:
    """The settings that a key's value holds: itself, or those of a section, each of its own origin, which
    `origin_of` tells of a section's value and a name in it. What is no setting becomes one of `problems`."""
    if key not in sections():
        yield Setting(key, value, origin)
        return
    if not isinstance(value, Mapping):
        problems.append(f"{place(origin, key)}: {shown(value, key)} is not a set of keys")
        return
    for name, inner in value.items():
        where = origin_of(value, name) if origin_of else origin
        full = f"{key}.{name}"
        if full in sections():
            if inner is not None:  # all that stood under it may be commented out
                yield from flatten(full, inner, where, problems, origin_of)
        elif full in config_keys():
            yield Setting(full, inner, where)
        else:
            problems.append(unknown(full, inner, where))


# ---- messages


def unknown(name: str, value: object, origin: str) -> str:
    """Of a key that is none, with the nearest that is."""
    by_spelling = {key.rpartition(".")[2]: key for key in reversed(config_keys())}
    by_spelling |= {key: key for key in [*config_keys(), *sections()]}
    section, _, last = name.rpartition(".")
    is_section = section in sections()
    near = nearest(name, by_spelling)
    if near is None and is_section:  # a key of another section?
        near = nearest(last, by_spelling)
    if near is not None:
        hint = f"did you mean {by_spelling[near]!r}?"
    else:
        prefix = f"{section}." if is_section else ""
        valid = [key.removeprefix(prefix) for key in config_keys() if key.startswith(prefix)]
        names = dict.fromkeys(key.partition(".")[0] for key in valid)
        of_section = f" of {section}" if is_section else ""
        hint = f"valid keys{of_section} are {', '.join(names)}; see hybridserve generate --help"
    return f"{origin}: unknown key {name!r} (value {shown(value, name)}); {hint}"


def place(origin: str, key: str) -> str:
    """Where a value stands and its key, which an option that is spelled out names already."""
    return origin if origin in (key, f"--{key}", f"option {key}") else f"{origin}: {key}"


def shown(value: object, key: str) -> str:
    """A value in a message, but for the keys of clients, wherever they were put."""
    text = repr(value.text if isinstance(value, TextValue) else value)
    if key == "server" or "key" in key.lower() or "key" in text.lower():
        return "not shown"
    return text if len(text) <= 80 else text[:77] + "..."
