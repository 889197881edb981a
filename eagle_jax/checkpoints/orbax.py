"""The library's own checkpoints: parameters in Orbax's format, restored straight to the shardings of a mesh.

A folder holds `eagle_jax.json` (the manifest), `params/` (Orbax) and, where they were given, a tokenizer's
files. The manifest is written last and lists every file of `params/` with its size, so that half a copy is
told from a whole one.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from eagle_jax.checkpoints.folders import MANIFEST, begin, check_writable, copy_files, finish, partial_folder
from eagle_jax.checkpoints.loading import describe, describe_problems
from eagle_jax.checkpoints.source import (
    CheckpointError,
    TensorInfo,
    convertible,
    read_json,
    unknown_tensor,
    write_json,
)

FORMAT_VERSION = 1
Kind = Literal["target", "head"]

_PARAMS = "params"
_CHUNK_BYTES = 64 * 2**20
_READ_AHEAD_BYTES = 256 * 2**20


def save(
    folder: Path,
    params: Mapping[str, jax.Array],
    config: Mapping[str, Any],
    kind: Kind,
    extra_files: Mapping[str, Path] | None = None,
    *,
    force: bool = False,
) -> None:
    """Writes a checkpoint. On several hosts, all call this with the same folder on a disk that they share.

    Args:
        folder: where to write; must not exist, or be empty.
        params: arrays by dotted path, on any sharding.
        config: the config that describes the parameters, in Hugging Face's keys.
        kind: whether it is a target or a draft head.
        extra_files: files to copy beside the parameters (name → where it is), such as a tokenizer's.
        force: replace a checkpoint that is there.

    Raises:
        CheckpointError: the folder is not empty or an extra file cannot be copied. What was there is left
            as it was.
    """
    if kind not in ("target", "head"):
        raise CheckpointError(f"kind of checkpoint is {kind!r}; expected 'target' or 'head'")
    folder = Path(folder).absolute()
    check_writable(folder, force)
    first = jax.process_index() == 0
    if first:
        copy_files(extra_files or {}, begin(folder))
    _wait_for_all_hosts(f"begin {folder}")
    partial = partial_folder(folder)
    with _orbax() as (ocp, context):
        # Weights do not shrink; compressing them costs minutes.
        context.array.saving.use_compression = False
        # Readers hold whole chunks, and one on another mesh may need a part of an array only.
        context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
        with context:
            ocp.save(partial / _PARAMS, dict(params))
    if first:
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "library_version": _library_version(),
            "config": dict(config),
            "params": {
                path: {"shape": list(array.shape), "dtype": np.dtype(array.dtype).name}
                for path, array in params.items()
            },
            "files": {
                str(file.relative_to(partial)): file.stat().st_size
                for file in sorted((partial / _PARAMS).rglob("*"))
                if file.is_file()
            },
        }
        write_json(partial / MANIFEST, manifest)
        finish(folder)
    _wait_for_all_hosts(f"finish {folder}")


def restore(folder: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns all parameters of a checkpoint, on the shardings and in the dtypes of `abstract`, bit for bit
    where those agree.

    Args:
        folder: what `save` wrote.
        abstract: shape, dtype and sharding of each parameter; without a sharding it goes to the default
            device.

    Raises:
        CheckpointError: the folder is not whole, or lists all parameters that it lacks, that it has
            besides, or that differ in shape or kind.
    """
    folder = Path(folder).absolute()
    infos = _infos(read_manifest(folder))
    missing = [
        f"missing: {path} {describe(wanted)}" for path, wanted in abstract.items() if path not in infos
    ]
    unexpected = [f"unexpected: {path} {info}" for path, info in infos.items() if path not in abstract]
    misshapen = [
        f"misshapen: {path} is {infos[path]}; expected {describe(wanted)}"
        for path, wanted in abstract.items()
        if path in infos
        and (
            tuple(wanted.shape) != infos[path].shape
            or not convertible(infos[path].dtype, np.dtype(wanted.dtype))
        )
    ]
    if problems := missing + unexpected + misshapen:
        raise CheckpointError(describe_problems(f"{folder} does not hold what is to be filled", problems))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted_arrays = {
        path: jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=wanted.sharding or device)
        for path, wanted in abstract.items()
    }
    restored = _load(folder, wanted_arrays)
    return {path: restored[path] for path in abstract}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, after a look at whether all its files are there.

    Raises:
        CheckpointError: there is no manifest, it is of another version, or files are missing or of another
            size.
    """
    folder = Path(folder)
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} is of format version {manifest.get('format_version')}; this "
            f"library reads {FORMAT_VERSION}"
        )
    if absent := {"kind", "config", "params", "files"} - manifest.keys():
        raise CheckpointError(
            f"{folder / MANIFEST} has no {', '.join(sorted(absent))}; fetch the checkpoint again"
        )
    for name, size in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(
                f"{file} is missing or does not have its {size} bytes; fetch the checkpoint again"
            )
    return manifest


class OrbaxSource:
    """A checkpoint of this library as a `TensorSource`, whose names are the parameters' dotted paths.

    Raises:
        CheckpointError: see `read_manifest`.
    """

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        manifest = read_manifest(self.path)
        self.config: dict[str, Any] = manifest["config"]
        self.kind: Kind = manifest["kind"]
        self.infos: Mapping[str, TensorInfo] = _infos(manifest)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor; see `TensorSource.read`."""
        if name not in self.infos:
            raise unknown_tensor(self.path, name)
        info = self.infos[name]
        wanted = np.broadcast_to(
            np.zeros((), info.dtype), info.shape
        )  # asks for a numpy array, and takes no memory
        array = np.asarray(_load(self.path, {name: wanted})[name])
        array.flags.writeable = False
        return array


def _infos(manifest: Mapping[str, Any]) -> dict[str, TensorInfo]:
    return {
        path: TensorInfo(tuple(entry["shape"]), jax.numpy.dtype(entry["dtype"]))
        for path, entry in manifest["params"].items()
    }


def _load(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    with _orbax() as (ocp, context):
        context.pytree.loading.partial_load = True
        # The limit must leave room for the largest array, or Orbax refuses to read it.
        largest = max((array.size * np.dtype(array.dtype).itemsize for array in wanted.values()), default=0)
        context.memory.read_concurrent_bytes = largest + _READ_AHEAD_BYTES
        try:
            with context:
                return ocp.load(folder / _PARAMS, dict(wanted))
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).strip().split("\n")[0][:160]
            raise CheckpointError(
                f"{folder} cannot be restored ({reason}); fetch the checkpoint again"
            ) from None


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """Orbax and a context for its options, with its log held to errors: it warns of its own inner
    workings."""
    from orbax.checkpoint import v1 as ocp

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield ocp, ocp.Context()
    finally:
        logger.setLevel(level)


def _wait_for_all_hosts(step: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(step)


def _library_version() -> str:
    try:
        return version("eagle-jax")
    except PackageNotFoundError:
        return "unknown"
