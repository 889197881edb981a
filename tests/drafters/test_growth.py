"""Trees grown from made-up scores: what every tree must satisfy, ties, and trees that cannot be."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.draft_tree import DynamicTree, StaticTree, TreeError, named_paths
from eagle_jax.drafters.growth import grow, rows_run

ROOTS = [7, 8, 9]
B, VOCAB = len(ROOTS), 40
TREES = [
    DynamicTree(total_tokens=16, depth=3, top_k=4),
    DynamicTree(total_tokens=24, depth=6, top_k=3),
    DynamicTree(total_tokens=6, depth=4, top_k=1),
    DynamicTree(total_tokens=5, depth=0, top_k=4),
    DynamicTree(total_tokens=2, depth=2, top_k=3),
    DynamicTree(total_tokens=4 + 2 * 16 + 1, depth=2, top_k=4),  # all that is grown
    StaticTree.chain(5),
    StaticTree(((0,), (1,), (1, 0), (1, 2), (1, 2, 1))),
    named_paths("eagle", "mc_sim_7b_63"),
]


def name_of(tree):
    if isinstance(tree, DynamicTree):
        return f"dynamic-{tree.total_tokens}-{tree.depth}-{tree.top_k}"
    return f"static-{tree.num_nodes}"


class MadeUp:
    """Children from tables; keeps what it was asked for.

    A hidden state says which node came out with it: its token and its depth. The memory holds tokens.
    """

    def __init__(self, tree, seed=0, step=0.0, barren=0.0):
        rng, C = np.random.default_rng(seed), tree.max_rank
        levels, rows = tree.max_depth, max(Counter(map(len, getattr(tree, "paths", ()))).values(), default=C)
        shape = (levels, B, max(rows, C), C)
        order = np.argsort(rng.random((*shape[:-1], VOCAB)), axis=-1)
        self.tokens = order[..., :C].astype(np.int32)
        scores = -np.sort(rng.exponential(1.0, shape), axis=-1)
        if step:  # so coarse that ties abound, zeros too
            scores = -np.floor(-scores / step) * step
        if barren:
            scores = -np.sort(-np.where(rng.random(shape) < barren, -np.inf, scores), axis=-1)
        self.scores = scores.astype(np.float32)
        self.tree, self.calls = tree, []

    def expand(self, memory, level, first_row, tokens, hidden, seen):
        return run_level(self.tables, memory, level, first_row, tokens, hidden)

    def expand_and_keep(self, *arguments):
        """Under `jax.disable_jit` only."""
        self.calls.append(tuple(np.array(x) for x in arguments))
        return self.expand(*arguments)

    @property
    def tables(self):
        return jnp.asarray(self.scores), jnp.asarray(self.tokens)

    def grow(self):
        return jax.tree.map(np.asarray, grown(self.tree, self.tables))

    def grow_openly(self):
        """The same, operation by operation; what was asked for stands in `calls`."""
        with jax.disable_jit():
            return jax.tree.map(np.asarray, grow_from_tables(self.tree, self.tables, self.expand_and_keep))


def run_level(tables, memory, level, first_row, tokens, hidden):
    memory = jax.lax.dynamic_update_slice_in_dim(memory, tokens, first_row, axis=1)
    out = jnp.stack([tokens.astype(jnp.float32), hidden[..., 1] + 1], axis=-1)
    return memory, out, tuple(table[level + 1, :, : tokens.shape[1]] for table in tables)


def grow_from_tables(tree, tables, expand):
    root = jnp.asarray(ROOTS, jnp.int32)
    hidden = jnp.stack([root.astype(jnp.float32), jnp.zeros(B)], axis=-1)
    memory = jnp.full((B, rows_run(tree)), -1, jnp.int32)
    return grow(tree, root, hidden, tuple(table[0, :, :1] for table in tables), memory, expand)


@partial(jax.jit, static_argnums=0)
def grown(tree, tables):
    return grow_from_tables(tree, tables, lambda *arguments: run_level(tables, *arguments[:-1]))


KINDS = {
    "distinct": {},
    "ties": {"step": 0.5},
    "many ties": {"step": 4.0},
    "barren": {"barren": 0.4},
    "barren ties": {"barren": 0.4, "step": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES, ids=name_of)
def test_what_every_tree_satisfies(tree, kind):
    drafted = MadeUp(tree, **KINDS[kind]).grow()
    shape = (B, tree.num_nodes)
    tokens, parents, depths = drafted.tokens, drafted.parents, drafted.depths
    mask, valid = drafted.mask, drafted.valid
    assert tokens.shape == parents.shape == depths.shape == valid.shape == shape
    assert tokens[:, 0].tolist() == ROOTS
    assert np.all(parents[:, 0] == 0)
    assert np.all(depths[:, 0] == 0)
    assert np.all(valid[:, 0])
    assert np.all(drafted.candidate)
    for b in range(B):
        siblings = set()
        for node in range(1, tree.num_nodes):
            parent = parents[b, node]
            assert 0 <= parent < node
            assert depths[b, node] == depths[b, parent] + 1 <= tree.max_depth
            assert (parent, tokens[b, node]) not in siblings
            siblings.add((parent, tokens[b, node]))
        for node in range(tree.num_nodes):
            seen, at = {node}, node
            while at:
                at = int(parents[b, at])
                seen.add(at)
            assert set(np.flatnonzero(mask[b, node]).tolist()) == seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [t for t in TREES if isinstance(t, DynamicTree)], ids=name_of)
def test_dynamic_tree_is_the_best_of_the_pool(tree, kind):
    """Against the plain algorithm with sorted lists, in which earlier entries win ties."""
    made_up = MadeUp(tree, **KINDS[kind])
    drafted = made_up.grow()
    for b in range(B):
        pool = []  # (score, token, parent's place in the pool)
        at_root = zip(made_up.scores[0, b, 0], made_up.tokens[0, b, 0], strict=True)
        pool += [(s, t, -1) for s, t in at_root]
        frontier = list(range(tree.top_k))
        for level in range(1, tree.depth + 1):
            scores, tokens, begin = made_up.scores[level, b], made_up.tokens[level, b], len(pool)
            for row, parent in enumerate(frontier):
                for s, t in zip(scores[row], tokens[row], strict=True):
                    pool.append((np.float32(pool[parent][0] + s), t, parent))
            frontier = sorted(range(begin, len(pool)), key=lambda i: (-pool[i][0], i))[: tree.top_k]
        kept = sorted(sorted(range(len(pool)), key=lambda i: (-pool[i][0], i))[: tree.total_tokens - 1])
        place = {-1: 0} | {index: i + 1 for i, index in enumerate(kept)}
        assert drafted.tokens[b, 1:].tolist() == [pool[i][1] for i in kept]
        assert drafted.valid[b, 1:].tolist() == [pool[i][0] > -np.inf for i in kept]
        # Every parent is kept with its child, ties or not.
        assert drafted.parents[b, 1:].tolist() == [place[pool[i][2]] for i in kept]


@pytest.mark.parametrize("tree", [TREES[0], *TREES[-2:]], ids=name_of)
def test_levels_are_expanded_from_their_parents(tree):
    """A node is run with its parent's hidden state, and sees the rows of its ancestors below the root."""
    made_up = MadeUp(tree)
    for openly, compiled in zip(*map(jax.tree.leaves, (made_up.grow_openly(), made_up.grow())), strict=True):
        np.testing.assert_array_equal(openly, compiled)
    ancestors = [[] for _ in range(B)]  # of every row so far: the rows that it and its descendants see
    for number, (memory, level, first_row, tokens, hidden, seen) in enumerate(made_up.calls):
        assert level == number
        assert seen.shape == (B, tokens.shape[1], rows_run(tree))
        for b in range(B):
            assert first_row == len(ancestors[b])
            lines = []
            for token, came_from, row_seen in zip(tokens[b], hidden[b], seen[b], strict=True):
                above = np.flatnonzero(row_seen).tolist()
                assert len(above) == came_from[1] == number
                assert all(row < first_row for row in above)
                assert came_from[0] == (memory[b, above[-1]] if above else ROOTS[b])
                if above:
                    assert above == ancestors[b][above[-1]]
                # The node is among its parent's children.
                row = above[-1] - (first_row - len(made_up.calls[number - 1][3][b])) if above else 0
                assert token in made_up.tokens[number, b, row]
                lines.append([*above, int(first_row) + len(lines)])
            ancestors[b] += lines
    assert len(made_up.calls) == tree.max_depth - 1
    assert all(len(rows) == rows_run(tree) for rows in ancestors)


