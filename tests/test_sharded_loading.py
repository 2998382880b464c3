"""Under ZeRO-3 no rank ever holds the whole model, in host memory either, and what it loads is what the files say."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTBigCodeConfig

from tests.launches import ROOT, command_for, run

RANKS = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What each rank saw, and the model's bytes."""
    folder = tmp_path_factory.mktemp("loading")
    config = GPTBigCodeConfig(n_embd=1024, n_layer=8, n_head=8, n_positions=128, vocab_size=8192, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "whole", max_shard_size="30MB")
    assert len(list((folder / "whole").glob("*.safetensors"))) > 5
    small = GPTBigCodeConfig(n_embd=64, n_layer=1, n_head=4, n_positions=128, vocab_size=512, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(small).save_pretrained(folder / "damaged")
    tensors = load_file(folder / "damaged" / "model.safetensors")
    del tensors["transformer.h.0.ln_1.weight"]
    tensors |= {"stranger": torch.ones(1), "transformer.wpe.weight": torch.ones(64, 128)}
    save_file(tensors, folder / "damaged" / "model.safetensors", metadata={"format": "pt"})
    arguments = [ROOT / "tests/loading.py", folder / "whole", folder / "damaged", folder]
    # Freed memory goes back to the system at once, so that what is measured is what is held, not what glibc keeps for later.
    environ = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = run([*command_for("zero3", RANKS, folder), *arguments], environ=environ)
    assert done.returncode == 0, done.stderr[:6000]
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return seen, sum(p.numel() for p in model.parameters()) * 4


def test_no_rank_holds_the_whole_model_in_host_memory(loaded):
    seen, whole_bytes = loaded
    for rank in seen:
        assert 0.25 <= rank["local_share"] < 0.26
        assert rank["peak_bytes"] < 0.4 * whole_bytes, rank
    # The same measurement sees transformers' loader put the whole checkpoint in rank 0's memory.
    assert max(rank["peak_bytes_of_transformers"] for rank in seen) > 0.9 * whole_bytes


def test_every_tensor_is_the_file_s(loaded):
    for rank in loaded[0]:
        assert rank["wrong"] == rank["not_loaded"] == []
        assert rank["dtypes"] == ["torch.float32"]


def test_missing_unexpected_and_misshapen_weights_are_fatal_on_every_rank(loaded):
    for rank in loaded[0]:
        assert "1 weights that the model needs are missing, transformer.h.0.ln_1.weight" in rank["mistakes"]
        assert "1 weights are in the files that the model does not have, stranger" in rank["mistakes"]
        assert "1 weights have another shape than the model's, transformer.wpe.weight" in rank["mistakes"]
