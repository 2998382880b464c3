"""The learning rate as a function of the step alone: no scheduler object that ranks, accumulation or a resume could advance wrongly."""

import math

from finetune.recipe import Optim


def learning_rate(optim: Optim, step: int) -> float:
    """The rate of an optimizer step.

    It rises by equal parts through `warmup_steps`, is at its peak on the step after them, and falls by half a cosine (Loshchilov
    and Hutter 2017, arXiv:1608.03983, equation 5) or a line that would reach zero one step after the last.

    Args:
        step: from 1. A step that fp16 overflow left out is not counted, so that the rate waits for the weights.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / (optim.warmup_steps + 1)
    progress = (step - 1 - optim.warmup_steps) / (optim.steps - optim.warmup_steps)
    left = 1 - progress if optim.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optim.lr * left
