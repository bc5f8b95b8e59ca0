"""What the names of an adapter's tensors say: which tensor belongs to which module of the model, and how.

Both generations of names are understood: a Linear for every expert (transformers 4), and all experts of a
layer in one pair of tensors (transformers 5). Knows names and shapes; reads no tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from hybridserve.lora.loader import no_pause
from hybridserve.lora.tensor_file import PAUSE_EVERY, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.tensor_file import Entry

Role = Literal["A", "B", "bias", "magnitude"]
PREFIX = "base_model.model."
ENDINGS: dict[str, tuple[Role, bool]] = {
    ".lora_A.weight": ("A", False),
    ".lora_B.weight": ("B", False),
    ".lora_B.bias": ("bias", False),
    ".lora_embedding_A": ("A", True),
    ".lora_embedding_B": ("B", True),
    ".lora_magnitude_vector": ("magnitude", False),
    ".lora_magnitude_vector.weight": ("magnitude", False),
}
"""How a key ends -> the tensor's role, and whether only an embedding has it."""
MAX_LISTED = 5
BASE_COPY = ".base_layer.weight"
NO_MODULE = "this model has no such module"
UPRIGHT_SINCE = (0, 19, 1)
"""Before this version peft took the first axis of an expert's weight for its inputs, whatever it was."""
NESTED = ".base_layer"
"""Of two adapted tensors of one module, peft puts one into the other's wrapper, which then has this name."""


class ExpertStack(NamedTuple):
    """All routed experts of a layer, as the model offers them one by one."""

    name: str
    """model.layers.1.feed_forward.experts"""
    num_experts: int
    hidden_size: int
    intermediate_size: int

    def modules(self, part: str) -> list[str]:
        return [f"{self.name}.{expert}.{part}_proj" for expert in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """What adapts one module, or one stacked tensor of all experts of a layer."""

    name: str
    """The module's, or ...experts.gate_up_proj, ...experts.down_proj."""
    keys: Mapping[Role, str]
    rank: int
    stack: ExpertStack | None = None
    transposed: bool = False
    """Whether A and B of the stack say what is added to the transposed weights (peft before 0.19.1)."""


@dataclass(slots=True)
class Contents:
    """All of an adapter file, sorted out."""

    tensors: dict[str, AdapterTensors] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    """Key -> the module of whose base weight it should be a copy."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> keys."""

    def refuse(self, reason: str, *keys: str) -> None:
        self.refused.setdefault(reason, []).extend(keys)

    def unsupported(self) -> dict[str, str]:
        """Key -> the first reason why it is refused."""
        reasons: dict[str, str] = {}
        for reason, keys in self.refused.items():
            for key in keys:
                reasons.setdefault(key, reason)
        return reasons

    def message(self) -> str:
        """What is refused, in one line: every reason, and no more keys than can be read."""
        parts = []
        for reason, keys in list(self.refused.items())[:MAX_LISTED]:
            rest = f" and {len(keys) - MAX_LISTED} more" if len(keys) > MAX_LISTED else ""
            parts.append(f"{', '.join(map(shown, keys[:MAX_LISTED]))}{rest}: {reason}")
        more = len(self.refused) - MAX_LISTED
        return "; ".join(parts) + (f"; and {more} more kinds" if more > 0 else "")


def sort_out(
    entries: Mapping[str, Entry],
    modules: Mapping[str, AdaptableModule],
    peft_version: tuple[int, ...] | None = None,
    pause: Callable[[], None] = no_pause,
) -> Contents:
    """Which module each tensor belongs to. Nothing is left out: what fits nowhere is among `refused`.
    `pause` is called between a few tensors and the next."""
    contents = Contents()
    stacks = {stack.name: stack for stack in find_stacks(modules.values())}
    wrappers: dict[str, dict[Role, str]] = {}
    embeddings: set[str] = set()
    seen: dict[str, str] = {}
    for index, key in enumerate(entries):
        if index % PAUSE_EVERY == 0:
            pause()
        plain = key.removeprefix(PREFIX)
        ending = next((ending for ending in ENDINGS if plain.endswith(ending)), None)
        if plain in seen:
            contents.refuse(f"the same as {shown(seen[plain])}", key)
        elif ending is None:
            _sort_out_copy(contents, key, entries[key], modules)
        else:
            name = plain.removesuffix(ending)
            role, of_embedding = ENDINGS[ending]
            other = wrappers.setdefault(name, {}).setdefault(role, key)
            if other != key:
                contents.refuse(f"the same as {shown(other)}", key)
            if of_embedding:
                embeddings.add(name)
        seen[plain] = key
    unknown = []
    for index, (name, keys) in enumerate(wrappers.items()):
        if index % PAUSE_EVERY == 0:
            pause()
        stack = stacks.get(name.removesuffix(NESTED))
        if stack is None and name not in modules:
            unknown.append(name)
        elif "A" not in keys or "B" not in keys:
            contents.refuse(f"lora_{'B' if 'A' in keys else 'A'} of the module is missing", *keys.values())
        elif stack is not None:
            _sort_out_stacked(contents, stack, keys, entries, peft_version)
        elif (name in embeddings) != (modules[name].kind == "embedding"):
            contents.refuse(f"{name} is {'no' if name in embeddings else 'an'} embedding", *keys.values())
        else:
            _sort_out_module(contents, modules[name], keys, entries)
    parents = _parents(modules) if unknown else ()
    for name in unknown:
        contents.refuse(_why_not(name, parents), *wrappers[name].values())
    return contents


def find_stacks(modules: Iterable[AdaptableModule]) -> list[ExpertStack]:
    """The layers whose experts the model offers."""
    found: dict[str, ExpertStack] = {}
    for module in modules:
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.gate_proj", module.name)
        if match:
            number = max(int(match[2]) + 1, found[match[1]].num_experts if match[1] in found else 0)
            found[match[1]] = ExpertStack(match[1], number, module.in_features, module.out_features)
    return list(found.values())


def _sort_out_copy(
    contents: Contents, key: str, entry: Entry, modules: Mapping[str, AdaptableModule]
) -> None:
    """A key that is no low-rank tensor: peft saves adapted embeddings with a copy of the base model's."""
    name = key.removeprefix(PREFIX)
    if not name.endswith(BASE_COPY):
        contents.refuse(_why_no_role(name), key)
        return
    module = modules.get(name.removesuffix(BASE_COPY))
    if module is None:
        contents.refuse(NO_MODULE, key)
        return
    size = (module.out_features, module.in_features)
    expected = size[::-1] if module.kind == "embedding" else size
    if entry.shape == expected:
        contents.copies[key] = module.name
    else:
        contents.refuse(f"{_shape(entry.shape)}, but the base model's weight is {_shape(expected)}", key)


def _sort_out_module(
    contents: Contents, module: AdaptableModule, keys: Mapping[Role, str], entries: Mapping[str, Entry]
) -> None:
    A, B = entries[keys["A"]].shape, entries[keys["B"]].shape
    # one of the two that is no matrix says nothing of the other
    rank = A[0] if len(A) == 2 else B[1] if len(B) == 2 else None
    out, inputs = module.out_features, module.in_features
    shapes: dict[Role, tuple[int | str, ...]] = {
        "A": ("r" if rank is None else rank, inputs),
        "B": (out, "r" if rank is None else rank),
        "bias": (out,),
        "magnitude": (out,),
    }
    if _check_shapes(contents, keys, entries, shapes) and rank is not None:
        contents.tensors[module.name] = AdapterTensors(module.name, keys, rank)


def _sort_out_stacked(
    contents: Contents,
    stack: ExpertStack,
    keys: Mapping[Role, str],
    entries: Mapping[str, Entry],
    peft_version: tuple[int, ...] | None,
) -> None:
    """Which of the two stacked tensors of a layer's experts is adapted, and which way round.

    peft names the wrappers by how they are nested, not by what they wrap: the sizes tell.
    """
    if len(keys) > 2:
        contents.refuse("stacked experts have neither biases nor magnitudes", *keys.values())
        return
    A, B = entries[keys["A"]].shape, entries[keys["B"]].shape
    if len(A) != 2 or len(B) != 2 or A[0] != B[1] or A[0] % stack.num_experts:
        contents.refuse(
            f"{_shape(A)} and {_shape(B)} are no A and B of {stack.num_experts} experts", *keys.values()
        )
        return
    hidden, inner = stack.hidden_size, stack.intermediate_size
    sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}  # out, in
    found = [(part, False) for part, size in sizes.items() if (B[0], A[1]) == size]
    found += [(part, True) for part, size in sizes.items() if (A[1], B[0]) == size]
    if len(found) > 1 and peft_version is not None:
        found = [match for match in found if match[1] == (peft_version < UPRIGHT_SINCE)]
    if not found:
        reason = (
            f"made for other experts than those of {stack.name}, of hidden size {hidden} and intermediate"
        )
        contents.refuse(f"{reason} size {inner}", *keys.values())
        return
    if len(found) > 1:
        reason = (
            "which way round these are depends on the version of peft, and the config has no peft_version"
        )
        contents.refuse(reason, *keys.values())
        return
    name, transposed = f"{stack.name}.{found[0][0]}", found[0][1]
    if name in contents.tensors:
        contents.refuse(f"{name} is adapted twice", *keys.values())
    else:
        rank = A[0] // stack.num_experts
        contents.tensors[name] = AdapterTensors(name, keys, rank, stack, transposed)


