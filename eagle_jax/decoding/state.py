"""Everything that a batch of sequences carries from step to step, on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.sampling import RowSampling

RUNNING, STOPPED, LENGTH, CANCELLED = 0, 1, 2, 3  # values of `DecodeState.finish`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the raw logits: of the chosen tokens, and the k best.

    The second axis is the token's absolute position in a `DecodeState`, its place in the step in a step's result.
    """

    chosen: Float[Array, "B S"]
    top_ids: Int[Array, "B S k"]
    top: Float[Array, "B S k"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """One batch of B sequences with room for S tokens each.

    Attributes:
        history: prompt and output; positions from `lengths` on are meaningless.
        prompt_lengths: tokens of the prompt.
        lengths: known tokens. The last is the root of the next tree: chosen, but not yet in the target's
            cache, which thus holds lengths − 1 rows.
        finish: why a row ended; RUNNING while it has not.
        steps: verification steps of each row while it ran.
        accept_lengths: tokens emitted by each of these steps, after all cuts.
        drafted: whether the token at a position was an accepted draft (else the target's own next token).
        presence: tokens of the history, for penalties.
        cache: the target's.
        drafter: the drafter's own state.
        logprobs: present when asked for.
    """

    history: Int[Array, "B S"]
    prompt_lengths: Int[Array, " B"]
    lengths: Int[Array, " B"]
    finish: Int[Array, " B"]
    steps: Int[Array, " B"]
    accept_lengths: Int[Array, "B S"]
    drafted: Bool[Array, "B S"]
    presence: Bool[Array, "B V"]
    cache: ContiguousCache
    drafter: Any
    logprobs: Logprobs | None

    @property
    def running(self) -> Bool[Array, " B"]:
        """Rows that have not ended."""
        return self.finish == RUNNING

    @property
    def generated(self) -> Int[Array, " B"]:
        """Output tokens so far."""
        return self.lengths - self.prompt_lengths


def emit(
    state: DecodeState,
    tokens: Int[Array, "B D1"],
    count: Int[Array, " B"],
    active: Bool[Array, " B"],
    sampling: RowSampling,
    logprobs: Logprobs | None = None,
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Appends up to `count` tokens to the active rows, cut at the first stop token and at the maximum length.

    Returns:
        The state, and how many tokens each row has got.
    """
    index = jnp.arange(tokens.shape[1])
    stops = jnp.any(tokens[:, :, None] == sampling.stop_ids[:, None, :], axis=2)
    full = state.generated[:, None] + index + 1 >= sampling.max_new_tokens[:, None]
    ends = (stops | full) & (index < count[:, None])
    ended = jnp.any(ends, axis=1) & active
    last = jnp.argmax(ends, axis=1).astype(jnp.int32)
    emitted = jnp.where(active, jnp.where(ended, last + 1, count), 0)
    stopped = jnp.take_along_axis(stops, last[:, None], axis=1)[:, 0]
    finish = jnp.where(ended, jnp.where(stopped, STOPPED, LENGTH), state.finish).astype(state.finish.dtype)

    kept = index < emitted[:, None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    drafted = jnp.broadcast_to(index + 1 < count[:, None], tokens.shape)
    if logprobs is not None and state.logprobs is not None:
        written = jax.tree.map(
            lambda buffer, new: write_rows(buffer, new, state.lengths), state.logprobs, logprobs
        )
    else:
        written = state.logprobs
    return (
        replace(
            state,
            history=write_rows(state.history, tokens, state.lengths),
            lengths=state.lengths + emitted,
            finish=finish,
            drafted=write_rows(state.drafted, drafted, state.lengths),
            presence=state.presence.at[rows, tokens].max(kept, mode="drop"),
            logprobs=written,
        ),
        emitted,
    )


def write_rows(
    buffer: Float[Array, "B S *x"], new: Float[Array, "B T *x"], start: Int[Array, " B"]
) -> Float[Array, "B S *x"]:
    """Writes T entries at `start` of every row."""

    def one(b, n, s):
        return jax.lax.dynamic_update_slice(b, n.astype(b.dtype), (s, *([0] * (b.ndim - 1))))

    return jax.vmap(one)(buffer, new, start)
