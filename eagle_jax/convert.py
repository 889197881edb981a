"""Convert checkpoints: `python -m eagle_jax.convert SOURCE DEST --to orbax|hf`.

SOURCE is a target or a draft head in any format that can be read: a Hugging Face folder (safetensors or
PyTorch files, in shards or not), a GGUF file, an Orbax folder of this library, a hub id, or
package:<package>/<file>. DEST is a folder to write. It appears when it is whole; after an error it is as it
was.

Tensors keep their values and dtypes, so that a round trip is exact; --dtype changes the floating ones.
Quantised GGUF tensors become float32. A target's tokenizer goes with it.

Heads are written as vLLM and SGLang read them. An EAGLE-3 head's config then lists the hidden states that it
reads twice, as those two number them differently. Where SOURCE leaves open how it numbers them, --target
decides.

Memory: the model once, in the dtypes that are written, and its largest tensor; from an Orbax folder up to
256 MiB more, which is read ahead.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_jax.console.command import Parser, exit_code
from eagle_jax.errors import ConfigError, EagleError

if TYPE_CHECKING:
    import jax
    import numpy as np

    from eagle_jax.checkpoints.source import TensorSource
    from eagle_jax.drafters.head_config import HeadConfig
    from eagle_jax.loading import Table
    from eagle_jax.models.config import ModelConfig
    from eagle_jax.models.functional import ParameterSpec
    from eagle_jax.progress import ReportProgress

Format = Literal["orbax", "hf"]
DTYPES = ("float32", "bfloat16", "float16")

# Files that belong to a tokenizer or to generating, which are copied as they are.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

_TAPS = "eagle_aux_hidden_state_layer_ids"
# What only describes the source's own format.
_SPECULATORS_KEYS = ("transformer_layer_config", "speculators_config", "speculators_model_type")
_LEFT_OUT = (*_SPECULATORS_KEYS, "speculators_version", "auto_map", "use_aux_norm")


@dataclass(frozen=True)
class Checkpoint:
    """What is converted.

    Attributes:
        kind: target or head.
        config: with Hugging Face's keys; what becomes `config.json`.
        params: by our dotted paths, on the host, in the dtypes that they are to be written in.
    """

    kind: Literal["target", "head"]
    config: dict[str, Any]
    params: dict[str, jax.Array]


@dataclass(frozen=True)
class _Layout:
    """What a source must hold: its config as it is to be written, its tensors' names, our parameters."""

    kind: Literal["target", "head"]
    config: dict[str, Any]
    table: Table
    specs: Mapping[str, ParameterSpec]


def convert(
    source: str,
    dest: Path,
    to: Format,
    *,
    dtype: str | None = None,
    target: str | None = None,
    force: bool = False,
    progress: ReportProgress | None = None,
) -> Checkpoint:
    """Converts a target or a head; see the module.

    Args:
        source: what `resolve_checkpoint` finds.
        dest: the folder to write.
        to: `orbax`, this library's own format, or `hf`, a Hugging Face folder.
        dtype: of floating parameters; None keeps each tensor's own.
        target: for heads, the target that they belong to; needed where a head's config leaves its taps open.
        force: replace a checkpoint that is there.
        progress: called after each tensor; see `eagle_jax.loading.fill`.

    Raises:
        EagleError: it cannot be read or written; `dest` is then as it was.
    """
    from eagle_jax.checkpoints.folders import check_writable
    from eagle_jax.checkpoints.resolve import resolve_checkpoint

    path = resolve_checkpoint(source)
    check_writable(dest, force)  # before the work, not after
    checkpoint = read(path, dtype, None if target is None else resolve_checkpoint(target), progress)
    with tempfile.TemporaryDirectory() as scratch:
        files = side_files(path, Path(scratch)) if checkpoint.kind == "target" else {}
        write(checkpoint, dest, to, files, force)
    return checkpoint


