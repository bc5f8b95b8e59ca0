"""Calls of tools in what a model writes: the parser alone, and the scanner of JSON in it."""

from __future__ import annotations

import json
import random
import re
import time
from typing import TYPE_CHECKING

import pytest

from hybridserve.server.json_scanner import MAX_DEPTH, JsonObjectScanner, NotJson
from hybridserve.server.tool_parser import (
    CLOSE,
    MAX_HELD,
    OPEN,
    ArgumentsGrown,
    CallBegun,
    CallBroken,
    Said,
    ToolCallParser,
    assembled,
)

if TYPE_CHECKING:
    from hybridserve.server.tool_parser import Event

NAMES = ("f", "g")
F = '{"name": "f", "arguments": {"a": [1, "]</tool_calls>"]}}'
F_ARGUMENTS = '{"a": [1, "]</tool_calls>"]}'

# text -> (content, calls, finish reason after a stop)
TEXTS: list[tuple[str, str, list[tuple[str, str]], str]] = [
    ("nothing", "nothing", [], "stop"),
    ("a < b <tool", "a < b <tool", [], "stop"),
    (f"{OPEN}[{F}]{CLOSE}", "", [("f", F_ARGUMENTS)], "tool_calls"),
    (f" {OPEN}[\n    {F}\n]{CLOSE}", " ", [("f", F_ARGUMENTS)], "tool_calls"),
    (f"hi {OPEN}[{F}]{CLOSE} there", "hi  there", [("f", F_ARGUMENTS)], "tool_calls"),
    (f"{OPEN}[{F} , {F}]{CLOSE}", "", [("f", F_ARGUMENTS)] * 2, "tool_calls"),
    (f"{OPEN}[{F}]{CLOSE}\n{OPEN}[{F}]{CLOSE}", "\n", [("f", F_ARGUMENTS)] * 2, "tool_calls"),
    (f"<<{OPEN}{OPEN}[{F}]", f"<<{OPEN}", [("f", F_ARGUMENTS)], "tool_calls"),
    (f"{OPEN}[{F}]", "", [("f", F_ARGUMENTS)], "tool_calls"),
    (f"{OPEN}[{F}] \n", "", [("f", F_ARGUMENTS)], "tool_calls"),
    (f"{OPEN}[{F}]</tool_c", "", [("f", F_ARGUMENTS)], "tool_calls"),
    (f"{OPEN}[{F}]</tool_cat>", "</tool_cat>", [("f", F_ARGUMENTS)], "tool_calls"),
    (f'{OPEN}[{{"name": "g"}}]{CLOSE}', "", [("g", "{}")], "tool_calls"),
    (f'{OPEN} [ {{ "name" : "g" , "arguments" : {{ }} }} ] {CLOSE}', "", [("g", "{ }")], "tool_calls"),
    (f'{OPEN}[{{"name":"g","arguments":{{"x":1.50e+3}}}}]', "", [("g", '{"x":1.50e+3}')], "tool_calls"),
    # not closed
    (f"{OPEN}[{F}", "", [("f", F_ARGUMENTS)], "stop"),
    (f"{OPEN}[{F},", "", [("f", F_ARGUMENTS)], "stop"),
    (f'{OPEN}[{F}, {{"na', ', {"na', [("f", F_ARGUMENTS)], "stop"),
    (f"{OPEN}[{F[:-1]}", f"{OPEN}[{F[:-1]}", [], "stop"),
    (f"{OPEN}[{F[:-9]}", f"{OPEN}[{F[:-9]}", [], "stop"),
    (f"{OPEN}[{F}]{CLOSE}{OPEN}[{F[:-9]}", f"{OPEN}[{F[:-9]}", [("f", F_ARGUMENTS)], "stop"),
    # not calls
    *(
        (text, text, [], "stop")
        for text in (
            OPEN,
            f"{OPEN}{CLOSE}",
            f"{OPEN}[]{CLOSE}",
            f"{OPEN}{F}{CLOSE}",
            f"{OPEN}[{F[:-1]}]{CLOSE}",
            f"{OPEN}[{F.replace('f', 'h', 1)}]{CLOSE}",
            f"{OPEN}[{F.replace('name', 'nome')}]{CLOSE}",
            f"{OPEN}[{F.replace('arguments', 'parameters')}]{CLOSE}",
            f'{OPEN}[{{"name": "f", "arguments": 3}}]{CLOSE}',
            f'{OPEN}[{{"name": "f", "arguments": "{{}}"}}]{CLOSE}',
            f'{OPEN}[{{"name": "f", "arguments": [1]}}]{CLOSE}',
            f'{OPEN}[{{"name": "f", "arguments": {{"a": tru3}}}}]{CLOSE} and on',
            f'{OPEN}[{{"name": "f", "arguments": {{"a": 1,}}}}]{CLOSE}',
            f'{OPEN}[{{"name": "f", "arguments": {{"a": 1}}, "id": 2}}]{CLOSE}',
            f'{OPEN}[{{"arguments": {{}}, "name": "f"}}]{CLOSE}',
            f'{OPEN}[{{"name": "{"f" * 100}", "arguments": {{}}}}]{CLOSE}',
            OPEN + " " * (MAX_HELD + 100) + "[",
            OPEN + "[" + '{"name": "f"' + " " * MAX_HELD,
        )
    ),
    (f"{OPEN}[{F}; {F}]{CLOSE}", f"; {F}]{CLOSE}", [("f", F_ARGUMENTS)], "stop"),
]


