"""Every key that a user may set, with its type, range, default and meaning.

Frozen user intent (D11): nothing here is derived from a model or a machine. Knows no file, no command line
and no tensor.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_size(value: object) -> object:
    """ "4GiB" or "1.5 MB" -> bytes; anything that is not text is left to the type check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", value.strip())
    if match is None or (match[2] or "") not in _UNITS:
        raise ValueError("a size is a number of bytes, or a number with a unit such as 512MiB or 4GiB")
    return (
        int(float(match[1]) * _UNITS[match[2] or ""])
        if "." in match[1]
        else int(match[1]) * _UNITS[match[2] or ""]
    )


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
BlockSize = Annotated[int, Field(ge=1, le=256), AfterValidator(_power_of_two)]
Dtype = Literal["float32", "bfloat16", "float16"]
AutoDtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "reference", "torch_native"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class CacheConfig(_Section):
    """The arena that holds KV blocks and recurrent states."""

    memory_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of the memory that is available at start-up which the arena may take",
    )
    memory_bytes: Size | None = Field(
        default=None, description="size of the arena, as 4GiB or bytes; wins over memory_fraction"
    )
    block_size: BlockSize = Field(default=16, description="tokens in a KV block: a power of two up to 256")
    dtype: AutoDtype = Field(default="auto", description="of K and V; auto is the model's")
    state_dtype: Dtype = Field(
        default="float32", description="of the recurrent state; convolution states have the model's"
    )
    check_integrity: bool = Field(
        default=False, description="check all bookkeeping of blocks and slots after every step (slow)"
    )


class SchedulerConfig(_Section):
    """What may run together, and in which order."""

    max_num_seqs: Count = Field(default=256, description="sequences that run at the same time, at most")
    max_num_batched_tokens: Count = Field(default=8192, description="tokens computed in one step, at most")
    policy: Literal["fcfs", "priority"] = Field(default="fcfs", description="order of waiting requests")


class KernelsConfig(_Section):
    """The backend of each operator; auto takes the fastest that works here."""

    attention: BackendName = Field(default="auto", description="backend of paged attention")
    ssm: BackendName = Field(default="auto", description="backend of convolution and selective scan")
    gemm: BackendName = Field(default="auto", description="backend of matrix products")
    moe: BackendName = Field(default="auto", description="backend of experts")


class EngineConfig(_Section):
    """All settings of an engine."""

    model: str = Field(min_length=1, description="a directory in Hugging Face format, a hub id, or demo")
    tokenizer: str | None = Field(
        default=None, min_length=1, description="a directory with tokenizer.json; the model's if null"
    )
    dtype: AutoDtype = Field(
        default="auto", description="of weights and activations; auto is the checkpoint's"
    )
    device: Literal["auto", "cpu"] = Field(default="auto", description="where the model runs")
    max_model_len: Count | None = Field(
        default=None,
        description="longest sequence, prompt and output together; what the model was made for if null",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="for requests that set no seed of their own")
    cache: CacheConfig = Field(
        default=CacheConfig(), description="the arena of KV blocks and recurrent states"
    )
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="what runs together")
    kernels: KernelsConfig = Field(default=KernelsConfig(), description="backend of each operator")
