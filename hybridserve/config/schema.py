"""Every key that a user may set, with its type, range, default and meaning.

Frozen user intent (D11): nothing here is derived from a model or a machine. Knows no file, no command line
and no tensor.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def parse_pairs(value: object) -> object:
    """ "a=dir,b=dir" -> {"a": "dir", "b": "dir"}, as on a command line; in Python directories are paths."""
    if isinstance(value, dict):
        return {name: _path(path) for name, path in value.items()}
    if not isinstance(value, str):
        return value
    if value.strip() == "{}":  # as in YAML: none, not even those that come with the model
        return {}
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not (name.strip() and path.strip()) for name, _, path in pairs):
        raise ValueError("must map names to directories: name=directory, separated by commas")
    return {name.strip(): path.strip() for name, _, path in pairs}


def parse_list(value: object) -> object:
    """ "a,b" -> ("a", "b"), as on a command line; a list -> a tuple."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return tuple(map(_path, value)) if isinstance(value, list | tuple) else value


def _path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _adapter_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            "a name is 1 to 64 of the characters A-Z a-z 0-9 . _ -, and the first is a letter or a digit"
        )
    return name


def _one_interface(interface: str) -> str:
    if interface in ("0.0.0.0", "::", "*"):
        raise ValueError("must be one address or interface, for ranks trust whoever reaches them there")
    return interface


def _key(secret: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", secret.get_secret_value()):
        raise ValueError("a key is printable ASCII without spaces, and not empty")
    return secret


def _origin(origin: str) -> str:
    if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
        raise ValueError("an origin is http://host[:port] or https://host[:port], or * for any")
    return origin.lower()


def _host_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", name):
        raise ValueError("a host is a name or an address without a port; IPv6 in brackets")
    return name.lower()


Text = Annotated[str, Field(min_length=1)]
Key = Annotated[SecretStr, AfterValidator(_key)]
Keys = Annotated[tuple[Key, ...], BeforeValidator(parse_list)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(parse_list)]
HostNames = Annotated[tuple[Annotated[str, AfterValidator(_host_name)], ...], BeforeValidator(parse_list)]
AdapterName = Annotated[str, AfterValidator(_adapter_name)]
Adapters = Annotated[dict[AdapterName, Text], BeforeValidator(parse_pairs)]
Directories = Annotated[tuple[Text, ...], BeforeValidator(parse_list)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
SizeOrNone = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""0: nothing of it."""
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
BlockSize = Annotated[int, Field(ge=1, le=256), AfterValidator(_power_of_two)]
Dtype = Literal["float32", "bfloat16", "float16"]
AutoDtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "native", "triton", "torch_native", "reference"]
AttentionName = Literal["auto", "native", "triton", "flash_attn", "flashinfer", "torch_native", "reference"]
SSMName = Literal["auto", "native", "triton", "mamba_ssm", "causal_conv1d", "torch_native", "reference"]
GemmName = Literal["auto", "exact", "onednn", "native", "native_exact", "triton", "torch_native", "reference"]
MoEName = Literal["auto", "exact", "native", "native_exact", "triton", "torch_native", "reference"]


HardwareName = Literal["auto", "h100-80gb", "h200-141gb", "a100-40gb", "a100-80gb", "l40s", "cpu"]


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
    prefix_caching: bool = Field(
        default=True, description="compute what prompts have in common once, as long as there is memory"
    )
    checkpoint_interval: Literal["auto"] | Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default="auto",
        description="tokens of a long prompt between two copies of its state that are kept: a multiple of "
        "block_size; 0: none in between; auto: as many as have as much K and V as a state takes",
    )
    host_swap_bytes: SizeOrNone | Literal["auto"] = Field(
        default="auto",
        description="host memory of a rank, as 4GiB or bytes, for sequences that gave way and for evicted "
        "prefixes; 0: none; auto: 4 GiB, or less where weights and arena leave less",
    )
    check_integrity: bool = Field(
        default=False, description="check all bookkeeping of blocks and slots after every step (slow)"
    )


class SchedulerConfig(_Section):
    """What may run together, and in which order."""

    max_num_seqs: Count = Field(default=256, description="sequences that run at the same time, at most")
    max_num_batched_tokens: Count = Field(default=8192, description="tokens computed in one step, at most")
    policy: Literal["fcfs", "priority"] = Field(default="fcfs", description="order of waiting requests")
    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what becomes of a sequence that gives way: swap: it is copied to the host and back; "
        "recompute: it is computed again; auto: what takes less time",
    )


class QuantizationConfig(_Section):
    """Weights in one byte or less an element."""

    format: Literal["auto", "none", "int8", "int8-w8a8", "bnb-int8", "bnb-nf4", "fp8"] = Field(
        default="auto", description="of weights: auto is the checkpoint's; another is made while loading"
    )
    targets: Annotated[tuple[Text, ...], BeforeValidator(parse_list), Field(min_length=1)] | None = Field(
        default=None,
        description="what is quantized: experts, mlp (experts and dense MLP), all (if null: projections of "
        "mixers, too), names of modules, or re: and a pattern of names",
    )


class ParallelConfig(_Section):
    """Ranks: processes, a device each, that answer as one engine."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="ranks among which every layer is divided"
    )
    pipeline: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="stages, each with some of the layers; ranks in all: tensor x pipeline"
    )
    expert: bool = Field(
        default=False, description="divide the experts of a layer among ranks, not each expert"
    )
    executor: Literal["auto", "local", "mp", "torchrun", "ray"] = Field(
        default="auto",
        description="what starts the ranks; auto: local for one, torchrun under torchrun, else mp",
    )
    step_timeout: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="seconds after which a rank counts as hanging, in a step or a load",
    )
    interface: Annotated[str, Field(min_length=1), AfterValidator(_one_interface)] = Field(
        default="127.0.0.1",
        description="where ranks meet: an address of this machine, or (several machines) a network "
        "interface's name such as eth0",
    )

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


