"""The forward pass of a LoRA layer with no more copies than it needs.

PEFT's own casts the layer's input to the adapter's fp32 and autocast casts it back: of StarCoder's 24,576-wide activations that is
800 MB in fp32 for a row of 8,192 tokens, and a second fp16 copy is kept for the backward pass. It scales and adds the adapter's
output at full width in passes of their own. Here the input is cast once, if at all, to the precision that is computed in; the scale is
put on the rank-wide product; and the output is added in place.
"""

from types import MethodType

import torch
from peft.tuners.lora import LoraLayer


def use_lean_forward(model: torch.nn.Module) -> int:
    """Give every LoRA layer of `model` the lean forward, in place, and return how many there are."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _forward(layer: LoraLayer, x: torch.Tensor) -> torch.Tensor:
    """base(x) + scale B A x, x [..., in] to [..., out]. The submodules are called, so that ZeRO-3's hooks gather their weights."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if layer.disable_adapters or layer.merged:
        return layer.base_layer(x)
    added = []
    for name in layer.active_adapters:
        lora_a, lora_b = layer.lora_A[name], layer.lora_B[name]
        narrow = lora_a(layer.lora_dropout[name](x.to(_dtype(lora_a, x)))) * layer.scaling[name]
        added.append(lora_b(narrow).to(x.dtype))
    # The base comes last. A 4-bit product keeps nothing for the backward pass, so where a checkpointed layer is recomputed its last
    # product, two fifths of the layer, is left out: torch stops once all that was kept is there again.
    out = layer.base_layer(x)
    for each in added:
        out = each.add_(out)  # in place of the adapter's: bitsandbytes returns a view
    return out


def _dtype(linear: torch.nn.Linear, x: torch.Tensor) -> torch.dtype:
    """What the input of an adapter's matrix has to be: under autocast anything, else as the matrix, which DeepSpeed keeps in half."""
    return x.dtype if torch.is_autocast_enabled(x.device.type) else linear.weight.dtype
