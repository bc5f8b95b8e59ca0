"""Steps and their results as flat bytes, to cross between ranks.

Knows the columns of `StepInput` and `StepOutput`; does not know how bytes travel. A message is a header, the
shape of every column in the order of its table, then the columns, each at a multiple of 8 bytes. A new column
is one line in a table.

Decoding makes no copies: arrays are views of the buffer, which therefore must be writable and theirs alone.
"""

from __future__ import annotations

import itertools
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridserve.engine.input_builder import PromptLogprobsInput, StepInput
from hybridserve.engine.model_runner import StepOutput
from hybridserve.engine.sampler import LogprobsOutput
from hybridserve.engine.sampling_input import PenaltyInput, SamplingInput
from hybridserve.engine.token_masks import AllowedInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike

ALIGNMENT = 8
ABSENT = -1
"""In the place of a shape: the column is None."""

Columns = dict[str, np.ndarray]


class WireError(ValueError):
    """Bytes that are no message of this version, or arrays that don't fit their table."""


class Column:
    """An array that a message may hold.

    name: a path of attributes. shape: one axis or more, each by its length or a name; equal names are equal
    lengths, "S+1" is one more than "S". A column of an optional part is absent with that part.
    """

    def __init__(
        self, name: str, dtype: DTypeLike, shape: tuple[int | str, ...], *, optional: bool = False
    ) -> None:
        self.name = name
        self.path = name.split(".")
        self.part = name.rpartition(".")[0]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.optional = optional
        self.axes: list[tuple[str, int]] = []
        """(name, how much longer than what that stands for); of an axis without a name, (empty, length)."""
        for axis in shape:
            base, _, more = str(axis).partition("+")
            self.axes.append(("", axis) if isinstance(axis, int) else (base, int(more or 0)))

    def check(self, shape: tuple[int, ...], lengths: dict[str, int]) -> None:
        """`lengths` is what the names of axes have meant so far."""
        if len(shape) != len(self.axes):
            raise WireError(f"{self.name}: {len(shape)} axes, not {len(self.axes)}")
        for length, (base, more) in zip(shape, self.axes, strict=True):
            expected = lengths.setdefault(base, length - more) + more if base else more
            if length != expected or expected < more or length < 0:
                raise WireError(f"{self.name}: shape {shape}, not {expected} where there is {length}")


class Format:
    """Encodes arrays as one message, and decodes it again."""

    _HEADER = struct.Struct("<4sHHq")  # magic, version, number of columns, step id

    def __init__(self, magic: bytes, version: int, columns: Sequence[Column]) -> None:
        self._magic = magic
        self._version = version
        self.columns = columns
        self._shapes = struct.Struct(f"<{sum(len(column.axes) for column in columns)}q")

    def encode(self, step_id: int, arrays: Mapping[str, np.ndarray | None]) -> bytearray:
        """WireError for an array of another shape than its table says, or that is missing."""
        lengths: dict[str, int] = {}
        shapes: list[int] = []
        places: list[tuple[int, np.ndarray]] = []
        end = self._HEADER.size + self._shapes.size
        for column in self.columns:
            array = arrays.get(column.name)
            if array is None:
                shapes += [ABSENT] * len(column.axes)
                continue
            if array.dtype != column.dtype:
                raise WireError(f"{column.name}: {array.dtype}, not {column.dtype}")
            column.check(array.shape, lengths)
            shapes += array.shape
            start = _aligned(end)
            places.append((start, array))
            end = start + array.nbytes
        self._check_present(arrays)
        buffer = bytearray(_aligned(end))
        self._HEADER.pack_into(buffer, 0, self._magic, self._version, len(self.columns), step_id)
        self._shapes.pack_into(buffer, self._HEADER.size, *shapes)
        for start, array in places:
            np.ndarray(array.shape, array.dtype, buffer, start)[...] = array
        return buffer

    def decode(self, buffer: memoryview | bytearray) -> tuple[int, Columns]:
        """The step id and the columns that are there. WireError for anything but what `encode` makes."""
        buffer = memoryview(buffer).cast("B")
        if len(buffer) < self._HEADER.size + self._shapes.size:
            raise WireError(f"{len(buffer)} bytes are too few for a header")
        magic, version, num_columns, step_id = self._HEADER.unpack_from(buffer)
        expected = (self._magic, self._version, len(self.columns))
        if (magic, version, num_columns) != expected:
            raise WireError(f"a message of {(magic, version, num_columns)}, expected {expected}")
        shapes = iter(self._shapes.unpack_from(buffer, self._HEADER.size))
        lengths: dict[str, int] = {}
        found: Columns = {}
        end = self._HEADER.size + self._shapes.size
        for column in self.columns:
            shape, dtype = tuple(itertools.islice(shapes, len(column.axes))), column.dtype
            if all(length == ABSENT for length in shape):
                continue
            column.check(shape, lengths)
            start = _aligned(end)
            end = start + math.prod(shape) * dtype.itemsize
            if end > len(buffer):
                raise WireError(f"{column.name}: of {shape}, which the message is too short for")
            found[column.name] = array = np.ndarray(shape, dtype, buffer, start)
            if dtype.kind == "b" and (array.view("u1") > 1).any():
                raise WireError(f"{column.name}: holds what is neither true nor false")
        if _aligned(end) != len(buffer):
            raise WireError(f"{len(buffer)} bytes, of which {_aligned(end)} are used")
        self._check_present(found)
        return step_id, found

    def _check_present(self, found: Mapping[str, object]) -> None:
        """Every column that its part, if that is there, can't do without."""
        parts = {column.part for column in self.columns if found.get(column.name) is not None} | {""}
        parts |= {part.rpartition(".")[0] for part in parts}
        for column in self.columns:
            if not column.optional and column.part in parts and found.get(column.name) is None:
                raise WireError(f"{column.name}: is missing")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


