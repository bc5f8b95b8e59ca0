"""Finds calls of tools in what a model writes, as Jamba writes them, while it writes.

    <tool_calls>[{"name": "f", "arguments": {...}}, ...]</tool_calls>

Knows characters; knows no requests, tokens or schemas. What is not to the letter such a list is text as any
other. Whether the text comes in one piece or in many makes no difference to what is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hybridserve.server.json_scanner import WHITESPACE, JsonObjectScanner, NotJson

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

OPEN = "<tool_calls>"
CLOSE = "</tool_calls>"
MAX_NAME = 64
MAX_HELD = 512
"""Characters that are held back at most, while it is not known yet whether a call begins, or whose."""
_NAME = ""
"""Stands for a name in `_HEAD`."""
_HEAD = ("{", '"name"', ":", '"', _NAME, ",", '"arguments"', ":")
_AFTER_NAME = _HEAD.index(_NAME) + 1


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Of the tool `name`; `source` is what the model wrote until here."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrown:
    """More of the JSON text of the newest call's arguments, as the model writes it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The newest call turned out to be none: what has come of it was text."""


Event = Said | CallBegun | ArgumentsGrown | CallBroken


class ToolCallParser:
    """Of one text. Holds back what may be the beginning of a call, and that is bounded; arguments are handed
    on as they come.

    names: of the tools that there are; a call of any other is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._read: Callable[[str, int], int] = self._in_text
        """Takes (text, position), and returns the position of what it hasn't read."""
        self._held = ""
        self._events: list[Event] = []
        self._part = self._seen = 0
        """Which part of `_HEAD` comes, and how many of its characters have."""
        self._name = ""
        self._scanner = JsonObjectScanner()
        self._is_closed = False
        """The newest list is whole."""
        self._goes_on = False
        """There is text after it."""

    def push(self, text: str) -> list[Event]:
        """What the next piece of the text adds."""
        position = 0
        while position < len(text):
            position = self._read(text, position)
        return self._take_events()

    def finish(self, *, is_cut: bool) -> list[Event]:
        """What was held back, when no more will come. `is_cut`: the model was not let go on; then a call that
        has begun stays one, though its arguments may not be whole."""
        if self._read in (self._in_arguments, self._at_end_of_call):
            if not is_cut:
                self._events.append(CallBroken())
        elif self._read != self._after_list and self._held.strip(WHITESPACE + ","):
            self._say(self._held)
        self._held = ""
        return self._take_events()

    def finish_reason(self, reason: str | None) -> str | None:
        """Of a text that has ended for `reason`: "tool_calls" where a list of calls is whole, and nothing
        that follows it was cut."""
        if self._is_closed and (reason == "stop" or (reason == "length" and not self._goes_on)):
            return "tool_calls"
        return reason

    # ---- what may be read: each method goes on until something else begins

    def _in_text(self, text: str, position: int) -> int:
        mark = text.find(OPEN, position)
        if mark >= 0:
            self._say(text[position:mark])
            self._held, self._read = OPEN, self._at_list
            return mark + len(OPEN)
        last = text.rfind(OPEN[0], position)
        if last < 0 or not OPEN.startswith(text[last:]):
            last = len(text)
        else:
            self._held, self._read = text[last:], self._in_mark
        self._say(text[position:last])
        return len(text)

    def _in_mark(self, text: str, position: int) -> int:
        """The opening marker, which an earlier piece ended in. Its first character is nowhere else in it."""
        if text[position] != OPEN[len(self._held)]:
            return self._give_up(position)
        if self._held + text[position] == OPEN:
            self._read = self._at_list
        return self._hold(text, position)

    def _at_list(self, text: str, position: int) -> int:
        if text[position] == "[":
            self._expect_call()
        elif text[position] not in WHITESPACE:
            return self._give_up(position)
        return self._hold(text, position)

    def _expect_call(self) -> None:
        self._part = self._seen = 0
        self._name = ""
        self._read = self._in_head

    def _in_head(self, text: str, position: int) -> int:
        """What stands before the arguments: one character of it."""
        char, part = text[position], _HEAD[self._part]
        if part == _NAME:
            if char == '"' and self._name in self._names:
                self._part += 1
            elif char == '"' or len(self._name) == MAX_NAME:
                return self._give_up(position)
            else:
                self._name += char
        elif self._seen == 0 and char in WHITESPACE:
            pass
        elif char == part[self._seen]:
            self._seen += 1
            if self._seen == len(part):
                self._part, self._seen = self._part + 1, 0
        elif char == "}" and self._part == _AFTER_NAME:  # it has none
            self._begin_call(self._held + char)
            self._events.append(ArgumentsGrown("{}"))
            self._read = self._after_call
            return position + 1
        else:
            return self._give_up(position)
        if self._part == len(_HEAD):
            self._read = self._at_arguments
        return self._hold(text, position)

    def _at_arguments(self, text: str, position: int) -> int:
        if text[position] in WHITESPACE:
            return self._hold(text, position)
        if text[position] != "{":
            return self._give_up(position)
        self._begin_call(self._held)
        self._scanner = JsonObjectScanner()
        self._read = self._in_arguments
        return position

    def _begin_call(self, source: str) -> None:
        self._events.append(CallBegun(self._name, source))
        self._held = ""
        self._is_closed = False

    def _in_arguments(self, text: str, position: int) -> int:
        try:
            end, is_whole = self._scanner.read(text, position)
        except NotJson as error:
            self._events.append(ArgumentsGrown(text[position : error.position]))
            return self._break(error.position)
        self._events.append(ArgumentsGrown(text[position:end]))
        if is_whole:
            self._read = self._at_end_of_call
        return end

    def _at_end_of_call(self, text: str, position: int) -> int:
        if text[position] == "}":
            self._held, self._read = "", self._after_call
            return position + 1
        return self._hold(text, position) if text[position] in WHITESPACE else self._break(position)

    def _after_call(self, text: str, position: int) -> int:
        char = text[position]
        if char == "]":
            self._held, self._read = "", self._after_list
            self._is_closed, self._goes_on = True, False
            return position + 1
        if char == ",":
            self._expect_call()
        elif char not in WHITESPACE:
            return self._give_up(position)
        return self._hold(text, position)

    def _after_list(self, text: str, position: int) -> int:
        """Up to the closing marker, which may be missing."""
        char, mark = text[position], self._held.lstrip(WHITESPACE)
        if not mark and char in WHITESPACE:
            return self._hold(text, position)
        if char != CLOSE[len(mark)]:
            return self._give_up(position)
        if mark + char == CLOSE:
            self._held, self._read = "", self._in_text
            return position + 1
        return self._hold(text, position)

    # ---- what is made of it

    def _hold(self, text: str, position: int) -> int:
        if len(self._held) == MAX_HELD:
            return self._give_up(position)
        self._held += text[position]
        return position + 1

    def _give_up(self, position: int) -> int:
        """What is held is text, and so is what comes."""
        self._say(self._held)
        self._held, self._read = "", self._in_text
        return position

    def _break(self, position: int) -> int:
        self._events.append(CallBroken())
        return self._give_up(position)

    def _say(self, text: str) -> None:
        self._goes_on = self._goes_on or bool(text.strip(WHITESPACE))
        self._events.append(Said(text))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return list(_joined(events))


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Texts that follow each other as one, and none that is empty."""
    for kind, run in groupby(events, type):
        if kind is Said or kind is ArgumentsGrown:
            if text := "".join([event.text for event in run]):  # type: ignore[union-attr]
                yield kind(text)
        else:
            yield from run


def assembled(events: Iterable[Event]) -> tuple[str, list[tuple[str, str]]]:
    """(the text, the name and the arguments of each call) of all events of a text. A call that broke is part
    of the text."""
    said: list[str] = []
    calls: list[list[str]] = []
    for event in events:
        match event:
            case Said(text):
                said.append(text)
            case CallBegun(name, source):
                calls.append([name, source])
            case ArgumentsGrown(text):
                calls[-1].append(text)
            case CallBroken():
                said += calls.pop()[1:]
    return "".join(said), [(name, "".join(arguments)) for name, _, *arguments in calls]
