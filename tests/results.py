"""The held-out loss of a result, by plain transformers and PEFT in one process: what anyone gets who loads it."""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from finetune.corpus import prepare
from finetune.packing import IGNORED
from finetune.recipe import load_recipe


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, out: Path) -> float:
    """Nats a token of `model` on the rows that the run in `out` evaluated on."""
    recipe, config = load_recipe(out / "recipe.yaml"), model.config
    data = prepare(recipe.data, AutoTokenizer.from_pretrained(out), recipe.run.seed, config.max_position_embeddings, config.vocab_size)
    tokens, positions, labels = (
        torch.from_numpy(array).long() for array in (data.held_out.tokens, data.held_out.positions, data.held_out.labels)
    )
    # Given positions that restart, transformers' own attention keeps the documents apart.
    logits = model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED).item()
