"""Pieces of documents to rows of one length, and rows to the micro batches of a rank.

Packing without cutting is best fit decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830).
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100  # the label of a token that is not learnt; torch's cross entropy leaves it out
# Pieces that are packed together. More would not fill rows better, and the bookkeeping of a row stays in memory.
WINDOW = 1 << 17


@dataclass(frozen=True)
class Rows:
    """Packed rows, each int32 [rows, seq_len].

    positions restart at 0 with each piece: attention then keeps the pieces apart, and a learned position table sees what it saw
    in pre-training. The first token of a piece has no context that could predict it: its label is IGNORED, as are those of
    tokens that are not learnt and of the padding, which is a piece of its own.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, places: np.ndarray) -> "Rows":
        """The rows at `places`."""
        return Rows(self.tokens[places], self.positions[places], self.labels[places])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign pieces to rows: int64 [pieces], the row of each.

    The longest piece comes first, and each goes to the row that it leaves the least room in.

    Args:
        lengths: int [pieces], each 1 to capacity.
        capacity: tokens in a row.
    """
    row_of, open_rows, rows = np.empty(len(lengths), np.int64), [[] for _ in range(capacity + 1)], 0
    rooms = 0  # bit r is set where a row has exactly r tokens of room
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            row, room, rows = rows, capacity, rows + 1
        row_of[piece] = row
        if room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    return row_of


def lay_out(lengths: np.ndarray, seq_len: int, packing: str) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens stand in which row.

    Args:
        lengths: int64 [pieces], in the order in which their tokens are stored; at most seq_len but for concat.
        packing: best_fit, concat or none.

    Returns:
        int64 [parts, 2], where each part begins in the stored tokens and how long it is, in the order of rows; and int64
        [rows + 1], the parts at which rows begin.
    """
    starts = np.cumsum(lengths) - lengths
    if packing == "concat":
        total = int(lengths.sum())
        cuts = np.unique(np.concatenate([starts, np.arange(0, total, seq_len), [total]])).astype(np.int64)
        parts = np.stack([cuts[:-1], np.diff(cuts)], axis=1)
        rows = np.searchsorted(cuts, np.arange(0, total, seq_len))
        return parts, np.append(rows, len(parts)).astype(np.int64)
    if packing == "none":
        return np.stack([starts, lengths], axis=1), np.arange(len(lengths) + 1)
    parts, firsts, done = [], [], 0
    for begin in range(0, len(lengths), WINDOW):
        window = slice(begin, begin + WINDOW)
        row_of = best_fit(lengths[window], seq_len)
        order = np.argsort(row_of, kind="stable")
        parts.append(np.stack([starts[window][order], lengths[window][order]], axis=1))
        firsts.append(done + np.searchsorted(row_of[order], np.arange(row_of.max() + 1)))
        done += len(row_of)
    return np.concatenate(parts), np.append(np.concatenate(firsts), done).astype(np.int64)


class Part:
    """Rows on disk, read as they are needed: a folder that `PartWriter` wrote."""

    @staticmethod
    def is_whole(path: Path) -> bool:
        """Whether the rows are there, not their facts alone."""
        try:
            facts = json.loads((path / "facts.json").read_text("utf-8"))
            return (path / "tokens.bin").stat().st_size == 4 * facts["tokens"]
        except (OSError, ValueError, KeyError):
            return False

    def __init__(self, path: Path):
        self.facts = json.loads((path / "facts.json").read_text("utf-8"))
        self.tokens = np.memmap(path / "tokens.bin", np.int32, "r") if self.facts["tokens"] else np.zeros(0, np.int32)
        self.parts, self.firsts = np.load(path / "parts.npy", mmap_mode="r"), np.load(path / "rows.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def rows(self, indices: np.ndarray) -> Rows:
        """The rows at `indices`."""
        shape = (len(indices), self.facts["seq_len"])
        tokens, labels = np.full(shape, self.facts["pad"], np.int32), np.full(shape, IGNORED, np.int32)
        positions = np.zeros(shape, np.int32)
        for row, index in enumerate(indices):
            place = 0
            for start, length in self.parts[self.firsts[index] : self.firsts[index + 1]]:
                stored = self.tokens[start : start + length]
                end = place + length
                tokens[row, place:end] = np.where(stored < 0, ~stored, stored)
                labels[row, place + 1 : end] = np.where(stored < 0, IGNORED, stored)[1:]
                positions[row, place:end] = np.arange(length)
                place = end
            positions[row, place:] = np.arange(shape[1] - place)
        return Rows(tokens, positions, labels)


class PartWriter:
    """Writes pieces as they come, and their rows when all are there."""

    def __init__(self, path: Path, seq_len: int, packing: str, pad: int):
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.seq_len, self.packing, self.pad = path, seq_len, packing, pad
        self.file, self.lengths, self.largest, self.learnt = open(path / "tokens.bin", "wb"), [], 0, 0
        self.digest = hashlib.blake2b(digest_size=16)

    def add(self, stored: np.ndarray, lengths: np.ndarray) -> None:
        """Add pieces: their tokens one after the other, int32, complemented where they are not learnt, and their lengths."""
        if not len(stored):
            return
        content = np.ascontiguousarray(stored).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.lengths.append(lengths)
        self.largest = max(self.largest, int(np.maximum(stored, ~stored).max()))
        self.learnt += int((stored >= 0).sum())

    def finish(self) -> dict[str, Any]:
        """Pack, and return what is known of the part, which its reader wants in facts.json beside what else is known."""
        self.file.close()
        lengths = np.concatenate(self.lengths).astype(np.int64) if self.lengths else np.zeros(0, np.int64)
        parts, firsts = (
            lay_out(lengths, self.seq_len, self.packing) if len(lengths) else (np.zeros((0, 2), np.int64), np.zeros(1, np.int64))
        )
        # What begins a part is predicted by nothing.
        tokens = np.memmap(self.path / "tokens.bin", np.int32, "r") if len(parts) else np.zeros(0, np.int32)
        labels = self.learnt - int((tokens[parts[:, 0]] >= 0).sum())
        np.save(self.path / "parts.npy", parts)
        np.save(self.path / "rows.npy", firsts)
        self.digest.update(parts.tobytes() + firsts.tobytes())
        return {
            "seq_len": self.seq_len,
            "pad": self.pad,
            "rows": len(firsts) - 1,
            "pieces": len(lengths),
            "tokens": int(lengths.sum()),
            "labels": labels,
            "largest_id": self.largest,
            "digest": self.digest.hexdigest(),
        }


def share(count: int, rank: int, world_size: int, micro_batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A rank's share of a global batch of `count` rows, as micro batches, equally many on each rank.

    Yields:
        int64 [micro_batch], places in the global batch; and bool [micro_batch], which of them count. Where the batch does not
        divide evenly some places come twice, and then count once.
    """
    micro_batches = -(-count // (world_size * micro_batch))
    first = rank * micro_batches * micro_batch
    for start in range(first, first + micro_batches * micro_batch, micro_batch):
        places = np.arange(start, start + micro_batch)
        yield places % count, places < count


def mask(rows: Rows, counts: np.ndarray) -> Rows:
    """The rows, with all labels of those that do not count IGNORED, so that they add no loss."""
    return Rows(rows.tokens, rows.positions, np.where(counts[:, None], rows.labels, np.int32(IGNORED)))