def parse(text: str, cuts: list[int], *, is_cut: bool = False) -> tuple[list[Event], str | None]:
    parser = ToolCallParser(NAMES)
    events: list[Event] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += parser.push(text[begin:end])
    events += parser.finish(is_cut=is_cut)
    return events, parser.finish_reason("length" if is_cut else "stop")


@pytest.mark.parametrize(("text", "content", "calls", "reason"), TEXTS)
def test_what_is_found_however_the_text_comes(
    text: str, content: str, calls: list[tuple[str, str]], reason: str
) -> None:
    rng = random.Random(text)
    drawn = [sorted(rng.sample(range(len(text)), 3)) for _ in range(40)]
    for cuts in [[], list(range(1, len(text))), *drawn]:
        events, found = parse(text, cuts)
        assert (*assembled(events), found) == (content, calls, reason), cuts


def test_nothing_is_lost_wherever_a_text_is_cut() -> None:
    """What is neither content nor a part of a call is markup between those."""
    between = rf"[\s,\]}}]*(?:{CLOSE}\s*)?"
    at_end = rf"[\s,\]}}]*(?:{'|'.join(CLOSE[:length] for length in range(len(CLOSE), 0, -1))})?\s*"
    for number, text in enumerate(text for text, *_ in TEXTS if len(text) < MAX_HELD):
        for end in range(number % 3, len(text) + 1, 3):
            events, reason = parse(text[:end], [], is_cut=True)
            pieces = [
                event.source if isinstance(event, CallBegun) else event.text
                for event in events
                if not isinstance(event, CallBroken) and event != ArgumentsGrown("{}")
            ]
            pattern = "".join(between + re.escape(piece) for piece in pieces) + at_end
            assert re.fullmatch(pattern, text[:end]), (text[:end], pieces)
            content, calls = assembled(events)
            if reason == "tool_calls":
                assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
            again, _ = parse(text[:end], list(range(1, end)), is_cut=True)
            assert assembled(again) == (content, calls)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "tool_calls"),
        ("\n</tool", "tool_calls"),
        (f"{CLOSE}\n", "tool_calls"),
        (f"{CLOSE} and th", "length"),
        (" and th", "length"),
        (f"{CLOSE}{OPEN}", "length"),
        (f'{CLOSE}{OPEN}[{{"name": "g"', "length"),
        (f"{CLOSE}{OPEN}[{F[:-5]}", "length"),
        (f"{CLOSE}{OPEN}[{F}", "length"),
        (f"{CLOSE}{OPEN}[{F}]", "tool_calls"),
        (f"{CLOSE} and {OPEN}[{F}]", "tool_calls"),
    ],
)
def test_b027_what_is_cut_after_a_list_was_closed(more: str, reason: str) -> None:
    assert parse(f"{OPEN}[{F}]{more}", [], is_cut=True)[1] == reason


