"""Reading shared conversations, and finding what the assistant said in them."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_jax.training import conversations
from eagle_jax.training.conversations import DataError, Report, parse_record, read_conversations
from eagle_jax.training.masks import Renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Earlier answers lose their reasoning; a prompt without thinking opens with an empty block.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer(template=CHATML):
    """Bytes as tokens, and the two marks of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bare)
    fast.chat_template = template
    return fast


def renderer(template=CHATML, **options):
    own = tokenizer(template)
    return Renderer(own, (own.convert_tokens_to_ids("<|im_end|>"),), len(own), options)


def chat(*contents, roles=("user", "assistant")):
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def supervised(record, using=None):
    """The supervised stretches of every sample, as texts."""
    using, report = using or renderer(), Report()
    texts = []
    for sample in using.samples(parse_record(record, "here", report), report):
        assert sample.tokens.dtype == np.int32
        assert sample.mask.dtype == bool
        cuts = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]])))
        texts.append([using.tokenizer.decode(sample.tokens[a:b]) for a, b in cuts.reshape(-1, 2)])
    return texts


def test_answers_are_supervised_to_the_token_that_ends_them():
    assert supervised(chat("Hi", "Hello!", "And?", "Bye")) == [["Hello!<|im_end|>", "Bye<|im_end|>"]]
    # The first token of an answer is the one that a wrong shift loses.
    assert supervised(chat("assistant\nX", "assistant\nX")) == [["assistant\nX<|im_end|>"]]
    assert supervised(chat("é🙂", "né🙂")) == [["né🙂<|im_end|>"]]


def test_system_turns_and_unanswered_questions_are_context():
    record = {"messages": [{"role": "system", "content": "S"}, *chat("a", "b", "c")["messages"]]}
    assert supervised(record) == [["b<|im_end|>"]]


def test_reasoning_is_kept_where_the_model_wrote_it():
    record = chat("a", "b", "c", "d")
    record["messages"][3]["reasoning_content"] = "hm"
    # The template drops the empty block of the first answer later on, so the turns are samples of their own.
    assert supervised(record, renderer(THINKING)) == [
        ["b<|im_end|>"],
        ["<think>\nhm\n</think>\n\nd<|im_end|>"],
    ]


def test_an_empty_reasoning_block_is_the_templates():
    assert supervised(chat("a", "b"), renderer(THINKING)) == [["b<|im_end|>"]]
    assert supervised(chat("a", "b"), renderer(THINKING, enable_thinking=False)) == [["b<|im_end|>"]]


def test_texts_and_ids_are_taken_as_they_are():
    assert supervised({"text": "all of it"}) == [["all of it"]]
    ids = renderer().tokenizer("abc")["input_ids"]
    assert supervised({"input_ids": ids, "loss_mask": [0, 1, 1]}) == [["bc"]]
    assert supervised({"input_ids": ids}) == [["abc"]]


def test_what_cannot_be_rendered_is_said():
    report = Report()
    with pytest.raises(DataError, match="token id 999999 is outside the model's 258 tokens"):
        list(renderer().samples(parse_record({"input_ids": [999999]}, "x", report), report))
    with pytest.raises(DataError, match="no chat template"):
        list(renderer(None).samples(parse_record(chat("a", "b"), "x", report), report))
    with pytest.raises(DataError, match=r"x: the chat template refuses it \(only one turn\)"):
        list(
            renderer("{{ raise_exception('only one turn') }}").samples(
                parse_record(chat("a", "b"), "x", report), report
            )
        )
    assert supervised(chat("a")) == []


# ---------------------------------------------------------------- records and files


