"""Convert checkpoints: `python -m eagle_jax.convert SOURCE DEST --to orbax|hf`.

SOURCE is a target or a draft head in any format that can be read (Hugging Face folder, GGUF file, Orbax folder, hub id,
`package:…`); DEST a folder to write. Tensors keep their dtype unless --dtype says otherwise, so a round trip is exact.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_jax.errors import ConfigError, EagleError

METHOD_OF_KIND = "eagle3 when the checkpoint has the norms of an EAGLE-3 head, else eagle"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """What is converted: parameters by our dotted paths, on the host.

    Attributes:
        kind: target or head.
        config: with Hugging Face's keys.
        params: arrays in the dtypes that they are to be written in.
    """

    kind: str
    config: dict[str, Any]
    params: dict[str, Any]


def read(source: str, dtype: str | None, target: str | None) -> Checkpoint:
    """Reads a target or head of any format and checks it against the model that its config describes.

    Args:
        dtype: of floating parameters; None keeps each tensor's own.
        target: for heads, the target that they belong to; needed where a head's config leaves its taps open.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eagle_jax.checkpoints.loading import load_parameters
    from eagle_jax.checkpoints.resolve import open_source, resolve_checkpoint
    from eagle_jax.drafters.head_config import HEAD_NAMES, read_head_config, resolve_taps
    from eagle_jax.loading import HEAD_MODULES, read_target_config, rename
    from eagle_jax.models.config import ModelConfig
    from eagle_jax.models.decoder import TARGET_NAMES, Target
    from eagle_jax.models.functional import Functional

    opened = open_source(resolve_checkpoint(source))
    names = {new: name for name in opened.infos if (new := rename(name, HEAD_NAMES)) is not None}
    config = dict(opened.config)
    if "fc.weight" in names:
        kind, table = "head", HEAD_NAMES
        method = "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle"
        model = read_target_config(resolve_checkpoint(target)) if target else _target_of(config, names, opened)
        taps = None if target or method == "eagle" else _stated_taps(config)
        head = read_head_config(config, frozenset(names), model, method, taps)
        specs = Functional.of(lambda: HEAD_MODULES[method](head, jnp.float32)).specs
        if method == "eagle3":
            layers = model.num_layers if target else None
            config = _eagle3_config(config, head, resolve_taps(config, layers) if layers else head.taps)
    else:
        kind, table = "target", TARGET_NAMES
        model = ModelConfig.from_hf(config)
        specs = Target(model, "float32").functional.specs
        if model.tie_word_embeddings:
            table = ((r"lm_head\.weight", None), *table)
        names = {new: name for name in opened.infos if (new := rename(name, table)) is not None}

    def stored(path: str, spec: Any) -> Any:
        if path not in names or not jnp.issubdtype(spec.dtype, jnp.floating):
            return spec.dtype
        return np.dtype(dtype) if dtype else opened.infos[names[path]].dtype

    abstract = {path: jax.ShapeDtypeStruct(spec.shape, stored(path, spec)) for path, spec in specs.items()}
    params = load_parameters(opened, table, abstract)
    floats = [p.dtype.name for p in params.values() if jnp.issubdtype(p.dtype, jnp.floating)]
    config.pop("dtype", None)
    config["torch_dtype"] = max(set(floats), key=floats.count)
    return Checkpoint(kind, config, params)


def _stated_taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The taps of a head whose target is not at hand: only a list that says its own numbering will do."""
    key = "eagle_aux_hidden_state_layer_ids"
    outer, nested = config.get(key), (config.get("eagle_config") or {}).get(key)
    if outer and nested and [i + 1 for i in nested] == list(outer):
        return tuple(outer)
    raise ConfigError(
        "this head's config does not say for certain which hidden states it reads; give its target with --target"
    )


def _target_of(config: Mapping[str, Any], names: Mapping[str, str], opened: Any) -> Any:
    """The shapes that a head's own config implies for its target, for want of the target itself."""
    from eagle_jax.models.config import ModelConfig

    layer = config.get("transformer_layer_config") or {}
    flat = {**layer, **config}
    width = flat.get("target_hidden_size") or flat.get("hidden_size")
    taps = (flat.get("eagle_aux_hidden_state_layer_ids") or [0])[-1]
    return ModelConfig.from_hf(
        flat | {"model_type": "llama", "hidden_size": width, "num_hidden_layers": max(taps, 7)}
    )


