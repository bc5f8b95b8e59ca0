"""Parts of an engine that its configuration and its plan say all about. Knows options; decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.core.scheduler import Scheduler
from hybridserve.engine.input_builder import InputBuilder
from hybridserve.engine.token_masks import TokenMasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.planner import EnginePlan


def make_scheduler(
    config: EngineConfig,
    plan: EnginePlan,
    eos_token_ids: Sequence[int],
    adapter_bytes: Callable[[str], int] | None,
) -> Scheduler:
    """`adapter_bytes`: what an adapter, by its id, takes on the device."""
    return Scheduler(
        plan.layout,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        policy=config.scheduler.policy,
        eos_token_ids=eos_token_ids,
        check_integrity=config.cache.check_integrity,
        adapters=None if plan.lora is None else plan.lora.slots(),
        adapter_bytes=adapter_bytes,
        fair_share=config.lora.fair_share,
        max_running_per_adapter=config.lora.max_running_per_adapter,
        prefix_caching=plan.prefix_caching,
        checkpoint_interval=plan.checkpoint_interval,
        num_host_slabs=plan.host.num_slabs,
        preemption=plan.host.preemption,
        swap_bytes_per_token=plan.host.swap_bytes_per_token,
    )


def make_builder(
    config: EngineConfig, plan: EnginePlan, eos_token_ids: Sequence[int], buckets: Sequence[int]
) -> InputBuilder:
    return InputBuilder(
        block_size=plan.layout.block_size,
        seed=config.seed,
        eos_token_ids=eos_token_ids,
        buckets=buckets,
        masks=TokenMasks(plan.vocab_size, eos_token_ids),
    )
