"""Hugging Face folders: `config.json` beside safetensors or PyTorch files, whole or in shards; read,
written, fetched."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.folders import copy_files, whole_folder
from eagle_jax.checkpoints.source import CheckpointError, TensorInfo, read_json, unknown_tensor, write_json
from eagle_jax.checkpoints.weight_files import SAFETENSORS_NAMES, SafetensorsFile, TorchFile, WeightFile

# Files that training leaves beside the weights.
_NOT_WEIGHTS = {
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scheduler.bin",
    "scaler.pt",
}


@dataclass(frozen=True)
class _Kind:
    """How one kind of weights is named and opened."""

    whole: str
    index: str
    suffixes: tuple[str, ...]
    open: Callable[[Path], WeightFile]


_KINDS = (
    _Kind("model.safetensors", "model.safetensors.index.json", (".safetensors",), SafetensorsFile),
    _Kind("pytorch_model.bin", "pytorch_model.bin.index.json", (".bin", ".pt", ".pth"), TorchFile),
)


class HuggingFaceSource:
    """A Hugging Face folder as a `TensorSource`.

    Weights are looked for as `model.safetensors`, `model.safetensors.index.json`, any one safetensors file,
    and the same for PyTorch files.

    Raises:
        CheckpointError: no `config.json`, no weights, or files that are missing, damaged or at odds with
            their index.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder; expected one with config.json and weights")
        self.config = read_json(self.path / "config.json")
        self._shard_of: dict[str, WeightFile] = {}
        for shard in _open_shards(self.path):
            for name in shard.infos:
                if name in self._shard_of:
                    raise CheckpointError(
                        f"{self.path}: tensor {name!r} is both in "
                        f"{self._shard_of[name].path.name} and in {shard.path.name}"
                    )
                self._shard_of[name] = shard
        self.infos: Mapping[str, TensorInfo] = {
            name: shard.infos[name] for name, shard in self._shard_of.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor; see `TensorSource.read`."""
        if name not in self._shard_of:
            raise unknown_tensor(self.path, name)
        return self._shard_of[name].read(name)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that `HuggingFaceSource` would look at."""
    return any((folder / kind.index).is_file() or _weight_files(folder, kind) for kind in _KINDS)


def _weight_files(folder: Path, kind: _Kind) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in kind.suffixes and p.name not in _NOT_WEIGHTS)


def _open_shards(folder: Path) -> list[WeightFile]:
    for kind in _KINDS:
        if (folder / kind.whole).is_file():
            return [kind.open(folder / kind.whole)]
        if (folder / kind.index).is_file():
            return _open_indexed(folder, kind)
        files = _weight_files(folder, kind)
        if len(files) == 1:
            return [kind.open(files[0])]
        if files:
            raise CheckpointError(
                f"{folder} has several weight files ({files[0].name}, …) and no {kind.index} to "
                "tell how they belong together"
            )
    raise CheckpointError(
        f"{folder} has no weights: expected model.safetensors, shards with "
        "model.safetensors.index.json, or pytorch_model.bin"
    )


def _open_indexed(folder: Path, kind: _Kind) -> list[WeightFile]:
    index = folder / kind.index
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files; fetch the file again")
    shards: dict[str, WeightFile] = {}
    for file_name in sorted(set(map(str, weight_map.values()))):
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{index} names the file {file_name!r}; expected a file in the same folder")
        if not (folder / file_name).is_file():
            raise CheckpointError(
                f"{folder / file_name} is missing, and {kind.index} names it; fetch the shard again"
            )
        shards[file_name] = kind.open(folder / file_name)
    absent = [name for name, file_name in weight_map.items() if name not in shards[file_name].infos]
    if absent:
        raise CheckpointError(
            f"{index} puts {absent[0]!r} in {weight_map[absent[0]]}, which does not have it"
            + (f" ({len(absent)} such tensors)" if len(absent) > 1 else "")
        )
    return list(shards.values())


