"""One seed gives one text: with any drafter, tree and batch, the text that plain decoding gives.

Tiny models with trained heads. Requests of every kind are mixed in each batch: greedy and sampled, cut by top-p,
top-k and min-p, penalised, with stop tokens and minimum lengths, ending at different times.
"""

from functools import lru_cache
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import head, mesh, target
from sameness import Answer, Comparison, Request, assert_same, decode

from eagle_jax import SamplingParams
from eagle_jax.decoding.generate import Generator
from eagle_jax.decoding.step import DecodeParams, Decoding
from eagle_jax.draft_tree import DynamicTree, StaticTree, named_paths
from eagle_jax.drafters.eagle_drafter import EagleDrafter
from eagle_jax.drafters.no_draft import NoDraft
from eagle_jax.parallel.sharding import TARGET_RULES

PROMPTS, ROWS, CAPACITY, CHUNK = 200, 50, 128, 64
LONGEST = 96  # of any row
SEEDS = (0, 1, 2**32 - 1)
EAGLE1 = ("eagle1/head_bias", "eagle")
EAGLE3 = ("eagle3/head", "eagle3")
STATIC = named_paths("eagle", "mc_sim_7b_63")
DRAFTERS = {
    "eagle1-static": (*EAGLE1, STATIC),
    "eagle1-chain": (*EAGLE1, StaticTree.chain(4)),
    "eagle2-dynamic": (*EAGLE1, DynamicTree(20, 3, 5)),
    "eagle3-static": (*EAGLE3, STATIC),
    "eagle3-chain": (*EAGLE3, StaticTree.chain(3)),
    "eagle3-dynamic": (*EAGLE3, DynamicTree(24, 4, 4)),
}
# Compiling takes the time, so the default set has one of each kind; all of them are slow tests.
IN_A_HURRY = [("eagle1-static", True), ("eagle2-dynamic", False), ("eagle3-chain", True)]
ALL = list(product(DRAFTERS, [True, False]))


def requests(seed: int) -> list[Request]:
    """The same prompts for every seed; parameters of all kinds, each with the others."""
    rng = np.random.default_rng(7)
    rows = []
    for i in range(PROMPTS):
        prompt = rng.integers(3, 199, rng.integers(1, 48)).tolist()
        # A few common tokens, so that texts also end by them.
        stops = tuple(rng.integers(0, 199, 3).tolist()) if rng.random() < 0.4 else ()
        longest = int(rng.choice([1, 2, 7, 16, 33, 48], p=[0.05, 0.05, 0.1, 0.2, 0.3, 0.3]))
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
            top_p=float(rng.choice([1.0, 0.9, 0.5])),
            top_k=int(rng.choice([0, 0, 5, 40])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
            max_new_tokens=longest,
            min_new_tokens=int(rng.choice([0, 0, min(5, longest)])),
            seed=seed,
            stop_token_ids=stops,
            ignore_eos=bool(rng.random() < 0.2),
        )
        rows.append(Request(prompt, params, sample=int(rng.integers(0, 3))))
    return rows


@lru_cache
def decoding(name: str | None, coupled: bool) -> tuple[Generator, DecodeParams]:
    """The compiled loop of a drafter; None: no speculation."""
    loaded = target()
    if name is None:
        drafter, params = NoDraft(), None
    else:
        folder, method, tree = DRAFTERS[name]
        own = head(folder, method)
        drafter, params = EagleDrafter(own.functional, own.config, tree, coupled, "float32"), own.params
    spec = Decoding(loaded.target, drafter)
    return Generator(spec, mesh(), TARGET_RULES, jnp.float32), DecodeParams(loaded.params, params)


def run(decoder: tuple[Generator, DecodeParams], batch: list[Request]) -> list[Answer]:
    return decode(*decoder, batch, CAPACITY, CHUNK, eos())


def eos() -> tuple[int, ...]:
    return target().target.config.eos_token_ids


@lru_cache
def plain(seed: int, begin: int) -> list[Answer]:
    return run(decoding(None, True), requests(seed)[begin : begin + ROWS])


def check(batch: list[Request], expected: list[Answer], got: list[Answer]) -> Comparison:
    return assert_same(target().target, target().params, batch, expected, got, eos(), LONGEST)


def check_lengths(answers: list[Answer]) -> None:
    for answer in answers:
        assert 1 + sum(answer.accept_lengths) == len(answer.token_ids)
        assert min(answer.accept_lengths, default=1) >= 1


def pairs(cases):
    return pytest.mark.parametrize(
        ("name", "coupled"),
        [pytest.param(*c, id=f"{c[0]}-{'coupled' if c[1] else 'deterministic'}") for c in cases],
    )


@pairs(IN_A_HURRY)
def test_same_text(name, coupled):
    batch = requests(SEEDS[0])[:ROWS]
    got = run(decoding(name, coupled), batch)
    check(batch, plain(SEEDS[0], 0), got)
    check_lengths(got)
    # That the texts are the same says nothing where nothing is speculated.
    greedy = [a for r, a in zip(batch, got, strict=True) if r.params.temperature == 0]
    assert mean_acceptance(greedy) > 1.3
    assert any(sum(a.drafted) for a in got)


def mean_acceptance(answers: list[Answer]) -> float:
    lengths = [n for a in answers for n in a.accept_lengths]
    return sum(lengths) / len(lengths)


@pytest.mark.slow
@pairs(ALL)
def test_same_text_for_all_prompts_and_seeds(name, coupled):
    """200 prompts, three seeds, in batches of 50."""
    for seed in SEEDS:
        for begin in range(0, PROMPTS, ROWS):
            batch = requests(seed)[begin : begin + ROWS]
            got = run(decoding(name, coupled), batch)
            result = check(batch, plain(seed, begin), got)
            check_lengths(got)
            print(f"{name} seed {seed}: {len(batch)} texts the same, {len(result.excused)} by the tolerance")


def test_the_batch_does_not_matter():
    """A request alone, with the rest of the batch idle, gives what it gives among others."""
    batch = requests(SEEDS[0])[:ROWS]
    for row in (1, 2, 3):
        got = decode(*decoding("eagle3-chain", True), batch[row : row + 1], CAPACITY, CHUNK, eos(), rows=ROWS)
        check(batch[row : row + 1], plain(SEEDS[0], 0)[row : row + 1], got)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "eagle1-static", "eagle3-dynamic"])
def test_batches_of_one(name):
    batch = requests(SEEDS[1])[:20]
    got = [run(decoding(name, True), [request])[0] for request in batch]
    check(batch, plain(SEEDS[1], 0)[:20], got)
