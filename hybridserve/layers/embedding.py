"""The two ends of a model: token ids to hidden states, hidden states to logits. Both are cut over the
vocabulary."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridserve.layers.linear import EVERYTHING
from hybridserve.layers.lora import AdaptableModule, OutputPart
from hybridserve.quant.format import Shard, Source, WeightFormat

if TYPE_CHECKING:
    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.context import BuildContext


class VocabSlice:
    """This rank's rows of a [vocab, hidden] weight: equal shares, the last padded with unread rows."""

    def __init__(self, context: BuildContext, vocab_size: int) -> None:
        self.num_rows = -(-vocab_size // context.tp.size)
        self.first = context.tp.rank * self.num_rows
        self.source = slice(min(self.first, vocab_size), min(self.first + self.num_rows, vocab_size))
        self.num_real = self.source.stop - self.source.start


class VocabParallelEmbedding:
    """[T] token ids -> [T, hidden].

    On a later stage of a pipeline it is there for the head that is tied to it: a copy, which adapters of the
    embedding don't concern.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        aliases: tuple[str, ...] = (),
    ) -> None:
        """`tied`: the output head reads this weight too. `aliases`: other names of this module."""
        self.tp = context.tp
        self.rows = VocabSlice(context, vocab_size)
        is_read_whole = tied and context.pipeline.is_last
        self.weight = context.within("embeddings").allocate(
            self.rows.num_rows, hidden_size, active=float(is_read_whole)
        )
        shape = (vocab_size, hidden_size)
        is_copy = not context.pipeline.is_first
        if not is_copy:
            context.footprint.reductions.append(hidden_size)
        context.weights.expect(f"{name}.weight", shape, self._load, active=float(tied), counted=not is_copy)
        for alias in aliases:
            context.weights.accept(f"{alias}.weight", shape, self._load, covers=(f"{name}.weight",))
        self.lora = None if is_copy else context.lora
        if self.lora is not None:
            self.table = self.lora.create_table()
            self.lora.offer(
                AdaptableModule(
                    name=name,
                    kind="embedding",
                    out_features=hidden_size,
                    in_features=vocab_size,
                    table=self.table,
                    outputs=(OutputPart(slice(0, hidden_size), 0),),
                    inputs=self.rows.source,
                    base=lambda: self.weight[: self.rows.num_real].t(),
                    partial=True,
                )
            )

    def __call__(self, input_ids: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        if self.tp.size == 1:
            hidden = torch.embedding(self.weight, input_ids)
            self._adapt(hidden, input_ids, lora)
            return hidden
        local = input_ids - self.rows.first
        elsewhere = (local < 0) | (local >= self.rows.num_real)
        hidden = torch.embedding(self.weight, local.masked_fill(elsewhere, 0))
        hidden.masked_fill_(elsewhere.unsqueeze(-1), 0)
        self._adapt(hidden, local.masked_fill(elsewhere, -1), lora)
        return self.tp.all_reduce(hidden)

    def _adapt(self, hidden: torch.Tensor, local_ids: torch.Tensor, lora: LoraBatch | None) -> None:
        """Add to this rank's summand: rows of other ranks (-1) are zero here, and so is their gain."""
        if lora is not None and self.lora is not None:
            self.lora.backend.add_embedding(hidden, local_ids, self.table, lora)

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight[: self.rows.num_real].copy_(tensor[self.rows.source])


class LMHead:
    """[R, hidden] -> logits [R, vocab] in float32 on rank 0, None elsewhere."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        self.tp = context.tp
        self.vocab_size = vocab_size
        self.rows = VocabSlice(context, vocab_size)
        formats = context.formats
        self.format: WeightFormat = formats.plain
        if tied_to is None:
            self.format = formats.linear([name], "delicate")
        context.footprint.gathered = self.rows.num_rows
        shape = (vocab_size, hidden_size)
        if tied_to is None:
            self.weights = self.format.create_linear(
                self.rows.num_rows, hidden_size, context.dtype, context.device
            )
            context.within("embeddings").hold(self.weights.values(), self.format)
            context.weights.expect(f"{name}.weight", shape, self._load, load_scaled=self._load)
            context.weights.finishers.append(partial(self.format.finish_linear, self.weights))
        else:
            self.weights = formats.plain.wrap_linear(tied_to.weight)
            check = partial(self._check_tied, f"{name}.weight", tied_to)
            context.weights.accept(f"{name}.weight", shape, check, covers=(), last=True)
        self.lora = context.lora
        if context.lora is not None:
            self.table = context.lora.create_table()
            context.lora.offer(
                AdaptableModule(
                    name=name,
                    kind="linear",
                    out_features=vocab_size,
                    in_features=hidden_size,
                    table=self.table,
                    outputs=(OutputPart(self.rows.source, 0),),
                    inputs=slice(0, hidden_size),
                    base=lambda: self.format.dequantize_linear(self.weights)[: self.rows.num_real],
                )
            )

    def __call__(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        local = self.format.apply_linear(hidden, self.weights, None)
        if lora is not None and self.lora is not None:
            self.lora.backend.add(local, hidden, self.table, lora)
        logits = self.tp.gather(local)
        return None if logits is None else logits[:, : self.vocab_size].float()

    def _load(self, tensor: Source) -> None:
        shard = Shard((self.rows.source, EVERYTHING), (slice(0, self.rows.num_real), EVERYTHING))
        self.format.load_linear(self.weights, tensor, shard)

    def _check_tied(self, name: str, embedding: VocabParallelEmbedding, tensor: torch.Tensor) -> None:
        mine = embedding.weight[: self.rows.num_real]
        if not torch.equal(mine, tensor[self.rows.source].to(mine)):
            raise ValueError(
                f"{name} differs from the input embedding, but the config says tie_word_embeddings"
            )
