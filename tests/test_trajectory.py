"""One trajectory everywhere: however ranks, micro batch, accumulation and sharding divide the same batches, training is the same.

Each launch runs several cases (see trajectories.py). The reference is one plain process with the whole batch at once.
"""

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.launches import ROOT, command_for, read_metrics, run
from tests.results import held_out_loss

STEPS, BATCH_ROWS = 20, 8
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
LAUNCHES = [("plain", 1), ("zero2", 1), ("zero3", 1), ("ddp", 2), ("zero2", 2), ("zero3", 2), ("ddp", 4), ("zero2", 4), ("zero3", 4)]
FAULTS = ["loss scaled by the world size", "clipping off", "one rank unsynchronised"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of very different lengths, so that micro batches have unequal label counts."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("data") / "rows.jsonl"
    words = ["return", "value", "self", "import", "index", "for", "in", "range", "(x)", "= 1", "\n    ", "def f", ":", "[0]"]
    rows = [" ".join(draw.choices(words, k=draw.choice([1, 2, 3, 40]))) for _ in range(400)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def case(data, out, method: str, micro_batch: int, processes: int, *overrides: str, fault: str | None = None) -> dict:
    arguments = ["recipes/smoke.yaml", f"data.train={data}", f"run.out={out}", f"method.kind={method}", "run.trackers=[]"]
    arguments += [f"data.cache={data.parent / 'cache'}"]
    arguments += [f"optim.steps={STEPS}", "optim.warmup_steps=2", f"optim.micro_batch={micro_batch}", "optim.weight_decay=0.1"]
    arguments += [f"optim.grad_accum={BATCH_ROWS // micro_batch // processes}", "optim.clip=0.5", "data.seq_len=32", "data.eval_rows=5"]
    arguments += ["optim.lr=1e-3" if method == "full" else "optim.lr=5e-3", "run.eval_every=1000", "run.sample_tokens=0"]
    arguments += ["method.targets=[]"] if method == "full" else []
    return {"arguments": arguments + list(overrides), "fault": fault}


def run_cases(strategy: str, processes: int, cases: dict[str, dict], folder) -> dict[str, list[dict]]:
    """Run the cases in one launch and read each one's metrics."""
    file = folder / "cases.json"
    file.write_text(json.dumps(list(cases.values())))
    done = run([*command_for(strategy, processes, folder), ROOT / "tests/trajectories.py", file])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {name: read_metrics(folder / name) for name in cases}


def cases_of(strategy: str, processes: int, data, folder) -> dict[str, dict]:
    whole, half, one = BATCH_ROWS // processes, BATCH_ROWS // processes // 2, 1
    keep = ["memory.keep_layers=1"] if processes == 2 else []
    cases = {
        "full": case(data, folder / "full", "full", half, processes, *keep),
        "lora": case(data, folder / "lora", "lora", one, processes),
    }
    if (strategy, processes) not in (("zero3", 1), ("zero3", 4)):  # the slowest; ZeRO-3 on two ranks shows it
        name, off = "lora without checkpointing", "memory.checkpoint_activations=false"
        cases[name] = case(data, folder / name, "lora", whole, processes, off)
    if strategy in ("plain", "zero2") and processes <= 2:
        cases["qlora"] = case(data, folder / "qlora", "qlora", half, processes, "memory.keep_mlp=1", *keep)
    faults = {("ddp", 2): FAULTS, ("zero2", 2): FAULTS[:2]}.get((strategy, processes), [])
    return cases | {fault: case(data, folder / fault, "lora", whole, processes, fault=fault) for fault in faults}


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    cases = {method: case(data, folder / method, method, BATCH_ROWS, 1) for method in ("full", "lora", "qlora")}
    return run_cases("plain", 1, cases, folder)


def steps(metrics: list[dict]) -> list[dict]:
    return [line for line in metrics if "loss" in line]


def differences(metrics: list[dict], expected: list[dict]) -> tuple[float, float]:
    """Largest absolute difference of losses (the evaluations' too), and largest relative difference of gradient norms."""
    losses = [abs(a[key] - b[key]) for a, b in zip(metrics, expected, strict=True) for key in ("loss", "eval_loss") if key in b]
    norms = [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(steps(metrics), steps(expected), strict=True)]
    return max(losses), max(norms)


def test_the_reference_learns_and_is_clipped(reference):
    for method, metrics in reference.items():
        losses = [line["loss"] for line in steps(metrics)]
        assert len(losses) == STEPS >= 20
        assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5, f"{method}: {losses}"
        assert sum(line["grad_norm"] > 0.5 for line in steps(metrics)) > 5, "clipping at 0.5 is active"
        assert metrics[-1]["eval_loss"] < metrics[0]["eval_loss"] - 0.5
        assert all(math.isfinite(line["grad_norm"]) for line in steps(metrics))


@pytest.mark.parametrize(("strategy", "processes"), LAUNCHES)
def test_every_division_of_the_batch_is_one_trajectory(strategy, processes, data, reference, tmp_path):
    results = run_cases(strategy, processes, cases_of(strategy, processes, data, tmp_path), tmp_path)
    for name, metrics in results.items():
        expected = reference[name if name in reference else "lora"]
        loss, norm = differences(metrics, expected)
        same = loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
        assert same == (name not in FAULTS), f"{name}: losses differ by {loss:.2e}, gradient norms by {norm:.2e}"
        assert [line["lr"] for line in steps(metrics)] == [line["lr"] for line in steps(expected)]
    # A full fine-tune leaves whole weights, also where each rank held a part of them.
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    assert held_out_loss(whole, tmp_path / "full") == pytest.approx(results["full"][-1]["eval_loss"], abs=1e-5)
