"""Which class computes which architecture. Families are imported when one of their models is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from hybridserve.models.config import load_hf_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.layers.context import BuildContext
    from hybridserve.models.base import CausalLM

__all__ = ["ARCHITECTURES", "build_model", "load_hf_config"]

ARCHITECTURES: Mapping[str, str] = {
    "BambaForCausalLM": "bamba",
    "JambaForCausalLM": "jamba",
    "LlamaForCausalLM": "llama",
    "MambaForCausalLM": "mamba",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
}
"""Architecture, as config.json names it -> module of `hybridserve.models`; the class has the architecture's
name."""


def build_model(config: Mapping[str, Any], context: BuildContext) -> CausalLM:
    """A model with weights that are allocated but not loaded; on the meta device, with none at all.

    Raises ValueError for an architecture that isn't supported and for a config that can't be computed as it
    says.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json: architectures: {architectures!r} is not a list")
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            module = importlib.import_module(f"hybridserve.models.{ARCHITECTURES[architecture]}")
            return cast("CausalLM", getattr(module, architecture)(config, context))
    named = ", ".join(map(str, architectures)) or "none named"
    supported = ", ".join(sorted(ARCHITECTURES))
    raise ValueError(f"config.json: architectures: {named}: not supported (supported: {supported})")
