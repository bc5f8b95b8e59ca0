"""Every family against transformers in float32: logits at every position, final states, greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridserve.kernels.attention.torch_native import TorchNative as NativeAttention
from hybridserve.kernels.gemm.torch_native import TorchNative as NativeGemm
from hybridserve.kernels.moe.torch_native import TorchNative as NativeMoE
from hybridserve.kernels.ssm.torch_native import TorchNative as NativeSSM
from hybridserve.models.hub import resolve_model
from tests.harness.models import Backends, load_runner, oracle, random_ids, save_model

TOLERANCE = 1e-4
LENGTH = 40
VARIANTS = {
    "jamba": ("jamba", {}),
    "jamba-dense-tied-biases": (
        "jamba",
        {
            "num_experts": 1,
            "tie_word_embeddings": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_dt_rank": "auto",
        },
    ),
    "jamba-one-attention": ("jamba", {"num_hidden_layers": 3}),
    "bamba": ("bamba", {}),
    "bamba-one-group": ("bamba", {"mamba_n_groups": 1, "num_key_value_heads": None}),
    "bamba-eight-groups-tied-biases": (
        "bamba",
        {
            "mamba_n_groups": 8,
            "tie_word_embeddings": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_chunk_size": 256,
        },
    ),
    "bamba-attention-first": ("bamba", {"attn_layer_indices": [0], "num_hidden_layers": 3, "head_dim": 32}),
    "bamba-rotary": (
        "bamba",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
    ),
    "mamba": ("mamba", {}),
    "mamba-biases-untied": (
        "mamba",
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "conv_kernel": 2},
    ),
    "llama": ("llama", {}),
    "llama-tied-biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None},
    ),
    "llama-head-dim": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-upper-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
PLAIN = Backends()
NATIVE = Backends(NativeAttention(), NativeSSM(), NativeGemm(), NativeMoE())


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a.float() - b.float()).abs().max().item()


def assert_states_equal(got, want) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert max_abs(a, b) <= TOLERANCE


@pytest.mark.parametrize("backends", [PLAIN, NATIVE], ids=["reference", "torch_native"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, seed: int, backends: Backends, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model = save_model(family, tmp_path, seed, **overrides)
    ids = random_ids(seed, LENGTH)
    want, states = oracle(model, ids)
    runner = load_runner(tmp_path, backends)
    assert max_abs(runner.run(ids), want) <= TOLERANCE
    assert_states_equal(runner.states(), states)
    assert max_abs(runner.run(ids, chunk=7, sequence=1), want) <= TOLERANCE
    assert_states_equal(runner.states(1), states)
    assert runner.model.weights.num_parameters == sum(p.numel() for p in model.parameters())


def test_qwen2_config_of_before_layer_types(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path, 0, **VARIANTS["qwen2-upper-window"][1])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = random_ids(0, LENGTH)
    assert max_abs(load_runner(tmp_path).run(ids), oracle(model, ids)[0]) <= TOLERANCE


@pytest.mark.parametrize("family", ["jamba", "bamba", "mamba", "llama"])
def test_greedy_tokens_equal_over_64_steps(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path, 3)
    ids = random_ids(3, 11)
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(torch.tensor([ids]), attention_mask=mask, **options)[0].tolist()
    runner = load_runner(tmp_path, NATIVE)
    got = list(ids)
    logits = runner.run(ids)[-1]
    for _ in range(64):
        got.append(int(logits.argmax()))
        logits = runner.step([(0, got[-1:])])[0][-1]
    assert got == want
    assert len(set(got[len(ids) :])) > 8, "a text that repeats itself proves little"


@pytest.mark.parametrize("family", ["jamba", "bamba", "mamba", "llama"])
def test_company_changes_nothing(family: str, tmp_path: Path) -> None:
    """Ragged steps of prefills and decodes, in an order that isn't that of the slots."""
    save_model(family, tmp_path, 4)
    runner = load_runner(tmp_path, NATIVE)
    alone = load_runner(tmp_path, NATIVE)
    prompts = [random_ids(10 + i, length) for i, length in enumerate((13, 9, 17))]
    want = [alone.run(ids, sequence=i) for i, ids in enumerate(prompts)]
    got: list[list[torch.Tensor]] = [[], [], []]
    for step in ([(2, 5), (0, 1)], [(1, 3), (2, 1), (0, 2)], [(0, 10), (2, 11), (1, 6)]):
        work = [(i, prompts[i][runner.sequences[i].num_computed :][:count]) for i, count in step]
        for (i, _), logits in zip(work, runner.step(work), strict=True):
            got[i].append(logits)
    for parts, whole in zip(got, want, strict=True):
        assert max_abs(torch.cat(parts), whole) <= TOLERANCE


@pytest.mark.parametrize("family", ["jamba", "bamba", "mamba"])
def test_state_matters(family: str, tmp_path: Path) -> None:
    """The other tests would pass falsely on models whose states fade."""
    save_model(family, tmp_path, 0)
    runner = load_runner(tmp_path)
    ids = random_ids(0, 31)
    for sequence in (0, 1, 2):
        runner.run(ids[:30], sequence=sequence)
    for _, ssm in runner.states(1):
        ssm.zero_()
    for conv, _ in runner.states(2):
        conv.zero_()
    kept, no_ssm, no_conv = (runner.step([(sequence, ids[30:])])[0] for sequence in (0, 1, 2))
    assert max_abs(kept, no_ssm) > 0.1
    assert max_abs(kept, no_conv) > 0.1


