"""The quality gate: the demo model on text that it was not trained on, on the engine's default path.

The whole table is in docs/quantization.md; `python benchmarks/quality.py` prints it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality import CASES, Quality, measure
from hybridserve.config.loader import load_config
from hybridserve.engine.planner import build_context, make_plan
from hybridserve.models.hub import resolve_model
from hybridserve.models.weights import load_model
from hybridserve.text import Tokenizer
from tests.harness.models import Backends, Runner

TEXT = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text(encoding="utf-8")
LIMITS = {  # change of perplexity, KL in nats a token, top-1 agreement
    "int8": (0.005, 0.002, 0.96),
    "int8-w8a8": (0.02, 0.006, 0.93),
    "fp8": (0.02, 0.01, 0.91),
    "bnb-int8": (0.005, 0.002, 0.96),
    "bnb-nf4": (0.10, 0.10, 0.75),
}


def check(results: dict[str, Quality]) -> None:
    base = results["bf16"]
    for name, (change, kl, agreement) in LIMITS.items():
        if name in results:
            found = results[name]
            assert abs(found.perplexity / base.perplexity - 1) <= change, name
            assert 0 < found.kl / found.num_tokens <= kl, name
            assert agreement <= found.agreed / found.num_tokens < 1, name


def test_int8_and_w8a8_predict_as_bf16_does() -> None:
    results = measure(
        "demo", TEXT[:12_000], {name: CASES[name] for name in ("bf16", "int8", "int8-w8a8")}, 512
    )
    assert results["bf16"].num_tokens > 3000
    check(results)


@pytest.mark.slow
def test_every_format_on_the_whole_text() -> None:
    """Also with full-precision activations, which must be no worse."""
    names = ["bf16", "int8", "int8, exact", "int8-w8a8", "fp8"]
    pytest.importorskip("bitsandbytes")
    results = measure("demo", TEXT, {name: CASES[name] for name in [*names, "bnb-int8", "bnb-nf4"]})
    assert results["bf16"].num_tokens > 9000
    check(results)
    assert results["int8, exact"].kl <= 1.1 * results["int8"].kl


def runner(options: dict[str, str]) -> Runner:
    """The demo model as the engine would run it, stepped by hand."""
    path = resolve_model("demo")
    plan = make_plan(load_config("demo", overrides={"memory_bytes": 1 << 28, **options}), path)
    context = build_context(plan, torch.device("cpu"))
    with torch.inference_mode():
        model = load_model(path, context)
    backends = Backends(context.attention, context.ssm)
    return Runner(model, backends, num_sequences=1, blocks_each=400, block_size=16, poison=0.0)


def drift(format_name: str) -> tuple[float, float, float]:
    """Of the states from bfloat16's, over 5,000 decode steps on the same tokens: the norm of the difference
    by that of the state, in the layer where it is largest; early, late, and at most."""
    ids = Tokenizer.load(resolve_model("demo")).encode(TEXT)[:5000]
    assert len(ids) == 5000
    one, other = runner({}), runner({"quantization.format": format_name})
    shares = []
    for index, token in enumerate(ids):
        for each in (one, other):
            each.step([(0, [token])])
        if index % 50 == 49:
            pairs = zip(one.states(), other.states(), strict=True)
            shares.append(max(float((a[1] - b[1]).norm() / a[1].norm()) for a, b in pairs))
    return sum(shares[4:24]) / 20, sum(shares[-20:]) / 20, max(shares)


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "usual", "most"), [("int8", 0.03, 0.1), ("int8-w8a8", 0.05, 0.15)])
def test_states_do_not_drift(format_name: str, usual: float, most: float) -> None:
    early, late, largest = drift(format_name)
    assert late <= usual
    assert largest <= most
    assert late <= 1.5 * early, "the difference grows"
