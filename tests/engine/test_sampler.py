"""The sampler against a plain definition of each parameter, one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve.engine import sampler
from hybridserve.engine.sampler import LogprobsOutput, logprobs
from hybridserve.engine.sampling_input import BANNED, PenaltyInput, SamplingInput
from hybridserve.engine.token_masks import AllowedInput
from hybridserve.kernels.pointwise import Native, TorchNative
from hybridserve.kernels.pointwise.torch_native import NUCLEUS_PREFIX
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    Sample = Callable[[torch.Tensor, SamplingInput], tuple[torch.Tensor, LogprobsOutput | None]]

VOCAB = 600


def make_sampling(rows: int, **columns: object) -> SamplingInput:
    sampling = SamplingInput(
        rows=np.arange(rows),
        temperature=np.ones(rows, dtype=np.float32),
        uniform=np.random.default_rng(0).random(rows),
    )
    for name, value in columns.items():
        setattr(sampling, name, value)
    return sampling


@pytest.fixture(params=[TorchNative, Native], ids=lambda backend: backend.name)
def sample(request: pytest.FixtureRequest) -> Sample:
    if reason := request.param.why_not(Capabilities("cpu", "float32")):
        pytest.skip(reason)
    backend = request.param()

    def sample(logits: torch.Tensor, sampling: SamplingInput) -> tuple[torch.Tensor, LogprobsOutput | None]:
        draws = sampler.prepare(sampling, torch.from_numpy, torch.from_numpy)
        token_ids, scores = sampler.sample(logits, draws, backend)
        return token_ids, None if scores is None else scores.output()

    return sample


def make_logits(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def support(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The distribution that one row [V] is drawn from, by the definitions."""
    probs = torch.softmax(logits.double(), dim=-1)
    probs = torch.where(probs < min_p * probs.max(), 0.0, probs)
    if top_k:
        kept = probs.argsort(descending=True)[:top_k]
        probs = torch.zeros_like(probs).index_put((kept,), probs[kept])
    if top_p < 1:
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        kept = order[before < top_p * probs.sum()]
        probs = torch.zeros_like(probs).index_put((kept,), probs[kept])
    return probs / probs.sum()


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 10000},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(limits: dict[str, float], sample: Sample) -> None:
    draws = 4000
    logits = make_logits(1)
    expected = support(logits[0], **limits)
    columns = {
        name: np.full(draws, value, dtype=np.int64 if name == "top_k" else np.float32)
        for name, value in limits.items()
    }
    uniform = (np.arange(draws) + 0.5) / draws
    token_ids, _ = sample(logits.expand(draws, -1).clone(), make_sampling(draws, uniform=uniform, **columns))
    frequency = torch.bincount(token_ids, minlength=VOCAB) / draws
    assert (frequency[expected == 0] == 0).all()
    # evenly spaced draws hit each token as often as its probability says, up to one draw at each end
    torch.testing.assert_close(frequency.double(), expected, atol=2.1 / draws, rtol=0)


def test_flat_distribution_has_a_nucleus_beyond_the_prefix(sample: Sample) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0] = torch.linspace(0, 0.01, VOCAB)
    expected = support(logits[0], top_p=0.9)
    assert (expected > 0).sum() > NUCLEUS_PREFIX
    draws = 2000
    columns = {"top_p": np.full(draws, 0.9, dtype=np.float32), "uniform": (np.arange(draws) + 0.5) / draws}
    token_ids, _ = sample(logits.expand(draws, -1).clone(), make_sampling(draws, **columns))
    assert set(token_ids.tolist()) <= set(expected.nonzero()[:, 0].tolist())
    assert len(set(token_ids.tolist())) > NUCLEUS_PREFIX


def test_rows_do_not_depend_on_company(sample: Sample) -> None:
    rows = 12
    logits = make_logits(rows).bfloat16().float()  # bfloat16 makes ties
    rng = np.random.default_rng(1)
    columns: dict[str, np.ndarray] = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 40], rows),
        "top_p": rng.choice([0.2, 0.9, 1.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.1], rows).astype(np.float32),
        "uniform": rng.random(rows),
    }
    together, _ = sample(logits.clone(), make_sampling(rows, **columns))
    for row in range(rows):
        one = {name: column[row : row + 1] for name, column in columns.items()}
        alone, _ = sample(logits[row : row + 1].clone(), make_sampling(1, **one))
        assert alone[0] == together[row]


def test_greedy_is_argmax_and_ignores_filters(sample: Sample) -> None:
    logits = make_logits(3)
    sampling = make_sampling(3, temperature=np.zeros(3, dtype=np.float32), top_k=np.array([5, 0, 1]))
    assert sample(logits.clone(), sampling)[0].tolist() == logits.argmax(-1).tolist()


