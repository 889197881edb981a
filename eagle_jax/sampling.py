"""From logits to the target's own choice: penalties, truncation, noise that depends on the request alone.

A choice is argmax(log p + G): p the processed distribution, G Gumbel noise keyed by (seed, sample, index of
the token in prompt + output). That is a draw from p, and it is the same draw whatever was speculated, in
whatever batch or slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.draft_tree import DraftTree

SMALLEST_TEMPERATURE = 1e-5  # below it logits would overflow, and the choice is the best token anyway


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of every row of a batch.

    Attributes:
        temperature: 0, or too small to divide by, is greedy.
        top_p: 1 keeps everything.
        top_k: 0 keeps everything.
        min_p: 0 keeps everything.
        repetition_penalty: 1 changes nothing.
        seed, sample: what the noise is keyed with, beside the position.
        min_new_tokens, max_new_tokens: bounds of the answer's length.
        stop_ids: tokens that end the answer, padded with −1.
    """

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    seed: Int[Array, " B"]
    sample: Int[Array, " B"]
    min_new_tokens: Int[Array, " B"]
    max_new_tokens: Int[Array, " B"]
    stop_ids: Int[Array, "B E"]

    @property
    def greedy(self) -> Bool[Array, " B"]:
        """Rows that take the most probable token."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def truncates(self) -> Bool[Array, " B"]:
        """Sampled rows that cut the distribution."""
        return ~self.greedy & ((self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0))

    @property
    def divisor(self) -> Float[Array, " B"]:
        """What logits are divided with: 1 in greedy rows, whose order a temperature would not change."""
        return jnp.where(self.greedy, 1.0, self.temperature)

    def plain(self, generated: Int[Array, " B"]) -> Bool[Array, ""]:
        """Whether every row takes the best of the logits as they are, with so many output tokens."""
        return jnp.all(self.greedy & (self.repetition_penalty == 1.0) & (generated >= self.min_new_tokens))


def gumbel_noise(
    sampling: RowSampling, positions: Int[Array, "B D1"], vocab_size: int
) -> Float[Array, "B D1 V"]:
    """G for the tokens that will stand at `positions` of prompt + output; zeros in greedy rows.

    Costs nothing while the whole batch is greedy.
    """

    def draw(_):
        def one(seed, sample, position):
            key = jax.random.fold_in(
                jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), sample), position
            )
            return jax.random.gumbel(key, (vocab_size,), jnp.float32)

        noise = jax.vmap(jax.vmap(one, in_axes=(None, None, 0)))(sampling.seed, sampling.sample, positions)
        return jnp.where(sampling.greedy[:, None, None], 0.0, noise)

    shape = (*positions.shape, vocab_size)
    return jax.lax.cond(jnp.all(sampling.greedy), lambda _: jnp.zeros(shape, jnp.float32), draw, None)


def process(
    logits: Float[Array, "B N V"],
    tree: DraftTree,
    presence: Bool[Array, "B V"],
    generated: Int[Array, " B"],
    sampling: RowSampling,
) -> Float[Array, "B N V"]:
    """The logits that the choice at every node is made from, as log-probabilities up to a constant.

    In order: repetition penalty (a token counts as seen in the history or on the node's path, root and node
    included), minimum length (no stop token before it), temperature, min-p, top-k, top-p. Greedy rows skip
    the last three.

    Args:
        presence: tokens of prompt and output so far, the root included.
        generated: output tokens so far, the root included.
    """
    logits = jax.lax.cond(
        jnp.any(sampling.repetition_penalty != 1.0),
        lambda x: _penalize(x, sampling, presence[:, None, :] | _path_presence(tree, x.shape[-1])),
        lambda x: x,
        logits,
    )
    too_short = generated[:, None] + tree.depths < sampling.min_new_tokens[:, None]
    logits = jax.lax.cond(
        jnp.any(too_short), lambda x: _ban(x, sampling.stop_ids, too_short), lambda x: x, logits
    )
    return truncate(logits / sampling.divisor[:, None, None], sampling)


def process_draft(
    logits: Float[Array, "B F Vd"],
    token_ids: Int[Array, " Vd"] | None,
    presence: Bool[Array, "B V"],
    sampling: RowSampling,
) -> Float[Array, "B F Vd"]:
    """The draft's side of `process`: close to it, and free to differ, since no draft can change the output.

    The penalty sees the history only, not the path. `token_ids` maps the draft vocabulary to the target's.
    """

    def full(x):
        seen = presence if token_ids is None else jnp.take(presence, token_ids, axis=1, mode="clip")
        x = _penalize(x, sampling, jnp.broadcast_to(seen[:, None, :], x.shape))
        return _truncate(x / sampling.divisor[:, None, None], sampling)

    # One branch for all that is rarely asked for: this is compiled once for every level of a tree.
    return jax.lax.cond(
        jnp.any((sampling.repetition_penalty != 1.0) | sampling.truncates),
        full,
        lambda x: x / sampling.divisor[:, None, None],
        logits,
    )


def _penalize(logits, sampling, seen):
    penalty = sampling.repetition_penalty[:, None, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _path_presence(tree: DraftTree, vocab_size: int) -> Bool[Array, "B N V"]:
    def one(tokens, mask):
        nodes = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], mask.shape)
        return jnp.zeros((tokens.shape[0], vocab_size), bool).at[nodes, tokens[None, :]].max(mask)

    return jax.vmap(one)(tree.tokens, tree.mask)


def _ban(logits, stop_ids, where):
    vocabulary = jnp.arange(logits.shape[-1])
    banned = jnp.any(stop_ids[:, :, None] == vocabulary, axis=1)
    return jnp.where(where[:, :, None] & banned[:, None, :], -jnp.inf, logits)


def truncate(logits: Float[Array, "B N V"], sampling: RowSampling) -> Float[Array, "B N V"]:
    """Min-p, top-k and top-p on tempered logits: what falls out becomes −inf.

    Instead of sorting the vocabulary, the cut is found by bisection over the bit patterns of the probabilities: 31
    masked sums give the exact threshold. Tokens that tie with the last one kept are kept. Skipped when no row asks.
    """
    return jax.lax.cond(jnp.any(sampling.truncates), lambda x: _truncate(x, sampling), lambda x: x, logits)


def _truncate(logits, sampling):
    cut = sampling.truncates[:, None, None] & ~_kept(logits, sampling)
    return jnp.where(cut, -jnp.inf, logits)


def _kept(logits, sampling):
    probabilities = jax.nn.softmax(logits, axis=-1)
    top = jnp.max(probabilities, axis=-1)
    floor = sampling.min_p[:, None] * top
    probabilities = jnp.where(probabilities >= floor[..., None], probabilities, 0.0)

    top_k = sampling.top_k[:, None]
    by_rank = _threshold(probabilities, lambda kept: jnp.sum(kept, axis=-1) >= top_k)
    probabilities = jnp.where(
        (top_k > 0)[..., None] & (probabilities < by_rank[..., None]), 0.0, probabilities
    )

    wanted = sampling.top_p[:, None] * jnp.sum(probabilities, axis=-1)
    by_mass = _threshold(
        probabilities, lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= wanted
    )
    by_mass = jnp.where(sampling.top_p[:, None] < 1.0, by_mass, 0.0)
    return (probabilities > 0.0) & (probabilities >= jnp.minimum(by_mass, top)[..., None])


def _threshold(probabilities, enough):
    """The largest t for which the tokens with probability >= t are enough (0: not even all of them are)."""
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)  # ordered like the probabilities, all >= 0
    low = jnp.zeros(probabilities.shape[:-1], jnp.int32)
    high = jnp.full(probabilities.shape[:-1], np.float32(1.0000001).view(np.int32), jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        holds = enough(bits >= middle[..., None])
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
