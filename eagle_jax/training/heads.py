"""The head that a run trains: a new one, or one to go on with; and the same head as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.convert import Checkpoint, read, write
from eagle_jax.drafters.head_config import HeadConfig, HeadError, read_head_config
from eagle_jax.errors import ConfigError
from eagle_jax.loading import HEAD_MODULES, LoadedTarget
from eagle_jax.models.functional import Functional
from eagle_jax.training.config import HeadSection
from eagle_jax.training.dataset import Dataset
from eagle_jax.training.initialise import Calibration, new_head
from eagle_jax.training.step import FROZEN
from eagle_jax.training.vocabulary import draft_vocabulary

_TAPS = "eagle_aux_hidden_state_layer_ids"
# What a head takes over from its target's config.
_TARGET_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("max_position_embeddings", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True)
class TrainedHead:
    """A head in training: what it is, and where it starts.

    Attributes:
        hf_config: its config as a checkpoint states it.
        config: the same, read.
        functional: its static half, in the run's dtype.
        trained: parameters to start from, float32 on the host.
        frozen: those that stay as they are.
    """

    hf_config: dict[str, Any]
    config: HeadConfig
    functional: Functional[Any]
    trained: dict[str, np.ndarray]
    frozen: dict[str, np.ndarray]

    def save(self, folder: Path, params: Mapping[str, jax.Array]) -> None:
        """Writes the head with these parameters, float32, as a checkpoint of this library."""
        everything = {**params, **{path: jnp.asarray(value) for path, value in self.frozen.items()}}
        config = {**self.hf_config, "torch_dtype": "float32"}
        write(Checkpoint("head", config, everything), folder, "orbax", {}, force=True)


def prepare_head(
    section: HeadSection,
    loaded: LoadedTarget,
    target_config: Mapping[str, Any],
    datasets: Sequence[Dataset],
    calibrate: Callable[[tuple[int, ...]], Calibration],
    seed: int,
) -> TrainedHead:
    """The head that a config asks for.

    Args:
        target_config: the target's, in Hugging Face's keys.
        datasets: where the draft vocabulary is counted.
        calibrate: called with the taps for what a linear start is fitted on.

    Raises:
        EagleError: its shapes do not go together, or the head to go on from cannot be read.
    """
    if section.warm_start is not None:
        return _warm_start(section, loaded)
    target, model = loaded.target, loaded.target.config
    token_ids = None
    if section.method == "eagle3" and section.draft_vocab_size is not None:
        if section.draft_vocab_size > model.vocab_size:
            raise ConfigError(
                f"head.draft_vocab_size {section.draft_vocab_size} is more than the target's vocabulary of "
                f"{model.vocab_size}; null means all of it"
            )
        if section.draft_vocab_size < model.vocab_size:
            token_ids = draft_vocabulary(
                datasets, model.vocab_size, section.draft_vocab_size, model.eos_token_ids
            )
    hf_config = _new_config(section, target_config, None if token_ids is None else len(token_ids))
    names = {"fc.weight"} | ({"layers.0.hidden_norm.weight"} if section.method == "eagle3" else set())
    if token_ids is not None:
        names.add("d2t")
    if section.method == "eagle":
        names.add("fc.bias")
    config = read_head_config(hf_config, frozenset(names), model, section.method, section.taps)
    hf_config |= _taps(config)
    functional = _functional(config, target.dtype)
    calibration = calibrate(config.taps) if section.start == "linear" else None
    arrays = new_head(config, functional.specs, loaded.params, token_ids, calibration, seed)
    return _split(hf_config, config, functional, arrays)


def _warm_start(section: HeadSection, loaded: LoadedTarget) -> TrainedHead:
    checkpoint = read(Path(str(section.warm_start)), None, loaded.path)
    if checkpoint.kind != "head":
        raise HeadError(f"head.warm_start {section.warm_start} is a whole model; expected a head")
    names = frozenset(checkpoint.params)
    config = read_head_config(checkpoint.config, names, loaded.target.config, section.method)
    functional = _functional(config, loaded.target.dtype)
    arrays = {
        path: np.asarray(value).astype(np.int32 if path == "d2t" else np.float32)
        for path, value in checkpoint.params.items()
    }
    return _split(checkpoint.config, config, functional, arrays)


def _functional(config: HeadConfig, dtype: str) -> Functional[Any]:
    module = HEAD_MODULES[config.method]
    return Functional.of(lambda: module(config, jnp.dtype(dtype)))


def _split(
    hf_config: dict[str, Any],
    config: HeadConfig,
    functional: Functional[Any],
    arrays: Mapping[str, np.ndarray],
) -> TrainedHead:
    frozen = {path: value for path, value in arrays.items() if path in FROZEN}
    trained = {path: value for path, value in arrays.items() if path not in FROZEN}
    return TrainedHead(hf_config, config, functional, trained, frozen)


def _new_config(
    section: HeadSection, target: Mapping[str, Any], draft_vocab_size: int | None
) -> dict[str, Any]:
    """A head's config in the keys that vLLM and SGLang read."""
    shapes = {key: target[key] for key in _TARGET_KEYS if target.get(key) is not None}
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (given := getattr(section, key)) is not None:
            shapes[key] = given
    heads = shapes["num_attention_heads"]
    shapes.setdefault("num_key_value_heads", heads)
    shapes.setdefault("head_dim", shapes["hidden_size"] // target["num_attention_heads"])
    if heads % shapes["num_key_value_heads"]:
        raise ConfigError(
            f"head.num_key_value_heads {shapes['num_key_value_heads']} does not divide its {heads} attention heads"
        )
    common = {
        "architectures": [
            "LlamaForCausalLMEagle3" if section.method == "eagle3" else "LlamaForCausalLMEagle"
        ],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **shapes,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if section.method == "eagle":
        return {**common, "bias": True}
    switches = {
        name: True
        for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
        if getattr(section, name)
    }
    return {
        **common,
        "draft_vocab_size": draft_vocab_size or shapes["vocab_size"],
        "target_hidden_size": target["hidden_size"],
        **switches,
    }


def _taps(config: HeadConfig) -> dict[str, Any]:
    if config.method == "eagle":
        return {}
    nested = {_TAPS: [tap - 1 for tap in config.taps], "use_aux_hidden_state": True}
    return {_TAPS: list(config.taps), "eagle_config": nested}
