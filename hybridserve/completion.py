"""Completion of command lines in bash, zsh and fish, by argcomplete.

Knows the shell's line and what an option's value may be; which options there are, their parser says.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

_OPTION = re.compile(r"(?<=\s)--[A-Za-z][\w.-]*")
_FILES = re.compile(r"FILE|DIR|YAML|MODEL|CHECKPOINT")
"""In the name of an argument that is a file or directory."""
_MODELS = ("demo",)


def script(shell: str) -> str:
    """What that shell has to evaluate once."""
    from argcomplete.shell_integration import shellcode

    return shellcode(["hybridserve"], shell=shell)


def words() -> list[str]:
    """Those after `hybridserve` in the line that is being completed, before the cursor."""
    line, end = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    return line[:end].split()[1:]


def answer(
    parser: argparse.ArgumentParser,
    command: argparse.ArgumentParser,
    choices: Mapping[str, Sequence[str]],
) -> NoReturn:
    """Tell the shell what may stand at the cursor, and end. `choices`: of options, by their destination."""
    from argcomplete import autocomplete
    from argcomplete.completers import SuppressCompleter

    for action in command._actions:
        is_file = isinstance(action.metavar, str) and _FILES.search(action.metavar)
        if names := choices.get(action.dest):
            action.completer = _Words(names)  # type: ignore[attr-defined]
        elif is_file or action.dest.endswith("tokenizer"):
            others = _MODELS if "MODEL" in str(action.metavar) else ()
            action.completer = _Files(others)  # type: ignore[attr-defined]
    _spell_as_typed(command)
    autocomplete(parser, always_complete_options=False, default_completer=SuppressCompleter())
    os._exit(1)  # it was no shell of ours that asked


class _Words:
    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def __call__(self, prefix: str, **context: object) -> list[str]:
        return [word for word in self._words if word.startswith(prefix)]


class _Files(_Words):
    """Names of files and directories, and some words."""

    def __call__(self, prefix: str, **context: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return [*super().__call__(prefix), *FilesCompleter()(prefix, **context)]


def _spell_as_typed(command: argparse.ArgumentParser) -> None:
    """Both spellings of an option's name work; offered is the one that is being typed: --max_tokens, or
    --max-tokens where the line has such a name already."""
    line = os.environ["COMP_LINE"]
    has_hyphens = any("-" in name[2:] for name in _OPTION.findall(line))
    old, new = ("_", "-") if has_hyphens else ("-", "_")

    def spelled(name: str) -> str:
        return f"--{name[2:].replace(old, new)}" if name.startswith("--") else name

    os.environ["COMP_LINE"] = _OPTION.sub(lambda match: spelled(match[0]), line)
    for action in command._actions:
        action.option_strings = [spelled(name) for name in action.option_strings]
    options = command._option_string_actions
    command._option_string_actions = {spelled(name): action for name, action in options.items()}
