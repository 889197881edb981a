"""What a drafting method is: two pure functions over a state pytree. A new method is one file that has them.

Verification, caches, engine and benchmark know nothing else about a method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.draft_tree import DraftTree
from eagle_jax.sampling import RowSampling

State = Any  # a drafter's own pytree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What the target has just computed and kept: a prefill chunk or the accepted path of a tree.

    Attributes:
        history: all known tokens of each sequence; those at positions (start, start + count] follow the kept
            rows.
        start: position of the first kept row.
        count: kept rows of each sequence (0: none, as in a chunk past the end of a shorter prompt).
        taps: the hidden states that the drafter asked for, at positions start … start + T − 1; rows past
            `count` are meaningless.
        choices: the target's choice at every node of the tree just verified; None after a prefill chunk.
        tree: that tree; None after a prefill chunk.
    """

    history: Int[Array, "B S"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    taps: Float[Array, "B T M"]
    choices: Int[Array, "B N"] | None = None
    tree: DraftTree | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Where drafting starts, and the randomness that the target will use.

    Attributes:
        history: all known tokens; the root is the last of them.
        lengths: number of known tokens, root included.
        sampling: the rows' sampling parameters.
        noise: noise[:, d] is the Gumbel noise of the choice made at a node of depth d; zeros in greedy rows.
        presence: tokens of the history, for penalties.
    """

    history: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    sampling: RowSampling
    noise: Float[Array, "B D1 V"]
    presence: Bool[Array, "B V"]

    @property
    def root(self) -> Int[Array, " B"]:
        """The last known token of each sequence."""
        return jnp.take_along_axis(self.history, self.lengths[:, None] - 1, axis=1)[:, 0]


class Drafter(Protocol):
    """A method bound to its static choices (head, tree). Hashable, for jitted functions to close over."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that `absorb` reads, in `Decoder`'s numbering."""

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree that `propose` returns, the root included."""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node that `propose` can return."""

    def init_state(self, batch: int, capacity: int) -> State:
        """State before anything is seen, for sequences of at most `capacity` tokens."""

    def state_axes(self) -> State:
        """`init_state`'s pytree with the logical axes of each leaf in its place."""

    def absorb(self, params: Any, state: State, seen: Seen) -> State:
        """Takes in what the target has kept; the same for prefill chunks and for steps."""

    def propose(self, params: Any, state: State, context: Context) -> tuple[State, DraftTree]:
        """Drafts a tree under the last known token."""