def _check_shapes(
    contents: Contents,
    keys: Mapping[Role, str],
    entries: Mapping[str, Entry],
    shapes: Mapping[Role, tuple[int | str, ...]],
) -> bool:
    wrong = [role for role, key in keys.items() if entries[key].shape != shapes[role]]
    for role in wrong:
        shape = _shape(entries[keys[role]].shape)
        contents.refuse(f"{shape}, but the base model makes it {_shape(shapes[role])}", keys[role])
    return not wrong


def _parents(modules: Iterable[str]) -> set[str]:
    """All that modules are parts of."""
    parents = set()
    for name in modules:
        while (name := name.rpartition(".")[0]) and name not in parents:
            parents.add(name)
    return parents


def _why_not(name: str, parents: Collection[str]) -> str:
    if name.endswith("conv1d"):
        return "convolutions are not adapted: training leaves the adapter out of the forward pass"
    if name in parents:
        return "the module has no weight of its own that can be adapted (such are A_log and D)"
    return NO_MODULE


def _why_no_role(name: str) -> str:
    if name.endswith("trainable_tokens_delta"):
        return "replaced rows of the embedding (trainable_token_indices) are not supported"
    if name.endswith("bias"):
        return "trained biases of the base model (bias: all, lora_only) are not supported"
    if name.endswith(".weight") and ".lora_" not in name:
        return "a whole weight in place of the base model's (modules_to_save) is not supported"
    return "not a tensor of LoRA that is known here"


def _shape(shape: tuple[int | str, ...]) -> str:
    return shown(list(shape)).replace("'", "")
