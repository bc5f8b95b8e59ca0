"""From what a user calls a model to a directory: a path, the word `demo`, or a hub id.

Only a hub id may touch the network, and only through huggingface_hub (extra `hub`), into its usual cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DEMO = "demo"
FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
"""What is fetched: weights, configs, tokenizer, chat template. Never code, never pickles."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str) -> Path:
    """The directory that holds a model. Raises ValueError, saying what to do, if there is none."""
    if name == DEMO:
        return Path(__file__).parent / "demo"
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser() raises for a user that isn't there
    if name and path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model: {name} is a file; a directory in Hugging Face format is needed")
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            f"model: {name!r}: no such directory, and not a hub id (owner/name) or {DEMO!r} either"
        )
    return _fetch(name)


def bundled_adapters(name: str) -> dict[str, Path]:
    """Name -> directory of the adapters that come with a model: only the bundled one has any."""
    if name != DEMO:
        return {}
    return {path.name: path for path in sorted((resolve_model(DEMO) / "adapters").glob("*")) if path.is_dir()}


def _fetch(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"model: {hub_id!r}: no such directory; to fetch it from the hub, pip install 'hybridserve[hub]'"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {hub_id!r}: no such directory, and not to be had from the hub: {reason}"
        ) from error
