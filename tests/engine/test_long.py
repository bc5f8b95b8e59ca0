"""F074: sequences so long that 16- and 32-bit products of positions, or quadratic memory, would show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.core.request import SamplingParams
from tests.harness.engine import TOLERANCE, Guarded, make_prompts
from tests.harness.models import oracle, save_model

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 200_000


@pytest.mark.slow
def test_f074_200_thousand_tokens(tmp_path: Path) -> None:
    """A Jamba of tiny width: the logits after all tokens, computed in chunks, are the oracle's."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    attention = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    }
    mamba = {"mamba_d_state": 4, "mamba_expand": 1, "mamba_dt_rank": 2}
    more = {"max_position_embeddings": 2**18, "num_experts": 1}
    model = save_model("jamba", tmp_path, seed=0, **shape, **attention, **mamba, **more)
    prompt = make_prompts([NUM_TOKENS], vocab_size=64)[0]
    engine = Guarded(
        tmp_path, chunk=16_384, memory="64MiB", max_model_len=NUM_TOKENS + 8, checksum=False, poison=None
    )
    engine.add("r", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    result = engine.run()["r", 0]
    with torch.inference_mode():
        logits, states = oracle(model, [*prompt, *result.token_ids[:-1]])
    assert (torch.stack(result.logits) - logits[NUM_TOKENS - 1 :]).abs().max() <= TOLERANCE
    assert result.token_ids == logits[NUM_TOKENS - 1 :].argmax(-1).tolist()
    for mine, theirs in zip(result.states, [t for pair in states for t in pair], strict=True):
        assert (mine - theirs).abs().max() <= TOLERANCE
