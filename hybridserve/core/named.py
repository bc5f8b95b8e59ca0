"""Named tuples made fast. Knows nothing of what is in them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T", bound=tuple[Any, ...])


def maker(kind: type[T]) -> Callable[[tuple[Any, ...]], T]:
    """Makes a `NamedTuple` of a tuple that has all its fields, defaults too, in their order. Calling the
    class runs Python and takes three times as long; worth it where one is made for each sequence of a
    step."""
    return functools.partial(tuple.__new__, kind)
