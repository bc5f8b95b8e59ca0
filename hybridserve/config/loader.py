"""Reads an `EngineConfig` from a YAML file, keyword options and command-line options; later ones win.

Knows keys by the schema alone. Every mistake of a user is one `ConfigError` whose lines each name where the
value stands, the key, the value and what would be valid. Imports the YAML reader only when there is a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from hybridserve.config.schema import EngineConfig, parse_list, parse_pairs
from hybridserve.config.spelling import nearest

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


_KEYS_OF_CLIENTS = ("server.api_keys", "server.admin_keys")
_ADAPTERS = "lora.adapters"
"""The key whose value has names of its own."""


class ConfigError(ValueError):
    """A setting that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class TextValue:
    """A value typed on a command line: its type is that of its key."""

    text: str


@dataclass(frozen=True, slots=True)
class _Setting:
    key: str
    value: object
    origin: str


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
def _sections() -> frozenset[str]:
    """Dotted names of everything that holds keys, at any depth."""
    parts = [key.split(".") for key in config_keys()]
    return frozenset(".".join(part[:depth]) for part in parts for depth in range(1, len(part)))


def load_config(
    model: str | os.PathLike[str] | None = None,
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    with_keys: bool = True,
) -> EngineConfig:
    """The settings of `file`, changed by `overrides`, changed by `model`.

    `overrides` maps keys to values: dotted (`cache.block_size`), nested (`cache={"block_size": 32}`), or by
    the last part alone where only one key ends in it (`block_size`); a top-level key always wins. A
    `TextValue` is converted to the type of its key. Without `with_keys`, ${NAME} in the keys of a server's
    clients stays as it is: who serves nobody needs no secrets. Raises ConfigError.
    """
    settings = list(_from_file(Path(file), with_keys)) if file is not None else []
    for name, value in (overrides or {}).items():
        origin = f"--{name}" if isinstance(value, TextValue) else f"option {name}"
        settings += _flatten(_resolve(name, value, origin), value, origin)
    if model is not None:
        settings.append(_Setting("model", os.fspath(model), "model"))
    if all(setting.key != "model" for setting in settings):
        raise ConfigError(f"{file or 'options'}: model: is required: a directory, a hub id, or demo")
    return _validate(settings)


def _resolve(name: str, value: object, origin: str) -> str:
    """The dotted key, or section, that an option's name means."""
    keys = config_keys()
    if name in keys or name in _sections():
        return name
    matches = [key for key in keys if key.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    raise _unknown(name, value, origin)


def _unknown(name: str, value: object, origin: str) -> ConfigError:
    by_spelling = {key.rpartition(".")[2]: key for key in reversed(config_keys())}
    by_spelling |= {key: key for key in [*config_keys(), *_sections()]}
    section, _, last = name.rpartition(".")
    is_section = section in _sections()
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
    return ConfigError(f"{origin}: unknown key {name!r} (value {_show(value, name)}); {hint}")


def _flatten(
    key: str, value: object, origin: str, origin_of: Callable[[object, object], str] | None = None
) -> Iterator[_Setting]:
    """The settings that a key's value holds: itself, or those of a section, each of its own origin.

    `origin_of` tells it of a section's value and a name in it.
    """
    if key not in _sections():
        yield _Setting(key, value, origin)
        return
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_place(origin, key)}: {_show(value, key)} is not a set of keys")
    for name, inner in value.items():
        where = origin_of(value, name) if origin_of else origin
        full = f"{key}.{name}"
        if full in _sections():
            if inner is not None:  # all that stood under it may be commented out
                yield from _flatten(full, inner, where, origin_of)
        elif full in config_keys():
            yield _Setting(full, inner, where)
        else:
            raise _unknown(full, inner, where)


def _place(origin: str, key: str) -> str:
    """Where a value stands and its key, which an option that is spelled out names already."""
    return origin if origin in (key, f"--{key}", f"option {key}") else f"{origin}: {key}"


