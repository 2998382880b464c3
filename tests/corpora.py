"""Make corpora in tests: a tokenizer, small files, and what a corpus holds."""

import json
import os
import signal
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer

from finetune.corpus import Corpus, prepare
from finetune.recipe import Data
from finetune.store import batch_sizes, read_batch

CASES = Path(__file__).parent / "cases" / "data"
TINY = Path(__file__).parent.parent / "models" / "tiny-starcoder"


@cache
def tiny_tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def make(folder: Path, train, seed: int = 0, **settings) -> Corpus:
    """The corpus of `data.train` with settings of the data section, cached in `folder`."""
    data = Data.model_validate({"train": train, "seq_len": 32, "cache": str(folder / "cache"), **settings})
    return prepare(data, tiny_tokenizer(), seed, 1024, 4096)


def documents(corpus: Corpus) -> list[str]:
    """The text of every document that was kept, in order."""
    path = Path(corpus.manifest()["cache"]) / "base" / "documents.arrow"
    return [document.text for number in range(len(batch_sizes(path))) for _, document in read_batch(path, number)]


def write_rows(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def write_functions(path: Path, count: int) -> str:
    """A JSONL file of `count` small functions, no two alike."""
    return write_rows(path, [{"text": f"def f{n}(x):\n    return x + {n} * {n * n + 7}\n"} for n in range(count)])


def die(*_) -> None:
    """A task under which a worker is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
