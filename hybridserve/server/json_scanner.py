"""Follows a JSON object that comes in pieces: where it ends, and whether it is one to the letter.

Knows characters; keeps neither text nor values. Each character costs the same, however long the object is.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64

WHITESPACE = " \n\r\t"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \n\r\t]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


def _number_table() -> dict[tuple[str, str], str]:
    """(state, character) -> next state, of a number."""
    digits = "0123456789"
    rows = [
        ("start", "-", "minus"),
        ("start", "0", "zero"),
        ("start", digits[1:], "whole"),
        ("minus", "0", "zero"),
        ("minus", digits[1:], "whole"),
        ("whole", digits, "whole"),
        ("zero", ".", "point"),
        ("whole", ".", "point"),
        ("point", digits, "fraction"),
        ("fraction", digits, "fraction"),
        ("zero", "eE", "e"),
        ("whole", "eE", "e"),
        ("fraction", "eE", "e"),
        ("e", "+-", "sign"),
        ("e", digits, "exponent"),
        ("sign", digits, "exponent"),
        ("exponent", digits, "exponent"),
    ]
    return {(state, char): after for state, chars, after in rows for char in chars}


_NUMBER = _number_table()
_COMPLETE_NUMBERS = frozenset({"zero", "whole", "fraction", "exponent"})


class NotJson(Exception):
    """`position`: of the first character that can't stand where it does."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class JsonObjectScanner:
    """Reads one object, from its `{` on. Nested deeper than MAX_DEPTH, it counts as none."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """The brackets that close what is open, the innermost last."""
        self._expects = "object"
        """One of: object, value, value or end, key, key or end, colon, comma or end; string, escape, hex,
        number, literal (the rest of such a token)."""
        self._is_key = False
        self._rest = ""
        """Of a literal, what must come; of a number, its state; of \\u, a character for each digit."""

    def read(self, text: str, position: int) -> tuple[int, bool]:
        """(where the object's part of `text` ends, whether the object does). Raises NotJson."""
        while position < len(text):
            expects = self._expects
            if expects == "string":
                end = _PLAIN.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing, too
                position = self._in_string(text, end) if end < len(text) else end
            elif expects in ("escape", "hex", "number", "literal"):
                position = self._in_token(text, position)
            else:
                position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
                if position < len(text):
                    self._begin(text, position)
                    position += 1
                    if not self._open:
                        return position, True
        return position, False

    def _in_string(self, text: str, position: int) -> int:
        """At a character that is not plain."""
        if text[position] == '"':
            self._expects = "colon" if self._is_key else "comma or end"
        elif text[position] == "\\":
            self._expects = "escape"
        else:
            raise NotJson(position)
        return position + 1

    def _in_token(self, text: str, position: int) -> int:
        """One character; none, where that is after the end of a number."""
        char = text[position]
        if self._expects == "number":
            after = _NUMBER.get((self._rest, char))
            if after is not None:
                self._rest = after
                return position + 1
            if self._rest not in _COMPLETE_NUMBERS:
                raise NotJson(position)
            self._expects = "comma or end"
            return position
        if self._expects == "literal":
            if char != self._rest[0]:
                raise NotJson(position)
            self._rest = self._rest[1:]
            self._expects = "literal" if self._rest else "comma or end"
        elif self._expects == "escape":
            if char not in '"\\/bfnrtu':
                raise NotJson(position)
            self._expects, self._rest = ("hex", "....") if char == "u" else ("string", "")
        else:
            if char not in _HEX:
                raise NotJson(position)
            self._rest = self._rest[1:]
            self._expects = "hex" if self._rest else "string"
        return position + 1

    def _begin(self, text: str, position: int) -> None:
        """At the first character of something new."""
        char, expects = text[position], self._expects
        if char == '"' and expects in ("value", "value or end", "key", "key or end"):
            self._is_key = expects.startswith("key")
            self._expects = "string"
        elif char == ":" and expects == "colon":
            self._expects = "value"
        elif char == "," and expects == "comma or end":
            self._expects = "key" if self._open[-1] == "}" else "value"
        elif char in "}]" and expects.endswith(" or end") and self._open[-1] == char:
            self._open.pop()
            self._expects = "comma or end"
        elif char == "{" and expects == "object":
            self._push("}", "key or end", position)
        elif not expects.startswith("value"):
            raise NotJson(position)
        elif char == "{":
            self._push("}", "key or end", position)
        elif char == "[":
            self._push("]", "value or end", position)
        elif char in _LITERALS:
            self._expects, self._rest = "literal", _LITERALS[char][1:]
        elif ("start", char) in _NUMBER:
            self._expects, self._rest = "number", _NUMBER["start", char]
        else:
            raise NotJson(position)

    def _push(self, closing: str, expects: str, position: int) -> None:
        if len(self._open) == MAX_DEPTH:
            raise NotJson(position)
        self._open.append(closing)
        self._expects = expects
