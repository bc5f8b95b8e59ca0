"""What deployments are planned for: a table of devices.

Memory is what the driver reports, speeds are those that vendors publish for dense arithmetic; what of them
decoding reaches is `roofline`'s to say. Knows numbers; which device is at hand it asks `gpus`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridserve.engine import gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.config.schema import EngineConfig
    from hybridserve.engine.gpus import GPU

GB = 10**9
TERA = 10**12
MIB = 2**20

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, and what joins it to the others of a tensor-parallel group."""

    name: str
    title: str
    device: str  # as torch calls it
    memory_bytes: int | None
    """None: what this machine has at the moment."""
    bandwidth: float
    """Of its memory, bytes/s."""
    flops: float
    """Dense bfloat16, operations/s."""
    link_bandwidth: float
    """Bus bandwidth of a large all-reduce, bytes/s."""
    link_latency: float
    """Of an all-reduce so small that its size doesn't matter, seconds."""
    host_bandwidth: float
    """Of copies to its host's pinned memory or from there, one way, bytes/s."""

    @property
    def is_here(self) -> bool:
        """Whether it is the machine at hand, whose memory can be asked for."""
        return self.memory_bytes is None


HARDWARE: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        # Bus bandwidth: 366 GB/s measured on four H100 (77 % of NVLink 4), the same share of NVLink 3.
        # Latency: one-shot all-reduces of up to 128 KiB take 7 to 10 us on NVLink; NCCL's, which are the
        # L40S's, 24 to 29 us. Host: 16 lanes of PCIe, of whose 64 (generation 5) or 32 GB/s copies of a few
        # kilobytes and more reach about 80 %.
        Hardware(
            "h100-80gb", "H100 80 GB", "cuda", 81_559 * MIB, 3_350 * GB, 989 * TERA, 366 * GB, 10e-6, 50 * GB
        ),
        Hardware(
            "h200-141gb",
            "H200 141 GB",
            "cuda",
            143_771 * MIB,
            4_800 * GB,
            989 * TERA,
            366 * GB,
            10e-6,
            50 * GB,
        ),
        Hardware(
            "a100-80gb", "A100 80 GB", "cuda", 81_920 * MIB, 2_039 * GB, 312 * TERA, 231 * GB, 10e-6, 25 * GB
        ),
        Hardware(
            "a100-40gb", "A100 40 GB", "cuda", 40_960 * MIB, 1_555 * GB, 312 * TERA, 231 * GB, 10e-6, 25 * GB
        ),
        Hardware("l40s", "L40S 48 GB", "cuda", 46_068 * MIB, 864 * GB, 362 * TERA, 20 * GB, 25e-6, 25 * GB),
        # Two Zen 4 cores, measured (bfloat16 products with AVX-512), whatever is at hand: that can
        # be measured itself. Ranks talk through the loopback. A copy within its memory reads each byte,
        # reads the line that it goes to, and writes that: a third of the bandwidth.
        Hardware(CPU, "CPU (as two Zen 4 cores)", CPU, None, 29 * GB, 0.37 * TERA, 2 * GB, 200e-6, 9.7 * GB),
    )
}
"""By the name that the key `hardware` gives them."""


_MODELS = {"H200": "h200-141gb", "H100": "h100-80gb", "A100": "a100-80gb", "L40S": "l40s"}
"""What the names that drivers report have in them."""

SMALL_A100_BYTES = 50 * GB
"""An A100 with less memory is one of 40 GB."""

UNKNOWN_GPU = "a100-80gb"
"""Whose speeds are taken for those of a GPU that is not in the table."""


def known_as(gpu: GPU) -> str | None:
    """Its name in the table; None where it has none."""
    name = next((name for model, name in _MODELS.items() if model in gpu.name), None)
    return "a100-40gb" if name == "a100-80gb" and gpu.total_bytes < SMALL_A100_BYTES else name


def _at_hand(gpu: GPU) -> Hardware:
    known = known_as(gpu)
    entry = HARDWARE[known or UNKNOWN_GPU]
    title = gpu.name if known else f"{gpu.name} (at the speeds of {entry.title})"
    return replace(entry, name=known or "auto", title=title, memory_bytes=None)


def choose_hardware(config: EngineConfig) -> Hardware:
    """What a configuration is planned for. ValueError where its keys don't agree, or name a GPU that is not
    here and not said to be elsewhere."""
    name: str = config.hardware
    if name == "auto":
        gpu = None if config.device == "cpu" else gpus.find_gpu()
        if gpu is not None:
            return _at_hand(gpu)
        if config.device == "cuda":
            names = ", ".join(each.name for each in HARDWARE.values() if each.device == "cuda")
            raise ValueError(
                f"device: cuda: {gpus.why_no_gpu()}; to plan for one that is elsewhere, say which: "
                f"hardware: {names}"
            )
        name = CPU
    hardware = HARDWARE[name]
    if config.device not in ("auto", hardware.device):
        raise ValueError(f"hardware: {name} is not device: {config.device}")
    return hardware


def engine_hardware(config: EngineConfig) -> Hardware:
    """What an engine of a configuration runs on: as `choose_hardware`, but a GPU that is named has to be
    here. ValueError, naming the key, where it isn't."""
    hardware = choose_hardware(config)
    if not hardware.is_here:
        gpu = gpus.find_gpu()
        if gpu is None or known_as(gpu) != hardware.name:
            there = gpus.why_no_gpu() if gpu is None else f"this machine has {gpu.name}"
            raise ValueError(
                f"hardware: {hardware.name}: {there}; `hybridserve plan` shows what it would hold"
            )
        hardware = _at_hand(gpu)
    gpu = gpus.find_gpu() if hardware.device == "cuda" else None
    if gpu is not None and (num_ranks := num_ranks_here(config)) > gpu.count:
        raise ValueError(
            f"parallel: {num_ranks} ranks on this machine need a GPU each, and it has {gpu.count}"
        )
    return hardware


def num_ranks_here(config: EngineConfig) -> int:
    """Ranks on this machine: all that are started here. Of those that others start it isn't known how many
    are."""
    return config.parallel.num_ranks if config.parallel.executor in ("auto", "local", "mp") else 1