STEP_INPUT = Format(
    b"HSSI",
    3,
    (
        Column("input_ids", "i8", ("T",)),
        Column("positions", "i8", ("T",)),
        Column("slot_mapping", "i8", ("T",)),
        Column("seq_lens", "i8", ("S",)),
        Column("query_start", "i8", ("S+1",)),
        Column("block_table", "i4", ("S", "B")),
        Column("state_slots", "i8", ("S",)),
        Column("has_state", "?", ("S",)),
        Column("adapter_slots", "i8", ("S",)),
        Column("adapter_start", "i8", ("S",)),
        Column("adapter_generations", "i8", ("K", 2)),
        Column("pending", "i8", ("Q", 2)),
        Column("state_copies", "i8", ("C", 2)),
        Column("block_copies", "i8", ("D", 2)),
        Column("state_saves", "i8", ("E", 2)),
        Column("block_swaps_out", "i8", ("F", 2)),
        Column("state_swaps_out", "i8", ("G", 2)),
        Column("block_moves", "i8", ("H", 2)),
        Column("state_moves", "i8", ("I", 2)),
        Column("block_swaps_in", "i8", ("J", 2)),
        Column("state_swaps_in", "i8", ("M", 2)),
        Column("sampling.rows", "i8", ("R",)),
        Column("sampling.temperature", "f4", ("R",)),
        Column("sampling.uniform", "f8", ("R",)),
        Column("sampling.top_k", "i8", ("R",), optional=True),
        Column("sampling.top_p", "f4", ("R",), optional=True),
        Column("sampling.min_p", "f4", ("R",), optional=True),
        Column("sampling.num_logprobs", "i8", ("R",), optional=True),
        Column("sampling.bias.0", "i8", ("L",)),
        Column("sampling.bias.1", "i8", ("L",)),
        Column("sampling.bias.2", "f4", ("L",)),
        Column("sampling.penalties.row", "i8", ("N",)),
        Column("sampling.penalties.token", "i8", ("N",)),
        Column("sampling.penalties.num_generated", "f4", ("N",)),
        Column("sampling.penalties.presence", "f4", ("R",)),
        Column("sampling.penalties.frequency", "f4", ("R",)),
        Column("sampling.penalties.repetition", "f4", ("R",)),
        Column("sampling.allowed.rows", "i8", ("A",)),
        Column("sampling.allowed.masks", "i4", ("A", "W")),
        Column("prompt_logprobs.rows", "i8", ("P",)),
        Column("prompt_logprobs.targets", "i8", ("P",)),
        Column("prompt_logprobs.num_top", "i8", (1,)),
    ),
)

