"""Reads a YAML file: the settings in it, each with its line, and what is wrong there.

Knows YAML, lines and the environment's variables; whether a value can be used is for the schema to say.
Imports the YAML reader only when there is a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridserve.config.schema import parse_list, parse_pairs
from hybridserve.config.settings import (
    CLIENT_KEYS,
    ConfigError,
    Setting,
    TextValue,
    config_keys,
    flatten,
    sections,
    shown,
    unknown,
)

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

_DIRECTORIES = {"lora.adapters": parse_pairs, "lora.roots": parse_list}
"""Keys whose relative directories are, in a file, relative to its folder; and how their text is read."""


def read_file(path: Path, with_keys: bool, problems: list[str]) -> Iterator[Setting]:
    """The settings of a file, in its order. What is no setting becomes one of `problems`; ConfigError for
    what is no YAML at all. Without `with_keys`, ${NAME} in the keys of clients stays as it is."""
    tree = _parse(path)
    for name, value in tree.items():
        where = _line(path, tree, name)
        if name not in config_keys() and name not in sections():
            problems.append(unknown(str(name), value, where))
            continue
        if value is None and name in sections():  # all that stood under it may be commented out
            continue
        for setting in flatten(str(name), value, where, problems, partial(_line, path)):
            written = _plain(setting.value)
            variables = variables_of(written)
            expanded = written
            if with_keys or setting.key not in CLIENT_KEYS:
                if missing := [variable for variable in variables if variable not in os.environ]:
                    value_shown = shown(_naming(written, missing[0]), setting.key)
                    said = f"{setting.key}: {value_shown}: the environment variable {missing[0]} is not set"
                    problems.append(f"{setting.origin}: {said}")
                    continue
                expanded = _expand(written)
            if setting.key in _DIRECTORIES:
                expanded = _anchored(expanded, setting.key, path.parent.absolute())
            yield replace(setting, value=expanded, written=written, variables=variables)


def _parse(path: Path) -> Mapping[Any, Any]:
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
    return tree


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


# ---- the environment


def _texts(value: object) -> Iterator[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return (text for text in inner if isinstance(text, str))


def variables_of(value: object) -> tuple[str, ...]:
    """Names of the variables in a text, or in the texts of a list or a mapping."""
    return tuple(dict.fromkeys(match[1] for text in _texts(value) for match in VARIABLE.finditer(text)))


def _naming(value: object, variable: str) -> object:
    """The value, or of a list or a mapping the text, that names a variable."""
    if isinstance(value, str):
        return value
    return next(text for text in _texts(value) if f"${{{variable}}}" in text)


def _expand(value: object) -> object:
    """Replaces ${NAME} by the environment's value; the result has the key's type, as on a command line, but
    in a list or a mapping it stays text."""

    def within(inner: object) -> object:
        return VARIABLE.sub(lambda match: os.environ[match[1]], inner) if isinstance(inner, str) else inner

    if isinstance(value, dict):
        return {name: within(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [within(inner) for inner in value]
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value
    return TextValue(str(within(value)))


# ---- directories


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
