"""EAGLE heads in float64 numpy, as short as they can be written: one sequence, and two lists as a cache."""

from __future__ import annotations

import numpy as np


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
    """Pairs (i, i + d/2) of x [T, heads, d]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)],
        -1,
    )


class NumpyHead:
    """A head with four heads and two KV heads; EAGLE-3 if it has a hidden_norm, else EAGLE-1.

    Args:
        tensors: under the names of released checkpoints, layer in `layers.0.`.
        target_embeddings, target_output: used where the head brings none.
    """

    heads, kv_heads = 4, 2

    def __init__(
        self,
        tensors,
        target_embeddings,
        target_output,
        theta=10000.0,
        fc_norm=False,
        norm_output=False,
        norm_before_fc=False,
        norm_before_residual=False,
    ):
        self.w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.embeddings = self.w.get("embed_tokens.weight", target_embeddings.astype(np.float64))
        self.target_output = target_output.astype(np.float64)
        self.theta, self.fc_norm, self.norm_output = theta, fc_norm, norm_output
        self.norm_before_fc, self.norm_before_residual = norm_before_fc, norm_before_residual
        self.keys, self.values = [], []

    def fuse(self, states):
        states = states.astype(np.float64)
        if "layers.0.hidden_norm.weight" not in self.w:
            return states
        if self.norm_before_fc:
            states = rms_norm(states, self.w["input_norm.weight"])
        if self.fc_norm:
            parts = np.split(states, 3, axis=-1)
            states = np.concatenate(
                [rms_norm(x, self.w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1
            )
        return states @ self.w["fc.weight"].T

    def step(self, tokens, features):
        """What is fed back, and the logits, of rows that follow all rows so far."""
        embedded = self.embeddings[tokens]
        if "layers.0.hidden_norm.weight" in self.w:
            normed = rms_norm(features, self.w["layers.0.hidden_norm.weight"])
            x = np.concatenate([rms_norm(embedded, self.w["layers.0.input_layernorm.weight"]), normed], -1)
            out = self.layer(x, normed if self.norm_before_residual else features)
            last = rms_norm(out, self.w["norm.weight"])
            return last if self.norm_output else out, last @ self.w["lm_head.weight"].T
        if "embedding_layernorm.weight" in self.w:
            embedded = rms_norm(embedded, self.w["embedding_layernorm.weight"])
            features = rms_norm(features, self.w["hidden_states_layernorm.weight"])
        x = np.concatenate([embedded, features], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)
        out = self.layer(x, x)
        return out, out @ self.target_output.T

    def layer(self, x, residual):
        x = residual + self.attend(x)
        normed = rms_norm(x, self.w["layers.0.post_attention_layernorm.weight"])
        gate, up, down = (self.w[f"layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        gated = normed @ gate.T
        return x + (gated / (1 + np.exp(-gated)) * (normed @ up.T)) @ down.T

    def attend(self, x):
        begin = len(self.keys)
        positions = begin + np.arange(len(x))
        q, k, v = (
            self.project(x, name, heads)
            for name, heads in zip("qkv", (self.heads, *[self.kv_heads] * 2), strict=True)
        )
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        self.keys += list(k)
        self.values += list(v)
        groups = self.heads // self.kv_heads
        keys, values = (np.repeat(rows, groups, axis=1) for rows in (self.keys, self.values))
        scores = np.einsum("thd,shd->hts", q, keys) / np.sqrt(q.shape[-1])
        scores = np.where(np.arange(len(keys)) <= positions[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), values)
        return mixed.reshape(len(x), -1) @ self.w["layers.0.self_attn.o_proj.weight"].T

    def project(self, x, name, heads):
        at = "layers.0.self_attn."
        y = x @ self.w[f"{at}{name}_proj.weight"].T + self.w.get(f"{at}{name}_proj.bias", 0)
        y = y.reshape(len(x), heads, -1)
        norm = self.w.get(f"{at}{name}_norm.weight")
        return y if norm is None else rms_norm(y, norm)
