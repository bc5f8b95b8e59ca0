"""Descriptions of texts, and the parameters that restrict what may be drawn."""

from __future__ import annotations

from typing import Any

import pytest

from hybridserve.core import structured_outputs as module
from hybridserve.core.limits import check_vocabulary
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.engine.messages import EngineRequest
from hybridserve.frontend import protocol


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs: nothing is given"),
        ({"regex": "a", "json": {}}, "structured_outputs: json and regex are several"),
        ({"regex": 3}, "structured_outputs.regex: int is not text"),
        ({"grammar": b"x"}, "structured_outputs.grammar: bytes is not text"),
        ({"choice": []}, "structured_outputs.choice: is not a list"),
        ({"choice": "ab"}, "structured_outputs.choice: is not a list"),
        ({"choice": ["a", 1]}, "structured_outputs.choice: int is not text"),
        ({"json": "{"}, "structured_outputs.json: is text, but not JSON"),
        ({"json": "NaN"}, "structured_outputs.json: is text, but not JSON"),
        ({"json": "[" * 100_000}, "structured_outputs.json: is text, but not JSON"),
        ({"json": "3"}, "structured_outputs.json: a schema is an object, true or false"),
        ({"json": 3}, "structured_outputs.json: a schema is an object, true or false"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json: holds what JSON can't"),
        ({"json": {"const": {1, 2}}}, "structured_outputs.json: holds what JSON can't"),
        ({"regex": "\ud800"}, "structured_outputs.regex: holds half of a surrogate pair"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json: holds half of a surrogate pair"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        StructuredOutputs(**fields)


def test_a_description_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DESCRIPTION_BYTES", 10)
    assert StructuredOutputs(regex="é" * 5).num_bytes == 10
    for fields in ({"regex": "é" * 5 + "a"}, {"json": {"title": "abc"}}, {"choice": ["abcdefgh", "a"]}):
        with pytest.raises(ValueError, match=r"^structured_outputs\.\w+: \d+ bytes, at most 10"):
            StructuredOutputs(**fields)


def test_a_schema_is_the_same_however_it_is_given() -> None:
    schema = {"properties": {"b": {}, "a": {"const": "é"}}}
    one = StructuredOutputs(json=schema)
    assert one == StructuredOutputs(json='{ "properties": {"b": {}, "a": {"const": "\\u00e9"}}}')
    assert hash(one) == hash(StructuredOutputs(json=one.json))
    assert one.text == '{"properties":{"b":{},"a":{"const":"é"}}}'
    assert one.kind == "json"
    assert StructuredOutputs(json=True).text == "true"
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs: dict is not StructuredOutputs"),
        (
            {
                "structured_outputs": StructuredOutputs(regex="a"),
                "max_tokens": 0,
                "prompt_logprobs": 0,
            },
            "structured_outputs: max_tokens is 0",
        ),
        (
            {"structured_outputs": StructuredOutputs(regex="a"), "allowed_token_ids": [1]},
            "allowed_token_ids: structured_outputs says already",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids: is empty"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: a token id can't be negative"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids: .* is not a list of token ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids: .* is not a list of token ids"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output: 1 is neither True nor False"),
    ],
)
def test_parameters_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**fields)


@pytest.mark.parametrize("token", [512, 2**31, 2**63])
def test_s017_a_token_that_the_model_does_not_have(token: int) -> None:
    params = SamplingParams(allowed_token_ids=[3, token], max_tokens=4)
    with pytest.raises(ValueError, match=f"^allowed_token_ids: token id {token} is not in the vocabulary"):
        check_vocabulary([1], params, 512)
    check_vocabulary([1], SamplingParams(allowed_token_ids=[3, 511]), 512)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(structured_outputs=StructuredOutputs(json={"const": "é"})),
        SamplingParams(structured_outputs=StructuredOutputs(choice=("a", "b"))),
        SamplingParams(allowed_token_ids=[5, 5, 3], include_stop_str_in_output=True),
    ],
)
def test_the_engine_gets_them_as_they_are(params: SamplingParams) -> None:
    message = protocol.Add(EngineRequest(request_id="r", prompt_ids=[1], params=params))
    assert protocol.decode(protocol.encode(message), protocol.ToEngine).request.params == params


def test_a_draw_that_follows_a_grammar_waits_for_the_token_before() -> None:
    def runnable(params: SamplingParams) -> int:
        return Request("r", [1, 2], params, num_computed=2, num_pending=1, max_computed=9).num_runnable

    assert runnable(SamplingParams()) == 1
    assert runnable(SamplingParams(allowed_token_ids=[1])) == 1
    assert runnable(SamplingParams(structured_outputs=StructuredOutputs(regex="a"))) == 0