def _validate(settings: list[_Setting]) -> EngineConfig:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings:
        *sections, name = setting.key.split(".")
        home = values
        for section in sections:
            home = home.setdefault(section, {})
        home[name] = (
            _typed(setting.key, setting.value.text) if isinstance(setting.value, TextValue) else setting.value
        )
        origins[setting.key] = setting.origin
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}  # the first problem of each key: a union reports one for every member
        for problem in error.errors(include_url=False):
            reason = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
            reason = reason.replace("String should", "should")
            if not problem["loc"]:  # of several keys together: the message says the rest
                name, _, reason = reason.partition(": ")
            else:
                name = ".".join(str(part) for part in problem["loc"][:3])
                reason = f"{_show(problem['input'], name)}: {reason}"
            ends = [len(name), *(match.start() for match in re.finditer(r"\.", name))]
            key = max((name[:end] for end in ends if name[:end] in origins), key=len)
            shown = name if key == _ADAPTERS else key
            lines.setdefault(shown, f"{_place(origins[key], shown)}: {reason}")
        raise ConfigError("\n".join(lines.values())) from None


def _typed(key: str, text: str) -> object:
    """Text from a command line or an environment variable, as a value of the key's type where it is one.

    What is not stays text, for the schema to refuse with its own words.
    """
    lax = TypeAdapter[Any](cast("type[Any]", config_keys()[key].annotation))
    for candidate in (None, text) if text == "null" else (text,):
        try:
            return lax.validate_python(candidate)
        except ValidationError:
            continue
    with suppress(ValueError):
        return int(text)
    return text


def _from_file(path: Path, with_keys: bool) -> Iterator[_Setting]:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        tree = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(
            f"{where}: {(error.problem or error.context or 'is not YAML').splitlines()[0]}"
        ) from None
    except YAMLError as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, CommentedMap):
        raise ConfigError(f"{path}: holds no keys")

    for name, value in tree.items():
        where = _line(path, tree, name)
        if name not in config_keys() and name not in _sections():
            raise _unknown(str(name), value, where)
        if value is None and name in _sections():  # all that stood under it may be commented out
            continue
        for setting in _flatten(str(name), value, where, partial(_line, path)):
            expanded = _plain(setting.value)
            if with_keys or setting.key not in _KEYS_OF_CLIENTS:
                expanded = _expand(expanded, setting.key, setting.origin)
            if setting.key in _DIRECTORIES:
                expanded = _anchored(expanded, setting.key, path.parent.absolute())
            yield replace(setting, value=expanded)


def _line(path: Path, mapping: Any, name: object) -> str:
    try:
        return f"{path}:{mapping.lc.key(name)[0] + 1}"
    except (KeyError, TypeError):  # a key that came by a YAML merge has no line of its own
        return f"{path}:{mapping.lc.line + 1}"


def _plain(value: object) -> object:
    """The YAML reader's values remember how they were spelled; the schema wants plain ones."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _expand(value: object, key: str, origin: str) -> object:
    """Replaces ${NAME} by the environment's value; the result has the key's type, as on a command line, but
    in a list or a mapping it stays text."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(
                f"{origin}: {key}: {_show(value, key)}: the environment variable {match[1]} is not set"
            )
        return os.environ[match[1]]

    def within(inner: object) -> object:
        return _VARIABLE.sub(variable, inner) if isinstance(inner, str) else inner

    if isinstance(value, dict):
        return {name: within(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [within(inner) for inner in value]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    return TextValue(_VARIABLE.sub(variable, value))


_DIRECTORIES = {"lora.adapters": parse_pairs, "lora.roots": parse_list}
"""Keys whose relative directories are, in a file, relative to its folder; and how their text is read."""


def _anchored(value: object, key: str, folder: Path) -> object:
    """The directories of a key with `folder` before those that are relative; what is no directory stays, for
    the schema to refuse."""

    def absolute(inner: object) -> object:
        if not isinstance(inner, str) or not inner or inner.startswith("~"):
            return inner
        return str(folder / inner)  # an absolute one stays what it is

    text = value.text if isinstance(value, TextValue) else value
    try:
        parsed = _DIRECTORIES[key](text)
    except ValueError:
        return value
    if isinstance(parsed, dict):
        return {name: absolute(inner) for name, inner in parsed.items()}
    return tuple(map(absolute, parsed)) if isinstance(parsed, tuple) else parsed


def _show(value: object, key: str) -> str:
    """A value in a message, but for the keys of clients, wherever they were put."""
    text = repr(value.text if isinstance(value, TextValue) else value)
    if key == "server" or "key" in key.lower() or "key" in text.lower():
        return "not shown"
    return text if len(text) <= 80 else text[:77] + "..."
