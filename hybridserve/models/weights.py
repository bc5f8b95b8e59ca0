"""Empties a checkpoint into a model: one tensor at a time, each exactly once, nothing missing and nothing
left over.

Knows files and names; where a tensor goes is said by the model's layers (`layers.weights`), and what becomes
of it by their formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.models.config import eos_token_ids, load_hf_config, read_json
from hybridserve.models.hub import resolve_model
from hybridserve.models.registry import build_model
from hybridserve.models.safetensors_file import SafetensorsFile
from hybridserve.quant import compressed_tensors
from hybridserve.quant.format import WeightError
from hybridserve.quant.policy import Quantization

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.layers.context import BuildContext
    from hybridserve.layers.weights import CheckpointTensor, ModelWeights
    from hybridserve.models.base import CausalLM

__all__ = [
    "Checkpoint",
    "StoredTensor",
    "check_weights",
    "eos_token_ids",
    "has_weights",
    "load_model",
    "load_weights",
    "resolve_model",
    "weight_files",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNSAFE_FILES = ("*.bin", "*.pt", "*.pth")
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")


def load_model(path: Path, context: BuildContext, advance: Callable[[], None] = lambda: None) -> CausalLM:
    """Build the model that a directory in Hugging Face format describes, and load its weights; `advance` is
    called after each tensor.

    Raises ValueError for whatever is wrong with the directory, naming the file and the field or tensor.
    """
    config = load_hf_config(path)
    stored = compressed_tensors.read_config(config)
    if (stored or Quantization()).stored != context.formats.quantization.stored:
        raise ValueError(f"{path}: quantized, but built as if it were not, or the other way round")
    model = build_model(config, context)
    load_weights(model, path, advance)
    return model


def check_weights(model: CausalLM, path: Path) -> Checkpoint:
    """Go through the motions of loading a model that was built on the meta device: every tensor is found, cut
    for this rank and put where it belongs, and no byte of any is read.

    Raises ValueError, naming the tensor, as `load_weights` would; what only the numbers tell, such as an
    infinity, stays unknown.
    """
    checkpoint = Checkpoint(path, model.weights, materialize=False)
    for stored in checkpoint.tensors:
        checkpoint.load(stored)
    return checkpoint


def load_weights(model: CausalLM, path: Path, advance: Callable[[], None] = lambda: None) -> None:
    """Load and finish all weights of a model that was just built. Peak memory: the model and one tensor."""
    checkpoint = Checkpoint(path, model.weights)
    for stored in checkpoint.tensors:
        checkpoint.load(stored)
        advance()
    for finish in model.weights.finishers:
        finish()
        advance()
    model.weights.tensors.clear()
    model.weights.finishers.clear()


class StoredTensor(NamedTuple):
    """One tensor of the model, as it lies in a file: plain, or the codes of a module that is quantized."""

    file: SafetensorsFile
    stored_name: str
    name: str
    """What the model calls it."""
    quantized: bool


class Checkpoint:
    """The files of a model directory, held against what a model expects, before any tensor is read.

    tensors: those to be loaded, in the order of the files; ones that look at others come last.
    """

    def __init__(self, path: Path, weights: ModelWeights, *, materialize: bool = True) -> None:
        """Raises ValueError, with the tensor's name, unless each tensor is there once and nothing is left
        over. With `materialize` off, tensors are loaded as outlines: for a model on the meta device."""
        self._read = SafetensorsFile.read if materialize else SafetensorsFile.outline
        self._materialize = materialize
        self.files = [SafetensorsFile(file) for file in weight_files(path)]
        self._weights = weights
        self._expected = weights.tensors
        self._places = {name: file for file in self.files for name in file.entries}
        self._covered: dict[str, Path] = {}
        found = [self._identify(file, name) for file in self.files for name in file.entries]
        self.tensors = [stored for stored in found if stored is not None]
        for stored in self.tensors:
            self._check(stored)
        for name, tensor in self._expected.items():
            if tensor.covers == (name,) and name not in self._covered:
                raise ValueError(f"{path}: the tensor {name!r} {_shape(tensor.shape)} is missing")
        self.tensors.sort(key=lambda stored: self._expected[stored.name].last)

    def load(self, stored: StoredTensor) -> None:
        """Read it, and give it to the model. ValueError, with its name, if its format can't take it."""
        expected = self._expected[stored.name]
        if expected.last and not self._materialize:  # it looks at the numbers of others
            return
        try:
            if stored.quantized:
                self._load_quantized(stored, expected)
            else:
                expected.load(self._read(stored.file, stored.stored_name))
        except WeightError as error:
            raise ValueError(f"{stored.file.path}: the tensor {stored.stored_name!r} {error}") from None

    def _identify(self, file: SafetensorsFile, name: str) -> StoredTensor | None:
        """None for what is read together with something else, adds nothing to it, or belongs to another
        stage."""
        if self._weights.skips(name):
            return None
        module, _, part = name.rpartition(".")
        if part == compressed_tensors.PACKED:
            return StoredTensor(file, name, f"{module}.weight", True)
        if part in compressed_tensors.BESIDE:
            codes = [f"{module}.{each}" for each in (compressed_tensors.CODES, compressed_tensors.PACKED)]
            if any(each in self._places and self._dtype(each) not in PLAIN_DTYPES for each in codes):
                return None  # if they are no codes either, that is what is wrong
        return StoredTensor(file, name, name, self._is_quantized(name))

    def _dtype(self, name: str) -> str:
        return self._places[name].entries[name].dtype

    def _is_quantized(self, name: str) -> bool:
        is_packed = name.endswith(f".{compressed_tensors.PACKED}")
        return is_packed or self._dtype(name) in compressed_tensors.CODE_DTYPES

    def _load_quantized(self, stored: StoredTensor, expected: CheckpointTensor) -> None:
        if expected.load_scaled is None:
            raise WeightError("is quantized, but it is none of those that can be")
        module = stored.name.removesuffix(".weight")
        scale_name = f"{module}.{compressed_tensors.SCALE}"
        if scale_name not in self._places:
            raise WeightError(f"is quantized, but its scales {scale_name!r} are missing")
        if (dtype := self._dtype(scale_name)) not in PLAIN_DTYPES:
            raise WeightError(f"has scales in {scale_name!r} that are {dtype}: not supported")
        self._check_shape(f"{module}.{compressed_tensors.SHAPE}", expected.shape)
        codes = self._read(stored.file, stored.stored_name)
        if stored.stored_name != stored.name:
            codes = compressed_tensors.unpack(codes)
        scale = self._read(self._places[scale_name], scale_name)
        expected.load_scaled(compressed_tensors.join(codes, scale, scale_name))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """What packed codes say they are."""
        if name not in self._places or not self._materialize:
            return
        found = self._read(self._places[name], name).flatten().tolist()
        if found != list(shape):
            raise WeightError(f"is {found} as {name!r} says, but the model's config makes it {_shape(shape)}")

    def _check(self, stored: StoredTensor) -> None:
        file, stored_name, name, _ = stored
        if name not in self._expected:
            raise ValueError(f"{file.path}: the tensor {stored_name!r} belongs nowhere in this model")
        expected, entry = self._expected[name], file.entries[stored_name]
        packed = stored_name != name
        shape = compressed_tensors.packed_shape(expected.shape) if packed else expected.shape
        if entry.shape != shape:
            raise ValueError(
                f"{file.path}: the tensor {stored_name!r} is {_shape(entry.shape)}, but the model's config "
                f"makes it {_shape(shape)}"
            )
        allowed = ("I32",) if packed else (*PLAIN_DTYPES, *compressed_tensors.CODE_DTYPES)
        if entry.dtype not in allowed:
            raise ValueError(f"{file.path}: the tensor {stored_name!r} is {entry.dtype}: not supported")
        for covered in expected.covers:
            if covered in self._covered:
                before = self._covered[covered]
                raise ValueError(
                    f"{file.path}: the tensor {stored_name!r} loads {covered!r} again, after {before}"
                )
            self._covered[covered] = file.path


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def has_weights(path: Path) -> bool:
    """Whether a model directory has weights, and not its config.json alone; whether they can be read,
    `weight_files` says."""
    return any(next(path.glob(pattern), None) for pattern in ("*.safetensors", INDEX_FILE, *UNSAFE_FILES))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: one, or those that an index names.

    Raises ValueError if there are none, or if the index is broken, names missing files or leads out of the
    directory.
    """
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        return _indexed_files(path)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        raise ValueError(
            f"{path}: {INDEX_FILE} is missing beside {shards[0]}"
            + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
            + ": it names every tensor's file, so that none is left out unnoticed"
        )
    others = sorted(file.name for pattern in UNSAFE_FILES for file in path.glob(pattern))
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
