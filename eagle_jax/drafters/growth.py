"""How a drafter that runs step by step grows a tree: static topologies and EAGLE-2's dynamic one.

Shared by every drafter with an autoregressive head. What the head is stays behind `Expand`.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.draft_tree import DraftTree, DynamicTree, StaticTree, Tree, ancestor_mask

Children = tuple[Float[Array, "B F C"], Int[Array, "B F C"]]  # log-scores, best first, and target token ids


Memory = Any  # the drafter's keys and values of uncommitted rows: `rows_run(tree)` of them


class Expand(Protocol):
    """Runs the head on the nodes of one level.

    Args:
        memory: keys and values of the rows run so far.
        level: 0 for the root's children.
        first_row: where this level's rows go in memory.
        tokens, hidden: the nodes' tokens, and the hidden states that their parents came out with.
        seen: the rows of memory that each node descends from.

    Returns:
        The memory with this level's rows, their new hidden states, and the best children of each.
    """

    def __call__(
        self,
        memory: Memory,
        level: int | Int[Array, ""],
        first_row: int | Int[Array, ""],
        tokens: Int[Array, "B F"],
        hidden: Float[Array, "B F D"],
        seen: Bool[Array, "B F R"],
    ) -> tuple[Memory, Float[Array, "B F D"], Children]:
        """See the class."""


def rows_run(tree: Tree) -> int:
    """How many rows of the head it takes to grow a tree: the nodes below the root that are expanded."""
    if isinstance(tree, DynamicTree):
        return tree.depth * tree.top_k
    return len(set(tree.parents) - {0})


def grow(
    tree: Tree,
    root: Int[Array, " B"],
    hidden: Float[Array, "B D"],
    first: Children,
    memory: Memory,
    expand: Expand,
) -> DraftTree:
    """Grows a tree under `root`.

    Args:
        hidden: the head's hidden state that `first` came from; the root's children are expanded with it.
        first: the root's best children, F = 1.
        memory: room for `rows_run(tree)` rows.
    """
    if isinstance(tree, StaticTree) and tree.is_chain:
        tree = DynamicTree(total_tokens=tree.num_nodes, depth=tree.max_depth - 1, top_k=1)
    if isinstance(tree, DynamicTree):
        return _grow_dynamic(tree, root, hidden, first, memory, expand)
    return _grow_static(tree, root, hidden, first, memory, expand)


def _grow_static(tree: StaticTree, root, hidden, first, memory, expand: Expand) -> DraftTree:
    B = root.shape[0]
    paths = [(), *tree.paths]
    parents = np.asarray(tree.parents, np.int32)
    depths = np.asarray([len(path) for path in paths], np.int32)
    nodes = range(len(paths))
    expanded = sorted(set(tree.parents) - {0})  # in the order in which their rows run, level by level

    node_token: dict[int, jax.Array] = {0: root}
    node_score: dict[int, jax.Array] = {}
    came_out = {0: hidden}

    def place_children(level: list[int], scores, tokens):
        for node in nodes:
            if node and parents[node] in level:
                row, rank = level.index(int(parents[node])), paths[node][-1]
                node_token[node] = tokens[:, row, rank]
                node_score[node] = scores[:, row, rank]

    place_children([0], *first)
    for depth in range(1, tree.max_depth):
        level = [node for node in expanded if depths[node] == depth]
        seen = np.asarray([[_above(other, node, parents) for other in expanded] for node in level])
        memory, out, (scores, tokens) = expand(
            memory,
            depth - 1,
            expanded.index(level[0]),
            jnp.stack([node_token[node] for node in level], axis=1),
            jnp.stack([came_out[int(parents[node])] for node in level], axis=1),
            jnp.broadcast_to(seen, (B, *seen.shape)),
        )
        came_out |= {node: out[:, row] for row, node in enumerate(level)}
        place_children(level, scores, tokens)

    shape = (B, len(paths))
    mask = np.asarray([[other == node or _above(other, node, parents) for other in nodes] for node in nodes])
    scores = jnp.stack([node_score[node] for node in nodes[1:]], axis=1)
    return DraftTree(
        tokens=jnp.stack([node_token[node] for node in nodes], axis=1),
        parents=jnp.broadcast_to(parents, shape),
        depths=jnp.broadcast_to(depths, shape),
        mask=jnp.broadcast_to(mask, (B, *mask.shape)),
        valid=jnp.concatenate([jnp.ones((B, 1), bool), scores > -jnp.inf], axis=1),
        candidate=jnp.ones(shape, bool),
    )


def _above(other: int, node: int, parents: np.ndarray) -> bool:
    """Whether `other` is a proper ancestor of `node`."""
    while node:
        node = int(parents[node])
        if node == other:
            return True
    return False


def _grow_dynamic(tree: DynamicTree, root, hidden, first, memory, expand: Expand) -> DraftTree:
    """EAGLE-2: scores are sums of log-probabilities in float32; ties go to the earlier node of the pool.

    The levels are alike, so they run as one scan: the head is traced and compiled once, however deep the tree.
    """
    B, k = root.shape[0], tree.top_k
    scores, tokens = (x[:, 0] for x in first)  # [B, k]
    memory_rows = jnp.arange(rows_run(tree))

    def run_level(carry, level):
        memory, scores, tokens, inputs, seen, frontier = carry
        memory, out, (child_scores, child_tokens) = expand(memory, level, level * k, tokens, inputs, seen)
        child_scores = (scores[:, :, None] + child_scores).reshape(B, k * k)
        child_tokens = child_tokens.reshape(B, k * k)
        grown = (child_scores, child_tokens, jnp.repeat(frontier, k, axis=1))

        scores, best = jax.lax.top_k(child_scores, k)
        row = best // k
        seen = seen | (memory_rows == level * k + jnp.arange(k)[:, None])
        carry = (
            memory,
            scores,
            jnp.take_along_axis(child_tokens, best, axis=1),
            jnp.take_along_axis(out, row[:, :, None], axis=1),
            jnp.take_along_axis(seen, row[:, :, None], axis=1),
            (k + level * k * k + best).astype(jnp.int32),
        )
        return carry, grown

    start = (
        memory,
        scores,
        tokens,
        jnp.broadcast_to(hidden[:, None], (B, k, hidden.shape[-1])),
        jnp.zeros((B, k, len(memory_rows)), bool),  # rows of memory that each frontier node descends from
        jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k)),  # its index in the pool
    )
    pool: tuple[Any, ...] = (scores, tokens, jnp.full((B, k), -1, jnp.int32))  # −1 is the root
    if tree.depth:  # a scan over no levels would still trace one
        _, grown = jax.lax.scan(run_level, start, jnp.arange(tree.depth, dtype=jnp.int32))
        pool = tuple(
            jnp.concatenate([top, jnp.moveaxis(levels, 0, 1).reshape(B, tree.depth * k * k)], axis=1)
            for top, levels in zip(pool, grown, strict=True)
        )
    pool_scores, pool_tokens, pool_parents = pool

    _, kept = jax.lax.top_k(pool_scores, tree.total_tokens - 1)
    kept = jnp.sort(kept, axis=1)
    pool_depths = np.concatenate([np.full(k, 1), np.repeat(np.arange(2, tree.depth + 2), k * k)])
    parent = jnp.take_along_axis(pool_parents, kept, axis=1)
    # A parent scores no less than its child and stands earlier in the pool, so it has been kept too.
    parents = jax.vmap(jnp.searchsorted)(kept, parent).astype(jnp.int32) + 1
    parents = jnp.where(parent < 0, 0, parents)

    zero = jnp.zeros((B, 1), jnp.int32)
    parents = jnp.concatenate([zero, parents], axis=1)
    valid = jnp.take_along_axis(pool_scores, kept, axis=1) > -jnp.inf
    valid = jnp.concatenate([zero == 0, valid], axis=1)
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], jnp.take_along_axis(pool_tokens, kept, axis=1)], axis=1),
        parents=parents,
        depths=jnp.concatenate([zero, jnp.take(pool_depths.astype(np.int32), kept)], axis=1),
        mask=ancestor_mask(parents, tree.max_depth),
        valid=valid,
        candidate=jnp.ones_like(valid),
    )
