"""Plain weights: shards land where they should, and what a backend packs is what is used."""

from __future__ import annotations

import torch

from hybridserve.kernels.gemm.interface import GemmBackend
from hybridserve.kernels.moe.reference import Reference as ReferenceMoE
from hybridserve.quant.format import Shard
from hybridserve.quant.unquantized import UnquantizedFormat

CPU = torch.device("cpu")
ALL = slice(None)


class Transposing(GemmBackend):
    """Packs a weight as [in, out], so that one which wasn't packed, or was twice, has the wrong shape."""

    name = "transposing"

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.T.contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x @ weight
        return out if bias is None else out + bias


class Doubling(ReferenceMoE):
    name = "doubling"

    def pack(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up, 2 * down


def plain() -> UnquantizedFormat:
    return UnquantizedFormat(Transposing(), Doubling())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_linear() -> None:
    weight_format, tensor, x, bias = plain(), random(6, 8), random(3, 4), random(5)
    weights = weight_format.create_linear(5, 4, torch.float32, CPU)
    columns = slice(2, 6)
    weight_format.load_linear(weights, tensor, Shard((slice(1, 3), columns), (slice(3, 5), ALL)))
    weight_format.load_linear(weights, tensor, Shard((slice(3, 6), columns), (slice(0, 3), ALL)))
    weight_format.finish_linear(weights)
    want = x @ torch.cat([tensor[3:6, columns], tensor[1:3, columns]]).T + bias
    torch.testing.assert_close(weight_format.apply_linear(x, weights, bias), want)


def test_experts() -> None:
    weight_format, x = plain(), random(3, 4)
    weights = weight_format.create_experts(2, 4, 6, torch.float32, CPU)
    parts = {
        name: random(2, *shape) for name, shape in {"gate": (8, 4), "up": (8, 4), "down": (4, 8)}.items()
    }
    parts["up"] += 1
    for name, tensors in parts.items():
        source = (ALL, slice(2, 8)) if name == "down" else (slice(2, 8), ALL)
        for expert, tensor in enumerate(tensors):
            weight_format.load_expert(weights, expert, name, tensor, Shard(source, (ALL, ALL)))
    weight_format.finish_experts(weights)
    ids = torch.tensor([[0, 1], [1, 0], [1, 0]])
    routing = torch.tensor([[0.5, 0.25], [0.6, 0.3], [0.2, 0.1]])
    out = weight_format.apply_experts(x, weights, routing, ids)
    for t in range(3):
        want = torch.zeros(4)
        for k in range(2):
            gate, up, down = (parts[name][ids[t, k]] for name in ("gate", "up", "down"))
            inner = torch.nn.functional.silu(gate[2:] @ x[t]) * (up[2:] @ x[t])
            want += routing[t, k] * 2 * (down[:, 2:] @ inner)
        torch.testing.assert_close(out[t], want)


def test_weights_are_in_the_dtype_asked_for() -> None:
    weights = plain().create_linear(2, 3, torch.bfloat16, torch.device("meta"))
    assert weights["weight"].dtype == torch.bfloat16
    assert weights["weight"].is_meta
