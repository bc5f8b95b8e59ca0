"""Integers in a JSON schema that would be enforced as others: llguidance reads every number as a float.

Knows which keywords hold numbers, values and schemas; what else they mean is for llguidance.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that map names to schemas."""
OF_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_WRITTEN = frozenset({"const", "enum"})
_EXCLUSIVE = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
_NUMERIC = frozenset({"minimum", "maximum", "multipleOf"})
_EXACT = 2**53
"""Up to here floats hold every integer, and its neighbours."""
_JSON_IN_LARK = re.compile(r"%json\s*(?=\{)")


def check_numbers(schema: object) -> None:
    """ValueError, naming the keyword, where an integer would become another one."""
    for keyword, number in _integers(schema):
        if abs(number) > _EXACT and (keyword in _EXCLUSIVE or not _is_kept(number)):
            raise ValueError(f"can't be enforced: {keyword}, with an integer that a float can't hold exactly")


def check_numbers_in_lark(grammar: str) -> None:
    """The same for the schemas in a grammar."""
    decoder = json.JSONDecoder()
    for found in _JSON_IN_LARK.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, found.end())
        except json.JSONDecodeError:
            continue  # or it is in a string, or llguidance will say what is wrong with it
        check_numbers(schema)


def _is_kept(number: int) -> bool:
    """Whether it is what is written for the float that is nearest to it: of 64 bits, that float's value;
    beyond, its shortest digits, and zeros."""
    try:
        near = float(number)
    except OverflowError:
        return False
    return number == (int(near) if abs(number) < 2**63 else int(Decimal(repr(near))))


def _integers(schema: object) -> Iterator[tuple[str, int]]:
    """Those that say what may be written, with their keywords. Without recursion: a schema may be deep."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        keyword, part = waiting.pop()
        if isinstance(part, list):
            waiting += [(keyword, each) for each in part]
        elif isinstance(part, dict):
            if keyword in OF_SCHEMAS:
                waiting += [("", each) for each in part.values()]
            elif keyword in OF_VALUES:
                waiting += [(keyword, each) for each in part.values()]
            else:
                waiting += part.items()
        elif type(part) is int and keyword in _WRITTEN | _EXCLUSIVE | _NUMERIC:
            yield keyword, part
