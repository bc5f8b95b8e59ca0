"""Stop strings against a brute-force reading of the text, one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.text import StopChecker


def run(stop: list[str], pieces: list[str], exempt: int = 0) -> tuple[list[str], str | None]:
    checker = StopChecker(stop)
    shown = []
    for i, piece in enumerate(pieces):
        text, matched = checker.push(piece, may_stop=i >= exempt)
        shown.append(text)
        if matched is not None:
            return shown, matched
    return [*shown, checker.flush()], None


def first_match(stop: list[str], text: str, exempt: int) -> tuple[int, str] | None:
    """(start, stop string) of the match that ends first, beyond `exempt`; the longest of several."""
    for end in range(exempt + 1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return end - len(longest), longest
    return None


TEXT = st.text(alphabet="ab", max_size=4)


@given(
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(TEXT, max_size=8),
    exempt=st.integers(0, 4),
)
def test_any_cut_of_a_text_gives_the_same(stop, pieces, exempt):
    shown, matched = run(stop, pieces, exempt)
    text = "".join(pieces)
    expected = first_match(stop, text, len("".join(pieces[:exempt])))
    assert matched == (expected[1] if expected else None)
    assert "".join(shown) == (text[: expected[0]] if expected else text)


@given(
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(TEXT, max_size=8),
)
def test_holds_back_no_more_than_the_beginning_of_a_stop_string(stop, pieces):
    checker = StopChecker(stop)
    text = shown = ""
    for piece in pieces:
        added, matched = checker.push(piece)
        if matched is not None:
            return
        text, shown = text + piece, shown + added
        held = text.removeprefix(shown)
        assert not held or any(s.startswith(held) for s in stop)


@pytest.mark.parametrize(
    ("pieces", "shown", "matched"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["ABC", "", "", "", ""], "DEFGHIJ"),
        (["ABC", "DEF", "G", "HI", "X"], ["ABC", "", "", "", "DEFGHIX", ""], None),
        (["ABCDEFGHIJKLM"], ["ABC"], "DEFGHIJ"),
        (["ABC", "DEFG"], ["ABC", "", "DEFG"], None),
        (["DEDEFGHIJ"], ["DE"], "DEFGHIJ"),
    ],
)
def test_a_stop_string_over_several_tokens(pieces, shown, matched):
    assert run(["DEFGHIJ"], pieces) == (shown, matched)


def test_a_stop_list_that_never_matches_returns_all_text():
    assert "".join(run(["</end>"], ["a < b", " </", "e", "nough"])[0]) == "a < b </enough"


def test_a_match_may_begin_but_not_end_before_min_tokens():
    assert run(["ab"], ["ab", "a", "b", "ab"], exempt=2) == (["ab", "", ""], "ab")
    assert run(["ab"], ["ab"], exempt=1) == (["ab", ""], None)


def test_without_stop_strings_text_passes_at_once():
    assert run([], ["a", "b"]) == (["a", "b", ""], None)
