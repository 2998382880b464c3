"""The first command of the README, as it is, and what it leaves; and what a run that is killed or mistaken leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.checkpoint import UNFINISHED
from finetune.recipe import load_recipe
from tests.launches import BIN, ROOT, command_for, free_port, read_metrics, run
from tests.results import held_out_loss

SMOKE = [BIN / "accelerate", "launch", "--config_file", "accelerate_configs/smoke.yaml"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke run: its process, its folder, and what each rank's engine was."""
    folder = tmp_path_factory.mktemp("smoke")
    arguments = [ROOT / "tests/probe.py", folder, "recipes/smoke.yaml", f"run.out={folder / 'out'}"]
    started = time.monotonic()
    done = run([*SMOKE, "--main_process_port", free_port(), *arguments])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    witnesses = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return done, folder / "out", witnesses, time.monotonic() - started


def test_it_was_deepspeed_zero_3_on_four_processes(smoke):
    _, _, witnesses, _ = smoke
    for seen in witnesses:
        assert seen["engine"] == "deepspeed.runtime.engine.DeepSpeedEngine"
        assert seen["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
        assert (seen["stage"], seen["world_size"], seen["backend"]) == (3, 4, "gloo")
        assert (seen["clipping"], seen["train_batch_size"]) == (1.0, 16)
        assert seen["sharded_numel"] > 0.9 * seen["numel"]
        assert seen["held_numel"] < 0.35 * seen["numel"]


def test_it_lowered_the_held_out_loss(smoke):
    _, out, _, _ = smoke
    metrics = read_metrics(out)
    losses = [line["eval_loss"] for line in metrics if "eval_loss" in line]
    assert len(losses) == 3  # before, at 10 and at 20
    assert losses[-1] < losses[0] - 0.05
    infilling = [line["infilling_loss"] for line in metrics if "infilling_loss" in line]
    assert len(infilling) == 3 and infilling[-1] < infilling[0] - 0.05
    assert [line["step"] for line in metrics] == list(range(21))
    for line in metrics[1:]:
        assert {"loss", "lr", "grad_norm", "tokens_per_second", "tokens", "skipped_steps", "peak_allocated_bytes"} <= set(line)


def test_its_adapter_loads_onto_the_base_and_gives_the_same_loss(smoke):
    _, out, _, _ = smoke
    assert load_recipe(out / "recipe.yaml") == load_recipe("recipes/smoke.yaml", [f"run.out={out}"])
    metrics, base = read_metrics(out), AutoModelForCausalLM.from_pretrained("models/tiny-starcoder", dtype=torch.float32)
    assert held_out_loss(base, out) == pytest.approx(metrics[0]["eval_loss"], abs=1e-4)
    assert held_out_loss(PeftModel.from_pretrained(base, out), out) == pytest.approx(metrics[-1]["eval_loss"], abs=1e-4)


def test_it_left_what_belongs_to_a_result(smoke):
    _, out, _, _ = smoke
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "recipe.yaml",
        "README.md",
        "metrics.jsonl",
        "data.json",
    } <= {path.name for path in out.iterdir()}
    assert not (out / UNFINISHED).exists()
    assert list(out.rglob("events.out.tfevents*")), "TensorBoard is the default tracker"
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (8, 16, ["c_attn", "c_fc", "c_proj"])
    card = (out / "README.md").read_text()
    assert "eval_loss after" in card and "models/tiny-starcoder" in card and "imbalance" in card


