"""Stands in for packages that can't be installed here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def install(patch: pytest.MonkeyPatch, name: str, *functions: Callable[..., Any]) -> None:
    """A package of this name whose module has these functions."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []  # type: ignore[attr-defined]
        patch.setitem(sys.modules, module.__name__, module)
    for function in functions:
        setattr(module, function.__name__, function)
