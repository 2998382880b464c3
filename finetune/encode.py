"""Documents to pieces of token ids, none longer than a row: fill-in-the-middle on characters, then the tokenizer.

A piece is int32. A token that is not learnt is stored as its bitwise complement, so that one array holds ids and loss mask.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from tokenizers import Tokenizer

from finetune import fim
from finetune.formats import Document
from finetune.mistakes import Mistake, Mistakes
from finetune.recipe import Data

# Room that a piece of a longer document leaves for what fill-in-the-middle adds: three sentinels, and the tokens that its cuts
# split. A piece that outgrows it stays left to right, and is counted.
FIM_ROOM = 8
# Of StarCoder's tokenizer on code it is 3 to 4; where a text has more it is encoded once more than needed.
MOST_CHARACTERS_A_TOKEN = 3
REPOSITORY_TOKENS = (("<reponame>", "<filename>"), ("<repo_name>", "<file_sep>"))  # StarCoder's, and StarCoder2's


@dataclass(frozen=True)
class Plan:
    """What encoding depends on beside the documents; can be sent to another process."""

    tokenizer_json: str
    end: int
    seq_len: int
    whole: bool  # documents stay whole, whatever their length
    fim_rate: float
    fim_spm_share: float
    fim_tokens: fim.FimTokens | None
    repository_tokens: tuple[str, str] | None
    seed: int
    middle_only: bool = False  # learn the middle alone, to measure infilling

    def for_evaluation(self) -> "Plan":
        """Left to right, so that the loss of two recipes can be compared."""
        return replace(self, fim_rate=0.0, fim_tokens=None)

    def for_infilling(self) -> "Plan":
        """Every document in prefix-suffix-middle order, the middle learnt alone."""
        return replace(self, fim_rate=1.0, fim_spm_share=0.0, middle_only=True, whole=False)


@dataclass
class Encoded:
    """Pieces of one document after the other."""

    pieces: list[np.ndarray] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    documents: int = 0

    def add(self, pieces: Iterable[list[int]]) -> None:
        self.pieces += [np.asarray(piece, np.int32) for piece in pieces]


def make_plan(data: Data, tokenizer, seed: int, formats: Sequence[str]) -> Plan:
    """The plan of a recipe's data section.

    Args:
        tokenizer: transformers' fast tokenizer.
        formats: of the sources.

    Raises:
        Mistakes: the tokenizer lacks the end of text, or the tokens that fill-in-the-middle or the repository format need.
    """
    mistakes = []
    if tokenizer.eos_token_id is None:
        mistakes.append(Mistake("recipe", "model.name", "its tokenizer has no end-of-text token", "take the tokenizer of a code model"))
    repository = next((names for names in REPOSITORY_TOKENS if all(name in tokenizer.get_vocab() for name in names)), None)
    if "repository" in formats and repository is None:
        what = "the repository format needs <reponame> and <filename> (or <repo_name> and <file_sep>), which the tokenizer lacks"
        mistakes.append(Mistake("recipe", "data.train", what, "set format: text"))
    if mistakes:
        raise Mistakes(*mistakes)
    return Plan(
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        end=tokenizer.eos_token_id,
        seq_len=data.seq_len,
        whole=data.packing == "concat",
        fim_rate=data.fim_rate,
        fim_spm_share=data.fim_spm_share,
        fim_tokens=fim.find_fim_tokens(tokenizer) if data.fim_rate > 0 else None,
        repository_tokens=repository,
        seed=seed,
    )


class Encoder:
    """Encodes documents as a plan says."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.limit = sys.maxsize if plan.whole else plan.seq_len
        # In text that comes from data "<fim_prefix>" is text; in control text it is the token.
        self.text = Tokenizer.from_str(plan.tokenizer_json)
        self.control = Tokenizer.from_str(plan.tokenizer_json)
        for tokenizer, as_text in ((self.text, True), (self.control, False)):
            tokenizer.encode_special_tokens = as_text
            tokenizer.no_truncation()
            tokenizer.no_padding()
        special = [token.content for token in self.text.get_added_tokens_decoder().values() if token.special]
        # Tokens of a byte-level vocabulary that begin inside a character: with a byte that UTF-8 never starts one with.
        inside = {chr(code) for code in _continuation_characters()}
        self.inside = {token_id for token, token_id in self.text.get_vocab(with_added_tokens=False).items() if token[:1] in inside}
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def encode(self, documents: Iterable[tuple[Document, str]]) -> Encoded:
        """Encode documents, each with the key of its draws: the same key gives the same draws, whoever encodes it.

        Documents of one repository that follow each other are joined while they fit a row.
        """
        out, repository, joined = Encoded(), "", []
        for document, key in documents:
            if any(self.special.search(segment.text) for segment in document.segments if not segment.is_control):
                out.notes["the text of a special token, kept as text"] += 1
            if repository and document.repository != repository:
                out.add([self._end(joined)])
                repository, joined = "", []
            if not document.repository:
                pieces = self._whole(document, out) if len(document.segments) > 1 else self._pieces(document.text, key, [], out)
                if pieces:
                    pieces[-1] = self._end(pieces[-1])
                    out.documents += 1
                    out.add(pieces)
                continue
            head = self._encode(self.plan.repository_tokens[0], is_control=True) + self._encode(document.repository)
            file_head = self._encode(self.plan.repository_tokens[1], is_control=True) + self._encode(f"{document.path}\n")
            pieces = self._pieces(document.text, key, head + file_head, out)
            out.documents += 1
            if len(pieces) == 1 and repository and len(joined) + len(pieces[0]) - len(head) < self.limit:
                joined += pieces[0][len(head) :]
                continue
            if repository:
                out.add([self._end(joined)])
            repository, joined = document.repository, pieces.pop()
            out.add(pieces)
        if repository:
            out.add([self._end(joined)])
        return out

    def _encode(self, text: str, is_control: bool = False) -> list[int]:
        return (self.control if is_control else self.text).encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _end(self, ids: list[int]) -> list[int]:
        """With its end of text, learnt as what it ends is; a chat template has written it already."""
        return ids if ids[-1] == self.plan.end else [*ids, self.plan.end if ids[-1] >= 0 else ~self.plan.end]

    def _whole(self, document: Document, out: Encoded) -> list[list[int]]:
        """A document of several segments, which is not cut: without its prompt an answer means nothing."""
        ids = []
        for segment in document.segments:
            part = self._encode(segment.text, segment.is_control)
            ids += part if segment.learnt else [~token for token in part]
        if len(ids) >= self.limit:
            out.dropped["longer than a row"] += 1
        elif not any(token >= 0 for token in ids[1:]):
            out.dropped["nothing to learn"] += 1
        else:
            return [ids]
        return []

    def _pieces(self, text: str, key: str, head: list[int], out: Encoded) -> list[list[int]]:
        """A text in pieces that fit a row, cut between characters without overlap; the last has room for the end of text.

        Args:
            key: of the draws; each piece draws for itself, so that prefix, middle and suffix stand in one row.
            head: tokens that go before the first piece.
        """
        # A text that is surely longer than a row need not be turned as a whole to find that out.
        ids = self._turn(text, f"{key}:0") if len(text) < MOST_CHARACTERS_A_TOKEN * self.limit else None
        if ids is None or len(head) + len(ids) >= self.limit:
            whole = self._encode(text)
            if len(head) + len(whole) >= self.limit:
                return self._learnable(self._cut(text, whole, key, head, out))
            ids = self._turn(text, f"{key}:0")
            if ids is None or len(head) + len(ids) >= self.limit:
                ids = whole
        return self._learnable([[*head, *ids]])

    def _cut(self, text: str, ids: list[int], key: str, head: list[int], out: Encoded) -> list[list[int]]:
        pieces, start = [], 0
        can_turn = self.plan.fim_tokens is not None and self.text.decode(ids) == text
        while start < len(ids):
            room, piece = self.limit - len(head), None
            if can_turn and room > 4 * FIM_ROOM:
                end = self._boundary(ids, start, min(room - FIM_ROOM, len(ids) - start))
                piece = self._turn(self.text.decode(ids[start:end]), f"{key}:{len(pieces)}")
                if piece and len(piece) + (end == len(ids)) > room:
                    out.notes["a piece left to right, for want of room"] += 1
                    piece = None
            if piece is None:
                left = len(ids) - start
                end = len(ids) if left < room else self._boundary(ids, start, min(room, left - 1))
                piece = ids[start:end]
            pieces.append([*head, *piece])
            head, start = [], end
        return pieces

    def _boundary(self, ids: list[int], start: int, count: int) -> int:
        """The end of a piece of at most `count` tokens from `start` that splits no character."""
        end = start + count
        while end < len(ids) and end > start + 1 and ids[end] in self.inside:
            end -= 1
        return end

    def _turn(self, text: str, key: str) -> list[int] | None:
        """The text as fill-in-the-middle, or None where it was not drawn."""
        if self.plan.fim_tokens is None:
            return None
        cut = fim.split(text, Random(key), self.plan.fim_rate, self.plan.fim_spm_share)
        if cut is None:
            return None
        prefix, middle, suffix = (self._encode(part) for part in (cut.prefix, cut.middle, cut.suffix))
        ids = fim.join(prefix, middle, suffix, cut.suffix_first, self.plan.fim_tokens)
        if self.plan.middle_only:
            seen = len(ids) - len(middle)
            ids[:seen] = [~token for token in ids[:seen]]
        return ids

    def _learnable(self, pieces: list[list[int]]) -> list[list[int]]:
        """Where the middle alone is learnt, the pieces that have one."""
        return [piece for piece in pieces if piece[0] < 0 and piece[-1] >= 0] if self.plan.middle_only else pieces


def _continuation_characters() -> list[int]:
    """How byte-level BPE writes the bytes 0x80 to 0xBF: those that Latin-1 can print as themselves, the others counted from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [byte if byte in printable else 256 + others.index(byte) for byte in range(0x80, 0xC0)]