@pytest.mark.parametrize("family", ["jamba", "bamba", "mamba", "llama", "qwen2"])
def test_bfloat16_is_close(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path, 0)
    ids = random_ids(5, LENGTH)
    exact = load_runner(tmp_path, NATIVE).run(ids)
    runner = load_runner(tmp_path, NATIVE, dtype=torch.bfloat16)
    logits = runner.run(ids)
    assert logits.dtype == torch.float32
    assert (logits - exact).std() < 0.1 * exact.std()
    for conv, ssm in runner.states():
        assert (conv.dtype, ssm.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("in_fp32", [True, False])
def test_mamba_keeps_its_residual_as_configured(in_fp32: bool, tmp_path: Path) -> None:
    save_model("mamba", tmp_path, 0, residual_in_fp32=in_fp32)
    runner = load_runner(tmp_path, NATIVE, dtype=torch.bfloat16)
    norm, seen = runner.model.norm_f, []
    runner.model.norm_f = lambda x: seen.append(x.dtype) or norm(x)
    runner.run(random_ids(0, 5))
    assert seen == [torch.float32 if in_fp32 else torch.bfloat16]


def test_cache_dtype_may_differ(tmp_path: Path) -> None:
    save_model("llama", tmp_path, 0)
    ids = random_ids(6, LENGTH)
    exact = load_runner(tmp_path, NATIVE).run(ids, chunk=9)
    runner = load_runner(tmp_path, NATIVE, cache_dtype="bfloat16")
    assert all(cache.dtype == torch.bfloat16 for cache in runner.caches)
    assert 0 < max_abs(runner.run(ids, chunk=9), exact) < 0.1


def test_demo_model() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    text = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text()[:1500]
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"][:120]
    want, states = oracle(model, ids)
    runner = load_runner(path, NATIVE)
    assert max_abs(runner.run(ids, chunk=50), want) <= TOLERANCE
    assert_states_equal(runner.states(), states)
    loss = torch.nn.functional.cross_entropy(want[:-1], torch.tensor(ids[1:])).item()
    assert loss < 5, f"{loss} nats a token: this is not the text that it was trained on"


def test_jamba_layer_pattern(tmp_path: Path) -> None:
    save_model("jamba", tmp_path, 0)
    runner = load_runner(tmp_path)
    kinds = [(type(layer.mixer).__name__, type(layer.feed_forward).__name__) for layer in runner.model.layers]
    assert [mixer for mixer, _ in kinds] == ["MambaMixer"] * 2 + ["Attention"] + ["MambaMixer"] * 3 + [
        "Attention"
    ] + ["MambaMixer"]
    assert [feed_forward for _, feed_forward in kinds] == ["GatedMLP", "SparseMoE"] * 4
    mamba = runner.model.layers[0].mixer
    assert mamba.conv_bias is not None
    assert mamba.in_proj.bias is None
    assert mamba.out_proj.projection.bias is None
    assert {p.dtype for p in (mamba.A, mamba.D, mamba.dt_bias)} == {torch.float32}


def test_j1_positions_mean_nothing_to_jamba(tmp_path: Path) -> None:
    save_model("jamba", tmp_path, 0)
    runner = load_runner(tmp_path)
    ids = random_ids(7, LENGTH)
    assert torch.equal(runner.step([(0, ids)])[0], runner.step([(1, ids)], position_offset=1000)[0])


def test_j2_routing_weights_are_not_renormalized(tmp_path: Path) -> None:
    model = save_model("jamba", tmp_path, 0)
    runner = load_runner(tmp_path)
    ids = random_ids(8, LENGTH)
    want, _ = oracle(model, ids)
    sums = []
    route = runner.backends.moe.route

    def traced(logits, top_k, *, renormalize):
        weights, expert_ids = route(logits, top_k, renormalize=renormalize)
        sums.append(weights.sum(-1))
        return weights, expert_ids

    for layer in runner.model.layers[1::2]:
        layer.feed_forward.backend = type("Traced", (), {"route": staticmethod(traced)})()
    assert max_abs(runner.run(ids), want) <= TOLERANCE
    assert len(sums) == 4
    assert max(s.max().item() for s in sums) < 1
    for layer in runner.model.layers[1::2]:
        layer.feed_forward.renormalize = True
    assert max_abs(runner.run(ids, sequence=1), want) > 100 * TOLERANCE


@pytest.mark.parametrize("which", ["dt_layernorm", "b_layernorm", "c_layernorm"])
def test_j3_dt_b_and_c_are_normed(which: str, tmp_path: Path) -> None:
    model = save_model("jamba", tmp_path, 0)
    runner = load_runner(tmp_path)
    ids = random_ids(9, LENGTH)
    with_norms, _ = oracle(model, ids)
    for module in model.modules():
        if hasattr(module, which):
            setattr(module, which, torch.nn.Identity())
    without, _ = oracle(model, ids)
    got = runner.run(ids)
    assert max_abs(with_norms, without) > 100 * TOLERANCE
    assert max_abs(got, with_norms) <= TOLERANCE


def test_meta_build_counts_without_memory(tmp_path: Path) -> None:
    from hybridserve.models.registry import build_model

    save_model("jamba", tmp_path, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    context = PLAIN.context(device="meta")
    model = build_model(config, context)
    loaded = load_runner(tmp_path).model
    assert model.weights.num_bytes == 4 * model.weights.num_parameters == loaded.weights.num_bytes
    assert model.cache_specs == loaded.cache_specs
    experts = 4 * 4 * 3 * 64 * 128  # layers, experts, projections
    embedding = 512 * 64
    active = model.weights.num_parameters - embedding - experts // 2
    assert model.weights.num_active_parameters == active
