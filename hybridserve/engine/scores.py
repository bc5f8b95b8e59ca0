"""Hands a step's log-probabilities to the requests that asked for them. Knows requests and plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.core.request import Request
    from hybridserve.engine.input_builder import BuiltStep
    from hybridserve.engine.messages import TokenLogprobs
    from hybridserve.engine.model_runner import StepOutput


def of_draws(
    built: BuiltStep, result: StepOutput, requests: Mapping[str, Request]
) -> dict[str, TokenLogprobs]:
    """Of the tokens that were drawn, by request. `requests` are those that have not ended."""
    scored = result.logprobs
    if scored is None:
        return {}
    found = {}
    for place, row in enumerate(scored.rows):
        request = requests.get(built.sample_ids[row])
        if request is not None and request.params.logprobs is not None:
            found[request.id] = scored.at(place, result.token_ids[row], request.params.logprobs)
    return found


def of_prompts(
    built: BuiltStep, result: StepOutput, requests: Mapping[str, Request]
) -> dict[str, list[TokenLogprobs]]:
    """Of the prompt tokens that the step has scored, in their order, by request."""
    scored, wanted = result.prompt_logprobs, built.input.prompt_logprobs
    if scored is None or wanted is None:
        return {}
    found = {}
    place = 0
    for request_id, count in built.prompt_spans:
        request = requests.get(request_id)
        if request is not None and request.params.prompt_logprobs is not None:
            num_top = request.params.prompt_logprobs
            found[request_id] = [
                scored.at(at, int(wanted.targets[at]), num_top) for at in range(place, place + count)
            ]
        place += count
    return found