class LoraConfig(_Section):
    """Low-rank adapters that requests may name. Off, at no cost, unless there are `adapters` or
    `allow_runtime_loading` is set."""

    adapters: Adapters | None = Field(
        default=None,
        description="name: directory of each adapter to begin with; if null, those that come with the model",
    )
    max_loaded: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16, description="adapters on the device at the same time, at most"
    )
    max_rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64, description="of an adapter, at most; nothing is reserved for it"
    )
    device_bytes: Size | None = Field(
        default=None,
        description="what adapters may take of the device's memory; null: no limit but max_loaded",
    )
    host_bytes: Size = Field(
        default=2 * 2**30, description="what adapters may take of the host's memory, to be loaded from there"
    )
    allow_runtime_loading: bool = Field(
        default=False, description="let adapters be loaded and unloaded while serving"
    )
    roots: Directories = Field(
        default=(), description="directories under which adapters may be loaded from while serving"
    )
    max_running_per_adapter: Count | None = Field(
        default=None, description="sequences of one adapter that run at the same time, at most"
    )
    fair_share: bool = Field(
        default=True, description="adapters with waiting requests, and the base model, take turns"
    )


class KernelsConfig(_Section):
    """The backend of each operator; auto takes the fastest that works here."""

    attention: AttentionName = Field(default="auto", description="backend of paged attention")
    ssm: SSMName = Field(default="auto", description="backend of convolution and selective scan")
    gemm: GemmName = Field(
        default="auto",
        description="backend of matrix products; exact: one that never rounds activations, of experts too",
    )
    moe: MoEName = Field(default="auto", description="backend of experts; exact as for gemm")
    pointwise: BackendName = Field(default="auto", description="backend of operators on rows, such as norms")
    lora: BackendName = Field(default="auto", description="backend of adapters")
    graphs: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="record decode steps, to be replayed; auto: where the backends allow it",
    )


class LimitsConfig(_Section):
    """What one HTTP request may ask for."""

    body_bytes: Size = Field(default=16 * 2**20, description="a request's body, at most")
    header_bytes: Annotated[Size, Field(ge=1024)] = Field(
        default=32 * 2**10, description="a request's line and headers, at most"
    )
    n: Annotated[int, Field(ge=1, le=128)] = Field(
        default=128, description="continuations of a prompt, at most"
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] = Field(
        default=20, description="most likely tokens reported a position, at most"
    )
    stop: Annotated[int, Field(ge=1, le=4096)] = Field(default=16, description="stop strings, at most")
    stop_bytes: Size = Field(default=256, description="a stop string's length in UTF-8, at most")
    schema_bytes: Annotated[Size, Field(le=2**20)] = Field(
        default=64 * 2**10, description="a JSON schema, regular expression, choice or grammar, at most"
    )


