"""The held-out loss of a result, by plain transformers and PEFT in one process: what anyone gets who loads it."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from finetune.corpus import prepare
from finetune.loss import count_labels, sum_losses, to_batch
from finetune.recipe import load_recipe


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, out: Path) -> float:
    """Nats a token of `model` on the rows that the run in `out` evaluated on."""
    recipe = load_recipe(out / "recipe.yaml")
    config = model.config
    data = prepare(recipe.data, AutoTokenizer.from_pretrained(out), recipe.run.seed, config.max_position_embeddings, config.vocab_size)
    batch = to_batch(data.held_out, torch.device("cpu"))
    return (sum_losses(model.eval(), batch) / count_labels(batch["labels"])).item()
