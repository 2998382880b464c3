"""Documents to pieces: every character kept, whatever is drawn, and no piece longer than a row."""

import json
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from finetune import fim
from finetune.encode import Encoder, make_plan
from finetune.formats import Document, Segment
from finetune.mistakes import Mistakes
from finetune.recipe import Data
from tests.corpora import CASES, make, tiny_tokenizer

END, PREFIX, MIDDLE, SUFFIX = 0, 1, 2, 3
# Anything but surrogates, which UTF-8 has no bytes for; with the texts of control tokens, and characters of several tokens.
texts = st.lists(
    st.one_of(st.text(max_size=30), st.sampled_from(["<fim_middle>", "<|endoftext|>", "日本語", "🧪", "def f(x):\n    "])), max_size=12
)
texts = texts.map("".join)


def encoder(seq_len=32, plan=lambda plan: plan, **data):
    return Encoder(plan(make_plan(Data(seq_len=seq_len, **data), tiny_tokenizer(), 0, [])))


def document(text):
    return Document("name", (Segment(text, learnt=True),), "here")


def read_back(ids: list[int]) -> str:
    """The characters of a piece, with the parts of fill-in-the-middle put back in their order."""
    ids = [token for token in ids if token != END]
    if ids[0] != PREFIX:
        return text_of(ids)
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    # In suffix-prefix-middle order the prefix stands before the middle already.
    return text_of(ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle])


def text_of(ids: list[int]) -> str:
    return b"".join(map(bytes_of, ids)).decode("utf-8")


@cache
def bytes_of(token: int) -> bytes:
    table = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(table[character] for character in tiny_tokenizer().convert_ids_to_tokens(token))


@given(st.text(max_size=60), st.integers(), st.floats(0, 1), st.floats(0, 1))
def test_cuts_are_the_text_and_the_same_key_gives_the_same(text, seed, rate, spm_share):
    cut = fim.split(text, Random(seed), rate, spm_share)
    assert cut is None or cut.prefix + cut.middle + cut.suffix == text
    assert cut == fim.split(text, Random(seed), rate, spm_share)


def test_rate_and_order_are_as_asked():
    cuts = [fim.split("a long enough document", Random(seed), 0.5, 0.25) for seed in range(4000)]
    cut = [pieces for pieces in cuts if pieces]
    assert 0.47 < len(cut) / len(cuts) < 0.53
    assert 0.22 < sum(pieces.suffix_first for pieces in cut) / len(cut) < 0.28
    assert fim.split("ab", Random(0), 1.0, 0.5) is None


def test_orders_are_those_that_starcoder_was_trained_with():
    tokens = fim.find_fim_tokens(tiny_tokenizer())
    assert (tokens.prefix, tokens.middle, tokens.suffix) == (PREFIX, MIDDLE, SUFFIX)
    pieces = [tiny_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in ("def f(", "x):\n  ", "return x\n")]
    for suffix_first, expected in (
        (False, "<fim_prefix>def f(<fim_suffix>return x\n<fim_middle>x):\n  "),
        (True, "<fim_prefix><fim_suffix>return x\n<fim_middle>def f(x):\n  "),
    ):
        assert tiny_tokenizer().decode(fim.join(*pieces, suffix_first, tokens)) == expected


def test_a_tokenizer_without_fim_is_a_mistake():
    plain = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<end>")
    with pytest.raises(Mistakes, match="data.fim_rate: .*<fim_prefix>"):
        make_plan(Data(fim_rate=0.5), tokenizer, 0, [])
    tokenizer.eos_token = None
    with pytest.raises(Mistakes, match="no end-of-text token"):
        make_plan(Data(fim_rate=0.0), tokenizer, 0, [])


@settings(max_examples=300)
@given(
    texts.filter(str.strip),
    st.sampled_from([8, 40, 64, 1000]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 9),
)
def test_every_character_comes_back_from_pieces_that_fit(text, seq_len, rate, spm_share, key):
    pieces = encoder(seq_len, fim_rate=rate, fim_spm_share=spm_share).encode([(document(text), str(key))]).pieces
    ids = [token for piece in pieces for token in piece.tolist()]
    assert all(0 < len(piece) <= seq_len for piece in pieces)
    if rate:
        assert "".join(read_back(piece.tolist()) for piece in pieces) == text
    else:
        assert ids[:-1] == tiny_tokenizer()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # The end of text stands once, at the end, and no other control token but what was put there.
    assert ids.count(END) == 1 and ids[-1] == END
    assert ids.count(PREFIX) == ids.count(MIDDLE) == ids.count(SUFFIX) <= (len(pieces) if rate else 0)
    assert not [token for token in ids if 3 < token < 19]


def test_a_long_document_is_turned_piece_by_piece():
    """Prefix, middle and suffix stand in one row, or the model could not use them."""
    text = "".join(f"value_{n} = {n} + other\n" for n in range(400))
    out = encoder(64, fim_rate=1.0).encode([(document(text), "key")])
    turned = [piece for piece in out.pieces if piece[0] == PREFIX]
    assert len(turned) > 0.9 * len(out.pieces) > 40
    assert all(sum(piece == MIDDLE) == 1 for piece in turned)
    assert len(out.pieces) - len(turned) <= out.notes["a piece left to right, for want of room"] + 1
    assert max(map(len, out.pieces)) <= 64 and sum(map(len, out.pieces)) / len(out.pieces) > 50


def test_what_is_too_short_for_three_pieces_stays(tmp_path):
    corpus = make(tmp_path, str(CASES / "G5_too_short_for_fim.jsonl"), fim_rate=1.0, eval_share=0.01)
    # A line end alone is an empty document.
    assert corpus.manifest()["sources"][0]["dropped"] == {"text is empty": 1}
    assert not set(corpus.first_row().tokens[0].tolist()) & {PREFIX, MIDDLE, SUFFIX}


def test_control_tokens_in_the_text_stay_text_and_are_counted():
    rows = [json.loads(line)["text"] for line in (CASES / "G6_control_tokens_in_text.jsonl").read_text().splitlines()]
    out = encoder(1000, fim_rate=0.0).encode([(document(text), "key") for text in rows])
    assert all([token for token in piece.tolist() if token < 19] == [END] for piece in out.pieces)
    assert out.notes["the text of a special token, kept as text"] == len(rows)


def test_infilling_is_measured_on_the_middle_alone():
    text = "def add(first, second):\n    return first + second\n"
    piece = encoder(1000, lambda plan: plan.for_infilling(), fim_rate=0.5).encode([(document(text), "key")]).pieces[0].tolist()
    learnt = [token for token in piece if token >= 0]
    assert piece[-len(learnt) :] == learnt and piece[-len(learnt) - 1] == ~MIDDLE and learnt[-1] == END
    whole = [token if token >= 0 else ~token for token in piece]
    assert whole[0] == PREFIX and read_back(whole) == text
    assert not encoder(1000, lambda plan: plan.for_infilling(), fim_rate=0.5).encode([(document("ab"), "key")]).pieces


def test_an_example_is_never_cut():
    example = Document("n", (Segment("p " * 40, learnt=False), Segment("ok", learnt=True)), "here")
    out = encoder(32).encode([(example, "key")])
    assert not out.pieces and out.dropped == {"longer than a row": 1}
    out = encoder(32, packing="concat").encode([(example, "key")])
    assert len(out.pieces) == 1 and out.documents == 1
