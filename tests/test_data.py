"""From files to rows: nothing lost, nothing doubled, every document apart, and the same on every rank."""

import json
import os
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from finetune import fim
from finetune.mistakes import Mistakes
from finetune.packing import IGNORED, check_fits, global_batch, pack, pick, prepare_rows
from finetune.recipe import Data
from finetune.sources import Document, hold_out, read_documents

END = 0
documents_of_ids = st.lists(st.lists(st.integers(1, 99), max_size=40).map(lambda ids: [*ids, END]), max_size=20)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("models/tiny-starcoder")


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_folder_reads_source_and_counts_the_rest(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.c").write_text("int x;\n")
    (tmp_path / "data.csv").write_text("1,2\n")
    (tmp_path / "latin.py").write_bytes("é".encode("latin-1"))
    (tmp_path / "zero.py").write_bytes(b"a\0b")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "minified.js").write_text("x" * 2000)
    (tmp_path / "huge.py").write_text("x = 1\n" * 200_000)
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "c.js").write_text("var x;\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    documents, skipped = read_documents(str(tmp_path))
    assert [(d.name, d.text) for d in documents] == [("a.py", "x = 1\n"), ("sub/b.c", "int x;\n")]
    assert skipped == Counter(
        {
            "vendored or generated folder": 2,  # node_modules, and the link that leads back
            "not source code": 1,
            "not UTF-8": 1,
            "binary": 1,
            "empty": 1,
            "a line over 1,000 characters": 1,
            "over 1,000,000 bytes": 1,
            "symbolic link": 1,
            "not a regular file": 1,
        }
    )


def test_jsonl_reads_text_or_content(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"content": "two", "stars": 3}\r\n{"text": null}\n{"text": ""}\n')
    documents, skipped = read_documents(str(path))
    assert [d.text for d in documents] == ["one", "two"]
    assert sum(skipped.values()) == 2


@pytest.mark.parametrize(
    ("line", "what"), [("{", "not a line of JSON"), ('{"code": "x"}', "no column text or content"), ("[1]", "no column")]
)
def test_jsonl_names_the_bad_line(tmp_path, line, what):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(Mistakes, match=rf"rows.jsonl:2: {what}"):
        read_documents(str(path))


def test_nothing_to_read_is_a_mistake(tmp_path):
    (tmp_path / "a.csv").write_text("1\n")
    with pytest.raises(Mistakes, match="not source code"):
        read_documents(str(tmp_path))


def test_hold_out_moves_nothing_when_data_is_added():
    documents = [Document(f"{n}.py", str(n)) for n in range(400)]
    train, held_out = hold_out(documents[:300], 0.1)
    more_train, more_held_out = hold_out(documents, 0.1)
    assert set(held_out) <= set(more_held_out) and set(train) <= set(more_train)
    assert not set(more_train) & set(more_held_out)
    assert len(more_train) + len(more_held_out) == 400
    assert 20 <= len(more_held_out) <= 60


@given(st.text(max_size=60), st.integers(), st.floats(0, 1), st.floats(0, 1))
def test_fim_pieces_are_the_document(text, seed, rate, spm_share):
    pieces = fim.split(text, Random(seed), rate, spm_share)
    assert pieces is None or pieces.prefix + pieces.middle + pieces.suffix == text
    assert pieces == fim.split(text, Random(seed), rate, spm_share)


def test_fim_rate_and_order_are_as_asked():
    cuts = [fim.split("a long enough document", Random(seed), 0.5, 0.25) for seed in range(4000)]
    cut = [pieces for pieces in cuts if pieces]
    assert 0.47 < len(cut) / len(cuts) < 0.53
    assert 0.22 < sum(pieces.suffix_first for pieces in cut) / len(cut) < 0.28
    assert fim.split("ab", Random(0), 1.0, 0.5) is None


def test_fim_orders_decode_to_the_document(tokenizer):
    tokens = fim.find_fim_tokens(tokenizer)
    assert (tokens.prefix, tokens.middle, tokens.suffix) == (1, 2, 3)
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("def f(", "x):\n  ", "return x\n")]
    for suffix_first, expected in (
        (False, "<fim_prefix>def f(<fim_suffix>return x\n<fim_middle>x):\n  "),
        (True, "<fim_prefix><fim_suffix>return x\n<fim_middle>def f(x):\n  "),
    ):
        assert tokenizer.decode(fim.join(*pieces, suffix_first, tokens)) == expected


