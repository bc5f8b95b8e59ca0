"""What a model's weights take of the memory, against what they would take if each was there once.

Linux only. Counts this process's private pages, and those of files that it has mapped in proportion; before
that an engine of the demo is made and closed, so that what every engine takes (libraries, kernels, pools of
threads) counts for nobody. The arena's pages are not touched until a step needs them.
"""

from __future__ import annotations

import ctypes
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping


def resident_bytes() -> int:
    """What remains when freed memory has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) * 1024


def resident_weights(path: Path, options: Mapping[str, Any]) -> dict[str, float]:
    """Bytes after loading, and after a first request; `ideal_bytes` as the formats have them."""
    small = {"memory_bytes": "64MiB", "max_num_seqs": 4, "max_model_len": 64}
    with LLM("demo", **small, **options) as demo:
        demo.generate("ROMEO:", SamplingParams(max_tokens=2), progress=False)
    del demo
    before = resident_bytes()
    start = time.perf_counter()
    with LLM(path, **small, **options) as llm:
        seconds = time.perf_counter() - start
        loaded = resident_bytes() - before
        llm.generate([[1, 300]], SamplingParams(max_tokens=2), progress=False)
        used = resident_bytes() - before
        ideal = llm.plan.weight_bytes
    return {
        "ideal_bytes": ideal,
        "resident_bytes": loaded,
        "after_a_request": used,
        "ratio": loaded / ideal,
        "load_seconds": seconds,
    }