def read(
    path: Path, dtype: str | None = None, target: Path | None = None, progress: ReportProgress | None = None
) -> Checkpoint:
    """Reads a target or head of any format and checks it against the model that its config describes.

    Raises:
        EagleError: it cannot be read, or holds other tensors than its config says.
    """
    import jax
    import numpy as np

    from eagle_jax.checkpoints.resolve import open_source
    from eagle_jax.drafters.head_config import HEAD_NAMES
    from eagle_jax.loading import read_parameters, rename

    source = open_source(path)
    names = frozenset(new for name in source.infos if (new := rename(name, HEAD_NAMES)) is not None)
    if names & {"fc.weight", "layers.0.hidden_norm.weight"}:
        layout = _head_layout(source, names, target)
    elif target is None:
        layout = _target_layout(source)
    else:
        raise ConfigError(f"--target is for heads, and {path} is none: it has no fc.weight")
    stored = {rename(name, layout.table): info.dtype for name, info in source.infos.items()}
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    abstract = {}
    for name, spec in layout.specs.items():
        kept = _dtype(name, np.dtype(spec.dtype), stored.get(name), dtype)
        abstract[name] = jax.ShapeDtypeStruct(spec.shape, kept, sharding=host)
    with np.errstate(over="ignore"):  # looked for below
        params = read_parameters(source, layout.table, abstract, progress)
    for name, array in params.items():
        if array.dtype == np.float16 and stored[name] != np.float16 and np.isinf(np.asarray(array)).any():
            raise ConfigError(f"{name} has values that float16 cannot hold; choose bfloat16")
    config = _with_dtype(layout.config, params)
    if "d2t" in params:
        _draft_tokens(params["d2t"], config["vocab_size"])
    return Checkpoint(layout.kind, config, params)


def _dtype(name: str, wanted: np.dtype, stored: np.dtype | None, asked: str | None) -> np.dtype:
    """What a parameter is stored as. A tensor of the wrong kind is refused when it is read."""
    import jax.numpy as jnp

    if stored is None or not all(jnp.issubdtype(d, jnp.floating) for d in (wanted, stored)):
        return wanted
    if asked is not None:
        return jnp.dtype(asked)
    if stored.name not in DTYPES:
        raise ConfigError(
            f"{name} is stored as {stored.name}; choose one of {', '.join(DTYPES)} with --dtype"
        )
    return stored


def _with_dtype(config: Mapping[str, Any], params: Mapping[str, jax.Array]) -> dict[str, Any]:
    """A config that states the dtype of most of the weights, under the key that it uses."""
    import jax.numpy as jnp

    sizes: Counter[str] = Counter()
    for array in params.values():
        if jnp.issubdtype(array.dtype, jnp.floating):
            sizes[array.dtype.name] += array.size
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, sizes.most_common(1)[0][0])}


# ---------------------------------------------------------------- what a source holds


def _target_layout(source: TensorSource) -> _Layout:
    from eagle_jax.loading import target_names
    from eagle_jax.models.config import ModelConfig
    from eagle_jax.models.decoder import Target

    target = Target(ModelConfig.from_hf(source.config), "float32")
    return _Layout("target", source.config, target_names(target.config), target.functional.specs)


def _head_layout(source: TensorSource, names: frozenset[str], target: Path | None) -> _Layout:
    from eagle_jax.drafters.head_config import HEAD_NAMES
    from eagle_jax.loading import open_head, read_target_config
    from eagle_jax.models.decoder import Target

    method = "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle"
    taps = None
    if target is not None:
        model = read_target_config(target)
    else:
        taps = _stated_taps(source.config) if method == "eagle3" else None
        model = _implied_target(source.config, taps or ())
    head, functional = open_head(source, Target(model, "float32"), method, taps)
    config = _eagle3_config(source.config, head) if method == "eagle3" else source.config
    return _Layout("head", config, HEAD_NAMES, functional.specs)


def _stated_taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The taps of a head whose target is not at hand: only a list given in both numberings will do."""
    outer, nested = config.get(_TAPS), (config.get("eagle_config") or {}).get(_TAPS)
    if outer and nested and [i + 1 for i in nested] == list(outer):
        return tuple(outer)
    given = f"gives {outer or nested}, in one numbering or the other" if outer or nested else "lists none"
    raise ConfigError(
        f"which hidden states this head reads depends on its target, for its config {given}: "
        "name the target with --target"
    )


def _implied_target(config: Mapping[str, Any], taps: tuple[int, ...]) -> ModelConfig:
    """Shapes that a head's own config implies for its target, for want of the target itself."""
    from eagle_jax.models.config import REQUIRED, ModelConfig

    flat = {"num_hidden_layers": 1, **(config.get("eagle_config") or {}), **_flatten(config)}
    if absent := [key for key in REQUIRED if not flat.get(key)]:
        raise ConfigError(
            f"this head's config lacks {', '.join(absent)}; if these are its target's, name it with --target"
        )
    model = ModelConfig.from_hf({**flat, "model_type": "llama"})
    width = flat.get("target_hidden_size") or model.hidden_size
    return replace(model, hidden_size=width, num_layers=max((1, *taps)), windows=())


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Speculators nest the layer's shapes."""
    layer = config.get("transformer_layer_config") or {}
    return {**layer, **{key: value for key, value in config.items() if value is not None or key not in layer}}


