"""Reads an `EngineConfig` from a YAML file, keyword options and command-line options; later ones win.

Every mistake of a user is one `ConfigError` with a line for each: where the value stands, the key, the value
and what would be valid. All that is wrong is told at once.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter, ValidationError

from hybridserve.config.schema import EngineConfig
from hybridserve.config.settings import (
    ConfigError,
    Setting,
    TextValue,
    config_keys,
    flatten,
    place,
    resolve,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic_core import ErrorDetails

__all__ = ["ConfigError", "Configuration", "TextValue", "config_keys", "load_config", "read_config"]

_ADAPTERS = "lora.adapters"
"""The key whose value has names of its own."""
_NO_MODEL = "-"
"""What no adapter can be called."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings that can be used. `settings`: what each key that was set was set to last, and where."""

    config: EngineConfig
    settings: Mapping[str, Setting]


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
    return read_config(model, file, overrides, with_keys=with_keys).config


def read_config(
    model: str | os.PathLike[str] | None = None,
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    with_keys: bool = True,
) -> Configuration:
    """As `load_config`, with the origin of each value."""
    settings: list[Setting] = []
    problems: list[str] = []
    if file is not None:
        from hybridserve.config.yaml_file import read_file

        settings += read_file(Path(file), with_keys, problems)
    for name, value in (overrides or {}).items():
        origin = f"--{name}" if isinstance(value, TextValue) else f"option {name}"
        try:
            settings += flatten(resolve(name, value, origin), value, origin, problems)
        except ConfigError as error:
            problems.append(str(error))
    if model is not None:
        settings.append(Setting("model", os.fspath(model), "model"))
    last = {setting.key: setting for setting in settings}
    if "model" not in last and not any("'model'" in problem for problem in problems):
        problems.append(f"{file or 'options'}: model: is required: a directory, a hub id, or demo")
    config = _validate(last, problems)
    if problems or config is None:
        raise ConfigError("\n".join(_in_order(problems, file)))
    return Configuration(config, last)


def _in_order(problems: list[str], file: object) -> list[str]:
    """Those of the file come first, by their lines."""
    line = re.compile(re.escape(f"{file}:") + r"(\d+): ")

    def key(problem: str) -> float:
        match = line.match(problem)
        return int(match[1]) if match else float("inf")

    return sorted(problems, key=key)


def _validate(settings: Mapping[str, Setting], problems: list[str]) -> EngineConfig | None:
    """The configuration; None where `problems` have grown. What several keys are together is also looked at
    where one that it does not depend on is wrong."""
    try:
        return EngineConfig.model_validate(_tree(settings.values()))
    except ValidationError as error:
        found = dict(_explain(error, settings))
    wrong = {key for key, _ in found}
    problems += found.values()
    try:
        rest = [setting for setting in settings.values() if setting.key not in wrong]
        EngineConfig.model_validate(_tree(rest))
    except ValidationError as error:
        for subject, text in _explain(error, settings):
            if subject not in found and not any(key in text for key in wrong):
                problems.append(text)
    return None


def _tree(settings: Iterable[Setting]) -> dict[str, Any]:
    """Sections in sections, as the schema wants them. A model that is missing is a problem of its own."""
    values: dict[str, Any] = {"model": _NO_MODEL}
    for setting in settings:
        *parents, name = setting.key.split(".")
        home = values
        for section in parents:
            home = home.setdefault(section, {})
        value = setting.value
        home[name] = _typed(setting.key, value.text) if isinstance(value, TextValue) else value
    return values


def _explain(
    error: ValidationError, settings: Mapping[str, Setting]
) -> Iterator[tuple[tuple[str, str], str]]:
    """(key, what of it is meant), message: the first of each, for a union reports one for every member."""
    told = set()
    for problem in error.errors(include_url=False):
        for name, reason in _reasons(problem):
            ends = [len(name), *(match.start() for match in re.finditer(r"\.", name))]
            key = max((name[:end] for end in ends if name[:end] in settings), key=len)
            subject = name if key == _ADAPTERS else key
            if (key, subject) not in told:
                told.add((key, subject))
                yield (key, subject), f"{place(settings[key].origin, subject)}: {reason}"


def _reasons(problem: ErrorDetails) -> Iterator[tuple[str, str]]:
    reason = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
    reason = reason.replace("String should", "should")
    if problem["loc"]:
        name = ".".join(str(part) for part in problem["loc"][:3])
        yield name, f"{shown(problem['input'], name)}: {reason}"
    else:  # of several keys together: each line of the message says the rest
        for line in reason.splitlines():
            name, _, rest = line.partition(": ")
            yield name, rest


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