def grown_from(tree, first, below):
    """A tree from scores given at the root [C] and below it [F, C], the same for every sequence and level."""
    k = tree.top_k
    tokens = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k, k))
    first, below = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (B, k, k)) for x in (first, below))

    def expand(memory, level, first_row, tokens_, hidden, seen):
        return memory, hidden, (below, tokens)

    root, hidden = jnp.zeros(B, jnp.int32), jnp.zeros((B, 2))
    return grow(tree, root, hidden, (first[:, :1], tokens[:, :1]), (), expand)


def test_half_precision_ties_do_not_separate_a_child_from_its_parent():
    """A child whose log-probability is 0 ties with its parent; scores in bfloat16 make that common."""
    coarse = jnp.asarray([0.0, -8.0, -8.0625], jnp.bfloat16)
    drafted = grown_from(DynamicTree(total_tokens=4, depth=3, top_k=3), coarse, coarse)
    assert np.asarray(drafted.parents).tolist() == [[0, 0, 1, 2]] * B
    assert np.asarray(drafted.depths).tolist() == [[0, 1, 2, 3]] * B


def test_small_steps_are_not_lost_in_a_sum():
    """Scores add up in float32, where −9.011 and −9.02 are two numbers; in bfloat16 both are −9."""
    first, below = [-9.0, -9.01], [[-0.02, -5.0], [-0.001, -5.0]]
    drafted = grown_from(DynamicTree(total_tokens=4, depth=1, top_k=2), first, below)
    assert np.asarray(drafted.parents).tolist() == [[0, 0, 0, 2]] * B


