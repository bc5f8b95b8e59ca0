"""langchain-openai against the real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

if TYPE_CHECKING:
    from tests.harness.serve_process import Server

pytestmark = pytest.mark.slow


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ann", "Bob"]


@pytest.fixture
def options(base_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    return {"base_url": base_url, "api_key": "none", "max_retries": 0, "temperature": 0}


def test_a_chat_whole_streamed_and_in_a_batch(options: dict[str, Any]) -> None:
    model = ChatOpenAI(model="demo", max_completion_tokens=12, stream_usage=True, **options)
    whole = model.invoke("what is the time?")
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    pieces = list(model.stream("what is the time?"))
    assert len(pieces) > 3
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert [piece.usage_metadata for piece in pieces if piece.usage_metadata] == [whole.usage_metadata]
    batch = model.batch(["what is the time?"] * 5)
    assert {each.content for each in batch} == {whole.content}

    async def later() -> str:
        return "".join([str(piece.content) async for piece in model.astream("what is the time?")])

    assert asyncio.run(later()) == whole.content


def test_an_adapter_as_a_model(options: dict[str, Any], served: Server) -> None:
    texts = {
        OpenAI(model=name, max_tokens=12, **options).invoke("And the") for name in ("demo", "bard", "kjv")
    }
    assert len(texts) == 3
    served.wait_idle()


def test_an_object_of_a_class(options: dict[str, Any]) -> None:
    model = ChatOpenAI(model="demo", max_completion_tokens=200, **options)
    said = model.with_structured_output(Person, method="json_schema").invoke("who are you?")
    assert isinstance(said, Person)


def test_a_mistake_is_told(options: dict[str, Any]) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        ChatOpenAI(model="nobody", **options).invoke("a")
    with pytest.raises(openai.BadRequestError, match="max_model_len is 2048"):
        ChatOpenAI(model="demo", max_completion_tokens=4000, **options).invoke("a")
