"""Attention that a T4 can hold: PyTorch's memory-efficient kernel, block by block, so that no dense mask keeps documents apart.

Given `enable_gqa`, which transformers sets for multi-query models when no mask is needed, that kernel refuses; below compute
capability 8.0 there is no other but the math kernel, which writes the whole heads x length x length matrix: 3,208 MiB against
169 MiB for one layer of StarCoder at 2,048 tokens, forward and backward (one H200 with a T4's kernels). So keys and values are
expanded to all heads by stride. A dense mask of a packed row would cost length x length values, and the arithmetic of the half
of them that is masked; blocks cost the squares of the documents' lengths alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from finetune.mistakes import Mistake, Mistakes
from finetune.shape import Shape

NAME = "sdpa_blocks"
# Shorter documents that follow each other share a block of up to so many tokens under a mask of their own: as many kernels as
# documents would take longer than the arithmetic that they save.
SHARED_TOKENS = 512


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of one row that attend to nothing outside: one document (mask None), or several short ones."""

    row: int
    start: int
    end: int
    mask: torch.Tensor | None  # bool [end - start, end - start], True where a query may see a key


def find_blocks(positions: np.ndarray, documents: torch.Tensor) -> list[Block]:
    """The blocks of packed rows, in order.

    Args:
        positions: int [rows, length], restarting at 0 with each document.
        documents: int [rows, length], a number for each document, on the device where the masks are wanted.
    """
    blocks = []
    for row, each in enumerate(positions):
        starts = [*np.flatnonzero(each == 0).tolist(), len(each)]
        first = 0
        while first < len(starts) - 1:
            last = first + 1
            while last < len(starts) - 1 and starts[last + 1] - starts[first] <= SHARED_TOKENS:
                last += 1
            start, end = starts[first], starts[last]
            mask = None
            if last - first > 1:
                own = documents[row, start:end]
                mask = (own[:, None] == own[None, :]).tril()
            blocks.append(Block(row, start, end, mask))
            first = last
    return blocks


def block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    blocks: list[Block] | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention in transformers' interface.

    Args:
        query: [batch, heads, query length, head size].
        key: [batch, key/value heads, key length, head size]; so is `value`.
        attention_mask: bool or additive [batch, 1, query length, key length]; None is causal, or full for one query token. Not
            looked at where there are blocks.
        is_causal: None leaves it to the mask and the module.
        sliding_window: a query sees this many keys, its own the last; in a mask it is contained already.
        blocks: of `find_blocks`; they cover every row.

    Returns:
        [batch, query length, heads, head size], and None for the weights, which are never made.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = _expand(key, groups), _expand(value, groups)
    if blocks is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, is_causal, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    rows = [[] for _ in range(len(query))]
    for block in blocks:
        inside = (slice(block.row, block.row + 1), slice(None), slice(block.start, block.end))
        part = _attend(query[inside], key[inside], value[inside], block.mask, dropout, scaling, sliding_window)
        rows[block.row].append(part.transpose(1, 2))
    return _join([_join(parts, dim=1) for parts in rows], dim=0), None


def _attend(query, key, value, mask, dropout: float, scaling: float | None, window: int | None) -> torch.Tensor:
    """Attention within one block, each [1, heads, length, head size]; a document longer than the window goes in stretches of it."""
    length = query.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None, scale=scaling)
    parts = []
    for start in range(0, length, window):
        end, first = min(start + window, length), max(start - window + 1, 0)
        distance = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        visible = (distance >= 0) & (distance < window)
        if mask is not None:
            visible &= mask[start:end, first:end]
        stretch = (slice(None), slice(None), slice(first, end))
        parts.append(scaled_dot_product_attention(query[:, :, start:end], key[stretch], value[stretch], visible, dropout, scale=scaling))
    return _join(parts, dim=2)


def _join(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    # A row of one document needs no copy: the kernels write in the order that the next layer reads.
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _expand(heads: torch.Tensor, groups: int) -> torch.Tensor:
    batch, count, length, size = heads.shape
    # A view with stride 0 for one head (multi-query); a copy for several (grouped-query).
    return heads[:, :, None].expand(batch, count, groups, length, size).reshape(batch, count * groups, length, size)


def forbid_math_kernel(shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """Switch PyTorch's math attention off for this process, and try one head of documents alone and together, forward and backward.

    Args:
        shape: of the model; only the size of a head matters to the choice.
        dtype: of queries, keys and values.

    Returns:
        The kernels that run, for the log.

    Raises:
        Mistakes: there is no kernel but the math one.
    """
    torch.backends.cuda.enable_math_sdp(False)  # of every device, in spite of its name
    length, kernels = 64, {}
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    for name, block in (("one document", Block(0, 0, length, None)), ("short documents", Block(0, 0, length, mask))):
        heads = torch.zeros(1, 1, length, shape.hidden_size // shape.heads, dtype=dtype, device=device, requires_grad=True)
        try:
            kernels[name] = SDPBackend(torch._fused_sdp_choice(heads, heads, heads, block.mask, is_causal=block.mask is None))
            block_attention(None, heads, heads, heads, None, blocks=[block])[0].sum().backward()
        except RuntimeError as error:
            what = f"no attention kernel but the math one, which writes heads x length x length values ({str(error).splitlines()[0]})"
            fix = "leave PyTorch's memory-efficient attention on, with a PyTorch built for this GPU (`python -m torch.utils.collect_env`)"
            raise Mistakes(Mistake(str(device), f"{dtype} attention of {name}", what, fix)) from error
    return ", ".join(f"{kernel.name.lower()} ({name})" for name, kernel in kernels.items())


AttentionInterface.register(NAME, block_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
