"""GGUF files of Llama-like models, presented as the Hugging Face checkpoint that they were made from.

Names and config keys are translated, shapes stand in Hugging Face's order, quantised tensors come out as
float32, one at a time. The tokenizer in the file is the business of `gguf_tokenizer`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from eagle_jax.checkpoints.gguf_container import GgufTensor, read_container
from eagle_jax.checkpoints.source import CheckpointError, TensorInfo, unknown_tensor
from eagle_jax.checkpoints.weight_files import map_array

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER_TENSOR = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_ROWS_AT_ONCE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file."""

    tensor: GgufTensor
    permuted_heads: int | None  # heads whose rows were reordered for interleaved rotary embeddings


class GgufSource:
    """A GGUF file as a `TensorSource` with Hugging Face's tensor names and config keys.

    Tensors of unknown purpose keep the file's name for them, so that loading reports them.

    Raises:
        CheckpointError: the file is damaged, one of several splits, or of an architecture not known here.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        container = read_container(self.path)
        stored = dict(container.tensors)
        rope_factors = None
        if _ROPE_FACTORS in stored:
            tensor = stored.pop(_ROPE_FACTORS)
            rope_factors = map_array(self.path, tensor.offset, TensorInfo(tensor.shape, np.dtype(np.float32)))
        if "token_embd.weight" not in stored:
            raise CheckpointError(f"{self.path} has no token_embd.weight, so it holds no language model")
        self.config: dict[str, Any] = _config(self.path, container.metadata, set(stored), rope_factors)
        self.config["vocab_size"] = stored["token_embd.weight"].shape[0]
        self._stored: dict[str, _Stored] = {}
        permutes = self.config["model_type"] in ("llama", "mistral")
        for file_name, tensor in stored.items():
            name = _hugging_face_name(file_name)
            heads = None
            if permutes and ".self_attn.q_proj." in name:
                heads = self.config["num_attention_heads"]
            elif permutes and ".self_attn.k_proj." in name:
                heads = self.config["num_key_value_heads"]
            self._stored[name] = _Stored(tensor, heads)
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(entry.tensor.shape, np.dtype(np.float32)) for name, entry in self._stored.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in float32; see `TensorSource.read`."""
        if name not in self.infos:
            raise unknown_tensor(self.path, name)
        stored = self._stored[name]
        shape, kind = stored.tensor.shape, stored.tensor.kind
        raw = map_array(
            self.path, stored.tensor.offset, TensorInfo((stored.tensor.nbytes,), np.dtype(np.uint8))
        )
        rows = raw.reshape(prod(shape[:-1]), -1)
        out = np.zeros((len(rows), shape[-1]), np.float32)
        step = max(1, _ROWS_AT_ONCE_BYTES // (4 * shape[-1]))
        try:
            for start in range(0, len(rows), step):
                out[start : start + step] = dequantize(rows[start : start + step], kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is quantised as {kind.name}, which cannot be read here; "
                "use a file with another quantisation"
            ) from None
        out = out.reshape(shape)
        if stored.permuted_heads is not None:
            out = _unpermute(out, stored.permuted_heads)
        out.flags.writeable = False
        return out


def _hugging_face_name(name: str) -> str:
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    elif match := _OUTER_TENSOR.fullmatch(name):
        part, kind = match.groups()
        if part in _OUTER_NAMES:
            return f"{_OUTER_NAMES[part]}.{kind}"
    return name


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of each head back from (pair, half) to (half, pair) order."""
    per_half = len(rows) // heads // 2
    return rows.reshape(heads, per_half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _config(
    path: Path, metadata: dict[str, Any], tensors: set[str], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path} has architecture {architecture!r}; expected one of {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} splits; merge them with llama-gguf-split --merge"
        )

    def given(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None or isinstance(value, list):
            raise CheckpointError(
                f"{path}: {architecture}.{key} is {value} in the metadata; expected one value for all layers"
            )
        return value

    if given("expert_count", 0):
        raise CheckpointError(
            f"{path} is a mixture of {given('expert_count')} experts; only dense models can be read"
        )
    window = given("attention.sliding_window", 0)
    model_type = "mistral" if architecture == "llama" and window else architecture
    heads = given("attention.head_count")
    head_dim = given(
        "attention.key_length", given("rope.dimension_count", given("embedding_length") // heads)
    )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": given("embedding_length"),
        "intermediate_size": given("feed_forward_length"),
        "num_hidden_layers": given("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": given("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": given("context_length"),
        "rms_norm_eps": _shortest(given("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(given("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_of_text(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if window:
        config["sliding_window"] = window
    scaling = _rope_scaling(path, given, config, rope_factors)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_of_text(metadata: dict[str, Any]) -> int | list[int] | None:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    ids = list(dict.fromkeys(ids))
    return ids if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(
    path: Path, given: Any, config: dict[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    kind = given("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": given("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = given("rope.scaling.original_context_length")
        return scaling
    if kind != "none":
        raise CheckpointError(f"{path} has rotary scaling {kind!r}; expected none, linear, yarn or Llama 3's")
    if factors is None:
        return None
    # Llama 3's scaling is stored as a divisor for each frequency: find the settings and prove that they
    # give it.
    scaling = {
        "rope_type": "llama3",
        "factor": _shortest(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(config["rope_theta"], config["head_dim"], scaling)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{path} has frequency factors that are not Llama 3's rotary scaling; this is not supported"
        )
    return scaling


def _llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
