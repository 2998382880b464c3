"""Documents to token rows of one length without padding, and rows to batches that every rank agrees on."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from finetune import fim
from finetune.mistakes import Mistake, Mistakes
from finetune.recipe import Data
from finetune.sources import Document, hold_out, read_documents

IGNORED = -100  # the label of a token that is not learnt; torch's cross entropy leaves it out
DOCUMENTS_A_CALL = 256  # the tokenizer works on all cores within one call


@dataclass(frozen=True)
class Rows:
    """Packed rows, each int32 [rows, seq_len].

    positions restart at 0 with each document and each row: attention then keeps the documents apart, and a learned position
    table sees what it saw in pre-training. The first token of a document has no context that could predict it: its label is
    IGNORED.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def fingerprint(self) -> str:
        """A hash of the rows, to compare between ranks."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.positions, self.labels):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Prepared:
    """Rows to train on and to evaluate on, and what was read to make them."""

    train: Rows
    held_out: Rows
    report: dict[str, int | dict[str, int]]


def prepare_rows(data: Data, tokenizer, seed: int) -> Prepared:
    """Read, split, tokenise and pack what the recipe's data section names.

    The result depends on the arguments and the files alone, so every rank makes the same rows without a collective.

    Raises:
        Mistakes: see `read_documents`; fewer tokens than one row; fill in the middle asked of a tokenizer without its tokens.
    """
    if tokenizer.eos_token_id is None:
        raise Mistakes(Mistake("recipe", "model.name", "its tokenizer has no end-of-text token", "take the tokenizer of a code model"))
    fim_tokens = fim.find_fim_tokens(tokenizer) if data.fim_rate > 0 else None
    documents, skipped = read_documents(data.train)
    train, held_out = hold_out(documents, data.eval_share)
    train_ids = list(_tokenise(train, tokenizer, seed, data.fim_rate, data.fim_spm_share, fim_tokens))
    # Held-out documents stay as they are, so that the loss of two recipes can be compared.
    held_out_ids = list(_tokenise(held_out, tokenizer, seed, 0.0, 0.0, None))
    train_rows, train_tail = pack(train_ids, data.seq_len)
    held_out_rows, _ = pack(held_out_ids, data.seq_len)
    for key, rows, ids in (("data.train", train_rows, train_ids), ("data.eval_share", held_out_rows, held_out_ids)):
        if len(rows) == 0:
            what = f"its {sum(map(len, ids)):,} tokens are less than one row of data.seq_len ({data.seq_len:,})"
            raise Mistakes(Mistake("recipe", key, what, "add data, lower data.seq_len, or change data.eval_share"))
    report = {
        "documents": len(documents),
        "documents_left_out": dict(Counter(skipped)),
        "train_documents": len(train),
        "train_rows": len(train_rows),
        "train_tokens": int(train_rows.tokens.size),
        "train_tokens_cut_from_the_end": train_tail,
        "held_out_documents": len(held_out),
        "held_out_rows": len(held_out_rows),
    }
    return Prepared(train_rows, held_out_rows, report)


def describe(report: dict[str, int | dict[str, int]]) -> str:
    """The report of `prepare_rows` as a line for the console."""
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in report["documents_left_out"].items()) or "nothing"
    return (
        f"data: {report['train_documents']:,} documents to train on ({report['train_rows']:,} rows, {report['train_tokens']:,} tokens), "
        f"{report['held_out_documents']:,} held out ({report['held_out_rows']:,} rows); left out: {left_out}"
    )


def check_fits(data: Prepared, positions: int, vocab_size: int) -> None:
    """Compare rows with the tables that they index, where a GPU would only report an assertion, and later.

    Raises:
        Mistakes: a row is longer than the table of positions, or a token id lies outside the embedding.
    """
    length, largest = data.train.tokens.shape[1], max(int(data.train.tokens.max()), int(data.held_out.tokens.max()))
    mistakes = []
    if length > positions:
        mistakes.append(Mistake("recipe", "data.seq_len", f"{length} is more than the model's {positions} positions", "lower it"))
    if largest >= vocab_size:
        what = f"its tokenizer gives id {largest} and its embedding has {vocab_size} rows"
        mistakes.append(Mistake("recipe", "model.name", what, "put the tokenizer beside the model that it belongs to"))
    if mistakes:
        raise Mistakes(*mistakes)


def _tokenise(
    documents: list[Document], tokenizer, seed: int, rate: float, spm_share: float, fim_tokens: fim.FimTokens | None
) -> Iterator[list[int]]:
    for start in range(0, len(documents), DOCUMENTS_A_CALL):
        chunk = documents[start : start + DOCUMENTS_A_CALL]
        # The draw depends on the document's name and the seed alone, whatever was read before it.
        cuts = [fim.split(d.text, Random(f"{seed}:{d.name}"), rate, spm_share) for d in chunk]
        texts = []
        for document, cut in zip(chunk, cuts, strict=True):
            texts += [cut.prefix, cut.middle, cut.suffix] if cut else [document.text]
        # split_special_tokens: "<fim_prefix>" inside someone's source is text, not a control token.
        encoded = iter(tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        for cut in cuts:
            ids = next(encoded) if cut is None else fim.join(next(encoded), next(encoded), next(encoded), cut.suffix_first, fim_tokens)
            yield [*ids, tokenizer.eos_token_id]


def pack(documents: Iterable[list[int]], seq_len: int) -> tuple[Rows, int]:
    """Join documents into one stream and cut it into rows.

    Args:
        documents: token ids, each with its end of text.
        seq_len: tokens in a row.

    Returns:
        The rows, and how many tokens at the end of the stream did not fill another one.
    """
    stream, starts, length = [], [], 0
    for ids in documents:
        stream.append(np.asarray(ids, dtype=np.int32))
        starts.append(length)
        length += len(ids)
    count, tail = divmod(length, seq_len)
    tokens = np.concatenate(stream)[: count * seq_len] if stream else np.zeros(0, np.int32)
    is_start = np.zeros(count * seq_len, dtype=bool)
    is_start[[start for start in starts if start < count * seq_len]] = True
    is_start[::seq_len] = True
    index = np.arange(count * seq_len, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(is_start, index, 0))
    labels = np.where(is_start, np.int32(IGNORED), tokens)
    shape = (count, seq_len)
    return Rows(tokens.reshape(shape), positions.reshape(shape).astype(np.int32), labels.reshape(shape)), tail


def global_batch(row_count: int, batch_rows: int, step: int, seed: int) -> np.ndarray:
    """Indices of the rows of optimizer step `step` (from 0): int64 [batch_rows].

    Epoch follows epoch without a gap, each in its own order. The batch depends on the step alone, so that ranks, micro batch
    and accumulation only divide it, and a run can start at any step.
    """
    places = np.arange(step * batch_rows, (step + 1) * batch_rows)
    indices = np.empty(batch_rows, dtype=np.int64)
    for epoch in np.unique(places // row_count):
        inside = places // row_count == epoch
        indices[inside] = np.random.default_rng([seed, int(epoch)]).permutation(row_count)[places[inside] % row_count]
    return indices


def pick(rows: Rows, indices: np.ndarray, rank: int, world_size: int, micro_batch: int) -> list[Rows]:
    """This rank's share of the rows at `indices`, as micro batches of at most `micro_batch` rows, equally many on each rank.

    Rows that are short for an even split are filled with repeated ones whose labels are all IGNORED, which add no loss.
    """
    micro_batches = -(-len(indices) // (world_size * micro_batch))
    share = micro_batches * micro_batch
    padded = np.resize(indices, share * world_size)
    labels = rows.labels[padded]
    labels[len(indices) :] = IGNORED
    mine = slice(rank * share, (rank + 1) * share)
    tokens, positions, labels = rows.tokens[padded[mine]], rows.positions[padded[mine]], labels[mine]
    cuts = [slice(start, start + micro_batch) for start in range(0, share, micro_batch)]
    return [Rows(tokens[cut], positions[cut], labels[cut]) for cut in cuts]
