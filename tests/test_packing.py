"""Pieces to rows: no token lost and none doubled, rows full, pieces apart, and every rank the same number of batches."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.packing import IGNORED, Part, PartWriter, best_fit, lay_out, mask, share

PAD = 4


def write(path: Path, pieces: list[list[int]], seq_len: int, packing: str) -> Part:
    writer = PartWriter(path, seq_len, packing, PAD)
    for start in range(0, len(pieces), 3):
        some = [np.array(piece, np.int32) for piece in pieces[start : start + 3]]
        writer.add(np.concatenate(some), np.array([len(piece) for piece in some]))
    facts = writer.finish()
    (path / "facts.json").write_text(json.dumps(facts))
    return Part(path)


def pieces_of(part: Part) -> list[list[int]]:
    """The pieces that rows hold, cut where positions restart, without padding."""
    rows = part.rows(np.arange(len(part)))
    out = []
    for tokens, positions in zip(rows.tokens.tolist(), rows.positions.tolist(), strict=True):
        for token, position in zip(tokens, positions, strict=True):
            if position == 0:
                out.append([])
            out[-1].append(token)
    return [piece for piece in out if piece[0] != PAD]


# No token is PAD, so that padding is seen; each piece begins with its number.
lists_of_pieces = st.lists(st.integers(1, 16), min_size=1, max_size=40).map(
    lambda lengths: [[100 + number] * length for number, length in enumerate(lengths)]
)


@given(st.lists(st.integers(1, 50), max_size=200))
def test_best_fit_overfills_no_row_and_opens_none_without_need(lengths):
    row_of = best_fit(np.array(lengths, np.int64), 50)
    fill = np.bincount(row_of, lengths) if lengths else np.zeros(0)
    assert len(row_of) == len(lengths) and (fill <= 50).all()
    assert (np.sort(fill)[:2].sum() > 50) if len(fill) > 1 else True, "two rows that would fit in one"
    assert not lengths or set(row_of.tolist()) == set(range(len(fill)))


@given(lists_of_pieces, st.sampled_from(["best_fit", "none", "concat"]))
@settings(max_examples=100)
def test_no_token_is_lost_and_none_doubled(tmp_path_factory, pieces, packing):
    part = write(tmp_path_factory.mktemp("part") / "p", pieces, 16, packing)
    found = pieces_of(part)
    if packing == "concat":
        assert [token for piece in found for token in piece] == [token for piece in pieces for token in piece]
        assert len(part) == -(-sum(map(len, pieces)) // 16), "only the last row can have room"
    else:
        assert sorted(found) == sorted(pieces)
    assert packing != "none" or len(part) == len(pieces)
    facts = part.facts
    assert facts["tokens"] == sum(map(len, pieces)) and facts["labels"] == int((part.rows(np.arange(len(part))).labels != IGNORED).sum())
    assert facts["largest_id"] == 99 + len(pieces)


def test_concat_cuts_where_a_row_ends_and_positions_restart_there(tmp_path):
    part = write(tmp_path / "p", [[11] * 5, [12] * 14, [13]], 8, "concat")
    rows = part.rows(np.arange(3))
    assert rows.tokens.tolist() == [[11] * 5 + [12] * 3, [12] * 8, [12] * 3 + [13] + [PAD] * 4]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], list(range(8)), [0, 1, 2, 0, 0, 1, 2, 3]]
    ignored = [[0, 5], [0], [0, 3, 4, 5, 6, 7]]
    assert [np.flatnonzero(row == IGNORED).tolist() for row in rows.labels] == ignored


def test_what_is_not_learnt_is_no_label_and_padding_never_is(tmp_path):
    part = write(tmp_path / "p", [[~7, ~8, 9, 0], [5, 6]], 8, "best_fit")
    rows = part.rows(np.array([0]))
    assert rows.tokens[0].tolist() == [7, 8, 9, 0, 5, 6, PAD, PAD]
    assert rows.labels[0].tolist() == [IGNORED, IGNORED, 9, 0, IGNORED, 6, IGNORED, IGNORED]
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert (part.facts["labels"], part.facts["tokens"]) == (3, 6)


@given(st.lists(st.lists(st.integers(20, 99), min_size=1, max_size=15).map(lambda ids: [*ids, 0]), min_size=1, max_size=20))
@settings(max_examples=50)
def test_each_end_of_text_is_a_label_exactly_once(tmp_path_factory, documents):
    part = write(tmp_path_factory.mktemp("part") / "p", documents, 16, "best_fit")
    assert int((part.rows(np.arange(len(part))).labels == 0).sum()) == len(documents)


def test_many_windows_are_laid_out_like_one(monkeypatch):
    monkeypatch.setattr("finetune.packing.WINDOW", 10)
    lengths = np.random.default_rng(0).integers(1, 33, 95)
    parts, firsts = lay_out(lengths, 32, "best_fit")
    assert sorted(map(tuple, parts.tolist())) == sorted(zip((np.cumsum(lengths) - lengths).tolist(), lengths.tolist(), strict=True))
    fills = [parts[a:b, 1].sum() for a, b in zip(firsts, firsts[1:], strict=False)]
    assert max(fills) <= 32 and min(fills) > 0


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6))
def test_ranks_share_a_batch_without_loss_and_in_equal_steps(count, world_size, micro_batch):
    shares = [list(share(count, rank, world_size, micro_batch)) for rank in range(world_size)]
    assert len({len(each) for each in shares}) == 1
    counted = [place for each in shares for places, counts in each for place in places[counts].tolist()]
    assert counted == list(range(count))
    assert all(len(places) == micro_batch and places.max() < count for each in shares for places, _ in each)


def test_rows_that_do_not_count_add_no_label(tmp_path):
    rows = write(tmp_path / "p", [[7, 8, 9]] * 2, 4, "best_fit").rows(np.array([0, 0]))
    masked = mask(rows, np.array([True, False]))
    assert masked.labels[1].tolist() == [IGNORED] * 4 and (masked.labels[0] == rows.labels[0]).all()


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_real_code_fills_its_rows(seq_len):
    """Token counts of a library's files, cut at a row: the bound of 3 % padding is on code, not on any lengths."""
    import sysconfig

    sizes = [path.stat().st_size // 4 + 1 for path in Path(sysconfig.get_path("stdlib")).glob("*.py")]
    lengths = np.array([min(seq_len, size - start) for size in sizes for start in range(0, size, seq_len)])
    _, firsts = lay_out(lengths, seq_len, "best_fit")
    assert lengths.sum() / ((len(firsts) - 1) * seq_len) > 0.97
