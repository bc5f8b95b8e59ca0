"""What the attention layer asks of its backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridserve.kernels.attention import Reference
from hybridserve.layers.attention import Attention
from tests.harness.models import Backends

SIZES: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


class Asked(Reference):
    """Keeps how it was asked."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.options.append(options)
        query: torch.Tensor = arguments[0]
        return query


class Narrow(Reference):
    name = "narrow"
    head_dims = (64, 128)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 50.0)])
def test_a_layer_names_its_window_and_its_cap(window: int | None, softcap: float | None) -> None:
    backend = Asked()
    context = Backends(attention=backend).context()
    layer = Attention(context, "layer", **SIZES, window=window, softcap=softcap)
    forward: Any = SimpleNamespace(attention=None, caches=[None], lora=None)
    layer(torch.zeros(3, 32), forward)
    assert backend.options == [{"scale": 8**-0.5, "window": window, "softcap": softcap}]


def test_heads_that_a_backend_has_no_arithmetic_for_are_refused() -> None:
    context = Backends(attention=Narrow()).context()
    with pytest.raises(ValueError, match=r"kernels\.attention: narrow takes heads of 64, 128, not 8"):
        Attention(context, "layer", **SIZES)
    Attention(context, "layer", **{**SIZES, "head_dim": 64})
