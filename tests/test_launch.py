"""A launch file and its DeepSpeed JSON are read before anything starts, and contradictions are said with file, key and fix."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from finetune import launch as launch_module
from finetune.launch import COMMAND, SECTIONS, ParentCommand, examine_launch, find_launch, read_launch
from finetune.machine import describe_machine
from finetune.mistakes import Mistakes
from finetune.preflight import find_launch_mistakes
from tests.launches import ROOT, run

CASES = Path("tests/cases/launch")
LAUNCH_FILES = sorted(Path("accelerate_configs").glob("*.yaml"))
FOUR_T4S = describe_machine("4xT4")
RANK = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED_RANK = RANK | {"ACCELERATE_USE_DEEPSPEED": "true"}
REMOVED = object()


def found(path: Path, machine=FOUR_T4S) -> list[str]:
    """Every mistake of a launch file, and between it and a machine. Each names the file and says what to do."""
    launch, mistakes = examine_launch(path)
    mistakes = [*mistakes, *(find_launch_mistakes(launch, machine) if launch else [])]
    assert all(mistake.file and mistake.what and mistake.fix for mistake in mistakes), mistakes
    return [str(mistake) for mistake in mistakes]


def changed(content: dict, changes: dict) -> dict:
    """`content` with dotted keys set, or taken out."""
    content = json.loads(json.dumps(content))
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        if value is REMOVED:
            del place[key]
        else:
            place[key] = value
    return content


def launch_file(tmp_path: Path, changes: dict, name: str = "4xT4") -> Path:
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(changed(yaml.safe_load(Path(f"accelerate_configs/{name}.yaml").read_text()), changes)))
    return path


def launch_with_json(tmp_path: Path, text: str) -> Path:
    (tmp_path / "ds.json").write_text(text)
    return launch_file(tmp_path, {"deepspeed_config.deepspeed_config_file": str(tmp_path / "ds.json")})


def launch_with(tmp_path: Path, changes: dict, name: str = "zero3-offload") -> Path:
    return launch_with_json(tmp_path, json.dumps(changed(json.loads(Path(f"ds_configs/{name}.json").read_text()), changes)))


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_shipped_launch_files_have_no_mistake(path):
    launch = read_launch(path)
    assert launch.path == str(path) and launch.processes == (1 if path.stem == "1xGPU" else 4)
    assert find_launch_mistakes(launch, describe_machine("4xT4,libaio=yes")) == []


@pytest.mark.parametrize(
    ("name", "strategy", "offloads"),
    [
        ("1xGPU", "one process", (False, False, False)),
        ("4xT4-ddp", "DDP", (False, False, False)),
        ("4xT4-zero2", "ZeRO-2", (False, False, False)),
        ("4xT4", "ZeRO-3", (False, False, False)),
        ("smoke", "ZeRO-3", (False, False, False)),
        ("4xT4-zero3-offload", "ZeRO-3", (True, True, False)),
        ("4xT4-zero3-nvme", "ZeRO-3", (True, True, True)),
    ],
)
def test_what_shipped_launch_files_mean(name, strategy, offloads):
    launch = read_launch(f"accelerate_configs/{name}.yaml")
    assert launch.strategy == strategy and launch.cpu == (name == "smoke")
    assert (launch.offloads_parameters, launch.offloads_optimizer, launch.uses_nvme) == offloads
    # Only where the file does not say otherwise does Accelerate take the optimizer that has to be compiled.
    assert launch.builds_cpu_adam == (name == "4xT4-zero3-nvme")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A3_distributed_no", ["distributed_type: 'NO' starts one process, whatever num_processes (4) says: write DEEPSPEED"]),
        (
            "A3_one_process",
            [
                "deepspeed_config.zero_stage: given inline: remove it: its home is zero_optimization.stage",
                "deepspeed_config.deepspeed_config_file: missing: name a DeepSpeed JSON, as in ds_configs/zero3.json",
                f"3 GPUs would stay empty while the others run out of memory: {COMMAND}",
            ],
        ),
        (
            "A5_eight_processes",
            ["num_processes: 8 processes on this machine and 4 visible GPUs: one process drives one GPU: set num_processes: 4"],
        ),
        ("C1_bf16", ["mixed_precision: precision (bf16) is not a launch file's business: remove it: precision follows the GPU"]),
        (
            "E6_two_sources",
            [
                "mixed_precision: precision (fp16)",
                "deepspeed_config.zero_stage: given inline beside a DeepSpeed file, which is a second source: remove it",
                "deepspeed_config.gradient_accumulation_steps: given inline beside a DeepSpeed file",
                f"ds/E1_string_gas.json does not exist, looked for from {ROOT}: it is looked for from the working directory: cd {ROOT}",
            ],
        ),
        (
            "E6_missing_ds_file",
            [f"deepspeed_config.deepspeed_config_file: ds/no_such.json does not exist, looked for from {ROOT}: correct"],
        ),
        (
            "E7_unknown_nested_key",
            [
                "deepspeed_config.zero_stge: no such key; Accelerate would ignore it and train with ZeRO-2: remove it; if zero_stage",
                "deepspeed_config.deepspeed_config_file: missing",
            ],
        ),
    ],
)
def test_bad_launch_files_are_explained(name, expected):
    mistakes = found(CASES / f"{name}.yaml")
    assert len(mistakes) == len(expected), mistakes
    for text in expected:
        assert any(text in mistake and f"{name}.yaml" in mistake for mistake in mistakes), mistakes


@pytest.mark.parametrize(
    ("name", "machine", "expected"),
    [
        ("E1_string_gas", "4xT4", """gradient_accumulation_steps: '8': write "auto"; its home is the recipe (optim.grad_accum)"""),
        ("E2_gas_absent", "4xT4", "gradient_accumulation_steps: absent, which is not the same as auto: write"),
        ("E5_optimizer_without_scheduler", "4xT4", "optimizer: a second owner of it: remove it: train.py makes AdamW"),
        ("E10_offload", "4xT4,compiler=no", "DeepSpeedCPUAdam is compiled at its first use"),
        ("E10_offload", "4xT4", None),
        ("D3_no_gather", "4xT4", None),
    ],
)
def test_bad_deepspeed_files_are_explained(tmp_path, name, machine, expected):
    mistakes = found(launch_with_json(tmp_path, (CASES / f"ds/{name}.json").read_text()), describe_machine(machine))
    assert len(mistakes) == (expected is not None), mistakes
    assert expected is None or (expected in mistakes[0] and "ds.json" in mistakes[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_procesess": 4}, "num_procesess: no such key: did you mean num_processes?"),
        ({"deepspeed_config.zero_stage": 3}, "deepspeed_config.zero_stage: given inline beside a DeepSpeed file"),
        ({"deepspeed_config.deepspeed_config_fil": "x"}, "did you mean deepspeed_config_file?"),
        ({"deepspeed_config": REMOVED}, "deepspeed_config.deepspeed_config_file: missing"),
        ({"deepspeed_config": "ds_configs/zero3.json"}, "deepspeed_config.deepspeed_config_file: missing"),
        ({"deepspeed_config.deepspeed_config_file": "ds_configs/zero33.json"}, "did you mean ds_configs/zero3.json?"),
        ({"distributed_type": "MULTI_GPU"}, "deepspeed_config: is never read with distributed_type 'MULTI_GPU'"),
        ({"distributed_type": False}, "distributed_type: YAML reads NO as false"),
        ({"distributed_type": "MULTI_CPU"}, "distributed_type: 'MULTI_CPU' is not supported"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "fsdp_config: not supported"),
        ({"distributed_type": REMOVED}, "distributed_type: missing"),
        ({"num_processes": REMOVED}, "num_processes: missing"),
        ({"num_processes": "4"}, "num_processes: '4' is not a number from 1"),
        ({"num_processes": 0}, "num_processes: 0 is not a number from 1"),
        ({"num_processes": 3, "num_machines": 2}, "num_processes: 3 processes do not divide over 2 machines"),
        ({"num_processes": 8, "num_machines": 2}, "deepspeed_multinode_launcher: 2 machines, and DeepSpeed's own launcher"),
        ({"gpu_ids": 0}, 'gpu_ids: 0 is not text, and Accelerate fails on it: write it in quotes: "0"'),
        ({"gpu_ids": "0,1"}, "gpu_ids: names 2 GPUs for 4 processes on this machine"),
        ({"use_cpu": True}, "use_cpu: does not hide this machine's GPUs"),
        ({"fp16": True}, "fp16: precision (True) is not a launch file's business"),
        ({"dynamo_backend": "INDUCTOR"}, "dynamo_backend: not supported"),
    ],
)
def test_other_mistakes_of_launch_files(tmp_path, changes, expected):
    mistakes = found(launch_file(tmp_path, changes))
    assert any(expected in mistake and "launch.yaml" in mistake for mistake in mistakes), mistakes


def test_an_unknown_type_brings_no_other_mistakes_with_it(tmp_path):
    for name in ("4xT4", "1xGPU"):
        assert len(found(launch_file(tmp_path, {"distributed_type": False}, name))) == 1


def test_one_gpu_and_cpu_mistakes(tmp_path):
    assert "num_processes: MULTI_GPU with one process" in found(launch_file(tmp_path, {"num_processes": 1}, "4xT4-ddp"))[0]
    cpu = {"gpu_ids": "-1", "use_cpu": True}
    assert "distributed_type: MULTI_GPU without a GPU" in found(launch_file(tmp_path, cpu, "4xT4-ddp"))[0]


def test_what_accelerate_config_writes_is_accepted(tmp_path):
    answers = {"debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False, "main_training_function": "main"}
    answers |= {"rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
    assert found(launch_file(tmp_path, answers | {"use_cpu": False, "gpu_ids": "all", "dynamo_backend": "NO"})) == []


def test_several_machines(tmp_path):
    changes = {"num_processes": 8, "num_machines": 2, "deepspeed_config.deepspeed_multinode_launcher": "standard"}
    path = launch_file(tmp_path, changes)
    assert found(path) == [] and read_launch(path).processes_per_machine == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gradient_clipping": 1.0}, 'gradient_clipping: 1.0: write "auto"; its home is the recipe (optim.clip)'),
        ({"gradient_clipping": REMOVED}, "gradient_clipping: absent, which is not the same as auto"),
        ({"train_batch_size": 64}, 'train_batch_size: 64: write "auto"'),
        ({"train_micro_batch_size_per_gpu": 1}, 'train_micro_batch_size_per_gpu: 1: write "auto"'),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: a second owner of it"),
        ({"fp16.enabled": True}, 'fp16.enabled: True: write "auto"; precision follows the GPU'),
        ({"fp16.enabled": REMOVED}, "fp16.enabled: absent, which means false"),
        ({"fp16": True}, "fp16: True is not a section"),
        ({"bf16.enabled": True}, "bf16.enabled: True"),
        ({"fp16.loss_scale_windw": 100}, "fp16.loss_scale_windw: no such key here: did you mean loss_scale_window?"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation: no such key here: did you mean zero_optimization?"),
        ({"zero_optimization": REMOVED}, "zero_optimization.stage: missing: write 2"),
        ({"zero_optimization": 3}, "zero_optimization: 3 is not a section"),
        ({"zero_optimization.stage": "3"}, "zero_optimization.stage: '3' is not a ZeRO stage"),
        ({"zero_optimization.stage": True}, "zero_optimization.stage: True is not a ZeRO stage"),
        ({"zero_optimization.stage": 2}, "offload_param.device: parameters can be offloaded with stage 3 alone, and this is stage 2"),
        ({"zero_optimization.cpu_offload": True}, "zero_optimization.cpu_offload: no such key here"),
        ({"zero_optimization.reduce_bucket_size": "5e7"}, "zero_optimization.reduce_bucket_size: the text '5e7'"),
        ({"zero_optimization.overlap_comm": "true"}, "zero_optimization.overlap_comm: the text 'true'"),
        ({"zero_optimization.sub_group_size": "auto"}, 'zero_optimization.sub_group_size: "auto" is not resolved here'),
        ({"zero_optimization.offload_param.device": "gpu"}, "'gpu' is no device to offload to: write none, cpu or nvme"),
        ({"zero_optimization.offload_param.device": "nvme"}, "offload_param.nvme_path: missing, and the device is nvme"),
        ({"zero_optimization.offload_param.pin_memry": True}, "did you mean pin_memory?"),
        ({"zero_optimization.offload_param.buffer_count": "5"}, "offload_param.buffer_count: the text '5'"),
        ({"zero_optimization.offload_optimizer": "cpu"}, "offload_optimizer: 'cpu' is not a section"),
        ({"aio.queue_dept": 8}, "aio.queue_dept: no such key here: did you mean queue_depth?"),
    ],
)
def test_other_mistakes_of_deepspeed_files(tmp_path, changes, expected):
    mistakes = found(launch_with(tmp_path, changes), describe_machine("4xT4,libaio=yes"))
    assert len(mistakes) == 1 and expected in mistakes[0] and "ds.json" in mistakes[0], mistakes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not valid JSON at line 1, column 1"),
        ('{"zero_optimization": {"stage": 3},}', "no comma after the last entry"),
        ("[]", "a list at the top"),
        ('{"gradient_clipping": "auto", "gradient_clipping": 1.0}', "gradient_clipping: given twice"),
    ],
)
def test_files_that_are_no_deepspeed_json(tmp_path, text, expected):
    assert any(expected in mistake and "ds.json" in mistake for mistake in found(launch_with_json(tmp_path, text)))


def test_files_that_are_no_launch_file(tmp_path):
    assert "No such file" in found(tmp_path / "none.yaml")[0]
    (tmp_path / "list.yaml").write_text("- a")
    assert "a list at the top" in found(tmp_path / "list.yaml")[0]
    (tmp_path / "twice.yaml").write_text("num_processes: 4\nnum_processes: 1\n")
    assert "num_processes is given twice" in found(tmp_path / "twice.yaml")[0]
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(Mistakes, match="distributed_type: missing"):
        read_launch(tmp_path / "empty.yaml")


def test_the_deepspeed_file_is_looked_for_from_the_folder_of_the_command(tmp_path):
    launch, mistakes = examine_launch(ROOT / "4xT4.yaml", tmp_path)
    assert launch.deepspeed is None
    assert f"looked for from {tmp_path}" in mistakes[0].what and f"cd {ROOT} first" in mistakes[0].fix
    assert read_launch("4xT4.yaml", ROOT).zero_stage == 3


# The names of the libraries


def test_deepspeed_knows_the_same_keys():
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor import constants as aio
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

    def keys(model) -> set[str]:
        fields = model.model_fields.items()
        return {field.alias or name for name, field in fields if not (field.json_schema_extra or {}).get("deprecated")}

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    assert {name: SECTIONS[name] for name in models} == {name: keys(model) for name, model in models.items()}
    assert SECTIONS["aio"] == {v for k, v in vars(aio).items() if k.startswith("AIO_") and not k.endswith(("_DEFAULT", "_FORMAT"))}
    top = {value for value in vars(constants).values() if isinstance(value, str)} | {aio.AIO, "zero_optimization"}
    assert SECTIONS[""] - top == set() and SECTIONS.keys() == {"", "aio", *models}


def test_accelerate_knows_the_same_keys_and_flags():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    fields = {field.name for field in dataclasses.fields(ClusterConfig)}
    # Of these two, ClusterConfig's reader makes others.
    assert launch_module.LAUNCH_KEYS == fields | {"fp16", "dynamo_backend"}
    assert launch_module.PRECISION_LAUNCH_KEYS | launch_module.UNSUPPORTED_LAUNCH_KEYS <= launch_module.LAUNCH_KEYS
    flags = set(launch_command_parser()._option_string_actions)
    assert launch_module.OVERRIDING_FLAGS <= flags and "--config_file" in flags
    # What Accelerate takes from deepspeed_config it takes as a flag's value.
    nested = {f"--{key}" for key in (*launch_module.NESTED_KEYS, *launch_module.NESTED_KEYS_WITH_ANOTHER_HOME)}
    assert nested <= flags and nested <= launch_module.OVERRIDING_FLAGS


# Which launch a process belongs to


def find(command: str, environ: dict[str, str] = DEEPSPEED_RANK, has_gpus: bool = True):
    """The launch of a process whose parent runs `command`, below a shell."""
    return find_launch(environ, [ParentCommand(command.split(), str(ROOT)), ParentCommand(["bash"], "/")], has_gpus)


def mistakes_of(command: str, environ: dict[str, str] = DEEPSPEED_RANK) -> list[str]:
    with pytest.raises(Mistakes) as error:
        find(command, environ)
    return [str(mistake) for mistake in error.value.mistakes]


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --config_file 4xT4.yaml train.py",
        "/usr/bin/python3 /opt/venv/bin/accelerate launch --config_file 4xT4.yaml train.py recipes/smoke.yaml",
        "python -u -X dev /opt/venv/bin/accelerate launch --config_file 4xT4.yaml train.py",
        "python -m accelerate.commands.launch --config_file 4xT4.yaml train.py",
        "python -m accelerate.commands.accelerate_cli launch --config_file 4xT4.yaml train.py",
        "python /lib/accelerate/commands/launch.py --config_file 4xT4.yaml train.py",
        "/opt/venv/bin/accelerate-launch --config_file 4xT4.yaml train.py",
        "accelerate launch --config_file=4xT4.yaml train.py",
        "accelerate launch --config-file 4xT4.yaml train.py",
        "accelerate launch --main_process_port 0 --config_file 4xT4.yaml --tee 3 ./train.py optim.lr=1e-4",
        "accelerate launch --num_processes 4 --config_file 4xT4.yaml train.py --mixed_precision fp16",
    ],
)
def test_the_launch_file_is_read_from_the_command_above(command):
    launch = find(command)
    assert (launch.path, launch.processes, launch.zero_stage) == ("4xT4.yaml", 4, 3)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("accelerate launch train.py", "accelerate launch: --config_file: missing; a default file"),
        ("accelerate launch train.py --config_file 4xT4.yaml", "accelerate launch: --config_file: missing"),
        ("accelerate launch --config_file", "accelerate launch: --config_file: missing"),
        ("accelerate launch --config_file none.yaml train.py", "none.yaml: No such file"),
        ("accelerate launch --zero_stage 2 --config_file 4xT4.yaml train.py", "--zero_stage: would outvote 4xT4.yaml: remove the flag"),
        ("accelerate launch --config_file 4xT4.yaml --mixed-precision=fp16 train.py", "--mixed_precision: would outvote"),
        ("accelerate launch --config_file 4xT4.yaml --multi_gpu train.py", "--multi_gpu: would outvote"),
        ("python -u -m deepspeed.launcher.launch --world_info=x train.py", "started by DeepSpeed's own launcher"),
        ("bash", "ACCELERATE_USE_DEEPSPEED: true in the environment, and no accelerate launch file"),
        ("accelerate test --config_file 4xT4.yaml", "ACCELERATE_USE_DEEPSPEED: true in the environment"),
    ],
)
def test_launches_that_outvote_or_lack_their_file(command, expected):
    assert any(expected in mistake for mistake in mistakes_of(command))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WORLD_SIZE": "2"}, "4xT4.yaml: num_processes: 4 in the file, and 2 processes are running (WORLD_SIZE)"),
        ({"WORLD_SIZE": "1"}, "4xT4.yaml: num_processes: 4 in the file, and 1 processes are running"),
        ({"ACCELERATE_USE_DEEPSPEED": "false"}, "distributed_type: DEEPSPEED in the file, and ACCELERATE_USE_DEEPSPEED is false"),
        ({"ACCELERATE_USE_CPU": "true"}, "environment: ACCELERATE_USE_CPU: set in the environment"),
        ({"ACCELERATE_USE_CPU": "1"}, "environment: ACCELERATE_USE_CPU: set in the environment"),
    ],
)
def test_an_environment_that_contradicts_the_file(environ, expected):
    mistakes = mistakes_of("accelerate launch --config_file 4xT4.yaml train.py", DEEPSPEED_RANK | environ)
    assert len(mistakes) == 1 and expected in mistakes[0]


def test_what_accelerate_itself_sets_for_one_process_is_no_contradiction(tmp_path):
    assert find("accelerate launch --config_file accelerate_configs/1xGPU.yaml train.py", {"ACCELERATE_USE_CPU": "False"}).gpu_ids == "0"
    path = launch_file(tmp_path, {"gpu_ids": "-1", "use_cpu": True}, "1xGPU")
    assert find(f"accelerate launch --config_file {path} train.py", {"ACCELERATE_USE_CPU": "True"}).cpu
    ddp = "accelerate launch --config_file accelerate_configs/4xT4-ddp.yaml train.py"
    assert "ACCELERATE_USE_CPU" in mistakes_of(ddp, RANK | {"ACCELERATE_USE_CPU": "true"})[0]


@pytest.mark.parametrize("program", ["/opt/venv/bin/torchrun", "-m torch.distributed.run", "/lib/torch/distributed/run.py"])
def test_torchrun_needs_no_file(program):
    launch = find(f"python {program} --nproc_per_node=4 train.py", RANK)
    assert (launch.path, launch.processes, launch.distributed_type, launch.strategy) == ("", 4, "MULTI_GPU", "DDP")
    assert find(f"python {program} train.py", RANK, has_gpus=False).distributed_type == "MULTI_CPU"
    assert find(f"python {program} train.py", RANK | {"WORLD_SIZE": "8"}).machines == 2
    # What is above torchrun is not what started this process.
    above = [ParentCommand(["python", *program.split()], "/"), ParentCommand("accelerate launch x.py".split(), "/")]
    assert find_launch(RANK, above).path == ""


def test_plain_python_is_one_process():
    launch = find("bash", {})
    assert (launch.path, launch.processes, launch.machines, launch.distributed_type) == ("", 1, 1, "NO")


def test_a_real_launch_is_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from finetune.launch import find_launch, parent_command_lines\n"
        "print(find_launch(os.environ, parent_command_lines()))\n"
    )
    path = os.path.relpath(launch_file(tmp_path, {"gpu_ids": "-1", "use_cpu": True}, "1xGPU"), ROOT)
    done = run([sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, script])
    assert f"Launch(path='{path}', processes=1, machines=1, distributed_type='NO', cpu=True" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK"),
        ({"RANK": "0"}, "RANK"),
    ],
)
def test_variables_that_no_launcher_sets_so_are_mistakes(environ, key):
    with pytest.raises(Mistakes, match=f"environment: {key}: "):
        find_launch(environ, [])
