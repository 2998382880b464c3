"""Runs several cases of `train.py` in the processes of one launch, since starting those takes longer than a case.

accelerate launch --config_file FILE tests/trajectories.py CASES.json      (or torchrun, or plain python)

CASES.json is a list of {"arguments": what follows `train.py`, "fault": a name below or null}. Each case leaves what train.py
leaves, in its own run.out. A fault is an error planted in the trainer, which the comparison of trajectories has to notice.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
from finetune.mistakes import Mistakes, exit_with
from finetune.quiet import silence


def plant(fault: str | None) -> list:
    """Patches under which the trainer has the fault."""
    import torch
    from accelerate import Accelerator

    from finetune import distributed

    backward, start = Accelerator.backward, distributed.start

    def scale_by_world_size(self, loss):
        backward(self, loss * self.num_processes)

    def start_without_clipping(*job):
        accelerator = start(*job)
        if accelerator.deepspeed_plugin is not None:
            accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
        return accelerator

    def start_with_rank_1_alone(*job):
        accelerator = start(*job)
        prepare = accelerator.prepare

        def exchange(_, bucket):
            own = bucket.buffer().clone()
            exchanged = torch.distributed.all_reduce(bucket.buffer().div_(accelerator.num_processes), async_op=True).get_future()
            return exchanged.then(lambda future: own if accelerator.process_index == 1 else future.value()[0])

        def prepare_and_hook(*objects):
            network, optimizer = prepare(*objects)
            network.register_comm_hook(None, exchange)
            return network, optimizer

        accelerator.prepare = prepare_and_hook
        return accelerator

    return {
        None: [],
        "loss scaled by the world size": [mock.patch.object(Accelerator, "backward", scale_by_world_size)],
        # check_prepared notices this one by itself, which is another test's business.
        "clipping off": [
            mock.patch.object(distributed, "start", start_without_clipping),
            mock.patch.object(torch.nn.utils, "clip_grads_with_norm_", lambda *_: None),
            mock.patch.object(distributed, "check_prepared", lambda *_: None),
        ],
        "one rank unsynchronised": [mock.patch.object(distributed, "start", start_with_rank_1_alone)],
    }[fault]


def main() -> None:
    silence()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import train

    for case in json.loads(Path(sys.argv[1]).read_text()):
        with contextlib.ExitStack() as patches:
            # The processes go on with the next case, so they stay in their group.
            patches.enter_context(mock.patch.object(Accelerator, "end_training", lambda self: None))
            for patch in plant(case.get("fault")):
                patches.enter_context(patch)
            train.train(*train.check(case["arguments"]))
        AcceleratorState._reset_state()
        GradientState._reset_state()
    if "RANK" in os.environ:
        import torch

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Mistakes as error:
        exit_with(error)
