"""Plain decoding as a drafter: the tree of one node. The baseline is thus the same loop and step."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_jax.draft_tree import DraftTree
from eagle_jax.drafters.protocol import Context, Seen


@dataclass(frozen=True)
class NoDraft:
    """Proposes nothing."""

    taps: tuple[int, ...] = ()
    num_nodes: int = 1
    max_depth: int = 0

    def init_state(self, batch: int, capacity: int) -> tuple[()]:
        """No state."""
        return ()

    def state_axes(self) -> tuple[()]:
        """No state."""
        return ()

    def absorb(self, params: None, state: tuple[()], seen: Seen) -> tuple[()]:
        """Nothing to learn."""
        return state

    def propose(self, params: None, state: tuple[()], context: Context) -> tuple[tuple[()], DraftTree]:
        """The root alone."""
        return state, DraftTree.root_only(context.root)