class ServerConfig(_Section):
    """HTTP. Without keys it serves this machine alone."""

    host: Text = Field(default="127.0.0.1", description="address to listen at")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=8000, description="port to listen at; 0 takes a free one"
    )
    api_keys: Keys = Field(default=(), description="keys of users; without any, none is asked for")
    admin_keys: Keys = Field(default=(), description="keys of those who may also load and unload adapters")
    insecure: bool = Field(
        default=False, description="listen beyond this machine though there are no api_keys"
    )
    cors_origins: Origins = Field(
        default=(), description="origins whose pages may call the server: https://host[:port], or *"
    )
    allowed_hosts: HostNames = Field(
        default=(),
        description="names that the Host header may have; if none: this machine's own on a loopback address, "
        "else any",
    )
    max_queue: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=1024,
        description="sequences accepted beyond scheduler.max_num_seqs, at most; more are told to come later",
    )
    request_timeout: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        default=None, description="seconds after which a request is given up; null: never"
    )
    drain_seconds: Annotated[float, Field(ge=0, le=10**6)] = Field(
        default=30.0, description="time that running requests have to finish after SIGTERM"
    )
    heartbeat_seconds: Annotated[float, Field(gt=0, le=10**6)] = Field(
        default=10.0, description="silence of the engine after which it counts as hanging"
    )
    unknown_fields: Literal["refuse", "warn"] = Field(
        default="refuse",
        description="of a request; warn: it is answered without them, and the log and a header name them",
    )
    tracing: bool = Field(
        default=False,
        description="send a span of each request to OTEL_EXPORTER_OTLP_ENDPOINT (needs the extra otel)",
    )
    limits: LimitsConfig = Field(default=LimitsConfig(), description="what one request may ask for")


class EngineConfig(_Section):
    """All settings of an engine."""

    model: str = Field(min_length=1, description="a directory in Hugging Face format, a hub id, or demo")
    tokenizer: str | None = Field(
        default=None, min_length=1, description="a directory with tokenizer.json; the model's if null"
    )
    served_name: str | None = Field(
        default=None, min_length=1, description="what clients call the model; if null, the end of its path"
    )
    dtype: AutoDtype = Field(
        default="auto", description="of weights and activations; auto is the checkpoint's"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the model runs; auto is a GPU if there is one, else the CPU"
    )
    hardware: HardwareName = Field(
        default="auto", description="what the deployment is planned for; auto is the machine at hand"
    )
    max_model_len: Count | None = Field(
        default=None,
        description="longest sequence, prompt and output together; what the model was made for if null",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="for requests that set no seed of their own")
    cache: CacheConfig = Field(
        default=CacheConfig(), description="the arena of KV blocks and recurrent states"
    )
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="what runs together")
    quantization: QuantizationConfig = Field(
        default=QuantizationConfig(), description="format of the weights, and which have it"
    )
    parallel: ParallelConfig = Field(
        default=ParallelConfig(), description="tensor and pipeline parallelism over several processes"
    )
    lora: LoraConfig = Field(default=LoraConfig(), description="low-rank adapters, chosen by request")
    kernels: KernelsConfig = Field(default=KernelsConfig(), description="backend of each operator")
    server: ServerConfig = Field(default=ServerConfig(), description="HTTP")

    @property
    def model_names(self) -> frozenset[str]:
        """What no adapter may be called."""
        return frozenset({self.model, PurePath(self.model).name, self.served_name or self.model})

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """What no single key can tell. A line of the message begins with its key."""
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if taken := self.model_names.intersection(self.lora.adapters or ()):
            yield f"lora.adapters.{min(taken)}: is a name of the base model"
        if self.parallel.executor == "local" and self.parallel.num_ranks > 1:
            yield f"parallel.executor: local is one process, tensor x pipeline are {self.parallel.num_ranks}"
        if self.lora.allow_runtime_loading and not self.lora.roots:
            yield "lora.allow_runtime_loading: True: nothing could be loaded, lora.roots names no directory"
