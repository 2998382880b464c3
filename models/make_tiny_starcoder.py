"""Make what pre-training the tiny StarCoder starts from: its tokenizer and its config, without weights.

python models/make_tiny_starcoder.py models/tiny-starcoder

The tokenizer is built as StarCoder's is (Li et al. 2023, arXiv:2305.06161, section 5.2): byte-level BPE, each digit alone, and the
special tokens first, so that they have StarCoder's ids. It learns from the Python standard library's source.
"""

import sys
import sysconfig

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTBigCodeConfig, PreTrainedTokenizerFast

from finetune.recipe import Source
from finetune.sources import Tally, open_source

SPECIAL_TOKENS = """<|endoftext|> <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <gh_stars> <issue_start> <issue_comment>
<issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output> <commit_before> <commit_msg>
<commit_after> <reponame>""".split()
VOCAB_SIZE = 4096


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = SPECIAL_TOKENS[0]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)


def make_config() -> GPTBigCodeConfig:
    return GPTBigCodeConfig(
        architectures=["GPTBigCodeForCausalLM"],
        vocab_size=VOCAB_SIZE,
        n_positions=1024,
        n_embd=192,
        n_layer=5,
        n_head=6,
        n_inner=768,
        multi_query=True,
        activation_function="gelu_pytorch_tanh",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


if __name__ == "__main__":
    folder = sys.argv[1]
    records = open_source(Source(source=sysconfig.get_path("stdlib")), Tally(), None, largest_bytes=1_000_000)
    make_tokenizer([record.columns["content"] for record in records]).save_pretrained(folder)
    make_config().save_pretrained(folder)