def test_its_console_is_quiet_and_ends_with_the_table(smoke):
    done, _, _, seconds = smoke
    assert seconds < 300
    lines = done.stdout.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("rank  device")]
    assert len(starts) == 2  # after the first step and at the end
    for start in starts:
        assert [line.split()[0] for line in lines[start + 1 : start + 5]] == ["0", "1", "2", "3"]
        assert lines[start + 5].startswith("imbalance: memory")
    for text in ("before training: def read_jsonl", "after training: def read_jsonl", "eval_loss", "infilling_loss", "[[ ]] is not"):
        assert done.stdout.count(text) >= 1
    noise = [line for line in (done.stdout + done.stderr).splitlines() if "Warning" in line or "Setting accelerator" in line]
    # What torchrun and DeepSpeed print in the launcher's own process, before train.py, is not ours.
    assert len(noise) <= 1, noise
    assert "Traceback" not in done.stderr and done.stderr.count("20/20") >= 1


def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path):
    arguments = [sys.executable, "train.py", "recipes/smoke.yaml", f"run.out={tmp_path}", "optim.steps=500", "run.trackers=[]"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        limit = time.monotonic() + 120
        while not (tmp_path / "metrics.jsonl").exists() or len(read_metrics(tmp_path)) < 3:
            assert time.monotonic() < limit and process.poll() is None, process.stderr.read()
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / UNFINISHED / "adapter_config.json").exists(), "the trial save of the first step"
    assert not (tmp_path / "adapter_config.json").exists()
    with pytest.raises(ValueError, match="adapter_config.json"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("models/tiny-starcoder"), tmp_path)


@pytest.mark.parametrize(
    ("recipe", "launch", "expected"),
    [
        # A bad recipe: one clean message from rank 0 among four.
        ("tests/cases/recipes/three_mistakes.yaml", "accelerate_configs/smoke.yaml", ["method.kind", "optim.lr", "data.fim_rate"]),
        # A launch file for GPUs on a machine without one.
        ("recipes/smoke.yaml", "4xT4.yaml", ["4xT4.yaml: num_processes: a launch for GPUs, and this machine shows none"]),
        # Accelerate starts one process for this file, and says nothing.
        ("recipes/smoke.yaml", "tests/cases/launch/A3_distributed_no.yaml", ["distributed_type: 'NO' starts one process"]),
    ],
)
def test_a_mistaken_launch_ends_with_our_message(recipe, launch, expected, tmp_path):
    command = [BIN / "accelerate", "launch", "--config_file", launch, "train.py", recipe, f"run.out={tmp_path}"]
    done = run(command, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for text in expected:
        assert sum(text in line for line in ours) == 1, done.stderr
    # Whatever traceback follows is the launcher's own.
    assert "train.py" not in "".join(line for line in done.stderr.splitlines() if line.lstrip().startswith("File "))


@pytest.mark.parametrize("world_size", ["1", "3"])
def test_a_world_of_another_size_than_the_file_s_is_refused(world_size, tmp_path):
    command = command_for("zero3", 2, tmp_path)
    command[command.index("--config_file") : command.index("--config_file")] = ["--num_processes", world_size]
    done = run([*command, "train.py", "recipes/smoke.yaml", f"run.out={tmp_path / 'out'}"])
    assert done.returncode != 0 and f"2 in the file, and {world_size} processes are running" in done.stderr


def test_half_precision_under_zero_3(tmp_path):
    """bf16 stands for fp16, which DeepSpeed refuses on a CPU: base and adapter in half, masters in fp32, every cast in its place."""
    overrides = ["model.precision=bf16", "optim.steps=6", "optim.warmup_steps=1", "run.sample_tokens=0", "run.trackers=[]"]
    command = [*command_for("zero3", 2, tmp_path), "train.py", "recipes/smoke.yaml", f"run.out={tmp_path / 'out'}", *overrides]
    done = run(command)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = read_metrics(tmp_path / "out")
    assert metrics[-1]["eval_loss"] < metrics[0]["eval_loss"]
    # What is saved are the masters.
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "adapter_model.safetensors").values()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained("models/tiny-starcoder", dtype=torch.float32)
    loss = held_out_loss(PeftModel.from_pretrained(base, tmp_path / "out"), tmp_path / "out")
    assert loss == pytest.approx(metrics[-1]["eval_loss"], abs=0.02)
