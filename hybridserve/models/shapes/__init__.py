"""Configurations of published models, so that a deployment can be planned before anything is downloaded.

Knows names and the shapes that belong to them; a checkpoint's own config.json, where there is one, is
better knowledge.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridserve.models.config import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILIES: Mapping[str, str] = {
    "jamba-large": r"jamba-large|ai21-jamba-(1\.5-large|large-1\.[567])",
    "jamba-mini": r"jamba-mini|jamba-v0\.1|ai21-jamba-(1\.5-mini|mini-1\.[567])|ai21-jamba2-mini",
    "jamba-3b": r"jamba-3b",
    "bamba-9b": r"bamba-9b(-v[12])?",
}
"""Shape -> last parts of the names of models that have it, in lower case."""


def shape_of(model: str) -> str | None:
    """The shape of a model that goes by this name, such as ai21labs/AI21-Jamba-Large-1.7 or
    /models/jamba-3b; None if none is known."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return next((shape for shape, names in FAMILIES.items() if re.fullmatch(names, last)), None)


def load_shape(shape: str) -> dict[str, Any]:
    """What stands in the config.json of a model of that shape."""
    return read_json(Path(__file__).parent / f"{shape}.json")
