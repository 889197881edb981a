"""What a decoder-only target looks like, read from a Hugging Face `config.json`.

Families are data: `FAMILIES` says in which switches a family differs from Llama. This file knows no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle_jax.errors import EagleError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


class ModelConfigError(EagleError):
    """A `config.json` describes a model that this library cannot run."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the fields carry the names of Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads both generations: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`."""
        nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if "full_attention" in nested:  # one entry a layer type; the families here use one rotary for all
            nested = nested["full_attention"]
        kind = nested.get("rope_type", nested.get("type", "default")) or "default"
        if kind not in ROPE_TYPES:
            raise ModelConfigError(
                f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        theta = nested.get("rope_theta", config.get("rope_theta")) or 10000.0
        names = (
            *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
            *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
        )
        given = {name: nested[name] for name in names if nested.get(name) is not None}
        max_positions = config.get("max_position_embeddings")
        original = nested.get("original_max_position_embeddings") or max_positions
        if kind == "dynamic":  # transformers scales by the model's own maximum here, whatever else is stated
            original = max_positions
        if kind == "yarn" and "factor" not in given and original and max_positions:
            given["factor"] = max_positions / original
        if kind not in ("default",) and "factor" not in given:
            raise ModelConfigError(f"rope scaling {kind!r} states no 'factor' in {dict(nested)}")
        if kind in ("dynamic", "yarn", "llama3") and not original:
            raise ModelConfigError(f"rope scaling {kind!r} needs original_max_position_embeddings")
        return cls(theta=float(theta), kind=kind, original_max_position_embeddings=original, **given)

    @property
    def output_scale(self) -> float:
        """What cosines and sines are multiplied with (yarn's attention factor)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def magnitude(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one decoder. Hashable, so that jitted functions can close over it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-5
    activation: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; None attends to everything
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        problems = []
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected a whole number")
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            problems.append(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.activation not in ACTIVATIONS:
            problems.append(f"activation {self.activation!r} is none of {', '.join(ACTIVATIONS)}")
        if len(self.windows) != self.num_layers:
            problems.append(f"{len(self.windows)} layer types for {self.num_layers} layers")
        if problems:
            raise ModelConfigError("; ".join(problems))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face config dict.

        Raises:
            ModelConfigError: an unknown family, a missing key, or a switch that no code here computes.
        """
        try:
            return cls._from_hf(config)
        except ModelConfigError:
            raise
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ModelConfigError(
                f"the config holds a value of another kind than expected: {error}"
            ) from None

    @classmethod
    def _from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        family = config.get("model_type", "llama")
        if family not in FAMILIES:
            raise ModelConfigError(
                f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
            )
        missing = [k for k in REQUIRED if not config.get(k)]
        if missing:
            raise ModelConfigError(f"the model's config lacks {', '.join(missing)}")
        num_heads = config["num_attention_heads"]
        common = dict(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rope=RopeConfig.from_hf(config),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            activation=config.get("hidden_act", "silu"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=token_ids(config.get("eos_token_id")),
        )
        return cls(**(common | FAMILIES[family](config)))

    @property
    def context_length(self) -> int:
        """Longest sequence that the model is made for; extended rotary embeddings reach past their table."""
        rope = self.rope
        if rope.kind == "dynamic":
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            extended = int((rope.original_max_position_embeddings or 0) * rope.factor)
            return max(self.max_position_embeddings, extended)
        return self.max_position_embeddings

    def with_layers(self, num_layers: int) -> ModelConfig:
        """The same model with another depth (a head is a decoder of one layer, without a window)."""
        return replace(self, num_layers=num_layers, windows=(None,) * num_layers)


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` may be absent, one id or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's: in the layers that `layer_types` names, else in those from `max_window_layers` on."""
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is None:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return dict(
        qkv_bias=bias or bool(config.get("qkv_bias", False)),  # EAGLE-1 heads for Qwen2 say qkv_bias
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    # An absent key means a window, as in transformers; later models of the family say null.
    return dict(windows=(config.get("sliding_window", 4096),) * config["num_hidden_layers"])


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(qkv_bias=True, windows=_windows(config))


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return dict(
        head_dim=config.get("head_dim") or 128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_windows(config),
    )


FAMILIES = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}