def test_impossible_children_are_marked():
    """A child of probability 0 may fill a place, and is not valid."""
    for tree in (DynamicTree(total_tokens=14, depth=2, top_k=3), StaticTree(((0,), (1,), (2,), (2, 0)))):
        made_up = MadeUp(tree, barren=0.6, seed=3)
        drafted = made_up.grow()
        possible = np.isfinite(made_up.scores[0, :, 0])
        assert not possible.all()
        for b in range(B):
            level = np.flatnonzero((drafted.parents[b] == 0) & (drafted.depths[b] == 1))
            assert drafted.valid[b, level].tolist() == possible[b, : len(level)].tolist()
            if isinstance(tree, DynamicTree):
                assert np.all(drafted.valid[b, drafted.parents[b, drafted.valid[b]]])


def test_static_trees():
    tree = StaticTree(((1, 0), (0,), (1,), (0,)))
    assert tree.paths == ((0,), (1,), (1, 0))
    assert (tree.num_nodes, tree.max_depth, tree.max_rank, tree.parents) == (4, 2, 2, (0, 0, 0, 2))
    assert StaticTree(()).num_nodes == 1
    chain = StaticTree.chain(3)
    assert chain.paths == ((0,), (0, 0), (0, 0, 0))
    assert (chain.num_nodes, chain.max_depth, chain.max_rank, chain.parents) == (4, 3, 1, (0, 0, 1, 2))
    assert named_paths("eagle", "mc_sim_7b_63").num_nodes == 26


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(StaticTree, ((),)), "non-empty"),
        (partial(StaticTree, ((0,), (-1,))), ">= 0"),
        (partial(StaticTree, ((0,), (1, 0))), r"without their parent path: \[\(1, 0\)\]"),
        (partial(named_paths, "eagle", "nope"), "known: mc_sim_7b_63"),
        (partial(named_paths, "lookahead", "mc_sim_7b_63"), "known: none"),
        (partial(DynamicTree, 6, 0, 4), r"\[2, 5\], got 6"),
        (partial(DynamicTree, 1, 3, 4), r"\[2, 53\], got 1"),
        (partial(DynamicTree, 54, 3, 4), r"\[2, 53\], got 54"),
        (partial(DynamicTree, 4, -1, 4), "depth -1"),
        (partial(DynamicTree, 4, 2, 0), "top_k 0"),
    ],
)
def test_trees_that_cannot_be(make, message):
    with pytest.raises(TreeError, match=message):
        make()


def test_dynamic_tree_numbers():
    tree = DynamicTree(total_tokens=60, depth=5, top_k=10)
    assert (tree.num_nodes, tree.max_depth, tree.max_rank) == (60, 6, 10)
