"""Bamba alone: every split of a prompt, limits of a step, what its config may say, and groups over ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.kernels.registry import Capabilities
from hybridserve.kernels.ssm import BACKENDS, Reference, TorchNative
from hybridserve.layers import mamba2, norm
from hybridserve.models.bamba import BambaConfig
from hybridserve.models.weights import load_model
from tests.harness.models import Backends, Runner, load_runner, oracle, random_ids, save_model
from tests.harness.quantized import everything
from tests.harness.tp import joined_states, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.kernels.ssm.interface import SSMBackend

TOLERANCE = 1e-4
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
RUNNING = [backend for backend in BACKENDS if not backend.why_not(Capabilities("cpu", "float32"))]


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def assert_same(states: list, expected: list) -> None:
    for mine, theirs in zip(states, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert max_abs(a, b) <= TOLERANCE


@pytest.mark.parametrize(
    ("backend", "groups"),
    [(backend, groups) for backend in RUNNING for groups in ([2] if backend is Reference else [1, 2, 8])],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_split_of_a_prompt(
    backend: type[SSMBackend], groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F010, F014, F019: 24 tokens in two chunks, cut anywhere, and in chunks of 1, 2, 3; then decodes.
    transformers computes all of it in one."""
    monkeypatch.setattr("hybridserve.kernels.ssm.torch_native._BLOCK_TOKENS", 4)
    model = save_model("bamba", tmp_path, groups, mamba_n_groups=groups)
    ids = random_ids(groups, 28)
    want, states = oracle(model, ids)
    backends = Backends(ssm=backend())
    loaded = load_model(tmp_path, backends.context())
    splits = range(1, 24) if groups == 2 else range(1, 24, 5)
    for chunks in [[k, 24 - k] for k in splits] + [[1] * 24, [2] * 12, [3] * 8]:
        runner = Runner(loaded, backends, num_sequences=1)
        parts, start = [], 0
        for chunk in [*chunks, 1, 1, 1, 1]:
            parts += runner.step([(0, ids[start : start + chunk])])
            start += chunk
        assert max_abs(torch.cat(parts), want) <= TOLERANCE
        assert_same(runner.states(), states)


def test_limits_of_a_step(tmp_path: Path) -> None:
    """transformers reads its own spelling of infinity, and limits a prompt's steps. It does not limit those
    of single tokens, so that its answer depends on how a sequence is cut: ours are limited alike."""
    model = save_model("bamba", tmp_path, 0, time_step_limit=(0.02, 0.03))
    ids = random_ids(0, 20)
    want, states = oracle(model, ids)
    for chunk in (20, 7, 1):
        runner = load_runner(tmp_path)
        assert max_abs(runner.run(ids, chunk), want) <= TOLERANCE
        assert_same(runner.states(), states)
    save_model("bamba", tmp_path / "free", 0)
    assert json.loads((tmp_path / "free" / "config.json").read_text())["time_step_limit"] == [
        0.0,
        {"__float__": "Infinity"},
    ]
    assert max_abs(load_runner(tmp_path / "free").run(ids), want) > 100 * TOLERANCE


SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
PLAIN = {**SIZES, "num_attention_heads": 4, "mamba_n_heads": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_n_heads": 7}, "mamba_n_heads: 7 heads"),
        (
            {"mamba_d_head": 8},
            r"mamba_n_heads: 8 heads of mamba_d_head \(8\) are not mamba_expand x hidden_size \(128\)",
        ),
        ({"mamba_n_groups": 3}, "mamba_n_groups: 3 groups of 8 heads"),
        ({"attn_layer_indices": [4]}, "attn_layer_indices: there is no layer 4 of 4"),
        ({"attn_layer_indices": [-1]}, "attn_layer_indices: there is no layer -1 of 4"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit: 0.5 to 0.1"),
        ({"time_step_limit": [0.1]}, "time_step_limit"),
        ({"time_step_limit": "none"}, "time_step_limit: 'none'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"num_attention_heads": 6}, "hidden_size: 64 is no multiple"),
        ({"mamba_d_conv": 1}, "mamba_d_conv: 1"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        BambaConfig.parse({**PLAIN, **fields})


@pytest.mark.parametrize("limits", [None, [0.0, float("inf")], [0, {"__float__": "Infinity"}]], ids=str)
def test_spellings_of_no_limit(limits: object) -> None:
    assert BambaConfig.parse({**PLAIN, "time_step_limit": limits}).time_step_limit == (0.0, float("inf"))


def test_published_config_of_before_transformers_5(tmp_path: Path) -> None:
    """rope_theta stands alone, and half of each head is rotated whatever partial_rotary_factor says."""
    model = save_model("bamba", tmp_path, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("rope_parameters") == {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
    config |= {"rope_theta": 10000.0, "attn_rotary_emb": 8, "partial_rotary_factor": 0.75}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = random_ids(0, 20)
    assert max_abs(load_runner(tmp_path).run(ids), oracle(model, ids)[0]) <= TOLERANCE


def run_tp(path: Path, size: int, ids: list[int], **options: Any) -> list:
    def rank(tp):
        runner = load_runner(path, tp=tp, **options)
        return runner.run(ids, chunk=9), runner.states()

    return run_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_f066_f067_groups_over_ranks(format_name: str, groups: int, size: int, tmp_path: Path) -> None:
    """Whole groups on each rank, or one that neighbours share; also where rows are in a byte."""
    save_model("bamba", tmp_path, 0, mamba_n_groups=groups, mamba_proj_bias=True, **EIGHT_HEADS)
    ids = random_ids(0, 24)
    options = {} if format_name == "none" else {"quantization": everything(format_name)}
    single = load_runner(tmp_path, **options)
    want = single.run(ids)
    results = run_tp(tmp_path, size, ids, **options)
    assert max_abs(results[0][0], want) <= TOLERANCE
    config = json.loads((tmp_path / "config.json").read_text())
    assert_same(joined_states([states for _, states in results], config), single.states())


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ({"mamba_n_groups": 8}, 3, "3 doesn't divide 8 heads of a Mamba-2 layer"),
        (
            {"mamba_n_groups": 4, "mamba_n_heads": 32, "num_attention_heads": 16},
            16,
            "",
        ),
        (
            {"mamba_n_groups": 3, "mamba_n_heads": 12, "hidden_size": 48, "num_attention_heads": 4},
            4,
            "4 neither divides 3 groups of B and C of a Mamba-2 layer nor is a multiple of them",
        ),
    ],
    ids=["heads", "shared", "groups"],
)
def test_f066_what_ranks_can_not_divide(
    overrides: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    save_model("bamba", tmp_path, 0, **overrides)
    if not message:
        assert run_tp(tmp_path, size, random_ids(0, 5))[0][0].shape == (5, 512)
        return
    with pytest.raises(ValueError, match=f"parallel.tensor: {message}"):
        run_ranks(size, lambda tp: load_runner(tmp_path, tp=tp))


def out_proj_is_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """F065."""

    class Partial(mamba2.RowParallelLinear):
        def __call__(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
            return self.projection(x, lora)

    patch.setattr(mamba2, "RowParallelLinear", Partial)


def each_rank_norms_its_part(patch: pytest.MonkeyPatch) -> None:
    """F066: the mean of squares of a part of a group."""

    def shared(self: norm.GroupedRMSNorm, x: torch.Tensor) -> torch.Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, (x.shape[1],))

    patch.setattr(norm.GroupedRMSNorm, "_shared", shared)


def groups_are_not_shared(patch: pytest.MonkeyPatch) -> None:
    """F066: each rank takes the first group."""

    class First(mamba2.OutputSlices):
        def __init__(self, name: str, slices: Any, tp: Any) -> None:
            super().__init__(name, slices, tp)
            x, B, _ = self.placements
            size = x.source.stop * tp.size // (tp.rank + 1)
            num = B.source.stop - B.source.start
            self.placements[1] = B._replace(source=slice(size, size + num))

    patch.setattr(mamba2, "OutputSlices", First)


@pytest.mark.parametrize(
    ("mutate", "groups", "size"),
    [(out_proj_is_not_reduced, 2, 2), (each_rank_norms_its_part, 1, 2), (groups_are_not_shared, 2, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_faults_of_ranks_are_seen(
    mutate: Any, groups: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("bamba", tmp_path, 0, mamba_n_groups=groups)
    ids = random_ids(0, 24)
    want = load_runner(tmp_path).run(ids)
    assert max_abs(run_tp(tmp_path, size, ids)[0][0], want) <= TOLERANCE
    mutate(monkeypatch)
    assert max_abs(run_tp(tmp_path, size, ids)[0][0], want) > 100 * TOLERANCE


def test_number_of_collectives_is_as_designed(tmp_path: Path) -> None:
    """A mixer and a feed-forward block reduce once each, the embedding once, and a norm whose groups are
    divided once more."""
    for groups, size, of_norms in ((2, 2, 0), (1, 2, 3), (2, 4, 3)):
        path = tmp_path / f"{groups}-{size}"
        save_model("bamba", path, 0, mamba_n_groups=groups)

        def rank(tp: Any, path: Path = path) -> tuple[int, int]:
            context = Backends().context(tp=tp)
            Runner(load_model(path, context), Backends()).run(random_ids(0, 5))
            return tp.meeting.num_reduced, len(context.footprint.reductions)

        assert run_ranks(size, rank)[0] == (5 * 2 + 1 + of_norms,) * 2


def a_block_begins_where_the_batch_does(patch: pytest.MonkeyPatch) -> None:
    """F010: decays counted from the border of a block of the flat batch, not from the sequence's first
    token."""
    plain = TorchNative.ssd_scan

    def scan(self: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, state: Any,
             metadata: Any, **more: Any) -> torch.Tensor:  # fmt: skip
        delta = torch.nn.functional.softplus(dt.float() + dt_bias)
        starts = metadata.query_start.tolist()
        for sequence, slot in enumerate(metadata.state_slots.tolist()):
            first = starts[sequence] // 4 * 4
            missed = delta[first : starts[sequence]].sum(0)
            state[slot] *= torch.exp(missed * A)[:, None, None]
        return plain(self, x, dt, A, B, C, D, z, dt_bias, state, metadata, **more)

    patch.setattr(TorchNative, "ssd_scan", scan)


def test_f010_packed_prompts_that_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5, 7 and 9 tokens in one step of blocks of 4, each with a state that isn't zero: logits and final
    states of each are those of transformers, alone; and the fault is seen."""
    monkeypatch.setattr("hybridserve.kernels.ssm.torch_native._BLOCK_TOKENS", 4)
    model = save_model("bamba", tmp_path, 0)
    prompts = [random_ids(seed, 6 + length) for seed, length in enumerate((5, 7, 9))]

    def far_off() -> float:
        runner = load_runner(tmp_path, Backends(ssm=TorchNative()))
        for sequence, ids in enumerate(prompts):
            runner.step([(sequence, ids[:6])])
        packed = runner.step([(sequence, ids[6:]) for sequence, ids in enumerate(prompts)])
        worst = 0.0
        for sequence, ids in enumerate(prompts):
            want, states = oracle(model, ids)
            worst = max(worst, max_abs(packed[sequence], want[6:]))
            for mine, theirs in zip(runner.states(sequence), states, strict=True):
                worst = max(worst, *(max_abs(a, b) for a, b in zip(mine, theirs, strict=True)))
        return worst

    assert far_off() <= TOLERANCE
    a_block_begins_where_the_batch_does(monkeypatch)
    assert far_off() > 10 * TOLERANCE
