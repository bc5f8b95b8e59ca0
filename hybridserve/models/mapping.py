"""A checkpoint's tensors as people read them: those whose names differ in numbers alone are one line.

Knows names and shapes; what a tensor is for, its name says.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hybridserve.models.weights import Checkpoint
    from hybridserve.quant.policy import FormatPolicy


class _Group(NamedTuple):
    """What tensors have in common."""

    name: str  # with * in the place of numbers
    shape: tuple[int, ...]
    dtype: str
    format: str


def mapping(checkpoint: Checkpoint, formats: FormatPolicy) -> Iterator[tuple[str, str]]:
    """Rows of a table: (names, how many, shape, dtype in the file -> format in memory), in the files' order
    of first appearance."""
    groups: dict[_Group, list[tuple[int, ...]]] = defaultdict(list)
    for stored in checkpoint.tensors:
        entry = stored.file.entries[stored.stored_name]
        kept = formats.formats.get(stored.name.removesuffix(".weight"), formats.plain)
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", stored.stored_name)
        index = tuple(int(part) for part in stored.stored_name.split(".") if part.isdigit())
        becomes = "" if kept is formats.plain else kept.name
        groups[_Group(name, entry.shape, entry.dtype, becomes)].append(index)
    for group, numbers in groups.items():
        parts = group.name.split("*")
        columns = [numbers_text(column) for column in zip(*numbers, strict=True)]
        name = "".join(part + column for part, column in zip(parts, [*columns, ""], strict=True))
        count = f"{len(numbers):,} x " if len(numbers) > 1 else ""
        becomes = f" -> {group.format}" if group.format else ""
        yield name, f"{count}{list(group.shape)} {group.dtype}{becomes}"


def numbers_text(numbers: Iterable[int]) -> str:
    """ "{0-71}", "{1,3..71}" for every second one, "{0-71 without 4,12..68}"; a number alone is itself."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return str(ordered[0])
    text = _progression(ordered)
    if text is None:
        gaps = sorted(set(range(ordered[0], ordered[-1] + 1)) - set(ordered))
        text = f"{ordered[0]}-{ordered[-1]} without {_progression(gaps) or _list(gaps)}"
        text = min(text, _list(ordered), key=len)
    return f"{{{text}}}"


def _progression(ordered: list[int]) -> str | None:
    """Evenly spaced numbers, or up to three of any kind."""
    steps = {later - earlier for earlier, later in itertools.pairwise(ordered)}
    if steps == {1}:
        return f"{ordered[0]}-{ordered[-1]}"
    if len(ordered) <= 3:
        return _list(ordered)
    return f"{ordered[0]},{ordered[1]}..{ordered[-1]}" if len(steps) == 1 else None


def _list(ordered: list[int]) -> str:
    return ",".join(map(str, ordered))
