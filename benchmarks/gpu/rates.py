"""What this device reaches at best: bytes a second of plain copies, operations a second of large products by
the vendor's library. Floors are computed with these, not with what a data sheet promises."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.clock import Clock

COPIED_BYTES = 2**30
PRODUCT = 8192
"""Rows, columns and inner size of the products."""

RATES_FILE = "rates.json"
"""In the directory that parts share."""

Rates = dict[str, float]
"""memory: bytes/s read and written together; read: bytes/s; launch: seconds of a graph of one kernel that
hardly does anything; float32, bfloat16, float16, int8: operations/s, a multiplication and an addition being
two."""


@torch.inference_mode()
def measure(clock: Clock) -> Rates:
    is_gpu = clock.device.type == "cuda"
    num_bytes, size = (COPIED_BYTES, PRODUCT) if is_gpu else (2**20, 64)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=clock.device)
    copy, small = torch.empty_like(source), torch.zeros(1, device=clock.device)
    rates = {
        "memory": 2 * num_bytes / clock.captured(lambda: copy.copy_(source)),
        "read": num_bytes / clock.captured(lambda: source.sum()),
        "launch": clock.captured(lambda: small.add_(1)),
    }
    for name in ("float32", "bfloat16", "float16"):
        a, b = (torch.randn(size, size, device=clock.device).to(getattr(torch, name)) for _ in range(2))
        rates[name] = 2 * size**3 / clock.captured(lambda a=a, b=b: a @ b)
    a, b = (torch.randint(-127, 128, (size, size), device=clock.device).to(torch.int8) for _ in range(2))
    rates["int8"] = 2 * size**3 / clock.captured(lambda: torch._int_mm(a, b.t()))
    return rates


def save(rates: Rates, work: Path) -> None:
    (work / RATES_FILE).write_text(json.dumps(rates))


def load(work: Path) -> Rates | None:
    """What another part measured; None where none has."""
    file = work / RATES_FILE
    return json.loads(file.read_text()) if file.exists() else None


def floor(num_bytes: float, num_ops: float, kind: str, rates: Rates) -> float:
    """Seconds below which no kernel comes that moves so many bytes and does so many operations of a kind."""
    return max(num_bytes / max(rates["memory"], rates["read"]), num_ops / rates[kind])
