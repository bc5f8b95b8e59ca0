"""What clients write about the look of a text, in OpenAI's way and in ours. Knows fields; whether what they
hold makes sense is for `core.structured_outputs` and `grammar`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from hybridserve.core.structured_outputs import StructuredOutputs

SchemaValue = Annotated[Any, WithJsonSchema({"type": ["object", "boolean", "string"]})]
"""A JSON schema: `StructuredOutputs` checks it."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class JsonSchema(_Part):
    """Names and descriptions are for people. The schema is enforced, strict or not."""

    name: str | None = None
    description: str | None = None
    schema_: SchemaValue = Field(alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> JsonSchema:
        if not isinstance(self.schema_, dict | bool):
            raise ValueError("schema should be an object, true or false")
        return self


class ResponseFormat(_Part):
    """json_object: any JSON object. json_schema: a JSON text that the schema accepts."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema is for type json_schema, and needed there")
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return None if self.type == "text" else StructuredOutputs(json={"type": "object"})


class Structured(_Part):
    """What the text must look like: one of these. docs/structured-outputs.md has the details."""

    json_: SchemaValue | None = Field(
        default=None, alias="json", description="a JSON schema, perhaps as text"
    )
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="in Lark's syntax or GBNF")

    @property
    def structured(self) -> StructuredOutputs:
        choice = None if self.choice is None else tuple(self.choice)
        return StructuredOutputs(json=self.json_, regex=self.regex, choice=choice, grammar=self.grammar)
