"""What a head is taught with: losses between the target's and the draft's distributions, and EAGLE-1's regression.

The vocabulary is large and the sequence long, so logits exist for a few rows at a time only: a scan over target rows
computes the target's logits of each once, and those of every step of the training-time test that predicts the token
after it. Softmax and sums are float32 whatever the weights are kept in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LossKind = Literal["forward_kl", "lk_alpha", "lk_lambda"]
MaskAlignment = Literal["both", "next", "slot"]
Denominator = Literal["supervised", "all"]

_TINY = 1e-6  # overlap below which its logarithm is cut off
_ELEMENTS = 2**26  # logits that exist at once


@dataclass(frozen=True)
class Objective:
    """The choices in which trainers differ; the defaults are this library's.

    Attributes:
        kind: `forward_kl` (soft cross-entropy), or the LK losses of arXiv 2602.23881, which raise the acceptance rate
            a = sum(min(p, q)) itself: `lk_alpha` is -log a; `lk_lambda` is w * KL + (1 - w) * (1 - a) with
            w = exp(-lk_decay * a) held fixed.
        step_decay: weight of step i is step_decay ** i.
        mask_alignment: slot p sees the token at p + 1 and predicts the one at p + 2. It counts when both are
            supervised (`both`), when the one at p + 1 is (`next`), or when that at p is (`slot`, as in EAGLE's code).
        denominator: losses are means over the rows that the mask lets count, or over all rows (EAGLE's code).
        count_last_row: also count the row after the last token, whose target logits are zeros (EAGLE's code).
    """

    kind: LossKind = "forward_kl"
    step_decay: float = 0.8
    lk_decay: float = 3.0
    mask_alignment: MaskAlignment = "both"
    denominator: Denominator = "supervised"
    count_last_row: bool = False

    @classmethod
    def of_reference(cls) -> Objective:
        """EAGLE-3's own training code, to compare with it."""
        return cls(mask_alignment="slot", denominator="all", count_last_row=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over rows, one for each step; of several batches they add up.

    Attributes:
        loss: of the rows' losses.
        correct: rows whose best draft token is the target's best.
        accepted: of the rows' acceptance rates, sum(min(p, q)) over the draft vocabulary.
        rows: rows that the mask lets count. Those whose best target token is outside the draft vocabulary are
            among them: they carry no loss and are never correct.
        prefix: slots that count in every step up to this one and were right in all of them.
        slots: slots that count in every step up to this one.
    """

    loss: Float[Array, " n"]
    correct: Float[Array, " n"]
    accepted: Float[Array, " n"]
    rows: Float[Array, " n"]
    prefix: Float[Array, " n"]
    slots: Float[Array, " n"]


def supervised(
    mask: Bool[Array, "B T"], segments: Int[Array, "B T"], length: int, objective: Objective
) -> Bool[Array, "n B T"]:
    """Whether slot p counts in step i, at [i, :, j] with j = p + i: the row of the target that teaches it is j + 1."""
    T = mask.shape[1]
    index = jnp.arange(T)

    def ahead(x, by):
        return jnp.pad(x[:, by:], ((0, 0), (0, by)))

    counts = {
        "both": ahead(mask, 1) & ahead(mask, 2) & (ahead(segments, 2) == segments),
        "next": ahead(mask, 1),
        "slot": mask,
    }[objective.mask_alignment]
    if not objective.count_last_row:
        counts &= (index < T - 1) & (ahead(segments, 1) == segments)
    steps = []
    for i in range(length):
        # The slot where the draft began belongs to the same document.
        began = jnp.pad(segments[:, : T - i], ((0, 0), (min(i, T), 0)), constant_values=-1) if i < T else None
        same = jnp.zeros_like(counts) if began is None else (began == segments) & (index >= i)
        steps.append(counts & same)
    return jnp.stack(steps)


def distillation(
    outputs: Sequence[Float[Array, "B T D"]],
    draft_weight: Float[Array, "Vd D"],
    hidden: Float[Array, "B T Dt"],
    target_weight: Float[Array, "V Dt"],
    token_ids: Int[Array, " Vd"] | None,
    counts: Bool[Array, "n B T"],
    objective: Objective,
) -> Sums:
    """Sums of losses and metrics of every step.

    Args:
        outputs: what the draft's logits are made from, of every step: normed states, float.
        draft_weight: the draft's language-model head.
        hidden: the target's states after its final norm.
        target_weight: the target's language-model head.
        token_ids: the target's id of every draft id; None: one vocabulary.
        counts: see `supervised`.
    """
    n, B, T = counts.shape
    V, Vd = target_weight.shape[0], draft_weight.shape[0]
    rows = max(1, min(B * T, _ELEMENTS // (V + n * Vd)))
    chunks = -(-B * T // rows)

    # Row j of the target teaches with the logits at j + 1: the state there, zeros after the last one.
    ahead = jnp.pad(hidden[:, 1:], ((0, 0), (0, 1), (0, 0)))
    ahead = jax.lax.stop_gradient(ahead)
    # Slot p in step i is taught by row p + i.
    aligned = jnp.stack([jnp.pad(x[:, : T - i], ((0, 0), (i, 0), (0, 0))) for i, x in enumerate(outputs)])

    def split(x, axis):  # rows of all sequences, in chunks in front
        shape = (*x.shape[:axis], B * T, *x.shape[axis + 2 :])
        x = jnp.pad(
            x.reshape(shape), [(0, chunks * rows - B * T if a == axis else 0) for a in range(x.ndim - 1)]
        )
        return jnp.moveaxis(x.reshape(*shape[:axis], chunks, rows, *shape[axis + 1 :]), axis, 0)

    def body(carry, chunk):
        state, taught, count = chunk
        results = _chunk_losses(state, draft_weight, taught, target_weight, token_ids, count, objective)
        loss, correct, accepted = results
        return (carry[0] + loss.sum(axis=1), carry[1] + accepted.sum(axis=1)), correct

    zeros = jnp.zeros((n,), jnp.float32)
    (loss, accepted), correct = jax.lax.scan(
        jax.checkpoint(body), (zeros, zeros), (split(aligned, 1), split(ahead, 0), split(counts, 1))
    )
    correct = jnp.moveaxis(correct, 1, 0).reshape(n, -1)[:, : B * T].reshape(n, B, T)

    # By slot: step i of slot p is at row p + i.
    right, live = jnp.ones((B, T), bool), jnp.ones((B, T), bool)
    prefix, slots = [], []
    for i in range(n):
        right = right & jnp.pad(correct[i][:, i:], ((0, 0), (0, min(i, T))))
        live = live & jnp.pad(counts[i][:, i:], ((0, 0), (0, min(i, T))))
        prefix.append(jnp.sum(right & live, dtype=jnp.float32))
        slots.append(jnp.sum(live, dtype=jnp.float32))
    return Sums(
        loss,
        correct.sum(axis=(1, 2), dtype=jnp.float32),
        accepted,
        counts.sum(axis=(1, 2), dtype=jnp.float32),
        jnp.stack(prefix),
        jnp.stack(slots),
    )


def _chunk_losses(outputs, draft_weight, hidden, target_weight, token_ids, counts, objective):
    """Losses, hits and acceptance rates [n, R] of R rows; zero where a row does not count."""
    target = _logits(hidden, target_weight)  # [R, V]
    best = jnp.argmax(target, axis=-1)
    if token_ids is None:
        known, restricted = jnp.ones_like(best, bool), target
    else:
        known = jnp.isin(best, token_ids)
        restricted = jnp.take(target, token_ids, axis=-1, mode="clip")
    log_p = jax.nn.log_softmax(restricted, axis=-1)
    p = jnp.exp(log_p)

    draft = _logits(outputs, draft_weight)  # [n, R, Vd]
    log_q = jax.nn.log_softmax(draft, axis=-1)
    choice = jnp.argmax(draft, axis=-1)
    choice = choice if token_ids is None else jnp.take(token_ids, choice, mode="clip")
    overlap = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    if objective.kind == "forward_kl":
        loss = -jnp.sum(p * log_q, axis=-1)
    elif objective.kind == "lk_alpha":
        loss = -jnp.log(jnp.maximum(overlap, _TINY))
    else:
        weight = jnp.exp(-objective.lk_decay * jax.lax.stop_gradient(overlap))
        divergence = jnp.sum(p * (log_p - log_q), axis=-1)
        loss = weight * divergence + (1 - weight) * (1 - overlap)
    carries = counts & known
    return (
        jnp.where(carries, loss, 0.0),
        carries & (choice == best),
        jnp.where(carries, jax.lax.stop_gradient(overlap), 0.0),
    )


def _logits(states, weight):
    return jax.lax.dot_general(
        states, weight, (((states.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def total(
    sums: Sums, rows: Float[Array, " n"], all_rows: Float[Array, ""] | float, objective: Objective
) -> Float[Array, ""]:
    """The loss: the steps' means, weighed.

    Args:
        rows: rows that count in each step, `Sums.rows`, of everything that makes one update.
        all_rows: all rows of that; `objective.denominator` says which of the two divides.
    """
    weights = objective.step_decay ** jnp.arange(sums.loss.shape[0])
    divisor = jnp.maximum(rows, 1.0) if objective.denominator == "supervised" else all_rows
    return jnp.sum(weights * sums.loss / divisor)


def feature_regression(
    predicted: Float[Array, "B T D"], hidden: Float[Array, "B T D"], counts: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """EAGLE-1's regression (arXiv 2401.15077): the sum over rows of the smooth L1 distance, a mean over features.

    Args:
        predicted: the head's output at slot p, its guess of the target's state at p + 1.
        hidden: the target's states after its final norm.
        counts: `supervised(...)[0]`.
    """
    ahead = jax.lax.stop_gradient(jnp.pad(hidden[:, 1:], ((0, 0), (0, 1), (0, 0)))).astype(jnp.float32)
    distance = jnp.abs(predicted.astype(jnp.float32) - ahead)
    smooth = jnp.where(distance < 1.0, 0.5 * distance**2, distance - 0.5)
    return jnp.sum(jnp.where(counts, jnp.mean(smooth, axis=-1), 0.0))


def feature_noise(key: Array, features: Float[Array, "B T D"], scale: float = 0.2) -> Float[Array, "B T D"]:
    """Features with uniform noise, as wide as EAGLE-1 makes it: `scale` at 512 tokens, less for longer sequences."""
    noise = jax.random.uniform(key, features.shape, jnp.float32, -0.5, 0.5) * (
        scale * 512 / features.shape[1]
    )
    return (features + noise).astype(features.dtype)
