"""A serving engine for hybrid language models. Importing this package imports neither torch nor pydantic."""

from __future__ import annotations

from hybridserve.version import __version__

TYPE_CHECKING = (
    False  # typing.TYPE_CHECKING to a type checker; the command line starts here, so import little
)
if TYPE_CHECKING:
    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.request import SamplingParams
    from hybridserve.core.structured_outputs import StructuredOutputs
    from hybridserve.frontend.async_engine import AsyncLLM
    from hybridserve.llm import LLM

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "AsyncLLM": "hybridserve.frontend.async_engine",
    "LLM": "hybridserve.llm",
    "SamplingParams": "hybridserve.core.request",
    "StructuredOutputs": "hybridserve.core.structured_outputs",
    "EngineConfig": "hybridserve.config.schema",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridserve' has no attribute {name!r}")
    import importlib

    from hybridserve.collector import collector_rests

    with collector_rests():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
