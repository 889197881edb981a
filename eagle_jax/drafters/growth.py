"""How a drafter that runs step by step grows a tree: static topologies and EAGLE-2's dynamic one.

Shared by every drafter with an autoregressive head. What the head is stays behind `Expand`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.draft_tree import DraftTree, DynamicTree, StaticTree, Tree, ancestor_mask

Children = tuple[Float[Array, "B F C"], Int[Array, "B F C"]]  # log-scores, best first, and target token ids


class Expand(Protocol):
    """Runs the head on the nodes of one level.

    A call with level i is the i-th; its mask's last axis spans the rows of all calls so far, its own at the
    end. Returns the head's new hidden states and the best children of every row.
    """

    def __call__(
        self, level: int, tokens: Int[Array, "B F"], hidden: Float[Array, "B F D"], mask: Bool[Array, "B F E"]
    ) -> tuple[Float[Array, "B F D"], Children]:
        """New hidden states and children of the nodes `tokens`, whose parents came out with `hidden`."""


def grow(
    tree: Tree, root: Int[Array, " B"], hidden: Float[Array, "B D"], first: Children, expand: Expand
) -> DraftTree:
    """Grows a tree under `root`.

    Args:
        hidden: the head's hidden state that `first` came from; the root's children are expanded with it.
        first: the root's best children, F = 1.
    """
    if isinstance(tree, DynamicTree):
        return _grow_dynamic(tree, root, hidden, first, expand)
    return _grow_static(tree, root, hidden, first, expand)


def _grow_static(tree: StaticTree, root, hidden, first, expand: Callable) -> DraftTree:
    B = root.shape[0]
    paths = [(), *tree.paths]
    parents = np.asarray(tree.parents, np.int32)
    depths = np.asarray([len(path) for path in paths], np.int32)
    has_children = set(parents[1:].tolist())

    node_token: dict[int, jax.Array] = {0: root}
    node_score: dict[int, jax.Array] = {}
    # Rows run so far (non-root nodes with children, level by level) and the hidden state that each came out
    # with.
    rows: list[int] = []
    inputs = {0: hidden}

    def place_children(expanded: list[int], scores, tokens):
        for node, path in enumerate(paths):
            if node and parents[node] in expanded:
                row = expanded.index(int(parents[node]))
                node_token[node] = tokens[:, row, path[-1]]
                node_score[node] = scores[:, row, path[-1]]

    place_children([0], *first)
    for depth in range(1, tree.max_depth):
        level = [n for n in range(len(paths)) if depths[n] == depth and n in has_children]
        rows += level
        mask = np.asarray([[other == n or _above(other, n, parents) for other in rows] for n in level])
        out, (scores, tokens) = expand(
            depth - 1,
            jnp.stack([node_token[n] for n in level], axis=1),
            jnp.stack([inputs[int(parents[n])] for n in level], axis=1),
            jnp.broadcast_to(mask, (B, *mask.shape)),
        )
        inputs |= {n: out[:, i] for i, n in enumerate(level)}
        place_children(level, scores, tokens)

    tokens = jnp.stack([node_token[n] for n in range(len(paths))], axis=1)
    shape = (B, len(paths))
    full_mask = np.asarray(
        [[other == n or _above(other, n, parents) for other in range(len(paths))] for n in range(len(paths))]
    )
    reachable = jnp.ones((B, 1), bool)
    if node_score:
        finite = jnp.stack([node_score[n] for n in range(1, len(paths))], axis=1) > -jnp.inf
        reachable = jnp.concatenate([reachable, finite], axis=1)
    return DraftTree(
        tokens=tokens,
        parents=jnp.broadcast_to(parents, shape),
        depths=jnp.broadcast_to(depths, shape),
        mask=jnp.broadcast_to(full_mask, (B, *full_mask.shape)),
        valid=reachable,
        candidate=jnp.ones(shape, bool),
    )


def _above(other: int, node: int, parents: np.ndarray) -> bool:
    """Whether `other` is a proper ancestor of `node`."""
    while node:
        node = int(parents[node])
        if node == other:
            return True
    return False


def _grow_dynamic(tree: DynamicTree, root, hidden, first, expand: Callable) -> DraftTree:
    """EAGLE-2: scores are sums of log-probabilities in float32; ties go to the earlier node of the pool."""
    B, k = root.shape[0], tree.top_k
    scores, tokens = (x[:, 0] for x in first)  # [B, k]
    pool_scores, pool_tokens = [scores], [tokens]
    pool_parents = [jnp.full((B, k), -1, jnp.int32)]  # −1 is the root

    frontier = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))  # indices into the pool
    inputs = jnp.broadcast_to(hidden[:, None], (B, k, hidden.shape[-1]))
    own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (B, k, k))
    seen = own[:, :, :0]  # which rows of earlier levels each frontier node descends from
    for level in range(tree.depth):
        mask = jnp.concatenate([seen, own], axis=2)
        out, (child_scores, child_tokens) = expand(level, tokens, inputs, mask)
        child_scores = (scores[:, :, None] + child_scores).reshape(B, k * k)
        pool_scores.append(child_scores)
        pool_tokens.append(child_tokens.reshape(B, k * k))
        pool_parents.append(jnp.repeat(frontier, k, axis=1))
        if level + 1 < tree.depth:
            scores, best = jax.lax.top_k(child_scores, k)
            tokens = jnp.take_along_axis(pool_tokens[-1], best, axis=1)
            row = best // k
            inputs = jnp.take_along_axis(out, row[:, :, None], axis=1)
            seen = jnp.take_along_axis(mask, row[:, :, None], axis=1)
            frontier = (k + level * k * k + best).astype(jnp.int32)

    all_scores = jnp.concatenate(pool_scores, axis=1)
    _, kept = jax.lax.top_k(all_scores, tree.total_tokens - 1)
    kept = jnp.sort(kept, axis=1)
    pool_depths = np.concatenate([np.full(k, 1), np.repeat(np.arange(2, tree.depth + 2), k * k)]).astype(
        np.int32
    )
    parent = jnp.take_along_axis(jnp.concatenate(pool_parents, axis=1), kept, axis=1)
    # A parent scores no less than its child and stands earlier in the pool, so it has been kept too.
    parents = jax.vmap(jnp.searchsorted)(kept, parent).astype(jnp.int32) + 1
    parents = jnp.where(parent < 0, 0, parents)
    kept_scores = jnp.take_along_axis(all_scores, kept, axis=1)
    kept_tokens = jnp.take_along_axis(jnp.concatenate(pool_tokens, axis=1), kept, axis=1)

    zero = jnp.zeros((B, 1), jnp.int32)
    parents = jnp.concatenate([zero, parents], axis=1)
    valid = jnp.concatenate([zero == 0, kept_scores > -jnp.inf], axis=1)
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], kept_tokens], axis=1),
        parents=parents,
        depths=jnp.concatenate([zero, jnp.take(pool_depths, kept)], axis=1),
        mask=ancestor_mask(parents, tree.max_depth),
        valid=valid,
        candidate=jnp.ones_like(valid),
    )
