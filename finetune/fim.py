"""Fill in the middle: cut a document in three and put the middle last, so that a left-to-right model learns to infill.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle" (arXiv:2207.14255), section 3; on
characters before tokenisation and with the token order of StarCoder (Li et al. 2023, arXiv:2305.06161, section 5.1).
"""

from dataclasses import dataclass
from random import Random

from finetune.mistakes import Mistake, Mistakes

SENTINELS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")


@dataclass(frozen=True)
class FimTokens:
    """Ids of the three sentinels."""

    prefix: int
    middle: int
    suffix: int


@dataclass(frozen=True)
class Pieces:
    """A document in three; `prefix + middle + suffix` is the document again."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool  # SPM order


def find_fim_tokens(tokenizer) -> FimTokens:
    """Resolve the sentinels once.

    Raises:
        Mistakes: a sentinel is unknown (the tokenizer would answer with its unknown id, in StarCoder the end of text),
            or it does not stand for exactly one id of its own.
    """
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SENTINELS]
    taken = {tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id} - {None}
    for token, token_id in zip(SENTINELS, ids, strict=True):
        encoded = tokenizer.encode(token, add_special_tokens=False)
        if token_id is None or token_id in taken or encoded != [token_id] or ids.count(token_id) > 1:
            what = f"the model's tokenizer has no {token} of its own (encoded as {encoded})"
            raise Mistakes(Mistake("recipe", "data.fim_rate", what, "set it to 0, or take a model trained to fill in the middle"))
    return FimTokens(*ids)


def split(text: str, generator: Random, rate: float, spm_share: float) -> Pieces | None:
    """Draw whether and where to cut.

    Args:
        text: the document. Cuts fall between characters, so never inside a UTF-8 sequence.
        generator: takes the same number of draws whatever the outcome.
        rate: share of documents that are cut, 0 to 1.
        spm_share: share of those in suffix-prefix-middle order.

    Returns:
        None if the document stays as it is: not drawn, or shorter than three pieces.
    """
    draws = [generator.random() for _ in range(4)]
    if draws[0] >= rate or len(text) < 3:
        return None
    first, second = sorted(int(draw * (len(text) + 1)) for draw in draws[2:])
    return Pieces(text[:first], text[first:second], text[second:], suffix_first=draws[1] < spm_share)


def join(prefix: list[int], middle: list[int], suffix: list[int], suffix_first: bool, tokens: FimTokens) -> list[int]:
    """Token ids of one document in PSM or SPM order, without the end of text.

    SPM keeps the prefix next to the middle, behind one sentinel: `<fim_prefix><fim_suffix>suffix<fim_middle>prefix middle`.
    """
    if suffix_first:
        return [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix, *middle]
    return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle, *middle]
