"""What the step does, on one process; the wrappers' own behaviour is seen in real launches by the other tests."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from finetune.distributed import step_was_skipped


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_the_fused_optimizer_leaves_a_step_out_when_we_say_so(value):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.AdamW([weight], lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum() * torch.tensor(value)).backward()
    scaler.unscale_(optimizer)
    norm = torch.linalg.vector_norm(weight.grad).item()
    scaler.step(optimizer)
    accelerator = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, scaler=scaler)
    assert step_was_skipped(accelerator, norm) == bool(torch.equal(weight.detach(), torch.ones(3))) == (not math.isfinite(value))


def test_without_a_loss_scale_nothing_is_skipped():
    accelerator = SimpleNamespace(distributed_type=DistributedType.NO, scaler=None)
    assert not step_was_skipped(accelerator, math.inf)  # and telemetry.Guard ends the run
