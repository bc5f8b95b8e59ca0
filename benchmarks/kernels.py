"""Speed of kernels alone, as JSON: `python benchmarks/kernels.py attention --dtype bfloat16`.

A section is a file `kernels_<operator>.py` beside this one with `measure(dtype)`, which checks each backend
against the reference, then yields records.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
from pathlib import Path

import torch


def main() -> None:
    files = Path(__file__).parent.glob("kernels_*.py")
    sections = sorted(path.stem.removeprefix("kernels_") for path in files)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="operator", help=f"of {', '.join(sections)}; default: all"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(sections):
        parser.error(f"no such operator: {', '.join(sorted(unknown))} (there are {', '.join(sections)})")
    torch.set_num_threads(arguments.threads)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "benchmark": "kernels",
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "runs": {
            section: list(importlib.import_module(f"kernels_{section}").measure(arguments.dtype))
            for section in arguments.sections or sections
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
