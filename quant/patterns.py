"""Patterns of module names, as `re:` targets of quantized checkpoints have them: a part of Python's regular
expressions, matched from a name's start.

Others wrote them, so matching must be bounded: all places where a pattern may stand are followed at once, in
time proportional to the name's length times the pattern's. What can't be followed so, is refused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

KNOWN = r"characters, ., [...], \d, \w, (...), |, *, +, ?, and ^ and $ at the ends"
_MAX_LENGTH = 2000
_MAX_DEPTH = 20
"""Of groups in one another."""
_CLASSES = {
    "d": frozenset("0123456789"),
    "w": frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"),
}


class _Characters(NamedTuple):
    """Those of a set, or all others."""

    members: frozenset[str]
    others: bool = False

    def have(self, character: str) -> bool:
        return (character in self.members) != self.others


@dataclass(slots=True)
class _State:
    """A place in a pattern: where `characters` lead to `next`, or, without any, where one is at once."""

    characters: _Characters | None = None
    next: list[int] = field(default_factory=list)
    at_end: bool = False
    """Only after a name's last character."""


class Pattern:
    """ValueError for what is not a regular expression, or none that is understood."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._states: list[_State] = []
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"has {len(text)} characters, of {_MAX_LENGTH} at most")
        if text.startswith("^"):
            self._place = 1
        self._end = self._add()
        self._start = self._choice(self._end, 0)
        if self._place < len(text):
            raise self._refuse("a ) without its (")
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Whether the pattern fits the name's start, as `re.match` tells."""
        places = self._closure({self._start})
        for character in name:
            if self._end in places:
                return True
            step = (places, character)
            if step not in self._steps:
                self._steps[step] = self._after(places, character)
            places = self._steps[step]
            if not places:
                return False
        return self._end in self._closure(places, at_end=True)

    def _after(self, places: frozenset[int], character: str) -> frozenset[int]:
        reached: set[int] = set()
        for state in map(self._states.__getitem__, places):
            if state.characters is not None and state.characters.have(character):
                reached.update(state.next)
        return self._closure(reached)

    def _closure(self, places: set[int] | frozenset[int], *, at_end: bool = False) -> frozenset[int]:
        """With all places that are reached without a character."""
        found, todo = set(places), list(places)
        while todo:
            state = self._states[todo.pop()]
            if state.characters is None and (at_end or not state.at_end):
                new = set(state.next) - found
                found |= new
                todo += new
        return frozenset(found)

    # Each part of the parser is given the place where to go on, and returns the one where it begins.

    def _choice(self, then: int, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise self._refuse(f"more than {_MAX_DEPTH} groups in one another")
        starts = [self._sequence(then, depth)]
        while self._peek() == "|":
            self._place += 1
            starts.append(self._sequence(then, depth))
        return starts[0] if len(starts) == 1 else self._add(next=starts)

    def _sequence(self, then: int, depth: int) -> int:
        """Parts one after the other; each ends where the next begins, which is known last."""
        start = here = self._add()
        while (character := self._peek()) not in ("", "|", ")"):
            end = self._add()
            if character == "$":
                self._place += 1
                self._states[here] = _State(None, [end], at_end=True)
            else:
                self._states[here].next.append(self._repeated(end, depth))
            here = end
        self._states[here].next.append(then)
        return start

    def _repeated(self, then: int, depth: int) -> int:
        again = self._add()
        start = self._item(again, depth)
        sign = self._peek()
        self._states[again].next.append(then)
        if sign not in ("*", "+", "?"):
            if sign == "{":
                raise self._refuse("a number of times")
            return start
        self._place += 1
        if self._peek() == "?":  # the shortest first: fits the same names
            self._place += 1
        if self._peek() in ("*", "+", "?", "{"):
            raise self._refuse("a repetition of a repetition")
        if sign in ("*", "+"):
            self._states[again].next.append(start)
        return start if sign == "+" else self._add(next=[start, then])

    def _item(self, then: int, depth: int) -> int:
        character = self._take()
        if character == "(":
            if self._peek() == "?":
                if self._text[self._place : self._place + 2] != "?:":
                    raise self._refuse("(? but for (?:")
                self._place += 2
            start = self._choice(then, depth + 1)
            if self._peek() != ")":
                raise self._refuse("a ( without its )")
            self._place += 1
            return start
        if character in ("*", "+", "?", "{", "^"):
            self._place -= 1
            raise self._refuse(f"a {character} there")
        return self._add(self._characters(character), [then])

    def _characters(self, character: str) -> _Characters:
        if character == ".":
            return _Characters(frozenset("\n"), others=True)
        if character == "[":
            return self._set()
        return _Characters(self._escaped() if character == "\\" else frozenset(character))

    def _escaped(self) -> frozenset[str]:
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character]
        if not character or character.isalnum():
            self._place -= bool(character)
            raise self._refuse(f"\\{character}")
        return frozenset(character)

    def _set(self) -> _Characters:
        others = self._peek() == "^"
        self._place += others
        members: set[str] = set()
        first = True
        while first or self._peek() != "]":
            first = False
            if not (character := self._take()):
                raise self._refuse("a [ without its ]")
            if character == "\\":
                members |= self._escaped()
            elif self._peek() == "-" and self._text[self._place + 1 :][:1] not in ("", "]"):
                self._place += 1
                last = self._take()
                if last == "\\" or last < character or ord(last) > 0x7F:
                    raise self._refuse(f"the range {character}-{last}")
                members |= set(map(chr, range(ord(character), ord(last) + 1)))
            else:
                members.add(character)
        self._place += 1
        return _Characters(frozenset(members), others)

    def _add(self, characters: _Characters | None = None, next: list[int] | None = None) -> int:
        self._states.append(_State(characters, next or []))
        return len(self._states) - 1

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self) -> str:
        character = self._peek()
        self._place += 1
        return character

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"{what}, at character {self._place + 1}, is not understood; what is: {KNOWN}")


@functools.cache
def pattern(text: str) -> Pattern:
    """The same one for the same text."""
    return Pattern(text)
