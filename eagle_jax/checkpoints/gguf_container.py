"""The GGUF container: typed metadata, and where each tensor lies in the file.

Read here rather than by `gguf.GGUFReader`, which makes an array of every string: seconds for a vocabulary,
against a fraction of one here. The types and their sizes are that package's.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from eagle_jax.checkpoints.source import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored; `shape` is in the order of numpy, the reverse of the
    file's."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufContainer:
    """What a GGUF file says before its data: metadata as plain Python values and lists, and its tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_container(path: Path) -> GgufContainer:
    """Reads all of a GGUF file but the tensors' data.

    Raises:
        CheckpointError: the file is missing, truncated, or no GGUF file of a known version and type.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; expected a GGUF file")
    try:
        if not is_gguf(path):
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except (struct.error, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is truncated or damaged in its header ({error}); fetch it again"
        ) from None


def _read(path: Path, data: mmap.mmap) -> GgufContainer:
    cursor = _Cursor(data, position=len(MAGIC))
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} is of GGUF version {version} (or big-endian); expected 2 or 3, little-endian"
        )
    tensor_count, entry_count = cursor.number("<Q"), cursor.number("<Q")
    metadata = {cursor.string(): cursor.value() for _ in range(entry_count)}
    listed = [
        (cursor.string(), cursor.numbers("<Q", cursor.number("<I")), cursor.number("<I"), cursor.number("<Q"))
        for _ in range(tensor_count)
    ]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, reversed_shape, kind_id, offset in listed:
        kind = GGMLQuantizationType(kind_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        shape = tuple(reversed(reversed_shape))
        if not shape or shape[-1] % block:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(shape)}, whose rows are not whole blocks of {block}"
            )
        tensors[name] = GgufTensor(shape, kind, start + offset, prod(shape) // block * block_bytes)
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=start)
    if end > len(data):
        raise CheckpointError(
            f"{path} is truncated: it has {len(data)} bytes and should have {end}; fetch it again"
        )
    return GgufContainer(metadata, tensors)


@dataclass
class _Cursor:
    """Reads values one after the other."""

    data: mmap.mmap
    position: int

    def number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def numbers(self, layout: str, count: int) -> list[int]:
        return [self.number(layout) for _ in range(count)]

    def bytes(self, count: int) -> bytes:
        found = self.data[self.position : self.position + count]
        if len(found) < count:
            raise ValueError(f"it ends at byte {len(self.data)}, within a value")
        self.position += count
        return found

    def string(self) -> str:
        return self.bytes(self.number("<Q")).decode("utf-8")

    def value(self) -> Any:
        kind = GGUFValueType(self.number("<I"))
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = GGUFValueType(self.number("<I")), self.number("<Q")
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has arrays of arrays")
        return self._scalars(kind, count)

    def _scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = _SCALARS[kind]
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()
