"""How a process behaves beside others: what is known noise stays silent, any text can be printed, and nobody is left behind."""

import ctypes
import logging
import os
import re
import signal
import sys
import warnings

KNOWN_WARNINGS = (
    # torch 2.13 renames functions that deepspeed 0.19 still calls, once for each module it has.
    (FutureWarning, r".*`?torch\..*is deprecated.*"),
    (FutureWarning, r".*torch\.distributed\.reduce_op.*"),
    # peft 0.21 still asks by transformers' old name whether activations are checkpointed.
    (FutureWarning, r".*`is_gradient_checkpointing` is deprecated.*"),
    # Checkpointing asks each backward pass whether the forward ran under autocast; on a CPU it did not.
    (UserWarning, r".*None of the inputs have requires_grad=True.*"),
)
KNOWN_MESSAGES = {
    # A CPU is what smoke runs ask for; where GPUs were meant, preflight has stopped already.
    "DeepSpeed": r"Setting accelerator to CPU",
    # A faster 4-bit product on some CPUs, from a package that would be downloaded at run time.
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward",
}


def silence() -> None:
    """Call before torch and deepspeed are imported, since both speak on import."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal that knows no é must not end a run
    # The tokenizer's own threads are used before any fork; the warning about it is for DataLoader workers, which there are none of.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Bars of loading and saving, one a rank, between the lines of the run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for category, message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name, message in KNOWN_MESSAGES.items():
        logging.getLogger(name).addFilter(lambda record, known=re.compile(message): not known.match(record.getMessage()))


def end_with_parent() -> None:
    """Let the kernel end this rank when its launcher dies, however that happens; a run without a launcher outlives its shell."""
    if "RANK" in os.environ:
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher or launcher == 1:
            sys.exit("the launcher has gone")