def test_penalties_by_definition(sample: Sample) -> None:
    logits = make_logits(2)
    generated, prompt = [3, 3, 9], [9, 11]
    expected = logits[1].clone()
    for token in {*generated, *prompt}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(generated):
        expected[token] -= 0.5 + 0.7 * generated.count(token)
    penalties = PenaltyInput(
        row=np.array([1, 1, 1]),
        token=np.array([3, 9, 11]),
        num_generated=np.array([2, 1, 0], dtype=np.float32),
        presence=np.array([0, 0.5], dtype=np.float32),
        frequency=np.array([0, 0.7], dtype=np.float32),
        repetition=np.array([1, 1.3], dtype=np.float32),
    )
    changed = logits.clone()
    sample(changed, make_sampling(2, penalties=penalties, temperature=np.zeros(2, dtype=np.float32)))
    torch.testing.assert_close(changed[1], expected)
    assert torch.equal(changed[0], logits[0])


def test_bias_and_bans(sample: Sample) -> None:
    logits = make_logits(2)
    best = int(logits[0].argmax())
    bias = (np.array([0, 1]), np.array([best, 5]), np.array([BANNED, 100.0], dtype=np.float32))
    greedy = np.zeros(2, dtype=np.float32)
    token_ids, _ = sample(logits.clone(), make_sampling(2, bias=bias, temperature=greedy))
    assert token_ids[0] == logits[0].topk(2).indices[1]
    assert token_ids[1] == 5


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2]])
def test_only_allowed_tokens_are_drawn_and_other_rows_do_not_change(rows: list[int], sample: Sample) -> None:
    """Whatever bias and filters say; the words end beyond the vocabulary."""
    allowed = [4, 31, 32, VOCAB - 1]
    bits = np.zeros(32 * -(-VOCAB // 32), dtype=np.uint8)
    bits[allowed] = 1
    masks = np.tile(np.packbits(bits, bitorder="little").view(np.int32), (len(rows), 1))
    bias = (np.array([0, 0]), np.array([5, 31]), np.array([100, BANNED], dtype=np.float32))
    filters = {"top_k": np.full(3, 3), "top_p": np.full(3, 0.9, dtype=np.float32), "bias": bias}
    seen = set()
    for seed in range(40):
        logits = make_logits(3, seed)
        uniform = np.full(3, seed / 40)
        restricted = make_sampling(3, uniform=uniform, **filters)
        restricted.allowed = AllowedInput(np.array(rows), masks)
        token_ids, _ = sample(logits.clone(), restricted)
        plain, _ = sample(logits.clone(), make_sampling(3, uniform=uniform, **filters))
        seen |= {int(token_ids[row]) for row in rows}
        assert set(token_ids[rows].tolist()) <= set(allowed)
        assert all(token_ids[row] == plain[row] for row in {0, 1, 2} - set(rows))
        assert token_ids[0] != 31
    assert seen == set(allowed)


def test_a_row_that_is_not_finite_is_reported_and_disturbs_nobody(sample: Sample) -> None:
    logits = make_logits(3)
    logits[1, 7] = torch.nan
    token_ids, _ = sample(logits.clone(), make_sampling(3))
    alone, _ = sample(make_logits(3), make_sampling(3))
    assert token_ids[1] == -1
    assert token_ids[0] == alone[0]
    assert token_ids[2] == alone[2]


def test_everything_banned_still_draws_a_token(sample: Sample) -> None:
    tokens = np.arange(VOCAB)
    bias = (np.zeros(VOCAB, dtype=np.int64), tokens, np.full(VOCAB, BANNED, dtype=np.float32))
    token_ids, _ = sample(make_logits(1), make_sampling(1, bias=bias))
    assert 0 <= token_ids[0] < VOCAB


def test_logprobs_are_of_the_raw_distribution(sample: Sample) -> None:
    logits = make_logits(3)
    sampling = make_sampling(3, num_logprobs=np.array([2, -1, 0]), top_k=np.array([1, 1, 1]))
    sampling.bias = (np.array([0]), np.array([int(logits[0].argmax())]), np.array([-50.0], dtype=np.float32))
    token_ids, scored = sample(logits.clone(), sampling)
    assert scored is not None
    assert scored.rows == [0, 2]
    reference = torch.log_softmax(logits, -1)
    assert scored.chosen == pytest.approx(
        [reference[0, token_ids[0]].item(), reference[2, token_ids[2]].item()]
    )
    assert scored.ranks == [2, 1]
    assert scored.at(0, int(token_ids[0]), 2).token_ids == [
        int(token_ids[0]),
        *reference[0].topk(2).indices.tolist(),
    ]


def test_logprobs_of_no_top_tokens() -> None:
    scored = logprobs(make_logits(2), torch.tensor([4, 5]), 0, [0, 1]).output()
    assert scored.top_ids == [[], []]
    assert scored.at(1, 5, 0).token_ids == [5]
