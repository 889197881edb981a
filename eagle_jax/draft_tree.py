"""What drafters make and decoding verifies: a tree of draft tokens, static in shape, dynamic in topology.

Node 0 is the root: the last token that the target chose, not yet in its cache. A chain is a tree with one
child a node; no speculation is the tree of one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eagle_jax.errors import EagleError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTree:
    """One tree for each sequence of the batch.

    Attributes:
        tokens: token ids; siblings are distinct.
        parents: parents[i] < i; the root's is 0.
        depths: 0 for the root; the node's absolute position is the root's plus its depth.
        mask: mask[i, j] says that j is i or an ancestor of i.
        valid: false for padding; such a node is computed and never accepted.
        candidate: false for rows that a drafter has computed for its own use and that may not be accepted.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    mask: Bool[Array, "B N N"]
    valid: Bool[Array, "B N"]
    candidate: Bool[Array, "B N"]

    @classmethod
    def root_only(cls, tokens: Int[Array, " B"]) -> DraftTree:
        """The tree of plain decoding."""
        zeros = jnp.zeros((tokens.shape[0], 1), jnp.int32)
        ones = zeros == 0
        return cls(tokens[:, None], zeros, zeros, ones[:, :, None], ones, ones)


def ancestor_mask(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """mask[i, j]: j is i itself or an ancestor of i, for trees no deeper than `max_depth`."""
    nodes = jnp.arange(parents.shape[1])
    reached = jnp.broadcast_to(nodes, parents.shape)
    mask = reached[:, :, None] == nodes
    for _ in range(max_depth):
        reached = jnp.take_along_axis(parents, reached, axis=1)
        mask = mask | (reached[:, :, None] == nodes)
    return mask


class TreeError(EagleError):
    """A tree that cannot be built."""


@dataclass(frozen=True)
class StaticTree:
    """A fixed topology: a node is a path of ranks, [1, 0] the best child of the root's second-best child.

    Paths are kept sorted by length, then lexicographically; every prefix of a path must be a path too.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = tuple(sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path)))
        if () in paths or any(rank < 0 for path in paths for rank in path):
            raise TreeError(f"tree paths are non-empty lists of ranks >= 0, got {self.paths}")
        orphans = [path for path in paths if len(path) > 1 and path[:-1] not in paths]
        if orphans:
            raise TreeError(f"tree paths without their parent path: {orphans[:5]}; add the missing prefixes")
        object.__setattr__(self, "paths", paths)

    @classmethod
    def chain(cls, num_tokens: int) -> StaticTree:
        """The best child of the best child …, `num_tokens` deep."""
        return cls(tuple((0,) * length for length in range(1, num_tokens + 1)))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """The longest path."""
        return max(map(len, self.paths), default=0)

    @property
    def max_rank(self) -> int:
        """How many children of one node a drafter must rank."""
        return max((rank + 1 for path in self.paths for rank in path), default=0)

    @property
    def is_chain(self) -> bool:
        """One child a node, always the best."""
        return bool(self.paths) and all(set(path) == {0} for path in self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, root first."""
        index = {path: i + 1 for i, path in enumerate(self.paths)} | {(): 0}
        return (0, *(index[path[:-1]] for path in self.paths))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): grown by the draft's own confidence, then pruned to the best nodes.

    Attributes:
        total_tokens: nodes that are verified, the root included.
        depth: expansions after the root's children; depth + 1 drafts can be accepted.
        top_k: children of a node, and nodes expanded on each level.
    """

    total_tokens: int
    depth: int
    top_k: int

    def __post_init__(self) -> None:
        pool = self.top_k + self.depth * self.top_k**2
        if self.depth < 0 or self.top_k < 1 or not 1 <= self.total_tokens - 1 <= pool:
            raise TreeError(
                f"a dynamic tree of depth {self.depth} and top_k {self.top_k} grows {max(pool, 0)} drafts: "
                f"total_tokens (root included) must lie in [2, {max(pool, 0) + 1}], got {self.total_tokens}"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return self.total_tokens

    @property
    def max_depth(self) -> int:
        """The longest path."""
        return self.depth + 1

    @property
    def max_rank(self) -> int:
        """How many children of one node a drafter must rank."""
        return self.top_k


Tree = StaticTree | DynamicTree

# Published static trees, by the method that they belong to. EAGLE-1's for 7B models: 4/8/8/3/2 nodes a level.
_EAGLE_PATHS = {
    "mc_sim_7b_63": (
        "0 1 2 3 0-0 0-1 0-2 1-0 1-1 2-0 2-1 3-0 0-0-0 0-0-1 0-0-2 0-1-0 0-1-1 0-2-0 0-2-1 1-0-0 "
        "0-0-0-0 0-0-0-1 0-0-0-2 0-0-0-0-0 0-0-0-0-1"
    ),
}
NAMED_PATHS: dict[str, dict[str, str]] = {"eagle": _EAGLE_PATHS, "eagle3": _EAGLE_PATHS}


def named_paths(method: str, name: str) -> StaticTree:
    """A published static tree.

    Raises:
        TreeError: the method has none of that name.
    """
    known = NAMED_PATHS.get(method, {})
    if name not in known:
        raise TreeError(f"method {method!r} has no static tree {name!r}; known: {', '.join(known) or 'none'}")
    return StaticTree(tuple(tuple(map(int, path.split("-"))) for path in known[name].split()))
