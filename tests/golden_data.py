"""The golden files of EAGLE 1, 2 and 3, and runs of the library on the same inputs.

Every run is compiled and done once and shared by all tests that look at it; the prompts of a case form one
batch of `ROWS` rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.decoding.generate import Generator
from eagle_jax.decoding.state import RUNNING, DecodeState
from eagle_jax.decoding.step import DecodeParams, Decoding
from eagle_jax.draft_tree import DraftTree, DynamicTree, StaticTree, Tree, named_paths
from eagle_jax.drafters.eagle_drafter import EagleDrafter, EagleState
from eagle_jax.drafters.protocol import Context
from eagle_jax.loading import LoadedHead, LoadedTarget, load_head, load_target
from eagle_jax.parallel.mesh import MeshShape, make_mesh
from eagle_jax.parallel.sharding import TARGET_RULES
from eagle_jax.sampling import RowSampling

GOLDEN = Path(__file__).parent / "golden"
TARGET = GOLDEN / "eagle3" / "target"
ROWS, CAPACITY, CHUNK = 4, 256, 64
NEW_TOKENS = 128
RELIABLE_GAP = 5e-5  # below it two candidates are so close that rounding may swap them
TOLERANCE = dict(atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class Case:
    """A head with a tree, as the golden files have them.

    Attributes:
        folder: of the golden files.
        name: what tells its files apart: the tree's name, or the head's for EAGLE-1.
        head: the head's folder.
        method, tree: how it is run.
    """

    folder: str
    name: str
    head: str
    method: str
    tree: Tree

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def prompts(self) -> list[list[int]]:
        return read_json(f"{self.folder}/prompts.json")["prompts"]

    @property
    def is_static(self) -> bool:
        return isinstance(self.tree, StaticTree)

    def _file(self, kind: str, prompt: int) -> str:
        name = f"{self.name}_p{prompt}" if self.is_static else f"p{prompt}_{self.name}"
        return f"{self.folder}/{kind}_{name}"

    def generation(self, prompt: int) -> dict[str, Any]:
        return read_json(self._file("gen", prompt) + ".json")

    def first_tree(self, prompt: int) -> dict[str, np.ndarray]:
        return read_npz(self._file("tree", prompt) + ".npz")

    def golden_prefill(self, prompt: int) -> dict[str, np.ndarray]:
        return read_npz(f"{self.folder}/prefill_p{prompt}.npz")


def read_json(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text())


def read_npz(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as archive:
        return dict(archive)


def _dynamic(folder: str, head: str, method: str, names: str) -> list[Case]:
    trees = read_json(f"{folder}/prompts.json")["tree_configs"]
    return [Case(folder, name, head, method, DynamicTree(**trees[name])) for name in names]


STATIC = [
    Case("eagle1", kind, f"eagle1/head_{kind}", "eagle", named_paths("eagle", "mc_sim_7b_63"))
    for kind in ("bias", "nobias")
]
DYNAMIC = [
    *_dynamic("eagle2/bias", "eagle1/head_bias", "eagle", "ABC"),
    *_dynamic("eagle2/nobias", "eagle1/head_nobias", "eagle", "AD"),
    *_dynamic("eagle3", "eagle3/head", "eagle3", "ABCDE"),
]
CASES = STATIC + DYNAMIC
BY_NAME = {str(case): case for case in CASES}

# Compiling takes the time, so by default every head has one tree; `make test-all` has them all.
DEFAULT = {"eagle1/bias", "eagle2/nobias/A", "eagle3/A"}


def cases(chosen: Sequence[Case]) -> list[Any]:
    """Test parameters, all but the default ones marked slow."""
    return [
        pytest.param(case, id=str(case), marks=() if str(case) in DEFAULT else pytest.mark.slow)
        for case in chosen
    ]


# ---------------------------------------------------------------- the library's side


@lru_cache
def mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshShape())


@lru_cache
def target() -> LoadedTarget:
    return load_target(TARGET, "float32", mesh())


@lru_cache
def head(name: str, method: str) -> LoadedHead:
    return load_head(GOLDEN / name, target(), method, mesh())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recorded:
    """A drafter's state and the tree that it drafted last."""

    state: EagleState
    tree: DraftTree


@dataclass(frozen=True)
class RecordingDrafter(EagleDrafter):
    """The EAGLE drafter, with a state that shows what it has just drafted."""

    def init_state(self, batch: int, capacity: int) -> Recorded:
        ints = jnp.zeros((batch, self.tree.num_nodes), jnp.int32)
        mask = jnp.zeros((*ints.shape, self.tree.num_nodes), bool)
        return Recorded(
            super().init_state(batch, capacity), DraftTree(ints, ints, ints, mask, ints > 0, ints > 0)
        )

    def state_axes(self) -> Recorded:
        row, square = ("batch", None), ("batch", None, None)
        return Recorded(super().state_axes(), DraftTree(row, row, row, square, row, row))

    def absorb(self, params, state, seen):
        return replace(state, state=super().absorb(params, state.state, seen))

    def propose(self, params, state, context):
        inner, tree = super().propose(params, state.state, context)
        return Recorded(inner, tree), tree


@dataclass(frozen=True)
class Level:
    """One pass of the head while a tree grows: hidden states, logits, and the children that it ranks."""

    hidden: np.ndarray  # [B, F, D]
    logits: np.ndarray  # [B, F, Vd]
    scores: np.ndarray  # [B, F, C]
    tokens: np.ndarray  # [B, F, C]


