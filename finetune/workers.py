"""What is done to each batch of documents on its own, by all cores at once: screening and encoding."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from finetune.encode import Encoder, Plan
from finetune.formats import Document
from finetune.mistakes import Mistake, Mistakes
from finetune.overlap import BINS, Benchmarks, NearDuplicates, hash_words, signature
from finetune.store import batch_sizes, place, read_batch

TRAIN, HELD_OUT, NEAR_DUPLICATE, CONTAMINATED = range(4)  # verdicts on a document
BATCHES_WORTH_WORKERS = 4  # starting processes takes longer than fewer batches


@dataclass(frozen=True)
class Setting:
    """What all tasks share."""

    plan: Plan
    threshold: float  # documents whose place is below it are held out
    weights: tuple[float, ...]  # of each source
    benchmarks: tuple[str, ...]


@dataclass
class Encoded:
    """What became of the documents of one source in a batch."""

    lengths: np.ndarray  # int64 [pieces]
    stored: np.ndarray  # int32, the tokens of the pieces; see encode
    facts: dict[str, Any]


class Workers:
    """Runs tasks over the batches of a file of documents, in order, in processes of their own where there are enough batches.

    No more results are held than there are workers to make them, so memory does not grow with the data.
    """

    def __init__(self, setting: Setting, batches: int):
        cores = len(os.sched_getaffinity(0))
        self.pool = None
        if cores > 1 and batches >= BATCHES_WORTH_WORKERS:
            # Spawned: a fork would copy the threads' locks of a process that has loaded torch.
            self.pool = ProcessPoolExecutor(min(cores, batches), get_context("spawn"), initializer=_start, initargs=(setting, True))
            self.ahead = 2 * min(cores, batches)
        else:
            _start(setting)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def map(self, task: Callable, documents: Path, *shared: Any) -> Iterator[Any]:
        """The results of `task(documents, batch, *shared)` for every batch, in order. Of a list in `shared` each gets its own item.

        Raises:
            Mistakes: a process was killed.
        """
        batches = range(len(batch_sizes(documents)))
        arguments = ((documents, batch, *(value[batch] if isinstance(value, list) else value for value in shared)) for batch in batches)
        if self.pool is None:
            yield from (task(*each) for each in arguments)
            return
        waiting = deque()
        try:
            for each in arguments:
                waiting.append(self.pool.submit(task, *each))
                if len(waiting) > self.ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            what = "a process that prepares it was killed, most likely for want of host memory"
            raise Mistakes(Mistake("recipe", "data.train", what, "free memory, or lower data.largest_bytes")) from None


_setting: Setting


def _start(setting: Setting, is_process: bool = False) -> None:
    global _setting
    _setting = setting
    if is_process:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process is one core's
    for cached in (_encoder, _benchmarks, _near_duplicates):
        cached.cache_clear()


@cache
def _encoder(kind: str) -> Encoder:
    plan = _setting.plan
    return Encoder({"train": plan, "held_out": plan.for_evaluation(), "infilling": plan.for_infilling()}[kind])


@cache
def _benchmarks() -> Benchmarks:
    return Benchmarks(_setting.benchmarks)


@cache
def _near_duplicates(signatures: Path) -> NearDuplicates:
    return NearDuplicates(np.load(signatures))


def sign_held_out(documents: Path, batch: int) -> np.ndarray:
    """Task: the signatures of a batch's held-out documents, uint32 [documents, 2, BINS]."""
    held_out = [document for _, document in read_batch(documents, batch) if place(document) < _setting.threshold]
    signatures = [_sign(document, hash_words(document.text)) for document in held_out]
    return np.array(signatures, np.uint32).reshape(-1, 2, BINS)


def _sign(document: Document, words: np.ndarray) -> np.ndarray:
    whole = signature(words)
    if len(document.segments) == 1:
        return np.stack([whole, whole])
    learnt = "".join(segment.text for segment in document.segments if segment.learnt)
    return np.stack([whole, signature(hash_words(learnt))])


def judge(documents: Path, batch: int, signatures: Path) -> np.ndarray:
    """Task: the verdict on each document of a batch, uint8 [documents]."""
    verdicts = []
    for _, document in read_batch(documents, batch):
        words, held_out = hash_words(document.text), place(document) < _setting.threshold
        if _setting.benchmarks and _benchmarks().found_in(words):
            verdicts.append(CONTAMINATED)
        elif held_out:
            verdicts.append(HELD_OUT)
        else:
            verdicts.append(NEAR_DUPLICATE if _near_duplicates(signatures).has(_sign(document, words)) else TRAIN)
    return np.array(verdicts, np.uint8)


def encode(documents: Path, batch: int, verdicts: np.ndarray, kind: str, number: int) -> list[Encoded]:
    """Task: a batch's pieces, for each source.

    Args:
        verdicts: from `judge`.
        kind: train, held_out or infilling.
        number: of the pass over the data, which the draws depend on.
    """
    chosen = [[] for _ in _setting.weights]
    for (source, document), verdict in zip(read_batch(documents, batch), verdicts, strict=True):
        if verdict != (TRAIN if kind == "train" else HELD_OUT):
            continue
        if kind == "infilling" and (document.repository or len(document.segments) > 1):
            continue
        key = f"{_setting.plan.seed}:{number}:{document.name}"
        copies = _copies(_setting.weights[source], key) if kind == "train" else 1
        chosen[source] += [(document, f"{key}:{copy}") for copy in range(copies)]
    out = []
    for each in chosen:
        encoded = _encoder(kind).encode(each)
        lengths = np.array([len(piece) for piece in encoded.pieces], np.int64)
        stored = np.concatenate(encoded.pieces) if encoded.pieces else np.zeros(0, np.int32)
        facts = {"documents": encoded.documents, "tokens": len(stored), "learnt": int((stored >= 0).sum())}
        out.append(Encoded(lengths, stored, facts | {"dropped": dict(encoded.dropped), "notes": dict(encoded.notes)}))
    return out


def _copies(weight: float, key: str) -> int:
    """How often a document is seen in a pass: the weight, its fraction drawn anew each pass."""
    return int(weight) + (Random(f"{key}:weight").random() < weight % 1)