_SCORES = (
    ("rows", "i8", ("P",)),
    ("chosen", "f8", ("P",)),
    ("ranks", "i8", ("P",)),
    ("top_ids", "i8", ("P", "k")),
    ("top_values", "f8", ("P", "k")),
)
STEP_OUTPUT = Format(
    b"HSSO",
    1,
    (
        Column("token_ids", "i8", ("R",)),
        Column("seconds", "f8", (2,)),  # forward, sample
        *(
            Column(f"{part}.{name}", dtype, tuple(f"{part}.{axis}" for axis in axes))
            for part in ("logprobs", "prompt_logprobs")
            for name, dtype, axes in _SCORES
        ),
    ),
)


def encode_step(step: StepInput) -> bytearray:
    return STEP_INPUT.encode(
        step.step_id, {each.name: _look_up(step, each.path) for each in STEP_INPUT.columns}
    )


def decode_step(buffer: memoryview | bytearray) -> StepInput:
    """WireError for bytes that `encode_step` would not make."""
    step_id, columns = STEP_INPUT.decode(buffer)
    parts = _by_part(columns)
    sampling = prompt_logprobs = None
    if "sampling" in parts:
        bias, penalties = parts.get("sampling.bias"), parts.get("sampling.penalties")
        allowed = parts.get("sampling.allowed")
        sampling = SamplingInput(
            **parts["sampling"],
            bias=None if bias is None else (bias["0"], bias["1"], bias["2"]),
            penalties=None if penalties is None else PenaltyInput(**penalties),
            allowed=None if allowed is None else AllowedInput(**allowed),
        )
    if wanted := parts.get("prompt_logprobs"):
        prompt_logprobs = PromptLogprobsInput(wanted["rows"], wanted["targets"], int(wanted["num_top"][0]))
    return StepInput(step_id=step_id, sampling=sampling, prompt_logprobs=prompt_logprobs, **parts[""])


def encode_output(output: StepOutput) -> bytearray:
    arrays: Columns = {
        "token_ids": np.array(output.token_ids, dtype=np.int64),
        "seconds": np.array([output.forward_seconds, output.sample_seconds]),
    }
    for part in ("logprobs", "prompt_logprobs"):
        scores: LogprobsOutput | None = getattr(output, part)
        if scores is not None:
            for name, dtype, axes in _SCORES:
                values = np.array(getattr(scores, name), dtype=dtype)
                if len(axes) == 2:  # of no rows, or rows of nothing, numpy can't tell the shape
                    values = values.reshape(len(scores.rows), len(scores.top_ids[0]) if scores.rows else 0)
                arrays[f"{part}.{name}"] = values
    return STEP_OUTPUT.encode(output.step_id, arrays)


def decode_output(buffer: memoryview | bytearray) -> StepOutput:
    """WireError for bytes that `encode_output` would not make."""
    step_id, columns = STEP_OUTPUT.decode(buffer)
    parts = _by_part(columns)
    forward_seconds, sample_seconds = columns["seconds"].tolist()
    return StepOutput(
        step_id,
        columns["token_ids"].tolist(),
        logprobs=_scores(parts.get("logprobs")),
        prompt_logprobs=_scores(parts.get("prompt_logprobs")),
        forward_seconds=forward_seconds,
        sample_seconds=sample_seconds,
    )


def _scores(columns: Columns | None) -> LogprobsOutput | None:
    if columns is None:
        return None
    return LogprobsOutput(**{name: array.tolist() for name, array in columns.items()})


def _by_part(columns: Columns) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for path, array in columns.items():
        part, _, name = path.rpartition(".")
        parts.setdefault(part, {})[name] = array
    return parts


def _look_up(value: Any, path: Sequence[str]) -> np.ndarray | None:
    """What a path of attributes, or of places in a tuple, leads to; None where one of them is."""
    for name in path:
        if value is None:
            return None
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return np.array([value]) if isinstance(value, int) else value