def _eagle3_config(config: Mapping[str, Any], head: Any, taps: tuple[int, ...]) -> dict[str, Any]:
    """The config that vLLM and SGLang read: the tap list twice, in the numbering that each expects."""
    key, model = "eagle_aux_hidden_state_layer_ids", head.model
    flat = {**(config.get("transformer_layer_config") or {}), **config}
    for nested in ("transformer_layer_config", "speculators_config", "speculators_model_type", "use_aux_norm"):
        flat.pop(nested, None)
    switches = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    return flat | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "tie_word_embeddings": False,
        key: list(taps),
        "eagle_config": {
            **(config.get("eagle_config") or {}),
            key: [tap - 1 for tap in taps],
            "use_aux_hidden_state": True,
        },
        **{name: getattr(head, name) for name in switches if getattr(head, name) or name in flat},
    }


def hugging_face_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Tensors under the names that Hugging Face, vLLM and SGLang read, one at a time."""
    import numpy as np

    for path, array in checkpoint.params.items():
        value = np.asarray(array)
        if checkpoint.kind == "target":
            yield (path if path.startswith("lm_head.") else f"model.{path}"), value
        elif path == "d2t":
            yield path, value.astype(np.int64)
            in_draft = np.zeros((checkpoint.config["vocab_size"],), bool)
            in_draft[np.arange(len(value)) + value] = True
            yield "t2d", in_draft
        else:
            yield path, value


def write(checkpoint: Checkpoint, folder: Path, to: str, files: Mapping[str, Path], force: bool) -> None:
    """Writes a checkpoint with the files that belong beside it."""
    if to == "orbax":
        from eagle_jax.checkpoints import orbax

        kind: Any = checkpoint.kind
        orbax.save(folder, checkpoint.params, checkpoint.config, kind, files, force=force)
    else:
        from eagle_jax.checkpoints.huggingface import save_safetensors

        tensors = hugging_face_tensors(checkpoint)
        save_safetensors(folder, tensors, checkpoint.config, extra_files=files, force=force)


def tokenizer_files(source: str, scratch: Path) -> dict[str, Path]:
    """The tokenizer's files of a checkpoint; those of a GGUF file are written to `scratch`."""
    from eagle_jax.checkpoints.resolve import load_tokenizer, resolve_checkpoint

    path = resolve_checkpoint(source)
    if not path.is_dir() or not any((path / name).is_file() for name in TOKENIZER_FILES[:1]):
        tokenizer = load_tokenizer(path)
        if tokenizer is None:
            return {}
        tokenizer.save_pretrained(scratch)
        path = scratch
    return {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}


def convert(
    source: str, dest: Path, to: str, dtype: str | None = None, target: str | None = None, force: bool = False
) -> Checkpoint:
    """Converts a target or a head; see the module.

    Raises:
        EagleError, CheckpointError: it cannot be read or written; nothing is left at `dest` then.
    """
    checkpoint = read(source, dtype, target)
    with tempfile.TemporaryDirectory() as scratch:
        files = tokenizer_files(source, Path(scratch)) if checkpoint.kind == "target" else {}
        write(checkpoint, dest, to, files, force)
    return checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle_jax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="folder, .gguf file, hub id or package:<package>/<file>")
    parser.add_argument("dest", type=Path, help="folder to write")
    parser.add_argument("--to", required=True, choices=("orbax", "hf"), help="format to write")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in the source"
    )
    parser.add_argument("--target", help="for a head: the target that it belongs to")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    args = parser.parse_args(argv)

    from eagle_jax.checkpoints.source import CheckpointError

    try:
        checkpoint = convert(args.source, args.dest, args.to, args.dtype, args.target, args.force)
    except (EagleError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(p.nbytes for p in checkpoint.params.values())
    print(f"{args.dest}: {checkpoint.kind}, {len(checkpoint.params)} tensors, {size / 2**20:.1f} MiB, {args.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
