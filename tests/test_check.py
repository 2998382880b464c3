"""`python -m finetune check`: every mistake of recipe, launch file and machine on stderr, exit code 2, nothing started."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from finetune.__main__ import build_parser, parse_arguments
from finetune.recipe import load_recipe
from tests.launches import ROOT

CASES = ROOT / "tests/cases"
LAUNCHES = {path.stem: path for path in (CASES / "launch").glob("*.yaml")}
DEEPSPEED_FILES = {path.stem: path for path in (CASES / "launch/ds").glob("*.json")}
RECIPES = {path.stem: path for path in (CASES / "recipes").glob("*.yaml")}
# What a mistake's first line has to hold: key and fix; the file is the case.
BAD_LAUNCHES = {
    "A3_distributed_no": ("distributed_type", "write DEEPSPEED"),
    "A3_one_process": ("num_processes", "accelerate launch --config_file 4xT4.yaml train.py"),
    "A5_eight_processes": ("num_processes", "set num_processes: 4"),
    "C1_bf16": ("mixed_precision", "remove it"),
    "E6_missing_ds_file": ("deepspeed_config.deepspeed_config_file", "correct the path"),
    "E6_two_sources": ("deepspeed_config.zero_stage", "remove it"),
    "E7_unknown_nested_key": ("deepspeed_config.zero_stge", "zero_stage"),
}
BAD_DEEPSPEED_FILES = {
    "E1_string_gas": ("gradient_accumulation_steps", 'write "auto"'),
    "E2_gas_absent": ("gradient_accumulation_steps", 'write "gradient_accumulation_steps": "auto"'),
    "E5_optimizer_without_scheduler": ("optimizer", "remove it"),
    "E10_offload": ("zero_optimization.offload_optimizer.device", "install a C++ compiler"),
}
BAD_RECIPES = {
    "device_map": ("model.device_map", "remove it"),
    "duplicate_section": ("optim is given twice", "correct that line"),
    "local_path_missing": ("data.train", "name a folder of code, data files, or owner/name on the hub"),
    "lora_names_partly_unknown": ("method.targets", "it has c_attn, c_fc, c_proj"),
    "not_yaml": ("not valid YAML at line", "correct that line"),
    "python_tag": ("not valid YAML at line", "correct that line"),
    "row_longer_than_positions": ("data.seq_len", "at most 8192"),
    "three_mistakes": ("method.kind", "did you mean lora?"),
    "unknown_key": ("optim.learning_rte", "did you mean optim.lr?"),
}
GOOD_RECIPES = {"empty", "lr_is_text"}


def run_check(recipe, launch, *more: str, machine: str = "4xT4") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "finetune", "check", str(recipe), "--launch", str(launch), "--machine", machine, *more]
    # A launcher's variables would be taken for this process's rank.
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)


def assert_refused(done: subprocess.CompletedProcess, file: str, key: str, fix: str) -> None:
    assert done.returncode == 2 and done.stdout == "", done
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr and all(line.startswith("error: ") for line in lines), done.stderr
    assert sum(file in line and key in line and fix in line for line in lines) == 1, done.stderr
    assert len(set(lines)) == len(lines), "each is said once"


def test_every_case_is_here():
    assert LAUNCHES.keys() == BAD_LAUNCHES.keys()
    assert DEEPSPEED_FILES.keys() == BAD_DEEPSPEED_FILES.keys() | {"D3_no_gather"}
    assert RECIPES.keys() == BAD_RECIPES.keys() | GOOD_RECIPES


@pytest.mark.parametrize("name", BAD_LAUNCHES)
def test_a_bad_launch_file_is_refused(name):
    key, fix = BAD_LAUNCHES[name]
    assert_refused(run_check("recipes/starcoderbase-1b-full.yaml", LAUNCHES[name]), f"{name}.yaml", f": {key}: ", fix)


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_a_bad_deepspeed_file_is_refused(name, tmp_path):
    (tmp_path / f"{name}.json").write_text(DEEPSPEED_FILES[name].read_text())
    content = yaml.safe_load((ROOT / "4xT4.yaml").read_text())
    content["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / f"{name}.json")
    (tmp_path / "4xT4.yaml").write_text(yaml.safe_dump(content))
    done = run_check("recipes/starcoder-lora.yaml", tmp_path / "4xT4.yaml", f"run.out={tmp_path / 'out'}", machine="4xT4,compiler=no")
    if name in BAD_DEEPSPEED_FILES:
        key, fix = BAD_DEEPSPEED_FILES[name]
        assert_refused(done, f"{name}.json", f": {key}: ", fix)
        assert done.stderr.count("error: ") == 1
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe_is_refused(name, tmp_path):
    done = run_check(RECIPES[name], "4xT4.yaml", f"run.out={tmp_path}")
    if name in GOOD_RECIPES:
        assert done.returncode == 0 and done.stderr == "", done.stderr
    else:
        key, fix = BAD_RECIPES[name]
        assert_refused(done, f"{name}.yaml", key, fix)
        assert done.stderr.count("error: ") == (3 if name == "three_mistakes" else 1)
    assert not (ROOT / "pwned").exists()


def test_a_good_job_is_summed_up(tmp_path):
    done = run_check("recipes/starcoder-lora.yaml", "4xT4.yaml", "optim.grad_accum=8", f"run.out={tmp_path}")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for text in ("no mistakes", "4 on 1 machine, ZeRO-3", "lora, fp16", "1 x 8 x 4 = 32 rows, 32,768 tokens"):
        assert text in done.stdout
    nvme = run_check(
        "recipes/starcoder-lora.yaml", "accelerate_configs/4xT4-zero3-nvme.yaml", f"run.out={tmp_path}", machine="4xT4,libaio=yes"
    )
    assert nvme.returncode == 0 and "has not been measured" in nvme.stdout, nvme


def test_mistakes_of_all_three_are_said_at_once():
    done = run_check(RECIPES["unknown_key"], LAUNCHES["C1_bf16"], machine="8xT4")
    assert done.returncode == 2
    for text in ("optim.learning_rte", "mixed_precision", "8 GPUs are visible and 4 processes would run"):
        assert done.stderr.count(text) == 1, done.stderr
    done = run_check(RECIPES["unknown_key"], LAUNCHES["C1_bf16"], machine="8xT5")
    for text in ("optim.learning_rte", "mixed_precision", "'8xT5' is not known"):
        assert done.stderr.count(text) == 1, done.stderr


def test_this_machine_is_asked_where_none_is_described(tmp_path):
    command = [
        sys.executable,
        "-m",
        "finetune",
        "check",
        "recipes/smoke.yaml",
        "--launch",
        "accelerate_configs/smoke.yaml",
        f"run.out={tmp_path}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 on 1 machine, ZeRO-3" in done.stdout, done.stderr


def test_torch_is_not_imported():
    program = (
        "import json, sys\n"
        "from finetune.__main__ import check, parse_arguments\n"
        "check(parse_arguments(['check', 'recipes/starcoder-lora.yaml', '--launch', '4xT4.yaml', '--machine', '4xT4', 'run.out=none']))\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "finetune.recipe" in modules and not modules & {"torch", "transformers", "accelerate", "deepspeed", "peft", "numpy"}


def test_the_command_line():
    arguments = parse_arguments(["check", "a.yaml", "optim.lr=1", "--launch", "b.yaml", "optim.steps=2", "--machine", "4xT4", "run.seed=3"])
    assert (arguments.recipe, arguments.launch, arguments.machine) == ("a.yaml", "b.yaml", "4xT4")
    assert arguments.overrides == ["optim.lr=1", "optim.steps=2", "run.seed=3"]
    for wrong in (
        ["check", "a.yaml"],
        ["check", "a.yaml", "--launch", "b.yaml", "--lunch"],
        ["check", "a", "--launch", "b", "c"],
        ["train"],
        [],
    ):
        with pytest.raises(SystemExit) as end:
            parse_arguments(wrong)
        assert end.value.code == 2


def test_every_command_in_the_documentation_parses():
    text = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("*/*.md"), *ROOT.glob("*/*.yaml")])
    commands = re.findall(r"python -m finetune (\w.*?)(?:`|#|$)", text, re.MULTILINE)
    assert len(commands) >= 1
    for command in commands:
        arguments = build_parser().parse_args(command.split())
        files = [arguments.recipe, *([arguments.launch] if "launch" in arguments else [])]
        assert all((ROOT / file).exists() for file in files), command
        load_recipe(ROOT / arguments.recipe, arguments.overrides)


def test_only_local_rank_0_speaks(tmp_path):
    program = "from finetune.mistakes import *; import finetune.mistakes as m; m.WAIT_FOR_RANK_0_SECONDS = 0.1\n"
    program += "exit_with(Mistakes(Mistake('a.yaml', 'b', 'c', 'd'), Mistake('a.yaml', '', 'e', 'f')))"

    def end(**environ: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=300
        )

    first = end(RANK="0", LOCAL_RANK="0")
    assert (first.returncode, first.stderr) == (2, "error: a.yaml: b: c: d\nerror: a.yaml: e: f\n")
    # A rank that is still there when rank 0 should have ended it made a mistake that is its own.
    assert "error: rank 3: a.yaml: b: c: d" in end(RANK="3", LOCAL_RANK="3").stderr