def test_layouts_of_records():
    sharegpt = {
        "id": "q_0",
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    ours = parse_record(chat("a", "b"), "f, line 1", Report())
    theirs = parse_record(sharegpt, "f, line 2", Report())
    assert theirs.messages == ours.messages == tuple(chat("a", "b")["messages"])
    assert (theirs.id, ours.id) == ("q_0", "f, line 1")
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.fingerprint != parse_record(chat("a", "c"), "", Report()).fingerprint
    mixed = {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert parse_record(mixed, "", Report()).messages == ours.messages


def test_half_characters_are_replaced():
    record = json.loads(json.dumps(chat("a \ud83d b", "\ud83d\ude42 c")))
    assert [m["content"] for m in parse_record(record, "", Report()).messages] == ["a \ufffd b", "🙂 c"]
    assert supervised(record) == [["🙂 c<|im_end|>"]]


def test_what_was_asked_does_not_depend_on_answers():
    first, second, third = (
        parse_record(chat("a", b, c), "", Report()) for b, c in (("x", "q"), ("y", "q"), ("x", "r"))
    )
    assert first.asked == second.asked != third.asked
    assert first.fingerprint != second.fingerprint


def test_what_holds_nothing_is_counted():
    report = Report()
    for record in (
        {"text": " "},
        {"messages": []},
        chat("hello", roles=("assistant", "user")),
        {"input_ids": []},
    ):
        assert parse_record(record, "x", report) is None
    assert report.skipped == {"empty text": 1, "no user message": 2, "no tokens": 1}
    # An answer to nothing is left out, the rest stays.
    turns = parse_record(chat("lead", "a", "b", roles=("assistant", "user")), "x", report).messages
    assert [m["content"] for m in turns] == ["a", "b"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "expected an object"),
        ({"prompt": "a"}, "none of the keys conversations, messages, text, input_ids; it has prompt"),
        ({"messages": "a"}, "expected a list of messages"),
        ({"messages": [{"role": "alien", "content": "a"}]}, "unknown role 'alien'"),
        ({"messages": [{"role": "user", "content": None}]}, "expected a text as content"),
        ({"messages": ["a"]}, "expected a message with role and content"),
        ({"input_ids": [1, -2]}, "expected token ids from 0 up"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "a 0 or 1 in loss_mask for each of 2"),
    ],
    ids=lambda x: "" if isinstance(x, str) else None,
)
def test_records_of_no_known_layout_are_refused(record, reason):
    with pytest.raises(DataError, match=f"^f, line 3: .*{reason}"):
        parse_record(record, "f, line 3", Report())


RECORDS = [chat(f"question {i}", "answer é🙂" * i) for i in range(1, 6)]


def read(path, report=None):
    return [c.messages[1]["content"] for c in read_conversations(str(path), report or Report())]


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_files(tmp_path, monkeypatch, block):
    monkeypatch.setattr(conversations, "_READ", block)
    expected = [r["messages"][1]["content"] for r in RECORDS]
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text("\n\n".join(json.dumps(r) for r in RECORDS) + "\n")
    array.write_text(json.dumps(RECORDS, indent=1, ensure_ascii=False))
    assert read(lines) == read(array) == expected


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_file_that_is_cut_off_is_read_to_its_last_whole_record(tmp_path, monkeypatch, block):
    monkeypatch.setattr(conversations, "_READ", block)
    path, whole = tmp_path / "a.json", json.dumps(RECORDS, indent=1)
    third = whole.index("question 4")
    for end in (third, len(whole) - 3, whole.index(',\n {\n  "messages"', third - 100) + 1):
        path.write_text(whole[:end])
        report = Report()
        texts = read(path, report)
        assert texts == [r["messages"][1]["content"] for r in RECORDS][: len(texts)]
        assert 3 <= len(texts) <= 4
        assert report.notes == [
            f"{path} is cut off: {len(texts)} whole records were read, the last one is lost"
        ]


def test_dialogues_of_the_chit_chat_challenge(tmp_path):
    path = tmp_path / "dataset.json"
    say = lambda *texts: [{"text": t, "sender": "x"} for t in texts]  # noqa: E731
    path.write_text(json.dumps({"k": {"messages": [say("Hello", "How are you?"), say("fine")]}}))
    (conversation,) = read_conversations(str(path), Report())
    assert [(m["role"], m["content"]) for m in conversation.messages] == [
        ("user", "Hello How are you?"),
        ("assistant", "fine"),
    ]


def test_sources_that_are_none(tmp_path, monkeypatch):
    broken = tmp_path / "b.jsonl"
    broken.write_text(json.dumps(RECORDS[0]) + "\n{broken\n")
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: no JSON"):
        read(broken)
    (tmp_path / "c.json").write_text("hello")
    with pytest.raises(DataError, match="expected a JSON array"):
        read(tmp_path / "c.json")
    with pytest.raises(DataError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"nothing\.jsonl does not exist; expected"):
        read("nothing.jsonl")
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\xfa\n")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "d.jsonl")
    monkeypatch.setitem(conversations.PACKAGES, "no-such-data", ("no_such_data", "x.json"))
    with pytest.raises(DataError, match="pip install no-such-data"):
        read("no-such-data")
