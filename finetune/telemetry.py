"""What a run measures: one line a step to metrics.jsonl and the trackers, one row a rank at the end, and when to stop."""

import json
import math
import os
import sys
import time
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from finetune.mistakes import Mistake, Mistakes
from finetune.recipe import Recipe


class Metrics:
    """Rank 0's record of the run. A tracker that fails after the start is dropped with a message; training goes on."""

    def __init__(self, accelerator: Accelerator, recipe: Recipe):
        self.accelerator, self.file = accelerator, None
        self.trackers = list(recipe.run.trackers)
        out = Path(recipe.run.out)
        if accelerator.is_main_process:
            self.file = open(out / "metrics.jsonl", "w", encoding="utf-8")
        flat = {f"{section}.{key}": str(value) for section, keys in recipe.model_dump().items() for key, value in keys.items()}
        if self.trackers:
            try:
                accelerator.init_trackers(out.name, config=flat)
            except OSError as error:
                raise Mistakes(Mistake(str(out), "", f"a tracker cannot write there ({error.strerror})", "free space there")) from None

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write `values` (plain numbers) under `step`.

        Raises:
            Mistakes: the disk does not take metrics.jsonl.
        """
        if self.file is None:
            return
        if not os.path.exists(self.file.name):
            raise Mistakes(Mistake(self.file.name, "", "is gone: the folder was removed or moved during the run", "start again"))
        try:
            self.file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
            self.file.flush()
        except OSError as error:
            raise Mistakes(Mistake(self.file.name, "", f"cannot be written ({error.strerror})", "free space there")) from None
        for tracker in list(self.accelerator.trackers):
            try:
                tracker.log(values, step=step)
            except Exception as error:  # a service that is down must not end a run of days
                print(f"warning: {tracker.name} stopped taking metrics ({error}); metrics.jsonl goes on", file=sys.stderr)
                self.accelerator.trackers.remove(tracker)

    def close(self) -> None:
        """Flush everything."""
        if self.file is not None:
            self.file.close()
        self.accelerator.end_training()


class Guard:
    """Stops a run whose numbers have gone bad, on all ranks alike, since all of them see the same reduced numbers.

    Args:
        stop_after_skips: fp16 overflows in a row that are too many. A few are normal: the loss scale is being found.
    """

    def __init__(self, stop_after_skips: int):
        self.stop_after_skips = stop_after_skips
        self.skipped = self.skipped_in_a_row = 0

    def observe(self, step: int, loss: float, gradient_norm: float, skipped: bool) -> None:
        """Take in one optimizer step.

        Args:
            step: from 1.
            loss: mean over the label tokens of the global batch, nats.
            gradient_norm: before clipping.
            skipped: the step was left out because of an fp16 overflow.

        Raises:
            Mistakes: the loss is not finite or exactly zero, the gradient is not finite though no overflow was
                reported, or too many steps in a row were skipped.
        """
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        where = f"step {step}"
        if not math.isfinite(loss) or loss == 0.0:
            raise Mistakes(Mistake(where, "loss", f"it is {loss}: the model or the labels are broken", "lower optim.lr; look at the data"))
        if not skipped and not math.isfinite(gradient_norm):
            raise Mistakes(Mistake(where, "gradient norm", f"it is {gradient_norm}", "lower optim.lr or optim.clip"))
        if self.skipped_in_a_row >= self.stop_after_skips:
            what = f"{self.skipped_in_a_row} fp16 overflows in a row: no loss scale is small enough"
            fix = "lower optim.lr or raise optim.warmup_steps; on GPUs from compute capability 8.0 use model.precision=bf16"
            raise Mistakes(Mistake(where, "loss scale", what, fix))


def memory_now(device: torch.device) -> dict[str, int]:
    """This rank's memory in bytes: of the GPU as PyTorch's allocator counts it, or of the process on a CPU (peak resident set)."""
    if device.type == "cuda":
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "total_bytes": torch.cuda.get_device_properties(device).total_memory,
        }
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {"peak_allocated_bytes": peak, "peak_reserved_bytes": peak, "total_bytes": psutil.virtual_memory().total}


def gather_ranks(accelerator: Accelerator, tokens: int, seconds: float) -> list[dict]:
    """One row a rank: device, memory in bytes, tokens trained on, tokens per second. All ranks call it."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    row = {"rank": accelerator.process_index, "device": f"{device} {name}" if device.type == "cuda" else name}
    row |= memory_now(device) | {"tokens": tokens, "tokens_per_second": tokens / max(seconds, 1e-9)}
    rows = [row]
    if accelerator.num_processes > 1:
        rows = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(rows, row)
    return rows


def table(rows: list[dict]) -> str:
    """The rows of `gather_ranks` as text, and the imbalance below: (most - least) / most, of memory and of tokens."""
    lines = [f"{'rank':>4}  {'device':<24} {'peak GiB':>9} {'reserved':>9} {'total':>7} {'tokens':>11} {'tokens/s':>9}"]
    for row in rows:
        peak, reserved, total = (row[key] / 2**30 for key in ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes"))
        lines.append(
            f"{row['rank']:>4}  {row['device']:<24} {peak:>9.2f} {reserved:>9.2f} {total:>7.2f}"
            f" {row['tokens']:>11,} {row['tokens_per_second']:>9,.0f}"
        )
    imbalance = {key: _imbalance([row[key] for row in rows]) for key in ("peak_allocated_bytes", "tokens")}
    lines.append(f"imbalance: memory {imbalance['peak_allocated_bytes']:.1%}, tokens {imbalance['tokens']:.1%}")
    if rows[0]["device"] == "CPU":
        lines.append("on a CPU the memory is each process's peak resident set, out of the whole machine's")
    return "\n".join(lines)


def _imbalance(values: list[float]) -> float:
    return (max(values) - min(values)) / max(max(values), 1e-9)
