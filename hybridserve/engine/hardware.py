"""What deployments are planned for: a table of devices.

Memory is what the driver reports, speeds are those that vendors publish for dense arithmetic; what of them
decoding reaches is `roofline`'s to say. Knows numbers; touches no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.config.schema import EngineConfig

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


def choose_hardware(config: EngineConfig) -> Hardware:
    """What a configuration is planned for. ValueError where its keys don't agree."""
    name: str = config.hardware
    if name == "auto":
        if config.device == "cuda":
            names = ", ".join(each.name for each in HARDWARE.values() if each.device == "cuda")
            raise ValueError(
                f"device: cuda: no GPU is looked for here; say which is meant: hardware: {names}"
            )
        name = CPU
    hardware = HARDWARE[name]
    if config.device not in ("auto", hardware.device):
        raise ValueError(f"hardware: {name} is not device: {config.device}")
    return hardware
