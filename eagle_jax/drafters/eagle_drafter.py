"""Drafting with an EAGLE head of any generation: what `fuse`, layer and `logits` compute is its own affair.

The head's KV cache keeps only rows built from the target's own features: row p from f_p and t_{p+1}. With n
known tokens there are n − 1 of them, as many as the target's cache has. Rows of tree nodes live for one
`propose`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.caches.contiguous import ContiguousCache, after_reads
from eagle_jax.draft_tree import DraftTree, Tree
from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.growth import Children, grow, rows_run
from eagle_jax.drafters.head_config import HeadConfig
from eagle_jax.drafters.protocol import Context, Seen
from eagle_jax.models.attention import OverCache
from eagle_jax.models.functional import Functional, Params
from eagle_jax.models.layers import embed
from eagle_jax.sampling import process_draft

Head = EagleHead | Eagle3Head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleParams:
    """The head's own parameters, and the target's that it borrows.

    Attributes:
        head: by dotted path.
        embeddings: the target's; the head's own take precedence.
        output_weight: the target's language-model head; read by EAGLE-1 only.
    """

    head: Params
    embeddings: Float[Array, "V D"]
    output_weight: Float[Array, "V D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleState:
    """Stable rows, and the hidden state that came out of the last of them."""

    cache: ContiguousCache
    hidden: Float[Array, "B D"]


@dataclass(frozen=True)
class EagleDrafter:
    """Drafter protocol for EAGLE 1, 2, 3 and 3.1.

    Attributes:
        head: the head's static half.
        config: its configuration.
        tree: what to grow.
        coupled: draft with the target's own noise (see `rank`); off: rank by the draft's probabilities alone.
        dtype: of the head's cache.
    """

    head: Functional[Head]
    config: HeadConfig
    tree: Tree
    coupled: bool
    dtype: Any

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self.config.taps

    @property
    def num_nodes(self) -> int:
        """See `Drafter`."""
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
        """See `Drafter`."""
        return self.tree.max_depth

    def init_state(self, batch: int, capacity: int) -> EagleState:
        """See `Drafter`."""
        model = self.config.model
        cache = ContiguousCache.zeros(1, batch, model.num_kv_heads, capacity, model.head_dim, self.dtype)
        return EagleState(cache, jnp.zeros((batch, model.hidden_size), self.dtype))

    def state_axes(self) -> EagleState:
        """See `Drafter`."""
        rows = ("batch", "kv_heads", None, None)
        return EagleState(ContiguousCache((rows,), (rows,)), ("batch", None))  # type: ignore[arg-type]

    def absorb(self, params: EagleParams, state: EagleState, seen: Seen) -> EagleState:
        """Runs the head on the kept rows, from true features, and commits them."""
        head = self.head.bind(params.head)
        B, T, _ = seen.taps.shape
        positions = seen.start[:, None] + jnp.arange(T)
        tokens = jnp.take_along_axis(seen.history, positions + 1, axis=1, mode="clip")
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
        hidden, rows = head(
            self._embed(head, params, tokens),
            head.fuse(seen.taps),
            positions,
            OverCache(state.cache.layer(0), seen.start, causal, positions),
        )
        last = jnp.take_along_axis(hidden, jnp.maximum(seen.count - 1, 0)[:, None, None], axis=1)[:, 0]
        start = after_reads(seen.start, jnp.argmax(last, axis=-1).astype(jnp.int32))
        return EagleState(
            state.cache.commit([rows], start),
            jnp.where((seen.count > 0)[:, None], last, state.hidden),
        )

    def propose(
        self, params: EagleParams, state: EagleState, context: Context
    ) -> tuple[EagleState, DraftTree]:
        """Grows the tree, one pass of the head a level."""
        if self.tree.max_depth == 0:
            return state, DraftTree.root_only(context.root)
        head = self.head.bind(params.head)
        stable = context.lengths - 1
        B, model = stable.shape[0], self.config.model
        room = jnp.zeros((B, rows_run(self.tree), model.num_kv_heads, model.head_dim), self.dtype)

        def expand(memory, level, first_row, tokens, hidden, seen):
            F = tokens.shape[1]
            positions = jnp.broadcast_to((stable + level)[:, None], tokens.shape)
            mask = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(F, dtype=bool), (B, F, F))], axis=2)
            out, rows = head(
                self._embed(head, params, tokens),
                hidden,
                positions,
                OverCache(state.cache.layer(0), stable, mask, positions, earlier=memory),
            )
            memory = tuple(
                jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), first_row, axis=1)
                for buffer, new in zip(memory, rows, strict=True)
            )
            return memory, out, self._rank(head, params, out, context, depth=level + 1)

        first = self._rank(head, params, state.hidden[:, None], context, depth=0)
        return state, grow(self.tree, context.root, state.hidden, first, (room, room), expand)

    def _embed(self, head: Head, params: EagleParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        if head.embed_tokens is not None:
            return head.embed_tokens(tokens)
        return embed(params.embeddings, tokens)

    def _rank(
        self, head: Head, params: EagleParams, hidden: Float[Array, "B F D"], context: Context, depth: Any
    ) -> Children:
        """The best children of nodes at `depth`, by log-softmax(log q + G).

        G is the noise that the target will choose with at these nodes, so the children are those that it is
        likely to choose *given* that noise (coupled drafts: arXiv 2408.07978). In greedy rows G = 0 and this
        is log q.
        """
        token_ids = head.token_ids() if isinstance(head, Eagle3Head) else None
        logits = process_draft(
            head.logits(hidden, params.output_weight), token_ids, context.presence, context.sampling
        )
        if self.coupled:
            noise = jax.lax.dynamic_index_in_dim(context.noise, depth, axis=1, keepdims=False)
            logits = (
                logits
                + (noise if token_ids is None else jnp.take(noise, token_ids, axis=1, mode="clip"))[
                    :, None, :
                ]
            )
        best, ids = jax.lax.top_k(logits, self.tree.max_rank)
        scores = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return scores, ids if token_ids is None else jnp.take(token_ids, ids, mode="clip")
