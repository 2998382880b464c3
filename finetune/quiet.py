"""Silence what the pinned libraries are known to print on every run and nobody can act on. Everything else stays loud."""

import logging
import os
import warnings

KNOWN_WARNINGS = (
    # torch 2.13 renames functions that deepspeed 0.19 still calls, once for each module it has.
    (FutureWarning, r".*`?torch\..*is deprecated.*"),
    (FutureWarning, r".*torch\.distributed\.reduce_op.*"),
    # Checkpointing asks each backward pass whether the forward ran under autocast; on a CPU it did not.
    (UserWarning, r".*None of the inputs have requires_grad=True.*"),
)


def silence() -> None:
    """Call before torch and deepspeed are imported, since deepspeed sets its logger up on import."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("DS_ACCELERATOR_LOG_LEVEL", "error")
    # The tokenizer's own threads are used before any fork; the warning about it is for DataLoader workers, which there are none of.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for category, message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name in ("deepspeed", "DeepSpeed", "torch.distributed.elastic.multiprocessing.redirects"):
        logging.getLogger(name).setLevel(logging.ERROR)
