"""The held-out loss of a result, by plain transformers and PEFT in one process: what anyone gets who loads it."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from finetune.loss import count_labels, sum_losses, to_batch
from finetune.packing import prepare_rows
from finetune.recipe import load_recipe


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, out: Path) -> float:
    """Nats a token of `model` on the rows that the run in `out` evaluated on."""
    recipe = load_recipe(out / "recipe.yaml")
    rows = prepare_rows(recipe.data, AutoTokenizer.from_pretrained(out), recipe.run.seed).held_out
    batch = {name: tensor[: recipe.data.eval_rows] for name, tensor in to_batch(rows, torch.device("cpu")).items()}
    return (sum_losses(model.eval(), batch) / count_labels(batch["labels"])).item()
