"""The GPUs at hand. Knows what the driver says; does not know what they are for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GPU:
    """The first one of this process; the others are taken to be like it."""

    name: str
    total_bytes: int
    free_bytes: int
    """At the moment: others may use it, too."""
    count: int


def find_gpu() -> GPU | None:
    """None where there is none, or torch can't use it. What this process has given back, such as an engine
    that was closed, counts as free."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()  # torch keeps what was given back, and the driver knows it as in use
    free, total = torch.cuda.mem_get_info(0)
    return GPU(torch.cuda.get_device_name(0), total, free, torch.cuda.device_count())


def why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "torch finds no GPU"


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Of a rank: a GPU for itself, by its number among the ranks of its machine. ValueError if there are too
    few."""
    if kind == "cpu":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"device: {kind}: rank {local_rank} of this machine has no GPU, of which it has {count}"
        )
    return torch.device(kind, local_rank)
