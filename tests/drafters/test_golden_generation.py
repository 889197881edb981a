"""Whole greedy generations against the reference implementations: every token, every accepted length.

The reference ends a generation after the block that reaches 128 tokens or holds EOS; ours is cut exactly
there.
"""

import json
import shutil

import numpy as np
import pytest
from golden_data import (
    BY_NAME,
    CASES,
    GOLDEN,
    NEW_TOKENS,
    TARGET,
    cases,
    greedy,
    loop,
    on_host,
    read_json,
    recorded,
)

from eagle_jax import LLM, SamplingParams
from eagle_jax.decoding.state import LENGTH, STOPPED


def cut(golden_accept_lengths, total):
    """Golden steps as ours count: accepted drafts plus the target's next token, cut at `total` tokens."""
    lengths, count = [], 1
    for accepted in golden_accept_lengths:
        if count == total:
            break
        lengths.append(min(accepted + 1, total - count))
        count += lengths[-1]
    return lengths


@pytest.mark.parametrize("case", cases(CASES))
def test_every_token_and_accepted_length(case):
    run = recorded(case)
    for i in range(len(case.prompts)):
        golden = case.generation(i)
        assert run.tokens(i) == golden["tokens"], f"prompt {i}"
        assert run.accept_lengths(i) == cut(golden["accept_lengths"], NEW_TOKENS), f"prompt {i}"
        assert 1 + sum(run.accept_lengths(i)) == NEW_TOKENS
        assert run.final.finish[i] == LENGTH


@pytest.mark.parametrize(
    "case", cases([BY_NAME[f"{name}/A"] for name in ("eagle3", "eagle2/bias", "eagle2/nobias")])
)
def test_eos_inside_an_accepted_run_ends_the_text_there(case):
    golden = read_json(f"{case.folder}/gen_p1_A_eos.json")
    eos = golden["eos_token_id"]
    expected = golden["tokens"][: golden["tokens"].index(eos) + 1]
    assert len(expected) < len(golden["tokens"])  # it lies inside the block
    ready = loop(case)
    state = on_host(ready.run(ready.start(), greedy([-1, eos]), NEW_TOKENS))
    begin, end = len(case.prompts[1]), int(state.lengths[1])
    assert state.history[1, begin:end].tolist() == expected
    assert state.finish[1] == STOPPED
    steps = int(state.steps[1])
    assert state.accept_lengths[1, :steps].tolist() == cut(golden["accept_lengths"], len(expected))
    # The other rows went on in the same device loop.
    assert state.lengths[0] - len(case.prompts[0]) == NEW_TOKENS
    assert state.history[0, len(case.prompts[0]) :][:NEW_TOKENS].tolist() == case.generation(0)["tokens"]


@pytest.mark.parametrize("name", ["eagle3/A", pytest.param("eagle1/bias", marks=pytest.mark.slow)])
def test_through_the_front_door(name):
    """The same in one device loop, from folders to results, with an EOS request beside the others."""
    case = BY_NAME[name]
    tree = {"kind": "static", "paths": "mc_sim_7b_63"}
    if not case.is_static:
        tree = {"kind": "dynamic"} | read_json(f"{case.folder}/prompts.json")["tree_configs"][case.name]
    goldens = [case.generation(i) for i in range(len(case.prompts))]
    stop = goldens[1]["tokens"][20]
    expected = [g["tokens"] for g in goldens]
    expected.append(expected[1][: expected[1].index(stop) + 1])

    llm = LLM(
        model=str(TARGET),
        speculative_config={"model": str(GOLDEN / case.head), "method": case.method, "tree": tree},
        batch_size=len(expected),
    )
    wanted = [SamplingParams(temperature=0, max_tokens=NEW_TOKENS)] * len(goldens)
    wanted.append(SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=(stop,)))
    answers = llm.generate([*case.prompts, case.prompts[1]], wanted)
    for answer, tokens, golden in zip(answers, expected, [*goldens, goldens[1]], strict=True):
        output = answer.outputs[0]
        assert output.token_ids == tokens
        assert output.accept_lengths == cut(golden["accept_lengths"], len(tokens))
        assert output.mean_acceptance_length == pytest.approx(np.mean(output.accept_lengths))
    assert [answer.outputs[0].finish_reason for answer in answers] == ["length"] * len(goldens) + ["stop"]


def test_chain_by_a_head_made_for_short_contexts(tmp_path):
    """C is a chain of five drafts. Rotary angles come from positions, so a head's own
    max_position_embeddings bounds nothing, be it shorter than a prompt."""
    case = BY_NAME["eagle3/C"]
    folder = shutil.copytree(GOLDEN / case.head, tmp_path / "head")
    config = read_json(f"{case.head}/config.json") | {"max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    assert max(map(len, case.prompts)) > 16
    chain = {"model": str(folder), "method": "eagle3", "num_speculative_tokens": 5}
    llm = LLM(model=str(TARGET), speculative_config=chain, batch_size=len(case.prompts))
    answers = llm.generate(case.prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    for i, answer in enumerate(answers):
        golden = case.generation(i)
        assert answer.outputs[0].token_ids == golden["tokens"]
        assert answer.outputs[0].accept_lengths == cut(golden["accept_lengths"], NEW_TOKENS)
