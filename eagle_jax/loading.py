"""From a checkpoint's path to a runnable target or head: config, static half, parameters on their devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eagle_jax.checkpoints.loading import Progress, load_parameters
from eagle_jax.checkpoints.orbax import OrbaxSource, restore
from eagle_jax.checkpoints.resolve import open_source
from eagle_jax.checkpoints.source import CheckpointError, TensorSource
from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.eagle_drafter import EagleParams
from eagle_jax.drafters.head_config import HEAD_NAMES, HeadConfig, read_head_config
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.cpu.pages import use_large_pages
from eagle_jax.models.decoder import TARGET_NAMES, Target
from eagle_jax.models.functional import Functional, ParameterSpec
from eagle_jax.parallel.sharding import HEAD_RULES, TARGET_RULES, Rules, shardings

Table = tuple[tuple[str, str | None], ...]
HEAD_MODULES: dict[str, type] = {"eagle": EagleHead, "eagle3": Eagle3Head}


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run.

    Attributes:
        path: where it was read from.
        target: its static half.
        params: by dotted path.
    """

    path: Path
    target: Target
    params: dict[str, jax.Array]


@dataclass(frozen=True)
class LoadedHead:
    """A draft head ready to run with one target."""

    path: Path
    config: HeadConfig
    functional: Functional
    params: EagleParams


def read_target_config(path: Path) -> ModelConfig:
    """The model that a checkpoint describes, without reading its weights."""
    return ModelConfig.from_hf(open_source(path).config)


def load_target(path: Path, dtype: str, mesh: Mesh, progress: Progress | None = None) -> LoadedTarget:
    """Reads a target in any format, straight to its shardings.

    Raises:
        CheckpointError, ModelConfigError: it cannot be read, or is no model that this library runs.
    """
    source = open_source(path)
    _check_kind(source, "target")
    target = Target(ModelConfig.from_hf(source.config), dtype)
    table = target_names(target.config)
    params = fill(source, table, target.functional.specs, mesh, TARGET_RULES, progress)
    return LoadedTarget(path, target, params)


def target_names(config: ModelConfig) -> Table:
    """The table from a target checkpoint's tensor names to our paths."""
    if config.tie_word_embeddings:  # some checkpoints store the tied head too
        return ((r"lm_head\.weight", None), *TARGET_NAMES)
    return TARGET_NAMES


def load_head(
    path: Path,
    loaded: LoadedTarget,
    method: str,
    mesh: Mesh,
    taps: tuple[int, ...] | None = None,
    overrides: Mapping[str, bool] | None = None,
    progress: Progress | None = None,
) -> LoadedHead:
    """Reads a head in any layout for use with a target.

    Raises:
        CheckpointError: it cannot be read, or its tensors are not those of its config.
        HeadError: it is a head of another kind or for another target.
    """
    source = open_source(path)
    _check_kind(source, "head")
    config, functional = open_head(source, loaded.target, method, taps, overrides)
    params = fill(source, HEAD_NAMES, functional.specs, mesh, HEAD_RULES, progress)
    embeddings = loaded.params["embed_tokens.weight"]
    output_weight = loaded.params.get("lm_head.weight", embeddings)
    return LoadedHead(path, config, functional, EagleParams(params, embeddings, output_weight))


def open_head(
    source: TensorSource,
    target: Target,
    method: str,
    taps: tuple[int, ...] | None = None,
    overrides: Mapping[str, bool] | None = None,
) -> tuple[HeadConfig, Functional]:
    """The config and static half of a head checkpoint, without reading its weights."""
    names = frozenset(new for name in source.infos if (new := rename(name, HEAD_NAMES)) is not None)
    config = read_head_config(source.config, names, target.config, method, taps, overrides)
    module = HEAD_MODULES[method]
    return config, Functional.of(lambda: module(config, jnp.dtype(target.dtype)))


def _check_kind(source: TensorSource, kind: str) -> None:
    """Our own checkpoints say what they are."""
    if isinstance(source, OrbaxSource) and source.kind != kind:
        raise CheckpointError(f"{source.path} is a {source.kind}; expected a {kind}")


def rename(name: str, table: Table) -> str | None:
    """Our path for a checkpoint's tensor; None for one that is left out."""
    for pattern, path in table:
        if match := re.fullmatch(pattern, name):
            return None if path is None else match.expand(path)
    return name


def fill(
    source: TensorSource,
    table: Table,
    specs: Mapping[str, ParameterSpec],
    mesh: Mesh,
    rules: Rules,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Reads parameters to where `rules` place them on `mesh`.

    Args:
        table: our paths for the checkpoint's names; our own checkpoints need none.
        progress: called with the bytes read, the bytes to read in all, and the name of what was read last:
            after each tensor, or once where all are read together (our own checkpoints).

    Raises:
        CheckpointError: the checkpoint does not hold just these parameters, or is damaged.
    """
    placed: Any = shardings({path: spec.axes for path, spec in specs.items()}, mesh, rules)
    abstract = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=placed[path])
        for path, spec in specs.items()
    }
    params = read_parameters(source, table, abstract, progress)
    use_large_pages(params.values())
    return params


def read_parameters(
    source: TensorSource,
    table: Table,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Reads parameters to the shardings and dtypes of `abstract`; see `fill`."""
    if not isinstance(source, OrbaxSource):
        return load_parameters(source, table, abstract, progress=progress)
    params = restore(source.path, abstract)  # reads several tensors at a time, and parts of them
    if progress is not None:
        total = sum(info.nbytes for info in source.infos.values())
        progress(total, total, source.path.name)
    return params
