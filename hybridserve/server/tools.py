"""Tools as clients write them, and what a request wants of them: what the model is told, which calls may be
made, and the grammar that makes sure of it.

Knows fields, schemas and the markers of `tool_parser`; whether a grammar can be enforced is for the engine to
say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.grammar.compiler import WHITESPACE
from hybridserve.grammar.schema_numbers import OF_SCHEMAS, OF_VALUES
from hybridserve.server.errors import bad_request
from hybridserve.server.tool_parser import CLOSE, OPEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.config.schema import LimitsConfig
    from hybridserve.core.request import SamplingParams
    from hybridserve.server.errors import ApiError
    from hybridserve.server.service import Service
    from hybridserve.text import Tokenizer

MAX_TOOLS = 128
NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class _Part(BaseModel):
    """Keys beyond the fields go to the chat template as they are."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")


class Function(_Part):
    """`parameters`: a JSON schema of an object; without it, there are none. `strict` has no effect where
    tool_choice lets the model choose, and needs none elsewhere."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise ValueError("parameters should be a schema of type object")
        return self

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return NO_PARAMETERS
        known = {key: value for key, value in self.parameters.items() if key not in ("$schema", "$id")}
        return {"type": "object", **known}


class Tool(_Part):
    type: Literal["function"]
    function: Function
    _num_bytes: int = PrivateAttr()

    @model_validator(mode="after")
    def _measure(self) -> Tool:
        self._num_bytes = len(msgspec.json.encode(self.for_template()))
        return self

    @property
    def num_bytes(self) -> int:
        """Of it as JSON: counted where the request is read, for a large one not in the event loop."""
        return self._num_bytes

    def for_template(self) -> dict[str, Any]:
        shown = self.model_dump(exclude_none=True, exclude={"function": {"strict"}})
        if self.function.parameters is not None:  # as it is, with what is null in it
            shown["function"]["parameters"] = self.function.parameters
        return shown


def _arguments(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("should be JSON as text")
    return value


Arguments = Annotated[Any, BeforeValidator(_arguments), WithJsonSchema({"type": ["string", "object"]})]


class CalledFunction(_Part):
    """`arguments`: the text of a JSON object, as this server's own answers have them; or the object."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Arguments = ""


class CalledTool(_Part):
    """A call in an assistant's message, of this server or any other."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With arguments as an object, as templates expect them; those that are none stay text."""
        shown = self.model_dump(exclude_none=True)
        arguments = self.function.arguments
        if isinstance(arguments, str):
            arguments = _object_of(arguments)
        shown["function"]["arguments"] = arguments
        return shown


def _object_of(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]
"""none, auto, required, or the name of a function in OpenAI's wrapping: `read_choice` checks it."""


