"""Reads an adapter that peft saved, whole and checked, into host memory.

Everything in the file is applied or the adapter is refused; what was read is known by the hash of its
content. Knows the names and sizes of a model's modules; which rank holds which part of them is for
`lora.layers` to know.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridserve.lora.loader import no_pause
from hybridserve.lora.peft_config import CONFIG_FILE, PeftConfig, Scaling
from hybridserve.lora.peft_format import sort_out
from hybridserve.lora.report import LoadReport
from hybridserve.lora.tensor_file import DTYPES, TensorFile, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from hashlib import _Hash as Hash
    from pathlib import Path

    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.peft_format import AdapterTensors, Contents, Role

WEIGHTS_FILE = "adapter_model.safetensors"
COPY_ROWS = 1024
UNUSED_COPY = "a copy of the base model's weight"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
UNREAD_PICKLE = f"never read: such files can run code. What counts is {WEIGHTS_FILE}"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleDelta:
    """What an adapter adds to one module's weight: scale * B A, in the file's dtype, on the host."""

    A: torch.Tensor  # [r, in]; of an embedding [r, vocabulary]
    B: torch.Tensor  # [out, r]
    scale: float
    bias: torch.Tensor | None = None  # [out], to be scaled as B is
    magnitude: torch.Tensor | None = None  # [out], DoRA's (arXiv 2402.09353)

    @property
    def rank(self) -> int:
        return self.A.shape[0]


class AdapterError(ValueError):
    """An adapter is refused for tensors that can't be applied, all of which `report.unsupported` lists."""

    def __init__(self, message: str, report: LoadReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One version of an adapter."""

    identity: str
    """Hash of all that the result depends on: equal for equal content, wherever the files lie."""
    path: Path
    deltas: Mapping[str, ModuleDelta]
    """By the name of an `AdaptableModule`. Modules that are left alone are absent."""
    max_rank: int
    invocation_tokens: tuple[int, ...]
    """An aLoRA is on from the last occurrence of these in the prompt; others, with none, always."""
    report: LoadReport
    num_bytes: int
    """Of host memory."""

    @property
    def needs_base(self) -> bool:
        """Whether what it adds depends on the base weights (DoRA), and so whether that is a number at all."""
        return any(delta.magnitude is not None for delta in self.deltas.values())


def read_adapter(
    path: Path,
    modules: Mapping[str, AdaptableModule],
    *,
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    pause: Callable[[], None] = no_pause,
) -> Adapter:
    """Read the adapter in directory `path` for the model that offers `modules` and computes in `dtype`.
    `pause` is called between one module and the next.

    Raises ValueError, naming file, tensor and limit, for whatever is wrong: files that are missing, broken or
    pickles; tensors that are not finite, or not in `dtype`; ranks above `max_rank`; fields of the config that
    can't be served. That is an AdapterError for tensors for which there is no module, of other sizes, or
    incomplete.
    """
    try:
        if not path.is_dir():
            raise ValueError(f"{path}: no such directory")
        return _read(path, modules, max_rank, dtype, pause)
    except OSError as error:
        raise ValueError(f"{error.filename or path}: {error.strerror}") from None


def _read(
    path: Path,
    modules: Mapping[str, AdaptableModule],
    max_rank: int,
    dtype: torch.dtype,
    pause: Callable[[], None],
) -> Adapter:
    config = PeftConfig.load(path)
    tokens = tuple(config.alora_invocation_tokens or ())
    _check_tokens(path / CONFIG_FILE, tokens, modules.values())
    with _open_weights(path, pause) as file:
        contents = sort_out(file.entries, modules, config.version, pause)
        for key, entry in file.entries.items():
            if entry.dtype not in DTYPES:
                contents.refuse(f"{shown(entry.dtype)} is none of {', '.join(DTYPES)}", key)
        if contents.refused:
            report = LoadReport({}, dict.fromkeys(contents.copies, UNUSED_COPY), contents.unsupported())
            message = f"{file.path}: not an adapter for this model: {contents.message()}"
            raise AdapterError(message, report)
        if not contents.tensors:
            raise ValueError(f"{file.path}: holds no low-rank tensors, so it would change nothing")
        scales = _check(file.path, config, contents, max_rank)
        for key, name in contents.copies.items():
            _check_copy(file, key, modules[name])
        content = hashlib.sha256(f"adapter {tokens}".encode())
        deltas: dict[str, ModuleDelta] = {}
        for name, tensors in sorted(contents.tensors.items()):
            content.update(f"{name} {scales[name].hex()}".encode())
            loaded = _load(file, tensors, content)
            _check_range(file.path, tensors, loaded, scales[name], dtype)
            deltas.update(_split(tensors, loaded, scales[name]))
            pause()
    unused = dict.fromkeys(contents.copies, UNUSED_COPY)
    unused |= {name: UNREAD_PICKLE for name in PICKLES if (path / name).exists()}
    report = LoadReport(_own_bytes(deltas), unused)
    highest = max(tensors.rank for tensors in contents.tensors.values())
    return Adapter(content.hexdigest(), path, deltas, highest, tokens, report, report.num_bytes)


def _open_weights(path: Path, pause: Callable[[], None]) -> TensorFile:
    if not (path / WEIGHTS_FILE).exists():
        for name in PICKLES:
            if (path / name).exists():
                raise ValueError(
                    f"{path}: no {WEIGHTS_FILE} there, only {name}: such files can run code when they are "
                    "read; convert it to safetensors"
                )
        raise ValueError(f"{path}: no {WEIGHTS_FILE} there")
    return TensorFile(path / WEIGHTS_FILE, pause)


def _check(file: Path, config: PeftConfig, contents: Contents, max_rank: int) -> dict[str, float]:
    """Whether config and tensors agree, as they must for peft. Returns the scale of each of them by name."""
    scaling = Scaling(config)
    scales = {}
    for name, tensors in contents.tensors.items():
        if tensors.rank > max_rank:
            raise ValueError(f"{file}: rank {tensors.rank} of {name} is above lora.max_rank ({max_rank})")
        pattern_name = _pattern_name(config, tensors)
        rank = scaling.rank(pattern_name)
        if rank != tensors.rank:
            raise ValueError(
                f"{file}: the tensors of {name} have rank {tensors.rank}, but by r and rank_pattern of the "
                f"config it is {rank}"
            )
        scales[name] = scaling.scale(pattern_name)
        for option, role in (("use_dora", "magnitude"), ("lora_bias", "bias")):
            wanted = getattr(config, option)
            if wanted != (role in tensors.keys):
                missing = "has no" if wanted else "has a"
                what = "lora_magnitude_vector" if role == "magnitude" else "lora_B.bias"
                raise ValueError(f"{file}: {option} is {str(wanted).lower()}, but {name} {missing} {what}")
    return scales


def _pattern_name(config: PeftConfig, tensors: AdapterTensors) -> str:
    """The name that peft matches patterns against: a parameter's own where it was targeted as such."""
    parameter = f"{tensors.name}.weight"
    targets = config.target_parameters or ()
    if any(parameter == target or parameter.endswith(f".{target}") for target in targets):
        return parameter
    return tensors.name


def _check_tokens(config_file: Path, tokens: Sequence[int], modules: Iterable[AdaptableModule]) -> None:
    for module in modules:
        vocab_size = module.in_features
        if module.kind == "embedding" and max(tokens, default=0) >= vocab_size:
            raise ValueError(
                f"{config_file}: alora_invocation_tokens: {max(tokens)} is no token of this model, which has "
                f"{vocab_size}"
            )


def _check_copy(file: TensorFile, key: str, module: AdaptableModule) -> None:
    """Whether a copy of a base weight is one, as far as this rank has it.

    peft would put it in the place of the base model's: one that differs belongs to another base model, or to
    a training of the whole weight.
    """
    embedding = module.kind == "embedding"
    base = module.base().T if embedding else module.base()
    if base.is_meta:  # another rank's
        return
    parts = [module.inputs] if embedding else [part.source for part in module.outputs]
    columns = slice(None) if embedding else module.inputs
    end = 0
    for part in parts:
        for start in range(part.start, part.stop, COPY_ROWS):
            theirs = file.read_rows(key, start, min(start + COPY_ROWS, part.stop))[:, columns]
            mine = base[end : end + len(theirs)].cpu()
            end += len(theirs)
            # one of the two has the precision of the other, or less
            if torch.equal(mine.to(theirs.dtype), theirs) or torch.equal(mine, theirs.to(mine.dtype)):
                continue
            raise ValueError(
                f"{file.path}: {shown(key)} is not this model's weight: the adapter is for another model"
            )


def _load(file: TensorFile, tensors: AdapterTensors, content: Hash) -> dict[Role, torch.Tensor]:
    """Read the tensors of one name, check their values and add them to the hash."""
    loaded: dict[Role, torch.Tensor] = {}
    for role, key in sorted(tensors.keys.items()):
        tensor = file.read(key)
        if not tensor.isfinite().all():
            raise ValueError(f"{file.path}: {shown(key)} holds values that are not finite")
        content.update(f"{role} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(memoryview(tensor.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        loaded[role] = tensor
    return loaded


def _check_range(
    file: Path,
    tensors: AdapterTensors,
    loaded: Mapping[Role, torch.Tensor],
    scale: float,
    dtype: torch.dtype,
) -> None:
    """Whether finite values stay so where they are computed with: A and B in the model's dtype, the others in
    float32."""
    for role, tensor in loaded.items():
        target = dtype if role in ("A", "B") else torch.float32
        if torch.finfo(tensor.dtype).max <= torch.finfo(target).max and role != "bias":
            continue
        values = tensor.to(target)
        if not (values * scale if role == "bias" else values).isfinite().all():
            largest = tensor.abs().max().item()
            raise ValueError(
                f"{file}: {shown(tensors.keys[role])} holds {largest:.4g}, which is too large for {target}"
            )


def _split(
    tensors: AdapterTensors, loaded: Mapping[Role, torch.Tensor], scale: float
) -> Iterator[tuple[str, ModuleDelta]]:
    """What each module gets: of stacked tensors every expert a part, gate and up the same A."""
    stack, A, B = tensors.stack, loaded["A"], loaded["B"]
    if stack is None:
        yield tensors.name, ModuleDelta(A, B, scale, loaded.get("bias"), loaded.get("magnitude"))
        return
    A = A.view(stack.num_experts, tensors.rank, -1)  # the expert is slowest in A, and fastest in B
    B = B.view(-1, tensors.rank, stack.num_experts).permute(2, 0, 1)
    if tensors.transposed:
        A, B = B.transpose(1, 2), A.transpose(1, 2)
    rows = (
        {"down": B}
        if tensors.name.endswith("down_proj")
        else dict(zip(("gate", "up"), B.chunk(2, 1), strict=True))
    )
    for part, part_B in rows.items():
        for expert, name in enumerate(stack.modules(part)):
            yield name, ModuleDelta(A[expert], part_B[expert], scale)


def _own_bytes(deltas: Mapping[str, ModuleDelta]) -> dict[str, int]:
    """Bytes of each module's tensors; those that several modules share count for the first."""
    applied, seen = {}, set()
    for name, delta in deltas.items():
        applied[name] = 0
        for tensor in (delta.A, delta.B, delta.bias, delta.magnitude):
            if tensor is not None and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                applied[name] += tensor.nbytes
    return applied
