"""What must not stand in the training documents: near-duplicates of held-out ones, and the problems of benchmarks.

Near-duplicates are found as for The Stack (Kocetkov et al. 2022, arXiv:2211.15533, section 3.3): the Jaccard similarity of the sets of
five consecutive words, estimated by MinHash, with candidates from locality-sensitive hashing. One permutation serves all
minima (Li et al. 2012, arXiv:1208.1259), which makes a signature one pass over the words.
"""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from finetune.mistakes import Mistake, Mistakes

SHINGLE_WORDS = 5
BINS = 128  # minima in a signature
BAND = 4  # of them in a band; similarity 0.7 meets in one of 32 bands with probability 0.9998
SIMILAR = 0.7
EMPTY = np.uint32(2**32 - 1)
# A benchmark's text of fewer words ("return a + b") is found in any code.
LEAST_WORDS = 8
WORDS = re.compile(rb"[\w\x80-\xff]+")  # of UTF-8; beyond ASCII everything counts as a letter
DOCSTRING = re.compile(r'"""(.+?)(?:>>>|"""|\'\'\')|\'\'\'(.+?)(?:>>>|"""|\'\'\')', re.DOTALL)
BENCHMARK_COLUMNS = ("prompt", "canonical_solution", "text", "code")  # HumanEval's and MBPP's


def hash_words(text: str) -> np.ndarray:
    """A 64-bit hash of each word, uint64 [words]; case and everything between words do not count."""
    words = WORDS.findall(text.lower().encode("utf-8"))
    return np.fromiter(map(zlib.crc32, words), np.uint64, len(words)) * np.uint64(0x9E3779B97F4A7C15)


def _hash_runs(words: np.ndarray, length: int) -> np.ndarray:
    """A hash of every run of `length` words, uint64 [words - length + 1], or of them all if there are fewer."""
    length = max(min(length, len(words)), 1)
    count = max(len(words) - length + 1, 0)
    mixed = np.zeros(count, np.uint64)
    for offset in range(length):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + words[offset : offset + count]
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(32))


def signature(words: np.ndarray) -> np.ndarray:
    """The MinHash signature of a document's word hashes, uint32 [BINS]; EMPTY where nothing fell into a bin."""
    runs = _hash_runs(words, SHINGLE_WORDS)
    out = np.full(BINS, EMPTY, np.uint32)
    np.minimum.at(out, (runs % np.uint64(BINS)).astype(np.int64), (runs >> np.uint64(32)).astype(np.uint32))
    return out


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """The estimated Jaccard similarity of two signatures, 0 to 1."""
    filled = (one != EMPTY) | (other != EMPTY)
    return float((one == other)[filled].mean()) if filled.any() else 0.0


class NearDuplicates:
    """An index of documents that tells whether another one is nearly one of them.

    Both all of the text and what is learnt of it have to be similar: chats that share a long system prompt are no duplicates, nor are
    two questions that have the same short answer.
    """

    def __init__(self, signatures: np.ndarray):
        """signatures: uint32 [documents, 2, BINS], of all of the text and of what is learnt."""
        self.signatures, self.bands = signatures, defaultdict(list)
        for number, (_, learnt) in enumerate(signatures):
            for key in self._keys(learnt):
                self.bands[key].append(number)

    def has(self, other: np.ndarray) -> bool:
        """Whether the document with the signatures `other`, uint32 [2, BINS], is one."""
        candidates = {number for key in self._keys(other[1]) for number in self.bands.get(key, ())}
        return any(
            all(similarity(own, its) >= SIMILAR for own, its in zip(self.signatures[number], other, strict=True)) for number in candidates
        )

    @staticmethod
    def _keys(one: np.ndarray) -> Iterable[tuple[int, bytes]]:
        for band in range(0, BINS, BAND):
            values = one[band : band + BAND]
            if (values != EMPTY).any():
                yield band, values.tobytes()


class Benchmarks:
    """Tells whether a document contains a prompt, its docstring or a solution of a benchmark, word for word."""

    def __init__(self, texts: Iterable[str]):
        self.starts = defaultdict(set)  # the first words of a text, to the hashes of all of it
        self.too_short = 0
        for text in texts:
            words = hash_words(text)
            if len(words) < LEAST_WORDS:
                self.too_short += 1
            else:
                self.starts[int(_hash_runs(words[:LEAST_WORDS], LEAST_WORDS)[0])].add(words.tobytes())

    def found_in(self, words: np.ndarray) -> bool:
        """Whether one of the texts is in a document, given by its `hash_words`."""
        if not self.starts or len(words) < LEAST_WORDS:
            return False
        runs = _hash_runs(words, LEAST_WORDS)
        for place in np.flatnonzero(np.isin(runs, np.fromiter(self.starts, np.uint64, len(self.starts)))):
            for text in self.starts[int(runs[place])]:
                if words[place : place + len(text) // 8].tobytes() == text:
                    return True
        return False


def read_benchmarks(paths: list[str]) -> list[str]:
    """The texts of benchmark files to look for: each problem's prompt, the prose of its docstring, and its solution.

    Raises:
        Mistakes: a file cannot be read, or a row has none of the columns of HumanEval or MBPP.
    """
    texts, mistakes = [], []
    for name in paths:
        try:
            lines = Path(name).read_text("utf-8").splitlines()
            rows = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
        except (OSError, ValueError) as error:
            mistakes.append(Mistake("recipe", "data.decontaminate", f"{name} cannot be read ({error})", "give a benchmark as JSONL"))
            continue
        for number, row in rows:
            columns = [column for column in BENCHMARK_COLUMNS if isinstance(row, dict) and isinstance(row.get(column), str)]
            if not columns:
                what = f"{name}:{number} has no column {' or '.join(BENCHMARK_COLUMNS)}"
                mistakes.append(Mistake("recipe", "data.decontaminate", what, "give HumanEval or MBPP as JSONL"))
                break
            for column in columns:
                texts.append(row[column])
                texts += [first or second for first, second in DOCSTRING.findall(row[column])]
    if mistakes:
        raise Mistakes(*mistakes)
    return texts
