"""The optimizer of a run: clipping, AdamW and a learning rate over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from eagle_jax.training.config import OptimizerSection


def learning_rate(config: OptimizerSection, steps: int) -> optax.Schedule:
    """The learning rate at each update of a run of `steps`: up along a line, then as `config.schedule` says."""
    warmup = min(round(config.warmup_share * steps), steps - 1)
    peak, last = config.learning_rate, config.final_share * config.learning_rate
    rest = steps - warmup
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, config.final_share)
    elif config.schedule == "wsd":
        decay = max(1, round(config.decay_share * steps))
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, last, decay)], [max(rest - decay, 0)]
        )
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return after
    # The first update is not lost on a rate of zero.
    up = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([up, after], [warmup])


def make_optimizer(config: OptimizerSection, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; weights of norms and biases do not decay."""
    parts: list[Any] = []
    if config.clip_value is not None:
        parts.append(optax.clip(config.clip_value))
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    adamw = optax.adamw(
        learning_rate(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_decays,
    )
    return optax.chain(*parts, adamw)


def _decays(params: Mapping[str, Any]) -> dict[str, bool]:
    return {path: value.ndim > 1 for path, value in params.items()}