def _eagle3_config(config: Mapping[str, Any], head: HeadConfig) -> dict[str, Any]:
    """The config that vLLM and SGLang read: flat, and the tap list in the numbering that each expects.

    What our reader takes from tensor names or from a family's defaults is written out.
    """
    from eagle_jax.drafters.head_config import SWITCHES

    model = head.model
    flat = {key: value for key, value in _flatten(config).items() if key not in _LEFT_OUT}
    biases = {"attention_bias": model.output_bias, "mlp_bias": model.mlp_bias}
    if "qkv_bias" in flat or model.qkv_bias != model.output_bias:
        biases["qkv_bias"] = model.qkv_bias
    return {
        **flat,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "rope_theta": model.rope.theta,
        "tie_word_embeddings": False,
        **biases,
        **{name: getattr(head, name) for name in SWITCHES if getattr(head, name) or name in flat},
        _TAPS: list(head.taps),
        "eagle_config": {
            **(config.get("eagle_config") or {}),
            _TAPS: [tap - 1 for tap in head.taps],
            "use_aux_hidden_state": True,
        },
    }


def _draft_tokens(d2t: jax.Array, vocab_size: int) -> np.ndarray:
    """Target id of each draft id."""
    import numpy as np

    ids = np.arange(len(d2t)) + np.asarray(d2t, np.int64)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"d2t leads to the token ids {low} … {high}; the target's vocabulary is 0 … {vocab_size - 1}"
        )
    return ids


# ---------------------------------------------------------------- writing


def hugging_face_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors under the names that Hugging Face, vLLM and SGLang read, one at a time."""
    import numpy as np

    for path, array in checkpoint.params.items():
        value = np.asarray(array)
        if checkpoint.kind == "target":
            yield (path if path.startswith("lm_head.") else f"model.{path}"), value
        elif path == "d2t":
            yield path, value.astype(np.int64)
            in_draft = np.zeros((checkpoint.config["vocab_size"],), bool)
            in_draft[_draft_tokens(array, len(in_draft))] = True
            yield "t2d", in_draft
        else:
            yield path, value


def write(checkpoint: Checkpoint, folder: Path, to: Format, files: Mapping[str, Path], force: bool) -> None:
    """Writes a checkpoint with the files that belong beside it.

    Raises:
        EagleError: `folder` must not be written, or cannot be.
    """
    from eagle_jax.checkpoints import orbax
    from eagle_jax.checkpoints.folders import partial_folder
    from eagle_jax.checkpoints.huggingface import save_safetensors

    try:
        if to == "orbax":
            orbax.save(folder, checkpoint.params, checkpoint.config, checkpoint.kind, files, force=force)
        else:
            tensors = hugging_face_tensors(checkpoint)
            save_safetensors(folder, tensors, checkpoint.config, extra_files=files, force=force)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    except EagleError:
        raise
    except ValueError as error:  # what TensorStore makes of a full disk
        raise ConfigError(f"{folder} cannot be written: {str(error).splitlines()[0]}") from None
    finally:
        _remove(partial_folder(folder))


def _remove(folder: Path) -> None:
    """Removes what an interrupted save has gathered."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def side_files(path: Path, scratch: Path) -> dict[str, Path]:
    """Files of a target's tokenizer, by name; that of a GGUF file is written to `scratch`.

    Raises:
        CheckpointError: a GGUF file's tokenizer is of a kind not known here.
    """
    from eagle_jax.checkpoints.resolve import load_tokenizer

    if path.is_dir():
        found = {name: path / name for name in SIDE_FILES if (path / name).is_file()}
        if found.keys() - {"generation_config.json"}:
            return found
    else:
        found = {}
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        return found
    tokenizer.save_pretrained(scratch)
    return found | {file.name: file for file in sorted(scratch.iterdir()) if file.is_file()}


# ---------------------------------------------------------------- the command


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eagle_jax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder, .gguf file, hub id or package:<package>/<file>")
    add("dest", metavar="DEST", type=Path, help="folder to write")
    add("--to", required=True, choices=("orbax", "hf"), help="format to write")
    add("--dtype", choices=DTYPES, help="of floating tensors; default: as in SOURCE")
    add("--target", metavar="SOURCE", help="for a head: the target that it belongs to")
    add("--force", action="store_true", help="replace the checkpoint that DEST holds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; see `exit_code`."""

    def command() -> None:
        args = _parser().parse_args(argv)
        from eagle_jax.progress import loading_bar

        with loading_bar(True, "Converting") as bar:
            options = dict(dtype=args.dtype, target=args.target, force=args.force, progress=bar)
            checkpoint = convert(args.source, args.dest, args.to, **options)
        size, count = sum(array.nbytes for array in checkpoint.params.values()), len(checkpoint.params)
        print(f"{args.dest}: {checkpoint.kind}, {count} parameters, {size / 2**20:.1f} MiB, {args.to}")

    return exit_code(command)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed
    sys.exit(main())
