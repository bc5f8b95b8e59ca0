"""Test-only models whose only memory is unusual: a convolution alone (as LFM2 has), and four state tensors a
layer.

Each has a definition of its own, one token at a time, that the engine is held against.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.core.cache_spec import CacheLayout, StateSpec, StateTensor
from hybridserve.core.scheduler import Scheduler
from hybridserve.engine.arena import Arena
from hybridserve.engine.core import EngineCore
from hybridserve.engine.input_builder import InputBuilder
from hybridserve.engine.model_runner import ModelRunner
from hybridserve.kernels.attention.torch_native import TorchNative as Attention
from hybridserve.kernels.pointwise.torch_native import TorchNative as Pointwise
from hybridserve.kernels.ssm.torch_native import TorchNative as SSM
from hybridserve.models.base import CausalLM
from tests.harness.engine import Guarded, GuardedExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import ForwardContext

VOCAB, WIDTH, TAPS = 64, 16, 4


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sibling(CausalLM):
    """Embeds a token, mixes it with what the state holds, and compares with all embeddings."""

    vocab_size = VOCAB
    max_position_embeddings = None
    tensors: tuple[StateTensor, ...]

    def __init__(self) -> None:
        self.embedding = random(0, VOCAB, WIDTH)
        self.cache_specs = [StateSpec(self.tensors)]

    def fresh(self) -> list[torch.Tensor]:
        return [torch.zeros(tensor.shape) for tensor in self.tensors]

    @abstractmethod
    def advance(self, x: torch.Tensor, state: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The definition: one token [WIDTH] and the state before -> what comes out, and the state after."""

    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None = None) -> torch.Tensor:
        return hidden @ self.embedding.T

    def tokens(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """Greedy, alone, one token at a time."""
        state, drawn = self.fresh(), list[int]()
        fed = list(prompt_ids)
        for token in fed:
            hidden, state = self.advance(self.embedding[token], state)
        while len(drawn) < count:
            drawn.append(int(self.logits(hidden, None).argmax()))
            hidden, state = self.advance(self.embedding[drawn[-1]], state)
        return drawn


class ConvSibling(Sibling):
    """T-conv: the state is the last inputs of a short convolution."""

    tensors = (StateTensor("conv", (WIDTH, TAPS - 1), "float32"),)
    weight = random(1, WIDTH, TAPS)

    def advance(self, x: torch.Tensor, state: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        window = torch.cat([state[0], x[:, None]], dim=1)
        return (window * self.weight).sum(1), [window[:, 1:]]

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x, view = self.embedding[input_ids], context.caches[0]
        return SSM().causal_conv1d(x, self.weight, None, view[0], context.ssm, silu=False)


class FourSibling(Sibling):
    """T-four: four tensors of different shapes and dtypes, all of which matter."""

    tensors = (
        StateTensor("sum", (WIDTH,), "float32"),
        StateTensor("matrix", (WIDTH, 3), "float32"),
        StateTensor("ring", (WIDTH, 2), "float32"),
        StateTensor("norm", (1,), "float32"),
    )

    def advance(self, x: torch.Tensor, state: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        total, matrix, ring, norm = state
        after = [
            0.95 * total + x,
            0.9 * matrix + x[:, None] * torch.tensor([1.0, -0.5, 0.25]),
            torch.stack([ring[:, 1], x], dim=1),
            0.99 * norm + x.square().mean(),
        ]
        hidden = x + after[0] + after[1].sum(1) - ring[:, 0] + after[3]
        return hidden, after

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        view, metadata = context.caches[0], context.ssm
        rows = []
        first = 0
        for length, slot, has_state in zip(
            metadata.query_lens, metadata.state_slots.tolist(), metadata.has_state.tolist(), strict=True
        ):
            state = [tensor[slot].clone() for tensor in view] if has_state else self.fresh()
            for token in input_ids[first : first + length].tolist():
                hidden, state = self.advance(self.embedding[token], state)
                rows.append(hidden)
            for tensor, value in zip(view, state, strict=True):
                tensor[slot] = value
            first += length
        return torch.stack(rows)


@dataclass(frozen=True)
class SiblingKind:
    model: type[Sibling]

    @property
    def num_tensors(self) -> int:
        return len(self.model.tensors)


SIBLINGS = {"T-conv": SiblingKind(ConvSibling), "T-four": SiblingKind(FourSibling)}


def sibling_engine(name: str, *, poison: str, **guards: Any) -> tuple[Guarded, Sibling]:
    """A guarded engine over a sibling, with few slots, and the sibling."""
    model = SIBLINGS[name].model()
    slot_bytes = sum(tensor.num_bytes for tensor in model.tensors)
    layout = CacheLayout.build(model.cache_specs, 16, 4 * max(slot_bytes, 64))
    runner = ModelRunner(model, Arena(layout, torch.device("cpu")), Attention(), SSM(), Pointwise())
    scheduler = Scheduler(
        layout, max_num_seqs=8, max_num_batched_tokens=6, max_model_len=64, check_integrity=True
    )
    executor = GuardedExecutor(runner, delay=0, poison=poison, checksum=True)
    core = EngineCore(scheduler, InputBuilder(block_size=16, seed=0), executor, VOCAB)
    return Guarded.over(core, executor, **guards), model
