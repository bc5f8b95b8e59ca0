"""Empties a checkpoint into a model: one tensor at a time, each exactly once, nothing missing and nothing
left over.

Knows files and names; where a tensor goes is said by the model's layers (`layers.weights`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybridserve.models.config import eos_token_ids, load_hf_config, read_json
from hybridserve.models.hub import resolve_model
from hybridserve.models.registry import build_model
from hybridserve.models.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from hybridserve.layers.context import BuildContext
    from hybridserve.layers.weights import ModelWeights
    from hybridserve.models.base import CausalLM

__all__ = ["eos_token_ids", "load_model", "load_weights", "resolve_model", "weight_files"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")


def load_model(path: Path, context: BuildContext) -> CausalLM:
    """Build the model that a directory in Hugging Face format describes, and load its weights.

    Raises ValueError for whatever is wrong with the directory, naming the file and the field or tensor.
    """
    model = build_model(load_hf_config(path), context)
    load_weights(model, path)
    return model


def load_weights(model: CausalLM, path: Path) -> None:
    """Load and finish all weights of a model that was just built. Peak memory: the model and one tensor."""
    loader = _Loader(model.weights)
    for file in weight_files(path):
        loader.load_file(file)
    loader.load_postponed()
    loader.check_complete(path)
    for finish in model.weights.finishers:
        finish()
    model.weights.tensors.clear()
    model.weights.finishers.clear()


class _Loader:
    def __init__(self, weights: ModelWeights) -> None:
        self._expected = weights.tensors
        self._loaded: dict[str, Path] = {}
        self._postponed: dict[str, SafetensorsFile] = {}

    def load_file(self, path: Path) -> None:
        file = SafetensorsFile(path)
        for name in file.entries:
            self._check(file, name)
            if self._expected[name].last:
                self._postponed[name] = file
            else:
                self._expected[name].load(file.read(name))

    def load_postponed(self) -> None:
        for name, file in self._postponed.items():
            self._expected[name].load(file.read(name))

    def check_complete(self, path: Path) -> None:
        for name, tensor in self._expected.items():
            if tensor.covers == (name,) and name not in self._loaded:
                raise ValueError(f"{path}: the tensor {name!r} {_shape(tensor.shape)} is missing")

    def _check(self, file: SafetensorsFile, name: str) -> None:
        if name not in self._expected:
            raise ValueError(f"{file.path}: the tensor {name!r} belongs nowhere in this model")
        expected, entry = self._expected[name], file.entries[name]
        if entry.shape != expected.shape:
            raise ValueError(
                f"{file.path}: the tensor {name!r} is {_shape(entry.shape)}, but the model's config makes it "
                f"{_shape(expected.shape)}"
            )
        if entry.dtype not in PLAIN_DTYPES:
            raise ValueError(
                f"{file.path}: the tensor {name!r} is {entry.dtype}: quantized weights are not supported yet"
            )
        for covered in expected.covers:
            if covered in self._loaded:
                before = self._loaded[covered]
                raise ValueError(f"{file.path}: the tensor {name!r} loads {covered!r} again, after {before}")
            self._loaded[covered] = file.path


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: one, or those that an index names.

    Raises ValueError if there are none, or if the index is broken, names missing files or leads out of the
    directory.
    """
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        return _indexed_files(path)
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if others:
        raise ValueError(
            f"{path}: no safetensors there, only {others[0]}: such files can run code when they are read; "
            "convert them to safetensors"
        )
    raise ValueError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} there")


def _indexed_files(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: weight_map does not map names of tensors to names of files")
    files = []
    for name in sorted(set(places.values())):
        # By name, not by where links lead: a Hugging Face cache is made of links to elsewhere.
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{index}: {name!r} is not the name of a file in the same directory")
        if not (path / name).is_file():
            raise ValueError(f"{index}: the file {name!r} that it names is missing")
        files.append(path / name)
    for file in files:
        mine = {tensor for tensor, name in places.items() if name == file.name}
        for tensor in sorted(mine ^ SafetensorsFile(file).entries.keys()):
            where = "names, but the file lacks" if tensor in mine else "does not name, but the file holds,"
            raise ValueError(f"{file}: a tensor that the index {where} {tensor!r}")
    return files
