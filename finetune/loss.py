"""The loss as a sum over label tokens, from hidden states in chunks: the full logits, 0.4 GB in fp32 per 2,048 tokens, never exist.

A sum, so that one division by the whole batch's count makes every split of the batch the same step.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from finetune.attention import find_blocks
from finetune.packing import IGNORED, Rows

CHUNK_TOKENS = 512  # x 49,152 logits: 100 MB in fp32, and half of that in fp16


def to_batch(rows: Rows, device: torch.device) -> dict[str, Any]:
    """Rows as `input_ids`, `position_ids` and `labels`, each int64 [rows, seq_len] on `device`, and the attention's `blocks`."""
    documents = np.cumsum(rows.positions == 0, axis=1)
    arrays = {"input_ids": rows.tokens, "position_ids": rows.positions, "labels": rows.labels, "documents": documents}
    host = {name: torch.from_numpy(array).to(torch.int64) for name, array in arrays.items()}
    if device.type == "cuda":
        host = {name: tensor.pin_memory() for name, tensor in host.items()}  # pageable memory makes the host wait for the copy
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in host.items()}
    return batch | {"blocks": find_blocks(rows.positions, batch.pop("documents"))}


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens of int64 [rows, seq_len] are learnt: int64 scalar. The first column predicts nothing and never counts."""
    return (labels[:, 1:] != IGNORED).sum()


def sum_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Cross entropy in nats, summed over the label tokens of a batch: fp32 scalar.

    Args:
        model: a causal language model with a `LossHead`, wrapped or not.
        batch: from `to_batch`.
    """
    with _head(model).answering_with_the_loss(batch["labels"]):
        # A mask of four dimensions is taken as it is, so that transformers makes none of its own; the blocks stand for it.
        no_mask = torch.empty(1, 1, 1, 1, device=batch["labels"].device)
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "blocks")}
        return model(**inputs, attention_mask=no_mask, use_cache=False).logits


class LossHead(torch.nn.Linear):
    """The output head [hidden size -> vocabulary]: logits as ever, or the summed loss where labels were set.

    It stays the module that owns the weight, so that ZeRO-3's hooks gather it, once, for all chunks.
    """

    labels: torch.Tensor | None = None

    @contextlib.contextmanager
    def answering_with_the_loss(self, labels: torch.Tensor) -> Iterator[None]:
        self.labels = labels
        try:
            yield
        finally:
            self.labels = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.labels is None:
            return super().forward(hidden)
        targets = pad(self.labels[:, 1:], (0, 1), value=IGNORED)  # the last token of a row predicts nothing
        return _ChunkedLoss.apply(hidden.flatten(0, 1), self.weight, targets.flatten())


def use_loss_head(model: torch.nn.Module) -> None:
    """Make the model's output head a `LossHead`, in place: weight, ties and hooks stay."""
    model.get_output_embeddings().__class__ = LossHead


def _head(model: torch.nn.Module) -> LossHead:
    while hasattr(model, "module"):  # DistributedDataParallel's and DeepSpeed's wrappers
        model = model.module
    return model.get_output_embeddings()


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross entropy whose gradients are computed with it, while a chunk's logits are there."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden [tokens, size]; weight [vocabulary, size]; targets int64 [tokens], IGNORED where there is no label."""
        dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
        head, needs_hidden, needs_weight = weight.to(dtype), ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), CHUNK_TOKENS):
                chunk = slice(start, start + CHUNK_TOKENS)
                own, labels = hidden[chunk].to(dtype), targets[chunk]
                counts = labels != IGNORED
                columns = torch.where(counts, labels, 0)[:, None]
                logits = (own @ head.T).float()
                log_sums = logits.logsumexp(dim=1, keepdim=True)
                total += ((log_sums - logits.gather(1, columns))[:, 0] * counts).sum()
                if needs_hidden or needs_weight:
                    # d loss / d logits = softmax - one-hot, for tokens that count.
                    slope = logits.sub_(log_sums).exp_()
                    slope.scatter_add_(1, columns, slope.new_full((1, 1), -1.0).expand_as(columns))
                    slope = slope.mul_(counts[:, None]).to(dtype)
                if needs_hidden:
                    hidden_gradient[chunk] = slope @ head
                if needs_weight:
                    weight_gradient += slope.T @ own
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            None if hidden_gradient is None else (hidden_gradient * gradient).to(hidden_gradient.dtype),
            None if weight_gradient is None else (weight_gradient * gradient).to(ctx.weight_dtype),
            None,
        )
