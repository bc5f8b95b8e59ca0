"""Compiles descriptions of texts with llguidance, which refuses what it can't enforce.

Knows llguidance and its messages; knows no requests, and imports neither torch nor numpy. llguidance is an
extra: what needs it says so.
"""

from __future__ import annotations

import importlib.util
import json
import re
from typing import TYPE_CHECKING

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.grammar.schema_numbers import check_numbers, check_numbers_in_lark

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"
"""Between the parts of a JSON text. Without a bound, a model that likes spaces never gets to the end."""
MESSAGE_LENGTH = 200
NO_TEXT = "no text is like this"
NO_END = f"{NO_TEXT}: nothing matches it, or it never ends"
MAX_LEXER_STATES = 50_000
"""Each is 1 to 2 kB: the part of a matcher that grows."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def why_not() -> str | None:
    """Why nothing can be compiled here, if so."""
    if importlib.util.find_spec("llguidance") is None:
        return "needs llguidance, which is not installed: pip install 'hybridserve[server]'"
    return None


def load_tokenizer(file: Path, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()) -> LLTokenizer:
    """Of a tokenizer.json, for a model of so many ids (or as many as the file has). Holds the interpreter's
    lock all the time: about a second for 65,536 ids. ValueError for a kind that llguidance doesn't know."""
    import llguidance
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # neither library raises anything narrower
        raise ValueError(f"the tokenizer can't be used for this: {_one_line(str(error))}") from None


def prepare(spec: StructuredOutputs) -> StructuredOutputs:
    """The same description, as Lark if it was GBNF. ValueError for what can't be read as such."""
    if spec.grammar is None or not _GBNF_RULE.search(spec.grammar):
        return spec
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return StructuredOutputs(grammar=any_to_lark(spec.grammar))
    except Exception as error:
        raise ValueError(f"structured_outputs.grammar: {_one_line(str(error))}") from None


def compile_matcher(tokenizer: LLTokenizer, spec: StructuredOutputs) -> LLMatcher:
    """A matcher at the beginning of a text. May take as long as the description is hard, without the
    interpreter's lock. ValueError, naming the field and the keyword, for what can't be enforced."""
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = llguidance.LLMatcher(tokenizer, _source(spec), log_level=0, limits=limits)
    except ValueError as error:
        raise ValueError(f"structured_outputs.{spec.kind}: {_one_line(str(error))}") from None
    # what is not enforced is a warning where a part of the grammar asks for leniency
    problem = matcher.get_error() or "\n".join(matcher.get_grammar_warnings())
    if problem:
        raise ValueError(f"structured_outputs.{spec.kind}: {explain(problem)}")
    return matcher


def check(tokenizer: LLTokenizer, spec: StructuredOutputs) -> StructuredOutputs:
    """`prepare`, and see that its text can begin. ValueError as `compile_matcher`."""
    spec = prepare(spec)
    matcher = compile_matcher(tokenizer, spec)
    for _ in range(2):  # at the very beginning, and after what every text begins with
        if not matcher.is_stopped() and not any(matcher.compute_bitmask()):
            raise ValueError(f"structured_outputs.{spec.kind}: {NO_TEXT}")
        if matcher.is_error():
            raise ValueError(f"structured_outputs.{spec.kind}: {explain(matcher.get_error())}")
        matcher.consume_tokens(matcher.compute_ff_tokens())
    return spec


def _source(spec: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_escape, spec.choice)))
    if spec.grammar is not None:
        check_numbers_in_lark(spec.grammar)
        return LLMatcher.grammar_from_lark(spec.grammar)
    schema = json.loads(spec.text)
    if schema is False:
        raise ValueError(NO_TEXT)
    if schema is not True and "x-guidance" in schema:
        raise ValueError("can't be enforced: x-guidance")
    check_numbers(schema)
    return LLMatcher.grammar_from_json_schema(
        "{}" if schema is True else spec.text, overrides={"lenient": False, "whitespace_pattern": WHITESPACE}
    )


def _escape(text: str) -> str:
    """A text as a regular expression for it alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def explain(problem: str) -> str:
    """A message of llguidance in one line that says what to change."""
    if keys := re.search(r"Unimplemented keys: (\[[^\]]*\])", problem):
        names = ", ".join(json.loads(keys[1]))
        return f"can't be enforced: {names[:MESSAGE_LENGTH]}"
    if "oneOf" in problem:
        return "can't be enforced: oneOf, where its branches may overlap; anyOf can"
    if inner := re.search(r"regex parse error:.*?error: ([^\n]*)", problem, re.DOTALL):
        return f"not a regular expression: {inner[1][:MESSAGE_LENGTH]}"
    if "NoExtension" in problem or "Regex is empty" in problem:
        return NO_END
    if "Too many items" in problem or "TooComplex" in problem:
        return "is too complex, or never ends"
    if "max is" in problem or "too large" in problem:
        return f"is too complex: {_one_line(problem)}"
    return _one_line(problem)


def _one_line(problem: str) -> str:
    """The first line, printable, not long."""
    first = problem.strip().partition("\n")[0]
    return ascii(first[:MESSAGE_LENGTH])[1:-1][:MESSAGE_LENGTH]
