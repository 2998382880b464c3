"""The loss as a sum over label tokens, so that one division by the whole batch's count makes every split of it the same step."""

import torch
from torch.nn.functional import cross_entropy

from finetune.packing import IGNORED, Rows


def to_batch(rows: Rows, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows as `input_ids`, `position_ids` and `labels`, each int64 [rows, seq_len] on `device`."""
    arrays = {"input_ids": rows.tokens, "position_ids": rows.positions, "labels": rows.labels}
    return {name: torch.from_numpy(array).to(device, torch.int64) for name, array in arrays.items()}


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens of int64 [rows, seq_len] are learnt: int64 scalar. The first column predicts nothing and never counts."""
    return (labels[:, 1:] != IGNORED).sum()


def sum_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy in nats, summed over the label tokens of a batch: fp32 scalar.

    Args:
        model: a causal language model, wrapped or not.
        batch: from `to_batch`. No attention mask: the positions, which restart with each document, keep documents apart.
    """
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    targets = batch["labels"][:, 1:].reshape(-1)
    return cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), targets, ignore_index=IGNORED, reduction="sum")