@dataclass(frozen=True)
class ListeningDrafter(EagleDrafter):
    """The EAGLE drafter, with an ear for every pass of its head. Works under `jax.disable_jit` only."""

    heard: list[Level] = field(default_factory=list, compare=False)

    def _rank(self, head, params, hidden, context, depth):
        scores, tokens = super()._rank(head, params, hidden, context, depth)
        logits = head.logits(hidden, params.output_weight)
        self.heard.append(Level(*map(np.asarray, (hidden, logits, scores, tokens))))
        return scores, tokens


@dataclass(frozen=True)
class Run:
    """A batch of generations.

    Attributes:
        after_prefill, after_first_step, final: states on the host.
        trees: of every step; a row's entries past its own number of steps are meaningless.
    """

    after_prefill: DecodeState
    after_first_step: DecodeState
    final: DecodeState
    trees: list[DraftTree]

    def tokens(self, row: int) -> list[int]:
        span = slice(int(self.final.prompt_lengths[row]), int(self.final.lengths[row]))
        return self.final.history[row, span].tolist()

    def accept_lengths(self, row: int) -> list[int]:
        return self.final.accept_lengths[row, : int(self.final.steps[row])].tolist()


def on_host(pytree: Any) -> Any:
    """A copy in numpy: the originals are donated to the next step."""
    return jax.tree.map(lambda x: np.array(x, copy=True), pytree)


def greedy(stop_ids: Sequence[int] = (), max_new_tokens: int = NEW_TOKENS) -> RowSampling:
    """Greedy rows, each with its own stop token."""

    def rows(value: float, dtype: Any) -> jax.Array:
        return jnp.full((ROWS,), value, dtype)

    stops = np.full((ROWS, 1), -1, np.int32)
    stops[: len(stop_ids), 0] = stop_ids
    return RowSampling(
        temperature=rows(0, jnp.float32),
        top_p=rows(1, jnp.float32),
        top_k=rows(0, jnp.int32),
        min_p=rows(0, jnp.float32),
        repetition_penalty=rows(1, jnp.float32),
        seed=rows(0, jnp.uint32),
        sample=rows(0, jnp.int32),
        min_new_tokens=rows(0, jnp.int32),
        max_new_tokens=rows(max_new_tokens, jnp.int32),
        stop_ids=jnp.asarray(stops),
    )


def batch(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """History and lengths of a batch; rows without a prompt are unused."""
    history, lengths = np.zeros((ROWS, CAPACITY), np.int32), np.zeros((ROWS,), np.int32)
    for i, prompt in enumerate(prompts):
        history[i, : len(prompt)] = prompt
        lengths[i] = len(prompt)
    return history, lengths


@lru_cache
def prefilled(case: Case) -> DecodeState:
    """The state behind a case's prompts; trees have no part in it, so a head's share what is compiled."""
    generator, params = _prefiller(case.head, case.method)
    return on_host(generator.start(params, *batch(case.prompts), greedy(), CHUNK))


@lru_cache
def _prefiller(head_name: str, method: str) -> tuple[Generator, DecodeParams]:
    loaded = head(head_name, method)
    drafter = EagleDrafter(loaded.functional, loaded.config, StaticTree.chain(1), True, "float32")
    return _generator(drafter), DecodeParams(target().params, loaded.params)


def _generator(drafter: EagleDrafter) -> Generator:
    return Generator(Decoding(target().target, drafter), mesh(), TARGET_RULES, jnp.float32)


@dataclass(frozen=True)
class Loop:
    """The compiled loop of a case."""

    case: Case
    drafter: RecordingDrafter
    generator: Generator
    params: DecodeParams

    def start(self) -> DecodeState:
        """The state behind the prompts, placed as the loop's own results are."""
        placed = self.generator.start(self.params, *batch([]), greedy(), CHUNK)
        state = prefilled(self.case)
        state = replace(state, drafter=Recorded(state.drafter, on_host(placed.drafter.tree)))
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, placed)

    def run(self, state: DecodeState, sampling: RowSampling, max_steps: int) -> DecodeState:
        return self.generator.run(self.params, state, sampling, max_steps)


@lru_cache
def loop(case: Case) -> Loop:
    """The loop of a case."""
    loaded = head(case.head, case.method)
    drafter = RecordingDrafter(loaded.functional, loaded.config, case.tree, True, "float32")
    return Loop(case, drafter, _generator(drafter), DecodeParams(target().params, loaded.params))


@lru_cache
def recorded(case: Case) -> Run:
    """The golden generation of all prompts of a case, step by step."""
    ready, sampling = loop(case), greedy()
    state, after_first, trees = ready.start(), None, []
    while np.any(np.asarray(state.finish) == RUNNING):
        state = ready.run(state, sampling, 1)
        trees.append(on_host(state.drafter.tree))
        after_first = after_first or on_host(state)
    return Run(prefilled(case), after_first, on_host(state), trees)


@lru_cache
def first_passes(case: Case) -> list[Level]:
    """The head's passes behind the first tree of every prompt, the root's first."""
    loaded, state, vocab_size = (
        head(case.head, case.method),
        prefilled(case),
        target().target.config.vocab_size,
    )
    drafter = ListeningDrafter(loaded.functional, loaded.config, case.tree, True, "float32")
    noise = jnp.zeros((ROWS, case.tree.max_depth + 1, vocab_size))
    state = jax.tree.map(jnp.asarray, state)
    context = Context(state.history, state.lengths, greedy(), noise, state.presence)
    with jax.disable_jit():
        drafter.propose(loaded.params, state.drafter, context)
    return drafter.heard
