"""The vocabulary cut over ranks that do not divide it."""

from __future__ import annotations

import pytest
import torch

from hybridserve.layers.embedding import LMHead, VocabParallelEmbedding
from tests.harness.models import Backends
from tests.harness.tp import run_ranks

VOCAB, HIDDEN = 10, 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_embedding_and_head(size: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    ids = torch.tensor([0, 9, 3, 3, 7, 5])

    def rank(tp):
        context = Backends().context(tp=tp)
        embedding = VocabParallelEmbedding(context, "embed", VOCAB, HIDDEN, tied=tied)
        embedding.weight.fill_(float("nan"))  # what memory may hold before loading
        head = LMHead(context, "head", VOCAB, HIDDEN, tied_to=embedding if tied else None)
        if not tied:
            head.weights["weight"].fill_(float("nan"))
        for name in ("embed.weight", "head.weight"):
            context.weights.tensors[name].load(weight)
        for finish in context.weights.finishers:
            finish()
        hidden = embedding(ids, None)
        return hidden, head(hidden, None)

    results = run_ranks(size, rank)
    assert all(torch.equal(hidden, weight[ids]) for hidden, _ in results)
    (_, logits), *others = results
    assert logits.shape == (len(ids), VOCAB)
    torch.testing.assert_close(logits, weight[ids] @ weight.T)
    assert all(nothing is None for _, nothing in others)