def check_tools(tools: Sequence[Tool], limits: LimitsConfig) -> None:
    """What can't be seen from one tool alone."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise bad_request(f"tools[{index}].function.name", "is the name of another tool as well")
        names.add(tool.function.name)
    if sum(tool.num_bytes for tool in tools) > limits.schema_bytes:
        message = f"should have at most {limits.schema_bytes} bytes together (server.limits.schema_bytes)"
        raise bad_request("tools", message)


def read_choice(value: Any, tools: Sequence[Tool]) -> str | Function:
    """none, auto or required; or the one function that is to be called."""
    if value is None:
        return "auto" if tools else "none"
    if value in ("none", "auto", "required"):
        if value == "required" and not tools:
            raise bad_request("tool_choice", "needs tools")
        return str(value)
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value != {"type": "function", "function": {"name": name}}:
        message = 'should be none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise bad_request("tool_choice", message)
    for tool in tools:
        if tool.function.name == name:
            return tool.function
    raise bad_request("tool_choice.function.name", "is not the name of one of the tools")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request may do with its tools.

    must_call: the answer is calls and nothing else, of the functions that `callable` has.
    is_single: and only one, in any case.
    """

    tools: Sequence[Tool]
    callable: Sequence[Function]
    must_call: bool
    is_single: bool

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: str | Function, is_parallel: bool) -> ToolUse | None:
        """None where the model is to know nothing of them."""
        if not tools or choice == "none":
            return None
        functions = [tool.function for tool in tools]
        if isinstance(choice, Function):
            return cls(tools, [choice], True, True)
        return cls(tools, functions, choice == "required", not is_parallel)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.callable)

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools]

    def grammar(self, tokenizer: Tokenizer, answer: StructuredOutputs | None = None) -> str:
        """In Lark's syntax. `answer`: the JSON that may be written instead of calls; by default, any text.

        Only where a call must be made are its arguments held to their schema: elsewhere one that can't be
        enforced is no reason to refuse."""
        schemas = [
            function.schema_of_arguments if self.must_call else {"type": "object"}
            for function in self.callable
        ]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": {"$ref": f"#/$defs/{index}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, function in enumerate(self.callable)
        ]
        listed: dict[str, Any] = {
            "type": "array",
            "items": {"anyOf": calls},
            "minItems": 1,
            "$defs": {str(index): _moved(schema, f"#/$defs/{index}") for index, schema in enumerate(schemas)},
        }
        if self.is_single:
            listed["maxItems"] = 1
        opening, closing = _terminal(tokenizer, OPEN), _terminal(tokenizer, CLOSE)
        if self.must_call:
            rules = [f"start: {opening} calls {closing}"]
        elif answer is not None:
            schema = json.loads(answer.text)
            rules = [f"start: {opening} calls {closing} | answer"]
            rules.append(f"answer: %json {_strictly({} if schema is True else schema)}")
        elif tokenizer.special_id(OPEN) is not None:
            rules = [f"start: TEXT ({opening} calls {closing})?", r"TEXT: /(.|\n)*/"]
        else:  # a text ends where the marker does, and not later
            rules = [f"start: TEXT | opened calls {closing}", f"opened[lazy]: TEXT {opening}"]
            rules.append(r"TEXT: /(.|\n)*/")
        return "\n".join(["%llguidance {}", *rules, f"calls: %json {_strictly(listed)}"])


def marker_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The special tokens that are markers of calls: they must not be missing in the text."""
    found = [] if tokenizer is None else [tokenizer.special_id(OPEN), tokenizer.special_id(CLOSE)]
    return frozenset(token_id for token_id in found if token_id is not None)


def _terminal(tokenizer: Tokenizer, marker: str) -> str:
    token_id = tokenizer.special_id(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _strictly(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"lenient": False, "whitespace_pattern": WHITESPACE}})


def _moved(schema: Any, to: str) -> Any:
    """A schema that has become a part of another one, at `to`: its references mean what they meant."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = to + value[1:]
        elif key in OF_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _moved(each, to) for name, each in value.items()}
        else:
            moved[key] = value if key in OF_VALUES else _moved(value, to)
    return moved


async def constrained(service: Service, use: ToolUse, params: SamplingParams) -> SamplingParams:
    """The parameters, with what makes sure of the calls. Their structured outputs, if any, are JSON, and
    have been checked: they are for the answer without calls. Raises ApiError, naming tool and keyword, where
    that can't be enforced."""
    tokenizer, answer = service.engine.tokenizer, params.structured_outputs
    if tokenizer is None or not (use.must_call or use.is_single or answer):
        return params
    if params.allowed_token_ids is not None:
        raise bad_request("allowed_token_ids", "tool_choice or parallel_tool_calls says what may be drawn")
    try:
        wanted = StructuredOutputs(grammar=use.grammar(tokenizer, answer))
        return await service.engine.checked(replace(params, structured_outputs=wanted))
    except ValueError as error:
        raise await _blamed(service, use, params, error) from None


async def _blamed(service: Service, use: ToolUse, params: SamplingParams, error: ValueError) -> ApiError:
    """Which tool is the reason why all of them can't be served."""
    field, _, reason = str(error).partition(": ")
    if not field.startswith("structured_outputs."):
        return bad_request("tool_choice" if use.must_call else "parallel_tool_calls", reason or field)
    if use.must_call and "too complex" not in reason:  # whole, it took no time
        numbers = {tool.function.name: index for index, tool in enumerate(use.tools)}
        for function in use.callable:
            alone = StructuredOutputs(json=function.schema_of_arguments)
            try:
                await service.engine.checked(replace(params, structured_outputs=alone))
            except ValueError as mistake:
                reason = str(mistake).partition(": ")[2]
                where = f"tools[{numbers[function.name]}].function.parameters"
                return bad_request(where, f"{reason} (of the tool {function.name})")
    return bad_request("tools", reason)
