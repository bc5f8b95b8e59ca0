"""What machine this is: the GPU, its clocks and driver, and versions of everything that is called.

Fails where there is no GPU that torch and Triton can use. Measures nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.records import Recorder, device_of, part_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGES = (
    *("torch", "triton", "transformers", "peft", "safetensors", "tokenizers", "numpy", "pydantic", "msgspec"),
    *("ruamel.yaml", "mamba-ssm", "causal-conv1d", "flash-attn", "flashinfer-python"),
)

GPU_FIELDS = (
    *("name", "driver_version", "memory.total", "memory.used", "mig.mode.current", "ecc.mode.current"),
    *("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.draw", "power.limit"),
    *("temperature.gpu", "pstate", "clocks_throttle_reasons.active", "pcie.link.gen.current"),
)
"""Of `nvidia-smi --query-gpu`."""


def main() -> int:
    arguments = part_arguments(__doc__).parse_args()
    recorder = Recorder(arguments.records, arguments.seconds)
    with recorder.piece("host", 0) as found:
        assert found is not None
        found |= {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "packages": {name: installed(name) for name in PACKAGES},
        }
    with recorder.piece("gpu", 0) as found:
        assert found is not None
        found["nvidia-smi"] = smi()
        found["nvcc"] = output_of(["nvcc", "--version"]).splitlines()[-1:]
    with recorder.piece("torch", 0) as found:
        assert found is not None
        found |= of_torch(device_of(arguments.dry))
    with recorder.piece("triton", 0) as found:
        assert found is not None
        found |= of_triton()
    return recorder.exit_status()


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def output_of(command: Sequence[str]) -> str:
    """What a command prints; why it does not where it can't be run."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (found.stdout or found.stderr).strip()


def smi() -> dict[str, str] | str:
    """A driver that does not know a field refuses them all, and names it: then the others are asked for."""
    query, wanted = ["nvidia-smi", "--format=csv,noheader,nounits", "--id=0"], [*GPU_FIELDS]
    while True:
        found = output_of([*query, f"--query-gpu={','.join(wanted)}"])
        values = [value.strip() for value in found.split(",")]
        if len(values) == len(wanted):
            return dict(zip(wanted, values, strict=True))
        unknown = [field for field in wanted if f'"{field}"' in found]
        if not unknown or len(unknown) == len(wanted):
            return found
        wanted = [field for field in wanted if field not in unknown]


def of_torch(device: str) -> dict[str, Any]:
    """RuntimeError if torch can't use the device."""
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    total = (torch.ones(1000, device=device) * 2).sum().item()
    if total != 2000:
        raise RuntimeError(f"{device} says that 1000 x 2 is {total:g}")
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": facts.name,
            "capability": f"{facts.major}.{facts.minor}",
            "multiprocessors": facts.multi_processor_count,
            "memory_bytes": total,
            "free_bytes": free,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def of_triton() -> dict[str, Any]:
    """Triton's version and what it compiles for; ModuleNotFoundError where it is not installed."""
    import triton

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    target = "the interpreter" if interpreted else str(triton.runtime.driver.active.get_current_target())
    return {"version": triton.__version__, "target": target}


if __name__ == "__main__":
    sys.exit(main())
