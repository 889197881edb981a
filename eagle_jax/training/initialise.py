"""A head before its first update.

A head that knows nothing spends most of a small budget on learning what can be computed. So the output norm and the
language-model head start as the target's, and the rest as the best linear guess of the target's next state:

  - fc gives the target's final state s_p at slot p, as far as a linear map of the taps can;
  - each query attends to its own slot, and values and output projection add A s_p + B e_{p+1}, where A and B are the
    ridge regression of s_{p+1} - s_p on the state and the next token's embedding;
  - the feed-forward layer adds next to nothing.

What the head feeds back is then a guess of a final state too, so that its later steps start as well as its first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from eagle_jax.drafters.head_config import HeadConfig
from eagle_jax.models.functional import ParameterSpec, Params

_SCALE = 0.02  # standard deviation of what starts at random
_RIDGE = 1e-2  # of the mean eigenvalue
_SHARPNESS = 1.5  # of queries and keys: a slot's score with itself is its square times sqrt(head_dim)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Calibration:
    """What a linear guess is fitted on: n slots p of some data.

    Attributes:
        taps: the states that the head reads, [n, M].
        states: the target's states after its final norm at p, [n, D].
        following: those at p + 1.
        embeddings: of the tokens at p + 1.
    """

    taps: np.ndarray
    states: np.ndarray
    following: np.ndarray
    embeddings: np.ndarray


def new_head(
    config: HeadConfig,
    specs: Mapping[str, ParameterSpec],
    params: Params,
    token_ids: np.ndarray | None,
    calibration: Calibration | None,
    seed: int,
) -> Arrays:
    """Parameters of a new head, float32 on the host (`d2t` int32).

    Args:
        specs: of the head's parameters.
        params: the target's.
        token_ids: the target's id of every draft id; None: one vocabulary.
        calibration: what to fit the linear guess on; None: all but norm and language-model head starts at random.
    """
    rng = np.random.default_rng([seed, 2])
    arrays: Arrays = {}
    for path, spec in specs.items():
        if path == "d2t":
            assert token_ids is not None
            arrays[path] = (token_ids - np.arange(len(token_ids))).astype(np.int32)
        elif path.endswith(".bias"):
            arrays[path] = np.zeros(spec.shape, np.float32)
        elif len(spec.shape) == 1:
            arrays[path] = np.ones(spec.shape, np.float32)
        else:
            arrays[path] = rng.normal(0.0, _SCALE, spec.shape).astype(np.float32)
    if config.method == "eagle3":
        output = params.get("lm_head.weight", params["embed_tokens.weight"])
        arrays["lm_head.weight"] = _host(output if token_ids is None else output[token_ids])
        arrays["norm.weight"] = _host(params["norm.weight"])
    if calibration is not None:
        fit = _fit_eagle3 if config.method == "eagle3" else _fit_eagle
        arrays |= {
            path: np.asarray(value, np.float32)
            for path, value in fit(config, arrays, calibration, rng).items()
        }
    return arrays


def _fit_eagle3(
    config: HeadConfig, arrays: Arrays, calibration: Calibration, rng: np.random.Generator
) -> Arrays:
    model, eps = config.model, config.model.rms_norm_eps
    D, H, K, d = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    states, following = (x.astype(np.float32) for x in (calibration.states, calibration.following))

    taps = calibration.taps.astype(np.float32)
    if config.norm_before_fc:
        taps = _unit(taps, eps)
    if config.fc_norm:
        taps = np.concatenate([_unit(x, eps) for x in np.split(taps, len(config.taps), axis=-1)], axis=-1)
    fc = ridge(taps, states)
    fused = taps @ fc.T

    normed = _unit(fused, eps)
    residual = normed if config.norm_before_residual else fused
    inputs = np.concatenate([_unit(calibration.embeddings.astype(np.float32), eps), normed], axis=-1)
    change = ridge(inputs, following - residual)  # [D, 2D]
    guess = residual + inputs @ change.T

    # Through the values of K heads no more than K * d directions pass: the strongest.
    left, strength, right = np.linalg.svd(change.astype(np.float64), full_matrices=False)
    rank = min(K * d, len(strength))
    root = np.sqrt(strength[:rank])
    values = np.zeros((K * d, 2 * D))
    values[:rank] = root[:, None] * right[:rank]
    outwards = np.zeros((D, K * d))
    outwards[:, :rank] = left[:, :rank] * root
    group = H // K
    by_head = np.repeat(outwards.reshape(D, K, 1, d), group, axis=2) / group

    keys = _SHARPNESS * rng.normal(0.0, 1 / np.sqrt(2 * D), (K, d, 2 * D))
    layer = "layers.0.self_attn."
    # How sure the guess may be: as far as it goes along with what comes.
    sure = float(np.mean(_unit(guess, eps) * _unit(following, eps)))
    return {
        "fc.weight": fc,
        f"{layer}q_proj.weight": np.repeat(keys, group, axis=0).reshape(H * d, 2 * D),
        f"{layer}k_proj.weight": keys.reshape(K * d, 2 * D),
        f"{layer}v_proj.weight": values,
        f"{layer}o_proj.weight": by_head.reshape(D, H * d),
        "layers.0.mlp.down_proj.weight": 0.1 * arrays["layers.0.mlp.down_proj.weight"],
        # States carry the weights of the target's norm already: this one gives them their size.
        "norm.weight": np.full((D,), np.sqrt(np.mean(following.astype(np.float64) ** 2))),
        "lm_head.weight": max(sure, 0.1) * arrays["lm_head.weight"],
    }


def _fit_eagle(
    config: HeadConfig, arrays: Arrays, calibration: Calibration, rng: np.random.Generator
) -> Arrays:
    """EAGLE-1: fc gives the guess of the next state, and the layer adds next to nothing."""
    parts = [calibration.embeddings.astype(np.float32), calibration.states.astype(np.float32)]
    if config.input_norms:
        parts = [_unit(x, config.model.rms_norm_eps) for x in parts]
    fc = ridge(np.concatenate(parts, axis=-1), calibration.following.astype(np.float32))
    small = {
        path: 0.1 * arrays[path]
        for path in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight")
    }
    return {"fc.weight": fc, **small}


def ridge(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """The matrix W [O, I] that makes outputs [n, O] of inputs [n, I] with the least squares, W itself included."""
    moments = inputs.T @ inputs
    moments[np.diag_indices_from(moments)] += _RIDGE * np.trace(moments) / len(moments)
    return np.linalg.solve(moments, inputs.T @ outputs).T


def _unit(x: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm without weights."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _host(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
