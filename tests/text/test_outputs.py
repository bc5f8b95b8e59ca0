"""What users are told of what an engine emits, delta by delta."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.engine.messages import EngineRequest, RequestMetrics, SequenceOutput, TokenLogprobs
from hybridserve.models.hub import resolve_model
from hybridserve.outputs import Delta, OutputProcessor, RequestOutput
from hybridserve.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("demo"))


def metrics(arrival: float = 0.0, finished: float = 1.0) -> RequestMetrics:
    return RequestMetrics(
        arrival=arrival,
        first_scheduled=None,
        first_token=None,
        finished=finished,
        num_cached_tokens=0,
        num_preemptions=1,
    )


def output(
    index: int, token_ids: list[int], reason: FinishReason | None = None, **more: Any
) -> SequenceOutput:
    found = None if reason is None else metrics(finished=index)
    return SequenceOutput(
        request_id="1", index=index, token_ids=token_ids, finish_reason=reason, metrics=found, **more
    )


class Told:
    """A request of one or more continuations, and all that is told of it."""

    def __init__(self, tokenizer: Tokenizer | None, **params: Any) -> None:
        self.request = EngineRequest(request_id="1", prompt_ids=[1], params=SamplingParams(**params))
        self.processor = OutputProcessor(tokenizer)
        self.processor.add(self.request)
        self.deltas: list[Delta] = []
        self.aborts: list[tuple[str, int]] = []
        self.output = RequestOutput.empty(self.request, None)

    def step(self, *outputs: SequenceOutput) -> list[Delta]:
        deltas, aborts = self.processor.process(outputs)
        self.deltas += deltas
        self.aborts += aborts
        for delta in deltas:
            self.output.add(delta)
        return deltas


def test_a_stop_string_ends_one_continuation_before_the_engine_does(tokenizer: Tokenizer) -> None:
    told = Told(tokenizer, n=2, stop=" people", max_tokens=8)
    the, people, of = tokenizer.encode("The people of", add_special_tokens=False)
    told.step(output(0, [the]), output(1, [the]))
    (first, second) = told.step(output(0, [people]), output(1, [of]))
    assert (first.finish_reason, first.stop_reason, first.text) == ("stop", " people", "")
    assert second.finish_reason is None
    assert told.aborts == [("1", 0)]
    assert told.step(output(0, [of])) == []  # drawn before the engine knew
    assert told.step(output(0, [], FinishReason.ABORT)) == []  # told already
    (last,) = told.step(output(1, [of], FinishReason.LENGTH))
    assert (last.finished, last.finish_reason) == (True, "length")
    assert [each.token_ids for each in told.output.outputs] == [[the, people], [the, of, of]]
    assert [each.text for each in told.output.outputs] == ["The", "The of of"]
    assert [each.finish_reason for each in told.output.outputs] == ["stop", "length"]
    assert told.output.finished
    assert told.step(output(1, [of])) == []  # forgotten


def test_the_last_delta_may_be_of_one_that_was_told_to_have_ended(tokenizer: Tokenizer) -> None:
    told = Told(tokenizer, stop=" people")
    told.step(output(0, tokenizer.encode("The people", add_special_tokens=False)))
    (last,) = told.step(output(0, [], FinishReason.ABORT))
    assert (last.finished, last.finish_reason, last.text, last.token_ids) == (True, None, "", ())
    assert told.output.outputs[0].finish_reason == "stop"


def test_metrics_are_those_of_the_whole_request() -> None:
    told = Told(None, n=3)
    told.step(*(output(index, [5], FinishReason.LENGTH) for index in (2, 0, 1)))
    assert told.output.metrics is not None
    assert (told.output.metrics.finished, told.output.metrics.num_preemptions) == (2, 3)


def test_without_a_tokenizer_there_is_no_text() -> None:
    told = Told(None, logprobs=1)
    told.step(output(0, [7], logprobs=[TokenLogprobs([7, 8], [-1.0, -0.5], 2)]))
    assert told.output.outputs[0].text == ""
    assert told.output.outputs[0].logprobs is not None
    assert [
        (key, value.rank, value.decoded_token) for key, value in told.output.outputs[0].logprobs[0].items()
    ] == [
        (7, 2, None),
        (8, 1, None),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_how_steps_cut_a_text_does_not_matter(seed: int, tokenizer: Tokenizer) -> None:
    """The tokens of a text, some at a time: the result is that of all at once."""
    draw = random.Random(seed)
    token_ids = tokenizer.encode("naïve 客单价 😀 people of the states. ", add_special_tokens=False)
    stop = draw.choice(["", "价", "the st", "of", "zz"])
    params = {"max_tokens": 100, "logprobs": 0, "prompt_logprobs": 0, **({"stop": stop} if stop else {})}
    whole, pieces = Told(tokenizer, **params), Told(tokenizer, **params)

    def scored(ids: list[int]) -> list[TokenLogprobs]:
        return [TokenLogprobs([token_id], [-token_id / 7], 1) for token_id in ids]

    whole.step(output(0, token_ids, logprobs=scored(token_ids), prompt_logprobs=scored([3, 4])))
    whole.step(output(0, [], FinishReason.LENGTH))
    pieces.step(output(0, [], prompt_logprobs=scored([3])))
    pieces.step(output(0, [], prompt_logprobs=scored([4])))
    position = 0
    while position < len(token_ids):
        some = token_ids[position : position + draw.randint(1, 4)]
        pieces.step(output(0, some, logprobs=scored(some)))
        position += len(some)
    pieces.step(output(0, [], FinishReason.LENGTH))
    assert pieces.output == whole.output
    assert len(pieces.deltas) > 3
    for told in (whole, pieces):
        assert sum(delta.finish_reason is not None for delta in told.deltas) == 1
        assert [delta.finished for delta in told.deltas] == [False] * (len(told.deltas) - 1) + [True]
        assert len(told.output.outputs[0].logprobs or ()) == len(told.output.outputs[0].token_ids)
    if not stop or stop == "zz":
        assert pieces.output.outputs[0].text == tokenizer.decode(token_ids)


def test_what_ends_a_text_is_part_of_it_where_that_was_asked_for(tokenizer: Tokenizer) -> None:
    the, people, of = tokenizer.encode("The people of", add_special_tokens=False)
    told = Told(tokenizer, stop=" peop", include_stop_str_in_output=True)
    told.step(output(0, [the]))
    (delta,) = told.step(output(0, [people]))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (" peop", "stop", " peop")
    assert told.output.outputs[0].text == "The peop"
    for shows, text in ((True, "The people of"), (False, "The people")):
        told = Told(tokenizer, stop_token_ids=(of,), include_stop_str_in_output=shows)
        told.step(output(0, [the, people, of], FinishReason.STOP, stop_reason=of))
        assert told.output.outputs[0].text == text


def test_the_last_token_of_a_text_that_is_complete_is_text(tokenizer: Tokenizer) -> None:
    the, people, of = tokenizer.encode("The people of", add_special_tokens=False)
    told = Told(tokenizer)
    told.step(output(0, [the]), output(0, [people, of], FinishReason.STOP, ends_in_text=True))
    assert told.output.outputs[0].text == "The people of"
    assert told.output.outputs[0].token_ids == [the, people, of]
    told = Told(tokenizer, stop=" of")
    told.step(output(0, [the, people, of], FinishReason.STOP, ends_in_text=True))
    assert (told.output.outputs[0].text, told.output.outputs[0].stop_reason) == ("The people", " of")