def save_safetensors(
    folder: Path,
    tensors: Iterable[tuple[str, Any]],
    config: Mapping[str, Any],
    max_shard_bytes: int = 5_000_000_000,
    *,
    extra_files: Mapping[str, Path] | None = None,
    force: bool = False,
) -> None:
    """Writes a Hugging Face folder: `config.json`, and `model.safetensors` or shards with their index.

    The folder appears when it is whole. One tensor at a time is held in memory.

    Args:
        folder: where to write; must not exist, or be empty.
        tensors: names and arrays (numpy or fully addressable jax arrays), taken one by one.
        config: what becomes `config.json`.
        max_shard_bytes: a shard is closed before a tensor that would make it larger.
        extra_files: files to copy beside the weights (name → where it is), such as a tokenizer's.
        force: replace a checkpoint that is there.

    Raises:
        CheckpointError: the folder is not empty, a name comes twice, or a dtype does not exist in
            safetensors.
    """
    folder = Path(folder)
    with whole_folder(folder, force) as partial:
        headers = _write_shards(partial, tensors, max_shard_bytes)
        weight_map: dict[str, str] = {}
        for number, header in enumerate(headers, 1):
            file_name = "model.safetensors"
            if len(headers) > 1:
                file_name = f"model-{number:05d}-of-{len(headers):05d}.safetensors"
            (partial / f"{number}.tensors").rename(partial / file_name)
            weight_map |= dict.fromkeys(header, file_name)
        if len(headers) > 1:
            total = sum(max(end for _, end in (e["data_offsets"] for e in h.values())) for h in headers)
            write_json(
                partial / "model.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
            )
        copy_files(extra_files or {}, partial)
        write_json(partial / "config.json", config)


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, Any]], max_shard_bytes: int
) -> list[dict[str, Any]]:
    """Writes shards `1.tensors`, `2.tensors` … and returns their headers.

    A header stands before data whose names are not known yet, so the data waits in a file of its own.
    """
    headers: list[dict[str, Any]] = [{}]
    names: set[str] = set()
    data_path = folder / "data"
    data = data_path.open("wb")
    try:
        for name, tensor in tensors:
            array = np.asarray(tensor)
            if name in names:
                raise CheckpointError(f"tensor {name!r} was given twice")
            if array.dtype not in SAFETENSORS_NAMES:
                raise CheckpointError(
                    f"tensor {name!r} has dtype {array.dtype}; safetensors knows "
                    f"{', '.join(map(str, SAFETENSORS_NAMES))}"
                )
            names.add(name)
            if headers[-1] and data.tell() + array.nbytes > max_shard_bytes:
                data.close()
                _join(folder / f"{len(headers)}.tensors", headers[-1], data_path)
                headers.append({})
                data = data_path.open("wb")
            begin = data.tell()
            if array.nbytes:
                data.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            headers[-1][name] = {
                "dtype": SAFETENSORS_NAMES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [begin, begin + array.nbytes],
            }
    finally:
        data.close()
    _join(folder / f"{len(headers)}.tensors", headers[-1], data_path)
    return headers


def _join(path: Path, header: Mapping[str, Any], data_path: Path) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors then start aligned
    with path.open("wb") as file, data_path.open("rb") as data:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        shutil.copyfileobj(data, file, 2**22)
    data_path.unlink()


def download(repository: str) -> Path:
    """Returns the local folder of a model on the Hugging Face hub, fetched if it is not in the cache yet.

    PyTorch files are fetched only when the model has no safetensors.

    Raises:
        CheckpointError: no such model, no access to it, or no network and nothing in the cache.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt"]
    others = ["*/*", "consolidated*"]  # copies of the weights in other formats
    try:
        folder = Path(
            huggingface_hub.snapshot_download(repository, allow_patterns=patterns, ignore_patterns=others)
        )
        if not has_weights(folder):
            folder = Path(
                huggingface_hub.snapshot_download(
                    repository, allow_patterns=[*patterns, "*.bin"], ignore_patterns=others
                )
            )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0][:160]
        raise CheckpointError(
            f"{repository} is neither a local path nor a model that the Hugging Face hub gives "
            f"out here ({reason}); "
            "check the name, the network and `hf auth login`"
        ) from None
    return folder
