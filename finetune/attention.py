"""Attention that a T4 can hold: keys and values are expanded to all heads by stride, so that PyTorch takes its memory-efficient kernel.

Given `enable_gqa`, which transformers sets for multi-query models when no mask is needed, that kernel refuses; below compute
capability 8.0 there is no other but the math kernel, which writes the whole heads x length x length matrix: 3,208 MiB against
169 MiB for one layer of StarCoder at 2,048 tokens, forward and backward (one H200 with a T4's kernels).
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_expanded"


def expanded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention in transformers' interface.

    Args:
        query: [batch, heads, query length, head size].
        key: [batch, key/value heads, key length, head size]; so is `value`.
        attention_mask: bool or additive [batch, 1, query length, key length]; None is causal, or full for one query token.
        is_causal: None leaves it to the mask and the module.

    Returns:
        [batch, query length, heads, head size], and None for the weights, which are never made.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = _expand(key, groups), _expand(value, groups)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=is_causal)
    return out.transpose(1, 2).contiguous(), None


def _expand(heads: torch.Tensor, groups: int) -> torch.Tensor:
    batch, count, length, size = heads.shape
    # A view with stride 0 for one head (multi-query); a copy for several (grouped-query).
    return heads[:, :, None].expand(batch, count, groups, length, size).reshape(batch, count * groups, length, size)


AttentionInterface.register(NAME, expanded_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
