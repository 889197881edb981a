"""What a head checkpoint is, read from its config and the names of its tensors, and whether it fits a target.

Released heads come in many dialects; this file knows them so that the head modules need not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle_jax.errors import EagleError
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.decoder import FINAL_HIDDEN

METHODS = ("eagle", "eagle3")
SWITCHES = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


class HeadError(EagleError):
    """A head checkpoint that cannot be run, or not with this target."""


@dataclass(frozen=True)
class HeadConfig:
    """One head.

    Attributes:
        method: `eagle` (1 and 2) or `eagle3` (3 and 3.1).
        model: the shapes of its decoder layer; `vocab_size` is the target's.
        draft_vocab_size: rows of its language-model head.
        target_hidden_size: width of the states that it reads.
        taps: which states, in boundary numbering (see `Decoder`).
        fc_bias: fc has a bias (EAGLE-1's default).
        own_embeddings: the checkpoint brings token embeddings.
        own_vocabulary_map: the checkpoint brings d2t.
        input_norms: HASS's norms on embedding and feature.
        fc_norm, norm_output, norm_before_fc, norm_before_residual: see `eagle3`.
    """

    method: str
    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    fc_bias: bool = False
    own_embeddings: bool = False
    own_vocabulary_map: bool = False
    input_norms: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False


# Tensor names of every dialect, to ours. First match wins; None is left unread on purpose.
HEAD_NAMES: tuple[tuple[str, str | None], ...] = (
    (r"(?:model\.)?t2d", None),  # follows from d2t
    (r"(?:model\.)?verifier_.*", None),  # speculators: copies of the target's
    (r".*rotary_emb\..*", None),
    (r"(?:model\.)?aux_norm_low\.(.*)", r"fc_norm.0.\1"),  # SGLang before EAGLE-3.1 was named
    (r"(?:model\.)?aux_norm_mid\.(.*)", r"fc_norm.1.\1"),
    (r"(?:model\.)?aux_norm_high\.(.*)", r"fc_norm.2.\1"),
    (r"(?:model\.)?midlayer\.(.*)", r"layers.0.\1"),
    (r"(?:model\.)?(.*)", r"\1"),
)


def read_head_config(
    config: Mapping[str, Any],
    tensor_names: frozenset[str],
    target: ModelConfig,
    method: str,
    taps: tuple[int, ...] | None = None,
    overrides: Mapping[str, bool] | None = None,
) -> HeadConfig:
    """Reads a head's Hugging Face config for use with `target`.

    Args:
        tensor_names: the checkpoint's tensors under our names; they decide where configs are silent or wrong.
        taps: overrides the config's own list (boundary numbering).
        overrides: switches of `SWITCHES` that the checkpoint states wrongly.

    Raises:
        HeadError: not a head of this method, or a head of another target; the message says why.
    """
    if method not in METHODS:
        raise HeadError(f"method {method!r} has no head; methods with one: {', '.join(METHODS)}")
    unknown = sorted(set(overrides or {}) - set(SWITCHES))
    if unknown:
        raise HeadError(f"head_overrides has unknown {', '.join(unknown)}; allowed: {', '.join(SWITCHES)}")
    _refuse_other_kinds(config, tensor_names, method)
    flat = _flatten(config)
    shapes = {"vocab_size": target.vocab_size} | flat | {"model_type": _layer_family(flat)}
    shapes.setdefault("num_hidden_layers", 1)
    # A head's own flag says which biases it has, whatever its family's default: old heads copied the target's
    # config.
    qkv_bias = "layers.0.self_attn.q_proj.bias" in tensor_names
    model = replace(
        ModelConfig.from_hf(shapes).with_layers(1),
        qkv_bias=qkv_bias,
        output_bias="layers.0.self_attn.o_proj.bias" in tensor_names,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensor_names,
        mlp_bias="layers.0.mlp.up_proj.bias" in tensor_names,
        tie_word_embeddings=False,
    )
    draft_vocab_size = flat.get("draft_vocab_size") or model.vocab_size
    target_hidden_size = flat.get("target_hidden_size") or model.hidden_size
    own_embeddings = "embed_tokens.weight" in tensor_names
    problems = []
    if model.vocab_size != target.vocab_size:
        problems.append(f"its vocabulary is {model.vocab_size}, the target's {target.vocab_size}")
    if target_hidden_size != target.hidden_size:
        problems.append(f"it reads states {target_hidden_size} wide, the target's are {target.hidden_size}")
    if model.hidden_size != target.hidden_size and not own_embeddings:
        problems.append(
            f"it is {model.hidden_size} wide, the target {target.hidden_size}, "
            "and it brings no embeddings of its own"
        )
    if method == "eagle" and model.hidden_size != target.hidden_size:
        problems.append("an EAGLE-1 head must be as wide as its target, whose lm_head it uses")
    if draft_vocab_size > target.vocab_size:
        problems.append(
            f"its draft vocabulary {draft_vocab_size} is larger than the target's {target.vocab_size}"
        )
    if problems:
        raise HeadError(f"this head belongs to another target: {'; '.join(problems)}")

    common = HeadConfig(
        method=method,
        model=model,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        taps=(FINAL_HIDDEN,),
        own_embeddings=own_embeddings,
        fc_bias="fc.bias" in tensor_names,
    )
    if method == "eagle":
        if taps not in (None, (FINAL_HIDDEN,)):
            raise HeadError(
                f"taps {list(taps or ())} given, but an EAGLE-1 head reads the final hidden state only"
            )
        return replace(common, input_norms="embedding_layernorm.weight" in tensor_names)
    switches: dict[str, Any] = {
        "fc_norm": bool(
            flat.get("fc_norm") or flat.get("use_aux_norm") or "fc_norm.0.weight" in tensor_names
        ),
        "norm_output": bool(flat.get("norm_output", False)),
        "norm_before_fc": bool(flat.get("norm_before_fc", False)),
        "norm_before_residual": bool(
            flat.get("norm_before_residual", "speculators_model_type" in config)  # absent = true there
        ),
    }
    chosen = taps or resolve_taps(config, target.num_layers)
    if len(set(chosen)) < len(chosen):
        raise HeadError(f"taps {list(chosen)} are not distinct; the head was trained on different states")
    out_of_range = [tap for tap in chosen if not 0 <= tap <= target.num_layers]
    if out_of_range:
        raise HeadError(f"taps {list(chosen)} reach outside the target's boundaries 0 … {target.num_layers}")
    return replace(
        common,
        taps=chosen,
        own_vocabulary_map="d2t" in tensor_names,
        **(switches | dict(overrides or {})),
    )


def resolve_taps(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The states that an EAGLE-3 head reads, in boundary numbering.

    Configs number them either by boundary (top level: "before layer i") or by the layer whose output they are
    (nested in `eagle_config`). A list equal to either default says itself which it is.
    """
    default = (2, num_layers // 2, num_layers - 3)
    key = "eagle_aux_hidden_state_layer_ids"
    nested = (config.get("eagle_config") or {}).get(key)
    given = config.get(key) or nested
    if not given:
        if len(set(default)) < 3 or min(default) < 0:
            raise HeadError(
                f"the default taps {list(default)} of a target of {num_layers} layers are not three distinct "
                "states; set speculative.taps"
            )
        return default
    ids = tuple(int(i) for i in given)
    if ids == default:
        return ids
    if config.get(key) and nested and [i + 1 for i in nested] == list(ids):
        return ids  # both numberings, and they agree
    outputs = tuple(i + 1 for i in ids)
    if outputs == default:
        return outputs
    return ids if config.get(key) else outputs


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Speculators nest the layer's shapes; eagle_config nests switches. Outer keys win."""
    layer = config.get("transformer_layer_config") or {}
    return {
        **(config.get("eagle_config") or {}),
        **layer,
        **{k: v for k, v in config.items() if v is not None},
    }


def _layer_family(flat: Mapping[str, Any]) -> str:
    """Heads are Llama layers; Qwen3's differ by norms that the tensors show, so any known family will do."""
    return "llama" if flat.get("model_type") not in ("mistral", "qwen2", "qwen3") else str(flat["model_type"])


def _refuse_other_kinds(config: Mapping[str, Any], names: frozenset[str], method: str) -> None:
    architectures = ", ".join(config.get("architectures") or ["?"])
    if any(".kv_a_proj_with_mqa." in name for name in names):
        raise HeadError(f"{architectures} is an MLA head, which is not supported yet")
    if any(name.startswith("layers.1.") for name in names):
        raise HeadError(f"{architectures} has several layers; EAGLE heads have one. Is this a whole model?")
    is_eagle3 = "layers.0.hidden_norm.weight" in names
    if "fc.weight" not in names:
        raise HeadError(f"{architectures} has no fc.weight: this is no EAGLE head")
    if is_eagle3 != (method == "eagle3"):
        raise HeadError(
            f"the checkpoint is an {'EAGLE-3' if is_eagle3 else 'EAGLE-1'} head, but the method is "
            f"{method!r}; use {'eagle3' if is_eagle3 else 'eagle'}"
        )
