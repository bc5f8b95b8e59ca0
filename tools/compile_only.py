"""Compiles what is launched, for a GPU that need not be there, and asks the assembler what it takes.

Knows no kernel. Whoever imports this has seen to it that Triton does not interpret (TRITON_INTERPRET).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""That a program can have, by compute capability."""

REGISTERS = 65536
"""Of a multiprocessor, for all threads of a program."""


@dataclass(frozen=True)
class Compiled:
    """One kernel, for one target, at one set of sizes."""

    name: str
    case: str
    target: int
    tile: str
    num_warps: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program

    def faults(self, budget: int) -> list[str]:
        faults = []
        if self.spilled > budget:
            faults.append(f"{self.spilled} bytes spilled, {budget} allowed")
        if self.shared > SHARED_BYTES[self.target]:
            faults.append(f"{self.shared} bytes of shared memory, {SHARED_BYTES[self.target]} there")
        if self.registers * self.num_warps * 32 > REGISTERS:
            faults.append(f"{self.registers} registers for {self.num_warps} warps")
        return faults


class NoDevice:
    """What Triton asks a driver before it compiles."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)


class Recorder:
    """Compiles what is launched, and keeps each kernel once."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.case = ""
        self.found: dict[str, Compiled] = {}

    def __enter__(self) -> Recorder:
        triton.runtime.driver.set_active(NoDevice(self.target))
        self._run = run = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if not all(0 < size < 65536 for size in grid[1:]) or not grid[0] > 0:
                raise ValueError(f"{kernel.__name__}: a grid of {grid}")
            compiled = run(kernel, *args, grid=grid, warmup=True, **options)
            self._keep(kernel.__name__, compiled, options)
            return compiled

        JITFunction.run = compile_only
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run

    def _keep(self, name: str, kernel: Any, options: dict[str, Any]) -> None:
        if kernel.hash in self.found:
            return
        blocks = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_T", "BLOCK_C", "BLOCK_D", "BLOCK", "SPLITS")
        tile = " ".join(f"{block[6:] or 'n'}={options[block]}" for block in blocks if block in options)
        registers, spilled = _resources(kernel.asm["cubin"])
        self.found[kernel.hash] = Compiled(
            *(name, self.case, self.target, tile, kernel.metadata.num_warps),
            *(registers, spilled, kernel.metadata.shared),
        )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack: that is where registers spill to, as kernels have nothing else there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"\b{what}:(\d+)", output) for what in ("REG", "STACK"))
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump says {output!r}")
    return int(registers[1]), int(stack[1])