def test_a_tokenizer_without_fim_is_a_mistake(tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    with pytest.raises(Mistakes, match="data.fim_rate: .*<fim_prefix>"):
        fim.find_fim_tokens(PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<end>"))


@given(documents_of_ids, st.integers(2, 30))
def test_pack_keeps_every_token_in_order(documents, seq_len):
    rows, tail = pack(documents, seq_len)
    stream = [token for ids in documents for token in ids]
    assert rows.tokens.reshape(-1).tolist() == stream[: len(stream) - tail]
    assert 0 <= tail < seq_len
    assert rows.tokens.shape == rows.positions.shape == rows.labels.shape


@given(documents_of_ids, st.integers(2, 30))
def test_pack_restarts_positions_and_never_predicts_across_documents(documents, seq_len):
    rows, _ = pack(documents, seq_len)
    starts = np.cumsum([0, *map(len, documents)])
    for place, (token, position, label) in enumerate(
        zip(rows.tokens.reshape(-1), rows.positions.reshape(-1), rows.labels.reshape(-1), strict=True)
    ):
        begin = max(starts[starts <= place].max(), place - place % seq_len)
        assert position == place - begin
        assert label == (IGNORED if place == begin else token)


@given(documents_of_ids)
def test_every_end_of_text_is_a_label_exactly_once(documents):
    rows, tail = pack([[7, *ids] for ids in documents], seq_len=1000)  # no document is cut at a row's end
    ends = int((rows.tokens == END).sum())
    assert int((rows.labels == END).sum()) == ends
    padded = pick(rows, np.arange(len(rows)), 0, 1, 7)
    assert sum(int((batch.labels == END).sum()) for batch in padded) == ends


@settings(max_examples=50)
@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 3))
def test_global_batches_visit_every_row_once_an_epoch(row_count, batch_rows, seed):
    steps = 3 * row_count // batch_rows + 1
    visited = np.concatenate([global_batch(row_count, batch_rows, step, seed) for step in range(steps)])
    for epoch in range(len(visited) // row_count):
        assert sorted(visited[epoch * row_count : (epoch + 1) * row_count]) == list(range(row_count))


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5))
def test_pick_divides_rows_without_loss_whatever_the_ranks(count, world_size, micro_batch):
    rows, _ = pack([[n + 1] * 7 + [END] for n in range(30)], seq_len=8)
    shares = [pick(rows, np.arange(count), rank, world_size, micro_batch) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    learnt = [row for share in shares for batch in share for row in batch.labels.tolist() if any(label != IGNORED for label in row)]
    assert learnt == rows.labels[:count].tolist()


def test_prepared_rows_are_the_same_for_every_process_and_differ_by_seed(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [f"def f{n}(x):\n    return x + {n}\n" for n in range(200)])
    data = Data(train=path, seq_len=32)
    first, again, other = (prepare_rows(data, tokenizer, seed) for seed in (0, 0, 1))
    assert first.train.fingerprint() == again.train.fingerprint() != other.train.fingerprint()
    assert first.held_out.fingerprint() == other.held_out.fingerprint()  # never cut for fill in the middle
    assert first.report["train_tokens"] + first.report["train_tokens_cut_from_the_end"] > 200 * 10
    assert first.train.tokens.shape == (first.report["train_rows"], 32)
    assert not np.isin(first.held_out.tokens, [1, 2, 3]).any() and np.isin([1, 2, 3], first.train.tokens).all()


def test_control_tokens_in_the_text_stay_text(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [f"{n} <fim_middle> b <|endoftext|> c <reponame> d" for n in range(20)])
    prepared = prepare_rows(Data(train=path, seq_len=8, fim_rate=0.0, eval_share=0.3), tokenizer, 0)
    tokens = prepared.train.tokens.reshape(-1)
    assert set(tokens[tokens < 19]) == {END}
    assert (tokens == END).sum() <= prepared.report["train_documents"]


def test_too_little_data_is_a_mistake(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", ["x = 1", "y = 2"])
    with pytest.raises(Mistakes, match="less than one row"):
        prepare_rows(Data(train=path, seq_len=512), tokenizer, 0)
    with pytest.raises(Mistakes, match="only one document"):
        prepare_rows(Data(train=write_jsonl(tmp_path / "one.jsonl", ["x"]), seq_len=8), tokenizer, 0)


def test_rows_that_the_model_cannot_index_are_a_mistake(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [f"value_{n} = {n}\n" * 5 for n in range(50)])
    prepared = prepare_rows(Data(train=path, seq_len=64, eval_share=0.3), tokenizer, 0)
    check_fits(prepared, positions=64, vocab_size=4096)
    with pytest.raises(Mistakes) as error:
        check_fits(prepared, positions=63, vocab_size=100)
    assert [mistake.key for mistake in error.value.mistakes] == ["data.seq_len", "model.name"]
