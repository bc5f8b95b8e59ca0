"""What the state machines of hypothesis begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Mapping


def drawn_engine(
    data: st.DataObject,
    *,
    num_slabs: Mapping[str, tuple[int, int]],
    max_model_len: int,
    most_tokens: int,
    **options: Any,
) -> ScriptedEngine:
    """An engine whose model and memory are drawn. `num_slabs`: of each kind of model, from and to;
    `most_tokens`: of a step, at most."""
    kind = data.draw(st.sampled_from(["hybrid", "kv", "state"]))
    slots_per_slab = data.draw(st.sampled_from([1, 2])) if kind == "hybrid" else 1
    layout = toy_layout(data.draw(st.integers(*num_slabs[kind])), kind=kind, slots_per_slab=slots_per_slab)
    num_host_slabs = data.draw(st.sampled_from([0, 2, 3, 6, 40]))
    policies = ["auto", "swap", "recompute"] if num_host_slabs else ["auto"]
    longest = layout.max_tokens_one_sequence() or max_model_len
    return ScriptedEngine(
        layout,
        depth=data.draw(st.sampled_from([1, 2])),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(1, most_tokens)),
        max_model_len=min(longest, max_model_len),
        num_host_slabs=num_host_slabs,
        preemption=data.draw(st.sampled_from(policies)),
        swap_bytes_per_token=data.draw(st.sampled_from([0, 300, 10**6])),
        **options,
    )
