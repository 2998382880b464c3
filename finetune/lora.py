"""LoRA layers with no more copies, kernels and kept tensors than they need.

PEFT's own casts the layer's input to the adapter's fp32 and autocast casts it back: of StarCoder's 24,576-wide activations that is
800 MB in fp32 for a row of 8,192 tokens, and a second fp16 copy is kept for the backward pass. It scales and adds the adapter's
output at full width in passes of their own, and autograd adds the two gradients of the input in one more. A frozen weight is kept for
the backward pass too, by bitsandbytes where saved-tensor hooks do not see it, which under ZeRO-3 holds on to every gathered weight.

Here y = W x + bias + scale B A x (Hu et al. 2021, arXiv 2106.09685, section 4.1) is two autograd functions without autocast. The
adapter computes in the input's precision from fp32 matrices that are cast on the way; the frozen product adds to it in place, keeps
nothing, and asks its module for the weight again in the backward pass, when it is there, whole, also under ZeRO-3.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer


def use_lean_forward(model: torch.nn.Module) -> None:
    """Give every LoRA layer of `model` the lean forward, in place."""
    for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
        layer.kept = None
        layer.forward = MethodType(_forward, layer)
        layer.base_layer.forward = MethodType(_base_forward, layer.base_layer)


def keep_output(layer: LoraLinear) -> Callable[[], tuple]:
    """A `context_fn` for torch's checkpoint: the layer's output is kept by the pass, and taken where the pass is repeated.

    It costs no more than it says: what reads the output, an activation function, has it saved anyway when the pass is repeated.
    """

    @contextlib.contextmanager
    def keeping(kept: list[torch.Tensor]) -> Iterator[None]:
        layer.kept = kept
        try:
            yield
        finally:
            layer.kept = None

    def contexts() -> tuple:
        kept = []  # of one layer in one micro batch
        return keeping(kept), keeping(kept)

    return contexts


def _forward(layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    """x [..., in] to [..., out], of x's dtype."""
    if layer.disable_adapters or layer.merged:
        return layer.base_layer(x)
    (name,) = layer.active_adapters
    lora_a, lora_b, dropout, scale = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name], layer.scaling[name]
    if hasattr(lora_a.weight, "ds_id"):
        # ZeRO-3 gathers a matrix while its own module is called, and keeps it in the base's precision. The base comes last here too.
        added = lora_b(lora_a(dropout(x)) * scale)
        return layer.base_layer(x) + added
    # Without dropout both products have one input, whose gradient is then added up in one place.
    one_input, joined = isinstance(dropout, torch.nn.Identity), torch.is_grad_enabled()
    bias = layer.base_layer.bias if joined else None
    whole = layer.kept.pop() if layer.kept else None
    added = _Adapter.apply(x.detach() if one_input else dropout(x), lora_a.weight, lora_b.weight, bias, scale, whole)
    if not joined:
        return added.add_(layer.base_layer(x))
    out = _FrozenProduct.apply(x, added, layer.base_layer, added.grad_fn, one_input, whole is None)
    if layer.kept is not None and whole is None:
        layer.kept.append(out.detach())
    return out


def _base_forward(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The frozen layer alone; without gradients by its own product, which for a few tokens needs no whole 4-bit weight."""
    return _FrozenProduct.apply(x, None, linear, None, False, True) if torch.is_grad_enabled() else type(linear).forward(linear, x)


def _weight(linear: torch.nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The frozen weight [out, in], from 4 bits where it is held in them."""
    weight = linear.weight
    if isinstance(linear, Linear4bit):
        weight = dequantize_4bit(weight.data.view(-1, 1), weight.quant_state)
    return weight.detach().to(dtype)


class _Adapter(torch.autograd.Function):
    """bias + scale B A x. Keeps x, A x, which is as narrow as the rank, and the matrices as they were computed with."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scale: float, whole) -> torch.Tensor:
        """x [..., in]; a [rank, in]; b [out, rank]; bias [out] or None; whole [..., out], the layer's output if it was kept, to be
        returned instead. To [..., out]."""
        ctx.scale, ctx.dtype = scale, a.dtype
        a, b, rows = a.to(x.dtype), b.to(x.dtype), x.flatten(0, -2)
        narrow = rows @ a.T
        ctx.save_for_backward(rows, narrow, a, b)
        if whole is not None:
            return whole.detach()
        out = x.new_empty(*x.shape[:-1], len(b))  # not a view, which could not be added to in place
        bias = x.new_zeros(()) if bias is None else bias.to(x.dtype)
        torch.addmm(bias, narrow, b.T, alpha=scale, out=out.view(len(rows), -1))
        return out

    @staticmethod
    def backward(ctx, _) -> tuple[torch.Tensor | None, ...]:
        of_x, of_a, of_b = ctx.gradients
        return of_x, of_a.to(ctx.dtype), of_b.to(ctx.dtype), None, None, None


class _FrozenProduct(torch.autograd.Function):
    """W x, added in place to what the adapter gave; in the backward pass the whole layer's gradients, the adapter's for it to return.
    Without an adapter W x + bias.

    It comes last and keeps nothing itself: where a checkpointed layer is recomputed, torch stops once all that was kept is there
    again, and the layer's last product, two fifths of StarCoder's, is left out.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, added: torch.Tensor | None, linear, adapter, one_input: bool, compute: bool) -> torch.Tensor:
        """x [..., in]; added [..., out]; adapter: the `_Adapter` node that made it, from x itself (`one_input`) or another; not
        `compute`: the product is in it already."""
        ctx.linear, ctx.adapter, ctx.one_input = linear, adapter, one_input
        if not compute:
            return added.detach()
        if added is None:
            return torch.nn.functional.linear(x, _weight(linear, x.dtype), linear.bias)
        ctx.mark_dirty(added)
        added.view(-1, added.shape[-1]).addmm_(x.flatten(0, -2), _weight(linear, x.dtype).T)
        return added

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_out, through_adapter = gradient.flatten(0, -2), None
        of_x = of_out @ _weight(ctx.linear, gradient.dtype) if ctx.needs_input_grad[0] else None
        if ctx.adapter is None:
            return None if of_x is None else of_x.view(*gradient.shape[:-1], -1), None, None, None, None, None
        rows, narrow, a, b = ctx.adapter.saved_tensors
        of_narrow = (of_out @ b).mul_(ctx.adapter.scale)
        if not ctx.one_input:
            through_adapter = (of_narrow @ a).view(*gradient.shape[:-1], -1)
        elif of_x is not None:
            of_x.addmm_(of_narrow, a)
        ctx.adapter.gradients = through_adapter, of_narrow.T @ rows, (of_out.T @ narrow).mul_(ctx.adapter.scale)
        return None if of_x is None else of_x.view(*gradient.shape[:-1], -1), gradient, None, None, None, None
