"""Which fields of a request are known, and what happens to those that are not served.

A field is honoured, or it is refused; the few that are accepted without any effect are listed here, and the
client is told. Knows names; the values of fields that are served are for `protocol`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from hybridserve.config.spelling import nearest
from hybridserve.server.errors import ApiError, bad_request, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted without effect, for it is not the answer that they are about."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "early_stopping": (False,),
    "echo": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Values of fields that are not served which ask for what is done anyway, as null does."""

_STRUCTURED = "is not supported: use structured_outputs"
REFUSED: Mapping[str, str] = {
    "audio": "is not supported: this server knows text only",
    "bad_words": "is not supported; see logit_bias",
    "chat_template": "is not supported: a template comes with the model",
    "chat_template_kwargs": "is not supported",
    "continue_final_message": "is not supported",
    "custom_logit_processor": "is not supported: a request brings no code",
    "documents": "is not supported",
    "function_call": "is not supported",
    "functions": "is not supported",
    "guided_choice": f"{_STRUCTURED}.choice",
    "guided_decoding_backend": _STRUCTURED,
    "guided_grammar": f"{_STRUCTURED}.grammar",
    "guided_json": f"{_STRUCTURED}.json",
    "guided_regex": f"{_STRUCTURED}.regex",
    "guided_whitespace_pattern": _STRUCTURED,
    "keep_alive": "is not supported",
    "logits_processors": "is not supported: a request brings no code",
    "lora_path": "is not supported: name an adapter as model",
    "adapter_id": "is not supported: name an adapter as model",
    "modalities": "only text is supported",
    "num_ctx": "is not supported: the context is max_model_len, for every request",
    "num_predict": "is not supported; max_tokens is",
    "options": "is not supported: parameters stand at the top level",
    "prediction": "is not supported",
    "prompt_embeds": "is not supported: a prompt is text or token ids",
    "reasoning_effort": "is not supported",
    "skip_special_tokens": "special tokens are never part of the text; see return_token_ids",
    "spaces_between_special_tokens": "special tokens are never part of the text; see return_token_ids",
    "stop_regex": "is not supported; stop is",
    "suffix": "is not supported",
    "tool_choice": "is for /v1/chat/completions",
    "tools": "is for /v1/chat/completions",
    "use_beam_search": "is not supported",
    "verbosity": "is not supported",
    "web_search_options": "is not supported",
}
"""What other servers know and this one does not, and what to do instead."""

Body = TypeVar("Body", bound=BaseModel)


def read_fields(
    model: type[Body], fields: Mapping[str, Any], *, refuse_unknown: bool = True
) -> tuple[Body, list[str]]:
    """A request, and the names of the fields that were accepted without effect. Raises ApiError 400 for the
    first field that is refused; without `refuse_unknown`, those that nobody knows are not, and their names
    are made harmless."""
    known = model.model_fields
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in fields.items():
        if name in known:
            if value is not None or known[name].is_required():
                kept[name] = value
        elif name in HARMLESS:
            ignored.append(name)
        elif name in REFUSED or name in WITHOUT_EFFECT:
            if value is not None and not _is_without_effect(name, value):
                raise bad_request(name, REFUSED.get(name, "is not supported"), "unsupported_field")
        elif not refuse_unknown:
            ignored.append(shown(name))
        else:
            near = nearest(name[:100], known)
            hint = f"did you mean {near}?" if near else "docs/server.md lists the fields that are"
            raise bad_request(shown(name), f"is not known; {hint}", "unknown_field")
    try:
        return model.model_validate(kept), sorted(ignored)
    except ValidationError as error:
        raise _invalid(error) from None


def _is_without_effect(name: str, value: object) -> bool:
    """By type as well: 1 is not True."""
    return any(type(value) is type(inert) and value == inert for inert in WITHOUT_EFFECT.get(name, ()))


def _invalid(error: ValidationError) -> ApiError:
    """The first problem, without the value."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    is_of_key = problem["loc"][-1:] == ("[key]",)  # of an object whose keys are the client's own
    loc = problem["loc"][:-2] if is_of_key else problem["loc"]
    path = [part for part in loc if isinstance(part, int) or part.isidentifier()]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    message = problem["msg"].removeprefix("Value error, ")
    for before, after in (("Input should", "should"), ("String should", "should"), ("List should", "should")):
        message = message.replace(before, after)
    message = {"missing": "is needed", "extra_forbidden": "is not known"}.get(problem["type"], message)
    return bad_request(shown(name) or None, f"a key {message}" if is_of_key else message)