def test_b004_only_the_beginning_of_a_marker_is_held_back() -> None:
    """Everything else comes with the piece that it is in."""
    parser, text, shown = ToolCallParser(NAMES), "a<b <tool_calk <<tool <tool_calls", ""
    for end, char in enumerate(text, start=1):
        shown += "".join(event.text for event in parser.push(char) if isinstance(event, Said))
        held = max(length for length in range(len(OPEN)) if text[:end].endswith(OPEN[:length]))
        assert shown == text[: end - held]
    parser.push('>[{"name": "f", "arguments": ')
    begun, first = parser.push("{")
    assert (type(begun), first) == (CallBegun, ArgumentsGrown("{"))
    for char in '"city": "W\\u00e4", "n": [1, 2.5, tr':
        assert parser.push(char) == [ArgumentsGrown(char)]


def test_held_text_is_bounded() -> None:
    for text in (OPEN + " " * 10_000, f"{OPEN}[" + "\n" * 10_000, f'{OPEN}[{{"name": "{"x" * 10_000}'):
        parser, shown = ToolCallParser(NAMES), 0
        for seen, char in enumerate(text, start=1):
            shown += sum(len(event.text) for event in parser.push(char) if isinstance(event, Said))
            assert seen - shown <= MAX_HELD


def test_a_broken_call_takes_back_what_came_of_it() -> None:
    text = f'{OPEN}[{{"name": "f", "arguments": {{"a": nope}}}}]'
    events, _ = parse(text, [])
    kinds = [type(event) for event in events]
    assert kinds == [CallBegun, ArgumentsGrown, CallBroken, Said]
    streamed = events[1].text + events[3].text  # type: ignore[union-attr]
    assert streamed == '{"a": nope}}]', "a stream has the rest of it as text"


@pytest.mark.parametrize(
    ("make", "unit"),
    [
        (lambda n: "<" * n, 6_000),
        (lambda n: f"{OPEN}[" * (n // 10), 6_000),
        (lambda n: f"{OPEN}[{F}]{CLOSE}" * (n // 80), 6_000),
        (lambda n: f'{OPEN}[{{"name": "f", "arguments": {{"a": "{"x" * n}"}}}}]', 1_000_000),
        (lambda n: f'{OPEN}[{{"name": "f", "arguments": {{"a": [{"1," * (n // 2)}1]}}}}]', 6_000),
    ],
    ids=["marks", "openings", "lists", "string", "numbers"],
)
def test_time_is_linear(make, unit) -> None:
    def seconds(size: int) -> float:
        text, best = make(size), float("inf")
        for _ in range(3):
            begin = time.thread_time()
            parse(text, [])
            best = min(best, time.thread_time() - begin)
        return best

    assert seconds(8 * unit) < 30 * seconds(unit)  # 8 times as much; 64 times where it is quadratic


# ---- the scanner

PIECES = [*'{}[],:"\\ \n-é\x01', "true", "false", "nul", "1", "0", "2.5", "e", "E+1"]
PIECES += ['"a"', r'"\u00e9"', '"k":']


def scanned(text: str, step: int) -> str | None:
    """What the scanner takes for an object; None where there is none, "" where it has no end."""
    scanner = JsonObjectScanner()
    for begin in range(0, len(text), step):
        piece, position = text[begin : begin + step], 0
        while position < len(piece):
            try:
                position, is_whole = scanner.read(piece, position)
            except NotJson:
                return None
            if is_whole:
                return text[: begin + position]
    return ""


def refuse(constant: str) -> float:
    raise ValueError(constant)


def test_the_scanner_agrees_with_pythons_json() -> None:
    rng = random.Random(6)
    decoder = json.JSONDecoder(parse_constant=refuse)
    num_objects = 0
    for _ in range(20_000):
        text = "{" + "".join(rng.choices(PIECES, k=rng.randint(0, 9)))
        try:
            expected = text[: decoder.raw_decode(text)[1]]
        except ValueError:
            expected = ""
        found = scanned(text, rng.randint(1, 5))
        assert (found or "") == expected, text
        num_objects += bool(expected)
    assert num_objects > 500


def test_a_beginning_of_an_object_is_never_refused() -> None:
    text = json.dumps({"a": [1, -2.5e-7, {'é\n"': None}, [], {}, True], "b": {"c": [False]}})
    for end in range(1, len(text)):
        assert scanned(text[:end], 1) == ""
    assert scanned(text + "x", 1) == text


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert scanned(nested(MAX_DEPTH), 7) == nested(MAX_DEPTH)
    assert scanned(nested(MAX_DEPTH + 1), 7) is None
