"""What is compiled, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.grammar.compiler import check, compile_matcher, explain, load_tokenizer, prepare
from tests.harness.structured import VOCAB_SIZE, random_schema, save_byte_tokenizer

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from llguidance import LLTokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    return load_tokenizer(path / "tokenizer.json", VOCAB_SIZE, [EOS])


def accepts(tokenizer: LLTokenizer, spec: StructuredOutputs, text: str) -> bool:
    """By masks, a token at a time, as when it is drawn."""
    matcher = compile_matcher(tokenizer, prepare(spec))
    for token in [*tokenizer.tokenize_str(text), EOS]:
        if matcher.is_stopped():
            return token == EOS
        mask = matcher.compute_bitmask()
        if not mask[token // 8] >> token % 8 & 1:
            return False
        assert matcher.consume_token(token)
    return True


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ({"regex": "^a+b?$"}, ["a", "aab"], ["", "b", "aabb"]),
        ({"regex": r"\d{2}/x"}, ["12/x"], ["1/x", "12x"]),
        ({"choice": ["a.c", "\n", "[", "é😀", "a"]}, ["a.c", "\n", "[", "é😀", "a"], ["abc", "", "aa"]),
        ({"grammar": 'start: "a" start "b" | "c"'}, ["c", "aacbb"], ["aacb", "ab"]),
        ({"grammar": 'root ::= "x" | "y" root\n'}, ["x", "yyx"], ["y", "xx"]),
        ({"grammar": 'start: "::="'}, ["::="], ["::"]),
        ({"json": True}, ["1", '{"a": [null]}'], ["{", "nul"]),
        ({"json": {"type": "object"}}, ["{}", '{"a":1}', '{\n  "a": 1\n}'], ["[]", '{"a"}', "{ " * 13 + "}"]),
        ({"json": '{"enum": ["a", 3]}'}, ['"a"', "3"], ['"b"', "4"]),
        ({"json": {"type": "object", "minProperties": 1}}, ['{"a":1}'], ["{}"]),
        ({"json": {"anyOf": [{"const": 1}, {"const": "é"}]}}, ["1", '"é"'], ["2"]),
    ],
)
def test_texts_that_fit_and_texts_that_do_not(
    tokenizer: LLTokenizer, spec: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    one = check(tokenizer, StructuredOutputs(**spec))
    assert [text for text in good if not accepts(tokenizer, one, text)] == []
    assert [text for text in bad if accepts(tokenizer, one, text)] == []


def test_white_space_has_a_bound(tokenizer: LLTokenizer) -> None:
    spec = StructuredOutputs(json={"type": "array"})
    assert accepts(tokenizer, spec, "[" + " " * 24 + "]")
    assert not accepts(tokenizer, spec, "[" + " " * 25 + "]")


@given(st.randoms(use_true_random=False))
def test_all_that_can_be_written_is_valid(tokenizer: LLTokenizer, rng: random.Random) -> None:
    schema = random_schema(rng)
    matcher = compile_matcher(tokenizer, StructuredOutputs(json=schema))
    drawn: list[int] = []
    while not matcher.is_stopped() and len(drawn) < 300:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]
        drawn.append(rng.choice(allowed))
        assert matcher.consume_token(drawn[-1])
    if matcher.is_stopped():
        jsonschema.validate(json.loads(tokenizer.decode_str([t for t in drawn if t != EOS])), schema)


KEYWORDS = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"properties": {"a": {"not": {"type": "string"}}}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
    "x-guidance": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
}


@pytest.mark.parametrize("keyword", list(KEYWORDS))
def test_what_cant_be_enforced_is_refused_by_name(tokenizer: LLTokenizer, keyword: str) -> None:
    with pytest.raises(ValueError, match=rf"^structured_outputs\.json: can't be enforced: .*{keyword}"):
        check(tokenizer, StructuredOutputs(json=KEYWORDS[keyword]))


def test_leniency_inside_a_grammar_is_refused_as_well(tokenizer: LLTokenizer) -> None:
    inner = json.dumps(KEYWORDS["x-guidance"])
    with pytest.raises(ValueError, match="can't be enforced: uniqueItems"):
        check(tokenizer, StructuredOutputs(grammar=f"start: %json {inner}"))


WIDE = 2**53 + 1
NUMBERS: list[tuple[str, dict[str, Any]]] = [
    ("const", {"const": WIDE}),
    ("const", {"const": -(2**63)}),
    ("const", {"const": {"a": [WIDE]}}),
    ("const", {"const": 10**400 + 1}),
    ("enum", {"properties": {"id": {"enum": ["a", 1, WIDE]}}}),
    ("enum", {"properties": {"default": {"enum": [WIDE]}}}),
    ("minimum", {"type": "integer", "minimum": WIDE, "maximum": 2**60}),
    ("maximum", {"type": "integer", "maximum": 2**63 - 1}),
    ("exclusiveMinimum", {"anyOf": [{"type": "integer", "exclusiveMinimum": 10**18}]}),
    ("exclusiveMaximum", {"$defs": {"a": {"exclusiveMaximum": WIDE}}, "$ref": "#/$defs/a"}),
    ("multipleOf", {"type": "array", "items": {"type": "integer", "multipleOf": WIDE}}),
]


@pytest.mark.parametrize(("keyword", "schema"), NUMBERS)
def test_an_integer_that_would_become_another_is_refused(
    tokenizer: LLTokenizer, keyword: str, schema: dict[str, Any]
) -> None:
    for spec in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        message = rf"^structured_outputs\.\w+: can't be enforced: {keyword}, with an integer"
        with pytest.raises(ValueError, match=message):
            check(tokenizer, StructuredOutputs(**spec))


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, 10**18, 10**22, 0.1, 1e22, 2**53 - 1])
def test_a_number_that_a_float_holds_is_written_as_it_is(tokenizer: LLTokenizer, number: float) -> None:
    spec = check(tokenizer, StructuredOutputs(json={"const": number, "default": WIDE}))
    assert accepts(tokenizer, spec, format(number, ".0f") if number != 0.1 else "0.1")
    assert not accepts(tokenizer, spec, str(int(number) + 1))


@pytest.mark.parametrize(
    "spec",
    [
        {"regex": r"[^\s\S]"},
        {"regex": r"a[^\s\S]"},
        {"grammar": 'start: start "a"'},
        {"grammar": "start: a\na: a"},
        {"grammar": 'start: a\na: "x" a'},
        {"grammar": 'root ::= root "a"'},
        {"json": {"$ref": "#"}},
        {"json": {"type": "string", "pattern": r"[^\s\S]"}},
    ],
)
def test_what_nothing_matches_is_said_in_plain_words(tokenizer: LLTokenizer, spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{next(iter(spec))}: ") as caught:
        check(tokenizer, StructuredOutputs(**spec))
    assert str(caught.value).partition(": ")[2] in (
        "no text is like this: nothing matches it, or it never ends",
        "is too complex, or never ends",
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"regex": "("}, "not a regular expression: unclosed group"),
        ({"regex": "(?=a)b"}, "not a regular expression: look-around"),
        ({"regex": r"\bx"}, "look"),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": False}, "no text is like this"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "Unsatisfiable"),
        ({"json": {"pattern": "("}}, "not a regular expression: unclosed group"),
        ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "not"),
        ({"json": {"format": "colour", "type": "string"}}, "Unknown format: colour"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"grammar": 'foo: "a"'}, "no start rule"),
        ({"grammar": 'root ::= "a" (\n'}, ""),
        ({"grammar": "start: @other"}, "unknown grammar"),
        ({"grammar": "start: <|nobody|>"}, "unknown special token"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(
    tokenizer: LLTokenizer, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{next(iter(spec))}: ") as caught:
        check(tokenizer, StructuredOutputs(**spec))
    text = str(caught.value)
    assert message in text
    assert len(text) < 300
    assert text.isprintable()


def test_messages_are_short_and_printable() -> None:
    assert explain("x" * 1000 + "\n") == "x" * 200
    assert explain("a\x1b[31m\u202eb\nsecond") == "a\\x1b[31m\\u202eb"


def test_a_vocabulary_larger_or_smaller_than_the_tokenizers(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    small = load_tokenizer(tmp_path / "tokenizer.json", 100, [EOS])
    assert small.vocab_size > 256
    assert load_tokenizer(tmp_path / "tokenizer.json", 1000, [EOS]).vocab_size == 1000
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer can't be used"):
        load_tokenizer(tmp_path / "tokenizer.json")
