"""What a text that is generated must look like: one description of it, in one of four languages.

Knows sizes and spellings; whether a description makes sense is for `hybridserve.grammar` to find out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_DESCRIPTION_BYTES = 2**20
"""Of a description in UTF-8. A server's `server.limits.schema_bytes` is lower."""

KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of four descriptions; ValueError, naming the field, for none, several, or one of another
    type.

    json: the text is a JSON value that this JSON Schema accepts (a mapping, a bool, or either as text). Kept
        as text: the order of properties is the order in which they are written.
    regex: the whole text matches it (Rust's syntax: no look-around, no back-references).
    choice: the text is one of these.
    grammar: the text is derived from `start` in Lark's syntax, as llguidance extends it, or from `root` in
        GBNF.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            many = f"{' and '.join(given)} are several" if given else "nothing is given"
            raise ValueError(f"structured_outputs: {many}; give one of json, regex, choice, grammar")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple) or not self.choice:
                raise ValueError("structured_outputs.choice: is not a list of at least one text")
            object.__setattr__(self, "choice", tuple(self.choice))
        for text in self.choice or (self.text,):
            if not isinstance(text, str):
                raise ValueError(f"structured_outputs.{given[0]}: {type(text).__name__} is not text")
        if self.num_bytes > MAX_DESCRIPTION_BYTES:
            raise ValueError(
                f"structured_outputs.{given[0]}: {self.num_bytes} bytes, at most {MAX_DESCRIPTION_BYTES}"
            )

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The description as one text; of a choice, its texts as a JSON list."""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        value: str = getattr(self, self.kind)
        return value

    @property
    def num_bytes(self) -> int:
        """Of the description in UTF-8. ValueError for what is not text."""
        try:
            return len(self.text.encode())
        except UnicodeEncodeError:
            raise ValueError(f"structured_outputs.{self.kind}: holds half of a surrogate pair") from None


def _schema_text(schema: object) -> str:
    """As JSON, without spaces."""
    if isinstance(schema, str):
        if len(schema) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"structured_outputs.json: is longer than {MAX_DESCRIPTION_BYTES} bytes")
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ValueError("structured_outputs.json: is text, but not JSON") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError("structured_outputs.json: a schema is an object, true or false")
    try:
        plain = dict(schema) if isinstance(schema, Mapping) else schema
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("structured_outputs.json: holds what JSON can't") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
