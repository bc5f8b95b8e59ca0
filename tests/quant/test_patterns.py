"""Patterns of names: those of Python where they are understood, bounded in time, and refused elsewhere."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridserve.quant.patterns import Pattern
from hybridserve.quant.policy import Quantization

NAMES = [
    "lm_head",
    "model.layers.0.mamba.in_proj",
    "model.layers.12.self_attn.q_proj",
    "model.layers.1.feed_forward.experts.2.gate_proj",
    "model.layers.1.feed_forward.router",
    "",
]

items = st.sampled_from(
    ["a", "b", "0", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "[a-c0-9]", "[]a-]", r"[\d.]", "_"]
)
signs = st.sampled_from(["", "", "*", "+", "?", "*?"])
texts = st.recursive(
    st.tuples(items, signs).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(st.lists(inner, max_size=3).map("|".join), st.sampled_from(["", "?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)
ends = st.sampled_from(["", "^"]), st.sampled_from(["", "$"])


@given(ends[0], texts, ends[1], st.text("ab0._c", max_size=8))
@settings(max_examples=400, deadline=None)
def test_fits_what_pythons_do(start: str, text: str, end: str, name: str) -> None:
    pattern = start + text + end
    assert Pattern(pattern).matches(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "text",
    [
        ".*",
        ".*lm_head",
        ".*router$",
        r".*\.layers\.\d+\.mamba\.(in|out)_proj",
        r"model\.layers\.[0-9]+\..*(gate|up|down)_proj$",
        r"^model\.layers\.(1|12)\.(?:.*\.)?experts.*",
        r".*self_attn.*|.*in_proj",
        r"\w+$",
        "",
    ],
)
def test_patterns_that_occur(text: str) -> None:
    pattern = Pattern(text)
    assert [pattern.matches(name) for name in NAMES] == [bool(re.match(text, name)) for name in NAMES]


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(a*)*b", "(a|a)*b", "(a?)+" * 20 + "$", ".*" * 200 + "b", "(.*.*)*=.*"]
)
def test_no_pattern_takes_long(text: str) -> None:
    """Each of these keeps Python's busy for longer than anybody waits."""
    start = time.perf_counter()
    pattern = Pattern(text)
    for index in range(20):
        assert not pattern.matches("a" * 60 + f".{index}")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a(b", r"a \( without its \), at character 4"),
        ("a)b", r"a \) without its \(, at character 2"),
        ("[ab", r"a \[ without its \]"),
        ("*a", r"a \* there, at character 1"),
        ("a**", "a repetition of a repetition"),
        ("a*+", "a repetition of a repetition"),
        ("a{3}", "a number of times"),
        ("(?!a)b", r"\(\? but for \(\?:"),
        (r"(a)\1", r"\\1"),
        (r"\bproj", r"\\b"),
        ("a\\", r"\\"),
        ("[z-a]", "the range z-a"),
        ("a^b", r"a \^ there"),
        ("(" * 50 + ")" * 50, "more than 20 groups in one another"),
        ("a" * 2001, "has 2001 characters, of 2000 at most"),
    ],
)
def test_others_are_refused_by_name(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Pattern(text)
    with pytest.raises(ValueError, match=rf"^quantization.targets: 're:.*': {what}"):
        Quantization("int8", (f"re:{text}",))
    with pytest.raises(ValueError, match=rf"^config.json: quantization_config: 're:.*': {what}"):
        Quantization("int8", ("Linear",), (f"re:{text}",), stored=True)
