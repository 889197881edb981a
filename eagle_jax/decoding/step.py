"""One step of speculative decoding: draft, verify, accept, commit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.caches.contiguous import after_reads, select_rows
from eagle_jax.decoding.state import DecodeState, Logprobs, emit, write_rows
from eagle_jax.decoding.verification import follow_target
from eagle_jax.draft_tree import DraftTree
from eagle_jax.drafters.protocol import Context, Drafter, Seen
from eagle_jax.models.decoder import Target
from eagle_jax.models.functional import Params
from eagle_jax.sampling import RowSampling, gumbel_noise, process


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeParams:
    """Parameters of the target and of the drafter."""

    target: Params
    drafter: Any


@dataclass(frozen=True)
class Decoding:
    """The static choices of a decoding loop; everything jitted closes over one.

    Attributes:
        target: the target's static half.
        drafter: the drafting method.
        num_logprobs: alternatives to report with each token; None: no log-probabilities at all.
    """

    target: Target
    drafter: Drafter
    num_logprobs: int | None = None


def step(spec: Decoding, params: DecodeParams, state: DecodeState, sampling: RowSampling) -> DecodeState:
    """Advances every running row by one verification step."""
    target, drafter = spec.target.bind(params.target), spec.drafter
    depth, active, start = drafter.max_depth, state.running, state.lengths - 1

    # Draft, with the noise that the target will choose with.
    noise = gumbel_noise(sampling, state.lengths[:, None] + jnp.arange(depth + 1), target.config.vocab_size)
    context = Context(state.history, state.lengths, sampling, noise, state.presence)
    drafter_state, tree = drafter.propose(params.drafter, state.drafter, context)

    # Verify: one pass over all nodes, which see the committed prefix and their ancestors.
    positions = start[:, None] + tree.depths
    out = target(tree.tokens, positions, state.cache, start, tree.mask, drafter.taps, state.prompt_lengths)
    logits = target.logits(out.hidden)
    choices = choose(logits, tree, noise, state, sampling)

    # Accept the path that follows the target's own choices; commit its rows and emit its tokens.
    accepted = follow_target(tree, choices, depth)
    cache = state.cache.commit(select_rows(out.rows, accepted.path), after_reads(start, choices[:, 0]))
    logprobs = token_logprobs(spec.num_logprobs, logits, accepted.path, accepted.tokens)
    state, emitted = emit(state, accepted.tokens, accepted.count, active, sampling, logprobs)

    # Let the drafter learn from what was kept.
    taps = jnp.take_along_axis(out.taps, accepted.path[:, :, None], axis=1)
    seen = Seen(state.history, start, accepted.count, taps, choices, tree)
    return replace(
        state,
        steps=state.steps + active,
        accept_lengths=write_rows(state.accept_lengths, emitted[:, None], state.steps),
        cache=cache,
        drafter=drafter.absorb(params.drafter, drafter_state, seen),
    )


def choose(
    logits: Float[Array, "B N V"],
    tree: DraftTree,
    noise: Float[Array, "B D1 V"],
    state: DecodeState,
    sampling: RowSampling,
) -> Int[Array, "B N"]:
    """The target's own choice at every node: argmax(log p + G), G = 0 in greedy rows."""

    def chosen(logits):
        scores = process(logits, tree, state.presence, state.generated, sampling)
        return _argmax(scores + jnp.take_along_axis(noise, tree.depths[:, :, None], axis=1))

    # Most batches are greedy and ask for nothing: theirs are the best logits, and no other pass over them is made.
    return jax.lax.cond(sampling.plain(state.generated), _argmax, chosen, logits)


def _argmax(scores: Float[Array, "B N V"]) -> Int[Array, "B N"]:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def token_logprobs(
    count: int | None, logits: Float[Array, "B N V"], path: Int[Array, "B D1"], tokens: Int[Array, "B D1"]
) -> Logprobs | None:
    """Log-probabilities of the raw logits for the tokens chosen along a path; None unless asked for."""
    if count is None:
        return None
    rows = jax.nn.log_softmax(jnp.take_along_axis(logits, path[:, :, None], axis=1), axis=-1)
    top, top_ids = jax.lax.top_k(rows, count)
    chosen = jnp.take_along_axis(rows, tokens[:, :, None], axis=2)[:, :, 0]
    return Logprobs(chosen, top_ids, top)


def prefill_chunk(
    spec: Decoding,
    params: DecodeParams,
    state: DecodeState,
    sampling: RowSampling,
    start: Int[Array, ""],
    size: int,
) -> DecodeState:
    """Takes in the prompts' tokens at [start, start + size); a row whose prompt ends there gets a token."""
    target, drafter = spec.target.bind(params.target), spec.drafter
    batch = state.history.shape[0]
    starts = jnp.full((batch,), start, jnp.int32)
    positions = starts[:, None] + jnp.arange(size)
    tokens = jnp.take_along_axis(state.history, positions, axis=1)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    out = target(tokens, positions, state.cache, starts, causal, drafter.taps, state.prompt_lengths)

    last = state.prompt_lengths - 1 - start
    ends: Bool[Array, " B"] = (last >= 0) & (last < size) & state.running
    index = jnp.clip(last, 0, size - 1)[:, None]
    logits = target.logits(jnp.take_along_axis(out.hidden, index[:, :, None], axis=1))
    root = DraftTree.root_only(jnp.take_along_axis(tokens, index, axis=1)[:, 0])
    noise = gumbel_noise(sampling, state.prompt_lengths[:, None], target.config.vocab_size)
    first = choose(logits, root, noise, state, sampling)
    logprobs = token_logprobs(spec.num_logprobs, logits, root.parents, first)
    state, _ = emit(state, first, jnp.ones((batch,), jnp.int32), ends, sampling, logprobs)

    count = jnp.clip(state.prompt_lengths - start, 0, size)
    seen = Seen(state.history, starts, count, out.taps)
    return replace(
        state,
        cache=state.cache.commit(out.rows, after_reads(starts, first[:, 0])),
        drafter=drafter.absorb(params.drafter, state.drafter, seen),
    )
