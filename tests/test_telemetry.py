"""What is measured is written down, and a run whose numbers have gone bad stops."""

import json

import pytest
import torch

from finetune.mistakes import Mistakes
from finetune.recipe import Optim, load_recipe
from finetune.schedule import learning_rate
from finetune.telemetry import Guard, Metrics, table

GIB = 2**30


def test_overflows_in_a_row_stop_the_run_with_advice():
    guard = Guard(stop_after_skips=3)
    for step, skipped in enumerate([True, True, False, True, True], start=1):
        guard.observe(step, 1.0, float("inf"), skipped) if skipped else guard.observe(step, 1.0, 0.5, skipped)
    assert (guard.skipped, guard.skipped_in_a_row) == (4, 2)
    with pytest.raises(Mistakes, match="step 6: loss scale: 3 fp16 overflows in a row: .*lower optim.lr.*bf16"):
        guard.observe(6, 1.0, float("inf"), True)


@pytest.mark.parametrize(
    ("loss", "norm", "what"), [(float("nan"), 1.0, "loss: it is nan"), (0.0, 1.0, "loss: it is 0.0"), (1.0, float("inf"), "gradient norm")]
)
def test_broken_numbers_stop_the_run(loss, norm, what):
    with pytest.raises(Mistakes, match=what):
        Guard(3).observe(1, loss, norm, skipped=False)


class FakeTracker:
    name = "fake"

    def __init__(self, fails):
        self.fails, self.seen = fails, []

    def log(self, values, step):
        if self.fails:
            raise ConnectionError("no service")
        self.seen.append((step, values))


class FakeAccelerator:
    is_main_process = True

    def __init__(self, trackers):
        self.trackers, self.ended = trackers, False

    def init_trackers(self, name, config):
        self.name, self.config = name, config

    def end_training(self):
        self.ended = True


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    good, bad = FakeTracker(False), FakeTracker(True)
    accelerator = FakeAccelerator([bad, good])
    metrics = Metrics(accelerator, load_recipe("recipes/smoke.yaml", [f"run.out={tmp_path / 'run'}"]))
    metrics.log(1, {"loss": 2.0})
    metrics.log(2, {"loss": 1.0})
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, 1.0)]
    assert good.seen == [(1, {"loss": 2.0}), (2, {"loss": 1.0})]
    assert capsys.readouterr().err.count("fake stopped taking metrics (no service)") == 1
    assert accelerator.ended and accelerator.config["optim.lr"] == "0.002"


def test_a_full_disk_is_a_mistake():
    accelerator = FakeAccelerator([])
    metrics = Metrics.__new__(Metrics)
    metrics.accelerator, metrics.file = accelerator, open("/dev/full", "w")
    with pytest.raises(Mistakes, match="/dev/full: cannot be written .No space left on device."):
        metrics.log(1, {"loss": 1.0})


def test_the_table_has_a_row_a_rank_and_the_imbalance():
    rows = [
        {
            "rank": rank,
            "device": "cuda:0 Tesla T4",
            "peak_allocated_bytes": peak * GIB,
            "peak_reserved_bytes": 13 * GIB,
            "total_bytes": 14 * GIB,
            "tokens": tokens,
            "tokens_per_second": 100.0,
        }
        for rank, peak, tokens in ((0, 12, 1000), (1, 9, 900))
    ]
    text = table(rows).splitlines()
    assert len(text) == 4 and "12.00" in text[1] and "1,000" in text[1] and text[2].strip().startswith("1")
    assert text[3] == "imbalance: memory 25.0%, tokens 10.0%"


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(("steps", "warmup_steps"), [(10, 3), (1, 0), (50, 49)])
def test_the_rate_is_transformers_own_one_step_on(schedule, steps, warmup_steps):
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    optim = Optim(lr=2e-4, steps=steps, warmup_steps=warmup_steps, schedule=schedule)
    make = {"cosine": get_cosine_schedule_with_warmup, "linear": get_linear_schedule_with_warmup}[schedule]
    reference = make(torch.optim.SGD([torch.zeros(1)], lr=optim.lr), warmup_steps + 1, steps + 1)
    for step in range(1, steps + 1):
        reference.optimizer.step()
        reference.step()
        assert learning_rate(optim, step) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        assert 0 < learning_rate(optim, step) <= optim.lr
    assert learning_rate(optim, warmup_steps + 1) == optim.lr
