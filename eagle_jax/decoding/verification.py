"""Which part of a draft tree is what the target would have said: one rule for every drafter.

At every node the target has made its own choice; the path that follows these choices is accepted, and the
choice at its end is the next token. What is emitted are the target's choices, so no draft can change the
text.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eagle_jax.draft_tree import DraftTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """The accepted path of each sequence.

    Attributes:
        path: nodes by depth, the root first; entries from `count` on repeat the last accepted node.
        count: accepted nodes, the root included: 1 … D + 1. So many tokens are emitted.
        tokens: the target's choice at every node of the path: tokens[i] follows path[i].
    """

    path: Int[Array, "B D1"]
    count: Int[Array, " B"]
    tokens: Int[Array, "B D1"]


def follow_target(tree: DraftTree, choices: Int[Array, "B N"], max_depth: int) -> Accepted:
    """Descends from the root to the child that holds the target's choice, for as long as there is one.

    Args:
        choices: the target's choice at every node.
        max_depth: bound of the tree's depth.
    """
    wanted = jnp.take_along_axis(choices, tree.parents, axis=1)
    matches = (tree.tokens == wanted) & tree.valid & tree.candidate & (tree.depths > 0)
    nodes = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)

    node = jnp.zeros(tree.tokens.shape[:1], jnp.int32)
    visited, count = [node], jnp.ones_like(node)
    for depth in range(1, max_depth + 1):
        child = matches & (tree.parents == node[:, None]) & (tree.depths == depth)
        found = jnp.any(child, axis=1)
        # Siblings are distinct, so at most one child matches.
        node = jnp.where(found, jnp.max(jnp.where(child, nodes, 0), axis=1), node)
        visited.append(node)
        count = count + found
    path = jnp.stack(visited, axis=1)
    return Accepted(path, count, jnp.take_along_axis(choices, path, axis=1))
