"""From what a user calls a model to a directory: a path, the word `demo`, or a hub id.

Only a hub id may touch the network, and only through huggingface_hub (extra `hub`), into its usual cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hybridserve.models.config import load_hf_config
from hybridserve.models.shapes import load_shape, shape_of

DEMO = "demo"
FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
"""What is fetched: weights, configs, tokenizer, chat template. Never code, never pickles."""
CONFIG = "config.json"
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
    return _fetch(name, FILES)


def resolve_config(name: str) -> tuple[dict[str, Any], str | None]:
    """The config.json of a model that is only looked at, and None; or, where it isn't on this machine but has
    a shape that is known here, that and its name. Otherwise as `resolve_model`, without the weights."""
    shape = shape_of(name)
    if shape is not None and not _is_here(name):
        return load_shape(shape), shape
    if HUB_ID.fullmatch(name) and not os.path.isdir(name):  # noqa: PTH112 - as in _is_here
        return load_hf_config(_fetch(name, [CONFIG])), None
    return load_hf_config(resolve_model(name)), None


def _is_here(name: str) -> bool:
    """Whether there is such a directory, or hub's cache has the model's config.json."""
    if os.path.isdir(os.path.expanduser(name)):  # noqa: PTH111, PTH112 - Path's raise for odd names
        return True
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return bool(HUB_ID.fullmatch(name)) and isinstance(try_to_load_from_cache(name, CONFIG), str)


def bundled_adapters(name: str) -> dict[str, Path]:
    """Name -> directory of the adapters that come with a model: only the bundled one has any."""
    if name != DEMO:
        return {}
    return {path.name: path for path in sorted((resolve_model(DEMO) / "adapters").glob("*")) if path.is_dir()}


def _fetch(hub_id: str, files: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"model: {hub_id!r}: no such directory; to fetch it from the hub, pip install 'hybridserve[hub]'"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=files))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {hub_id!r}: no such directory, and not to be had from the hub: {reason}"
        ) from error
