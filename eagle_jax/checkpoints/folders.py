"""Folders that appear whole or not at all.

A checkpoint is written into a hidden neighbour, `.<name>.partial`, which is renamed when everything is in
it. A save that is killed leaves that neighbour behind, and the next save clears it.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eagle_jax.checkpoints.source import CheckpointError

MANIFEST = "eagle_jax.json"


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is gathered before it takes its name."""
    return folder.parent / f".{folder.name}.partial"


def check_writable(folder: Path, force: bool) -> None:
    """Refuses to write over what is there.

    Raises:
        CheckpointError: `folder` is a file, or holds anything and `force` is off, or holds something that
            is no checkpoint.
    """
    if not folder.name:
        raise CheckpointError(f"{folder} cannot be a checkpoint's folder: give it a name")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose a folder that does not exist yet")
    if not any(folder.iterdir()):
        return
    if not force:
        raise CheckpointError(f"{folder} is not empty; choose another folder, or replace it (--force)")
    if not any((folder / name).is_file() for name in (MANIFEST, "config.json")):
        raise CheckpointError(
            f"{folder} holds no checkpoint and will not be replaced, even by force; choose another folder"
        )


def begin(folder: Path) -> Path:
    """Returns the empty folder in which to gather the checkpoint."""
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(folder: Path) -> None:
    """Gives the gathered checkpoint its name; what had the name before is removed after."""
    replaced = folder.parent / f".{folder.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial_folder(folder).rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path, force: bool) -> Iterator[Path]:
    """Gathers a checkpoint in the folder that it yields; it takes its name when the block ends well.

    Raises:
        CheckpointError: see `check_writable`.
    """
    check_writable(folder, force)
    partial = begin(folder)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finish(folder)


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copies files (name in the folder → where it is now), such as a tokenizer's.

    Raises:
        CheckpointError: a file is missing, or its name is not that of a file directly in the folder.
    """
    for name, origin in files.items():
        if Path(name).name != name or (folder / name).exists():
            raise CheckpointError(
                f"cannot copy {origin} to {name!r}: expected a plain file name not yet in the checkpoint"
            )
        if not Path(origin).is_file():
            raise CheckpointError(f"{origin} is not a file, so it cannot be copied beside the checkpoint")
        shutil.copyfile(origin, folder / name)
