"""A mixture of experts: a router, and feed-forward experts of which each token uses a few.

Every rank holds a part of every expert's intermediate axis or, under expert parallelism, some of the experts
whole. Routing is the same on all ranks, and their results are summands.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.moe.interface import ExpertGroups
from hybridserve.layers.context import EXPERTS
from hybridserve.layers.linear import EVERYTHING, ReplicatedLinear, cut
from hybridserve.layers.lora import AdaptableModule, ExpertAdapters, OutputPart
from hybridserve.quant.format import Shard

if TYPE_CHECKING:
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext
    from hybridserve.layers.lora import LoraRegistry
    from hybridserve.quant.format import Source


class SparseMoE:
    """sum over the top k experts of routing weight * expert(x); [T, hidden] -> [T, hidden].

    Checkpoints hold `experts.N.{gate,up,down}_proj.weight`, or all experts stacked as `experts.gate_up_proj`
    [experts, 2 intermediate, hidden] and `experts.down_proj` [experts, hidden, intermediate].
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
    ) -> None:
        self.tp = context.tp
        self.backend = context.moe
        self.top_k = top_k
        self.renormalize = renormalize
        self.router = ReplicatedLinear(context, name, "router", hidden_size, num_experts)
        self.experts, self.part = slice(0, num_experts), slice(0, intermediate_size)
        if context.expert_parallel:
            context.divide(num_experts, EXPERTS)
            self.experts = cut(f"{name}.experts", num_experts, context.tp)
        else:
            context.divide(intermediate_size, "inner columns of an expert")
            self.part = cut(f"{name}.experts", intermediate_size, context.tp)
        num_local = self.experts.stop - self.experts.start
        self.is_divided = num_local < num_experts
        local = self.part.stop - self.part.start
        parts = ("gate_proj", "up_proj", "down_proj")
        modules = [f"{name}.experts.{expert}.{part}" for expert in range(num_experts) for part in parts]
        self.format = context.formats.experts(f"{name}.experts", modules)
        if not context.expert_parallel:
            context.divide_inputs(intermediate_size, self.format)
        self.weights = self.format.create_experts(
            num_local, hidden_size, local, context.dtype, context.device
        )
        context.within("experts").hold(self.weights.values(), self.format, active=top_k / num_experts)
        context.footprint.widen("experts", top_k * (3 * local + 2 * hidden_size))
        context.footprint.reductions.append(hidden_size)
        self._expect_experts(context, f"{name}.experts", num_experts, hidden_size, intermediate_size)
        context.weights.finishers.append(partial(self.format.finish_experts, self.weights))
        self.lora = context.lora
        if context.lora is not None:
            self.gate_up_table = context.lora.create_table(num_local)
            self.down_table = context.lora.create_table(num_local)
            self._offer(context.lora, f"{name}.experts", num_experts, hidden_size, intermediate_size)

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        weights, ids = self.backend.route(self.router(x, lora), self.top_k, renormalize=self.renormalize)
        adapters = None if lora is None else self._adapters(lora)
        if self.is_divided:
            return self.tp.all_reduce(self._apply_own(x, weights, ids, adapters))
        return self.tp.all_reduce(self.format.apply_experts(x, self.weights, weights, ids, adapters))

    def _apply_own(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, adapters: ExpertAdapters | None
    ) -> torch.Tensor:
        """The summands of this rank's experts: each of its (token, expert) pairs as a token with one
        expert."""
        tokens, places = ((ids >= self.experts.start) & (ids < self.experts.stop)).nonzero(as_tuple=True)
        own = (ids[tokens, places] - self.experts.start).unsqueeze(1)
        delta = None if adapters is None else _OfTokens(adapters, x, tokens)
        rows = self.format.apply_experts(
            x[tokens], self.weights, weights[tokens, places].unsqueeze(1), own, delta
        )
        outputs = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        outputs[tokens, places] = rows.float()
        return outputs.sum(1).to(x.dtype)

    def _adapters(self, lora: LoraBatch) -> ExpertAdapters | None:
        """None where no adapter of the step has anything for these experts."""
        if self.lora is None or not (self.gate_up_table.concerns(lora) or self.down_table.concerns(lora)):
            return None
        return ExpertAdapters(self.lora.backend, self.gate_up_table, self.down_table, lora)

    def _offer(
        self, registry: LoraRegistry, name: str, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        everything = slice(0, hidden_size)
        local = self.part.stop - self.part.start
        registry.num_elsewhere += 3 * (num_experts - (self.experts.stop - self.experts.start))
        for group, expert in enumerate(range(self.experts.start, self.experts.stop)):
            for part, start in (("gate", 0), ("up", local)):
                registry.offer(
                    AdaptableModule(
                        name=f"{name}.{expert}.{part}_proj",
                        kind="linear",
                        out_features=intermediate_size,
                        in_features=hidden_size,
                        table=self.gate_up_table,
                        outputs=(OutputPart(self.part, start),),
                        inputs=everything,
                        base=partial(self.format.dequantize_expert, self.weights, group, part),
                        group=group,
                    )
                )
            registry.offer(
                AdaptableModule(
                    name=f"{name}.{expert}.down_proj",
                    kind="linear",
                    out_features=hidden_size,
                    in_features=intermediate_size,
                    table=self.down_table,
                    outputs=(OutputPart(everything, 0),),
                    inputs=self.part,
                    base=partial(self.format.dequantize_expert, self.weights, group, "down"),
                    partial=not self.is_divided,
                    group=group,
                )
            )

    def _expect_experts(
        self, context: BuildContext, name: str, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        up, down = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        active = self.top_k / num_experts
        names: dict[str, list[str]] = {"gate": [], "up": [], "down": []}
        for expert in range(num_experts):
            for part, shape in (("gate", up), ("up", up), ("down", down)):
                tensor = f"{name}.{expert}.{part}_proj.weight"
                load = partial(self._load, expert, part)
                context.weights.expect(tensor, shape, load, active=active, load_scaled=load)
                names[part].append(tensor)
        stacked = (num_experts, 2 * intermediate_size, hidden_size)
        covers = (*names["gate"], *names["up"])
        context.weights.accept(f"{name}.gate_up_proj", stacked, self._load_stacked_gate_up, covers=covers)
        stacked = (num_experts, hidden_size, intermediate_size)
        context.weights.accept(
            f"{name}.down_proj", stacked, self._load_stacked_down, covers=(*names["down"],)
        )

    def _load(self, expert: int, part: str, tensor: Source) -> None:
        if not self.experts.start <= expert < self.experts.stop:
            return
        source = (EVERYTHING, self.part) if part == "down" else (self.part, EVERYTHING)
        shard = Shard(source, (EVERYTHING, EVERYTHING))
        self.format.load_expert(self.weights, expert - self.experts.start, part, tensor, shard)

    def _load_stacked_gate_up(self, tensor: torch.Tensor) -> None:
        for expert, gate_up in enumerate(tensor):
            gate, up = gate_up.chunk(2)
            self._load(expert, "gate", gate)
            self._load(expert, "up", up)

    def _load_stacked_down(self, tensor: torch.Tensor) -> None:
        for expert, down in enumerate(tensor):
            self._load(expert, "down", down)


class _OfTokens:
    """What adapters add inside the experts where rows are tokens of `x`, given again for each of their
    experts."""

    def __init__(self, adapters: ExpertAdapters, x: torch.Tensor, tokens: torch.Tensor) -> None:
        self.adapters = adapters
        self.x = x
        self.tokens = tokens

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.adapters.add_gate_up(y, self.x, self._whole(groups))

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.adapters.add_down(y, x, self._whole(groups))

    def _whole(self, groups: ExpertGroups) -> ExpertGroups:
        return ExpertGroups(self.tokens[groups.tokens], groups.experts)
