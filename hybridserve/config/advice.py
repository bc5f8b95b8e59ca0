"""What is worth knowing of a configuration that can be used: what it needs, and this machine hasn't.

Looks at files' names and at the environment; changes nothing. No advice is a mistake: a file may be meant for
another machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hybridserve.config.settings import CLIENT_KEYS
from hybridserve.config.yaml_file import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.config.loader import Configuration


def worth_knowing(configuration: Configuration) -> Iterator[str]:
    """Lines of where, key and what."""
    for key, text in _all(configuration):
        setting = configuration.settings.get(key)
        origin = "default" if setting is None else setting.origin
        yield f"{origin}: {key}: {text}"


def _all(configuration: Configuration) -> Iterator[tuple[str, str]]:
    config = configuration.config
    model = config.model
    is_path = model.startswith(("/", "./", "../", "~"))
    if is_path and not Path(model).expanduser().is_dir():
        yield "model", f"{model} is no directory here"
    for name, path in (config.lora.adapters or {}).items():
        if not Path(path).expanduser().is_dir():
            yield "lora.adapters", f"{name}: {path} is no directory here"
    for root in config.lora.roots:
        if not Path(root).expanduser().is_dir():
            yield "lora.roots", f"{root} is no directory here"
    for key in CLIENT_KEYS:
        setting = configuration.settings.get(key)
        written = () if setting is None else setting.written
        keys = [written] if isinstance(written, str) else written if isinstance(written, list) else []
        if any(not VARIABLE.search(str(each)) for each in keys):
            yield key, "stands in the file itself; ${NAME} of the environment keeps it out"
        for name in () if setting is None else setting.variables:
            if name not in os.environ:
                yield key, f"the environment variable {name} is not set here, and `serve` needs it"
