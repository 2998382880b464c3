"""Recipe, launch and machine go together, or each contradiction is said before a weight is read."""

import glob
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.launch import Launch, read_launch
from finetune.machine import GIB, Gpu, Machine, available_host_bytes, describe_machine, parse_nvidia_smi, select_visible, this_machine
from finetune.mistakes import Mistakes
from finetune.preflight import find_mistakes, find_notes, precision, visible_gpus
from finetune.recipe import Recipe, load_recipe

WHERE = "recipes/starcoder-lora.yaml"
PLAIN = Launch("", 1, 1, "NO", False, None, None, "")
TORCHRUN = replace(PLAIN, processes=4, distributed_type="MULTI_GPU")
T4, A100 = describe_machine("T4").gpus[0], describe_machine("a100-40").gpus[0]


def launch(name: str, **changes) -> Launch:
    return replace(read_launch("4xT4.yaml" if name == "4xT4" else f"accelerate_configs/{name}.yaml"), **changes)


@pytest.fixture
def find(tmp_path):
    """Mistakes of the flagship with overrides, on a launch and a described machine; nothing of this computer is looked at."""

    def find(*overrides: str, on: Launch | str = "4xT4", machine: str | Machine = "4xT4", recipe: str = WHERE, **more) -> list[str]:
        job = load_recipe(recipe, [f"run.out={tmp_path / 'out'}", "run.trackers=[]", *overrides])
        machine = describe_machine(machine) if isinstance(machine, str) else machine
        mistakes = find_mistakes(job, launch(on) if isinstance(on, str) else on, machine, recipe, **({"environ": {}} | more))
        assert all(mistake.file and mistake.what and mistake.fix for mistake in mistakes), mistakes
        return [str(mistake) for mistake in mistakes]

    return find


def one(mistakes: list[str], *texts: str) -> None:
    assert len(mistakes) == 1, mistakes
    for text in texts:
        assert text in mistakes[0], mistakes[0]


SMALL = "model.name=bigcode/starcoderbase-1b"
TINY = ("model.name=models/tiny-starcoder", "method.targets=[]")


# How many GPUs


@pytest.mark.parametrize("name", ["plain", "1xGPU"])
def test_four_gpus_and_one_process_print_the_command(find, name):
    # The situation that this repository is for: one process on GPU 0, three GPUs empty.
    on = PLAIN if name == "plain" else launch("1xGPU", gpu_ids=None)
    one(
        find(SMALL, on=on),
        "num_processes: 4 GPUs are visible and 1 process would run: 3 GPUs would stay empty",
        "accelerate launch --config_file 4xT4.yaml train.py recipes/starcoder-lora.yaml",
        "DataParallel and DDP put a whole copy of the model on every GPU, so neither helps",
    )


def test_one_gpu_on_purpose_is_no_mistake(find):
    assert find(SMALL, on="1xGPU") == []
    assert find(SMALL, on=PLAIN, machine="1xT4") == []
    # A rehearsal puts all ranks on one GPU; everything else is still compared.
    assert find(SMALL, on=TORCHRUN, machine="h200", rehearsal=True) == []
    one(find(SMALL, "data.seq_len=9000", on=TORCHRUN, machine="h200", rehearsal=True), "data.seq_len")


@pytest.mark.parametrize(
    ("on", "machine", "texts"),
    [
        ("4xT4", "2xT4", ["4xT4.yaml: num_processes: 4 processes on this machine and 2 visible GPUs", "set num_processes: 2"]),
        (
            "4xT4",
            "8xT4",
            ["8 GPUs are visible and 4 processes would run", "set num_processes: 8 and accelerate launch --config_file 4xT4.yaml"],
        ),
        (TORCHRUN, "2xT4", ["launch: num_processes: 4 processes on this machine and 2 visible GPUs", "torchrun --nproc_per_node=2"]),
        (TORCHRUN, "8xT4", ["accelerate launch --config_file 4xT4.yaml", "with num_processes: 8 in it"]),
        (PLAIN, "2xT4", ["2 GPUs are visible and 1 process would run: 1 GPU would stay empty", "with num_processes: 2 in it"]),
        ("4xT4", "cpu", ["4xT4.yaml: num_processes: a launch for GPUs, and this machine shows none", "accelerate_configs/smoke.yaml"]),
        ("1xGPU", "cpu", ["1xGPU.yaml: num_processes: a launch for GPUs, and this machine shows none"]),
    ],
)
def test_processes_and_gpus_are_compared(find, on, machine, texts):
    one(find(SMALL, on=on, machine=machine), *texts)


def test_gpu_ids_are_counted(find):
    one(find(SMALL, on=launch("4xT4-ddp", gpu_ids="0,1")), "gpu_ids: names 2 GPUs for 4 processes")
    assert find(SMALL, on=launch("4xT4-ddp", gpu_ids="0,1", processes=2)) == []
    one(find(SMALL, on=launch("4xT4-ddp", gpu_ids="0,1,2,3"), machine="2xT4"), "4 processes on this machine and 2 visible GPUs")
    # Half of the processes are on the other machine.
    assert find(SMALL, on=launch("4xT4-ddp", processes=8, machines=2)) == []


def test_a_cpu_launch_is_no_mistake_where_there_are_gpus(find):
    assert find(*TINY, on="smoke") == [] == find(*TINY, on="smoke", machine="cpu")
    assert visible_gpus(launch("smoke"), describe_machine("4xT4")) == ()


def test_a_large_model_without_a_usable_gpu_is_refused(find):
    one(find(on=PLAIN, machine="cpu"), "model.name: 15.5 billion parameters and no usable GPU", "check nvidia-smi")
    assert find(*TINY, on=PLAIN, machine="cpu") == []


# Precision


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [((T4,) * 4, "fp16"), ((A100,) * 4, "bf16"), ((A100, T4), "fp16"), ((), "fp32"), ((replace(T4, capability=(7, 0)),), "fp16")],
)
def test_precision_follows_compute_capability(gpus, expected):
    machine = Machine(gpus, 0, True, False)
    assert precision(Recipe(), launch("4xT4"), machine) == expected
    assert precision(load_recipe(WHERE, ["model.precision=fp32"]), launch("4xT4"), machine) == "fp32"
    assert precision(Recipe(), launch("smoke"), machine) == "fp32", "a CPU launch sees no GPU"


def test_precision_that_the_hardware_lacks_is_refused(find):
    one(find("model.precision=bf16"), "model.precision: bf16, and Tesla T4 has compute capability 7.5", "write auto, which gives fp16 here")
    assert find("model.precision=bf16", machine="4xa100-40") == []
    assert find("model.precision=fp16") == []
    one(find(*TINY, "model.precision=fp16", on="smoke"), "model.precision: fp16 on a CPU", "write auto")
    assert find(*TINY, "model.precision=bf16", on="smoke") == []


def test_save_dtype_is_for_full_models(find):
    one(find("run.save_dtype=fp32"), "run.save_dtype: fp32 for a lora run", "it is for method.kind: full")
    full = ["method.kind=full", "method.targets=[]", SMALL, "run.save_dtype=fp32"]
    assert find(*full, on="4xT4-zero2") == []


# What no batch and no row length can make fit


def test_the_flagship_fits_where_it_is_sharded(find):
    assert find() == [] == find(on="4xT4-zero3-offload")
    assert find(on="4xT4-zero3-nvme", machine="4xT4,libaio=yes") == []


@pytest.mark.parametrize("on", ["4xT4-ddp", "4xT4-zero2", "1xGPU", "torchrun"])
def test_whole_copies_of_starcoder_are_refused(find, on):
    strategy = {"4xT4-zero2": "ZeRO-2", "1xGPU": "one process"}.get(on, "DDP")
    file = "no launch file" if on == "torchrun" else f"accelerate_configs/{on}.yaml"
    one(
        find(on=TORCHRUN if on == "torchrun" else on),
        f"model.name: 15.5 billion parameters x 2 bytes = 28.9 GiB of weights, whole on every GPU with {strategy} ({file})",
        "exceed the 14.6 GiB of a Tesla T4",
        f"shard them: accelerate launch --config_file 4xT4.yaml train.py {WHERE}; or method.kind: qlora",
    )


def test_whole_copies_fit_on_larger_gpus(find):
    assert find(on="4xT4-ddp", machine="4xa100-40") == []
    # The smallest counts.
    mixed = Machine((A100, A100, A100, T4), 0, True, False)
    one(find(on="4xT4-ddp", machine=mixed), "exceed the 14.6 GiB of a Tesla T4")


def test_shards_that_are_larger_than_a_gpu_are_refused(find):
    alone = launch("4xT4", processes=1)
    one(find(on=alone, machine="1xT4"), "x 2 / 1 bytes = 28.9 GiB of weights a GPU with ZeRO-3", "use more GPUs")
    assert find(on=launch("4xT4-zero3-offload", processes=1), machine="1xT4") == []


def test_full_fine_tuning_is_sized_by_the_number_of_parameters(find):
    full = ["method.kind=full", "method.targets=[]"]
    one(
        find(*full),
        "method.kind: full: 15.5 billion parameters x (16 / 4) bytes = 57.8 GiB a GPU with ZeRO-3",
        "no batch or row length can change that",
        "or accelerate_configs/4xT4-zero3-offload.yaml with 231 GiB of host memory",
    )
    assert find(*full, SMALL, on="4xT4-zero2") == [] == find(*full, SMALL)
    one(find(*full, SMALL, on="4xT4-ddp"), "full: 1.1 billion parameters x (16 + 0 / 4) bytes = 16.9 GiB a GPU with DDP")
    one(find(*full, "model.name=bigcode/starcoderbase-7b"), "no batch or row length")
    one(find(*full, "model.name=bigcode/starcoderbase-3b", on="4xT4-zero2"), "x (2 + 14 / 4) bytes = 15.")


def test_what_is_offloaded_fits_in_host_memory(find):
    full = ["method.kind=full", "method.targets=[]"]
    assert find(*full, on="4xT4-zero3-offload", machine="4xT4,host=240") == []
    one(
        find(*full, on="4xT4-zero3-offload", machine="4xT4,host=192"),
        "method.kind: 15.5 billion parameters x 16 bytes = 231.2 GiB are kept in host memory with accelerate_configs/",
        "192.0 GiB are free on each machine (1): use a machine with more memory, method.kind: lora",
    )
    one(find(on="4xT4-zero3-offload", machine="4xT4,host=28"), "model.name: 15.5 billion parameters x 2 bytes = 28.9 GiB are kept")
    assert find(on="4xT4-zero3-offload", machine="4xT4,host=29") == []
    # Each machine holds its part, an NVMe disk takes it all, and without offload nothing stays on the host.
    assert find(on=launch("4xT4-zero3-offload", processes=8, machines=2), machine="4xT4,host=15") == []
    assert find(on="4xT4-zero3-nvme", machine="4xT4,host=1,libaio=yes") == [] == find(machine="4xT4,host=1")


def test_a_4_bit_base_is_whole_on_every_gpu(find):
    qlora = ["method.kind=qlora"]
    for on in ("4xT4-ddp", "4xT4-zero2", "1xGPU"):
        assert find(*qlora, on=on) == []
    one(
        find(*qlora),
        "method.kind: qlora with ZeRO-3 (4xT4.yaml)",
        "use accelerate_configs/4xT4-zero2.yaml or accelerate_configs/4xT4-ddp.yaml",
    )
    one(find(*qlora, on="4xT4-zero3-offload"), "qlora with ZeRO-3")
    small = Machine((replace(T4, total_bytes=6 * GIB),) * 4, 0, True, False)
    one(find(*qlora, on="4xT4-ddp", machine=small), "x 0.56 bytes = 8.1 GiB of weights, whole on every GPU", "use a smaller model")


# What the recipe names


def test_rows_are_no_longer_than_the_positions(find):
    mistakes = find(recipe="tests/cases/recipes/row_longer_than_positions.yaml")
    one(mistakes, "row_longer_than_positions.yaml: data.seq_len: 16384 is more than the 8192 positions of bigcode/starcoder: at most 8192")
    assert find("data.seq_len=8192") == []
    one(find(*TINY, "data.seq_len=1025", on="smoke"), "the 1024 positions of models/tiny-starcoder")


def test_every_target_matches_a_module(find):
    mistakes = find(recipe="tests/cases/recipes/lora_names_partly_unknown.yaml")
    one(mistakes, "method.targets: 'q_attn' matches no linear module of bigcode/starcoder (gpt_bigcode): it has c_attn, c_fc, c_proj")
    one(find("model.name=bigcode/starcoder2-15b", "method.targets=[q_proj, c_attn]"), "'c_attn' matches no linear module")
    assert find("method.targets=[]") == []
    one(find("method.kind=full", SMALL, on="4xT4-zero2"), "method.targets: given for a full fine-tune", "remove it")


def test_what_layers_may_keep(find):
    qlora = {"on": "4xT4-zero2"}
    one(find("memory.keep_layers=30", "memory.keep_mlp=11", "method.kind=qlora", **qlora), "name 41 layers together", "at most 40")
    assert find("memory.keep_layers=20", "memory.keep_mlp=20", "method.kind=qlora", **qlora) == []
    expected = "memory.keep_mlp: it is LoRA's forward pass on c_fc", "use memory.keep_layers"
    one(find("memory.keep_mlp=1"), *expected)
    one(find("memory.keep_mlp=1", "method.kind=qlora", "method.targets=[c_attn]", **qlora), *expected)
    one(find("memory.keep_mlp=1", "method.kind=full", "method.targets=[]", SMALL, **qlora), *expected)
    assert find("memory.keep_layers=1", "method.kind=full", "method.targets=[]", SMALL, **qlora) == []


def test_a_missing_data_path_is_never_a_hub_name(find, tmp_path, monkeypatch):
    case = str(Path("tests/cases/recipes/local_path_missing.yaml").resolve())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("{}")
    mistakes = find(SMALL, on=PLAIN, machine="1xT4", recipe=case)
    one(mistakes, f"data.train: ./data/trian.jsonl does not exist, looked for from {tmp_path}: did you mean data/train.jsonl?")
    near = find(SMALL, "data.train=dta/train.jsonl", on=PLAIN, machine="1xT4", recipe=case)
    one(near, f"looked for from {tmp_path}: did you mean data?")
    (tmp_path / "data/notes.txt").write_text("")
    one(find(SMALL, "data.train=data/notes.txt", on=PLAIN, machine="1xT4", recipe=case), "neither a folder nor a file of rows")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("models/tiny-starcodr", "models/tiny-starcodr does not exist, looked for from {cwd}: did you mean models/tiny-starcoder?"),
        ("./bigcode/starcoder", "does not exist, looked for from {cwd}"),
        ("/nowhere/starcoder", "/nowhere/starcoder does not exist"),
        ("~/no-such-starcoder", "does not exist, looked for from {cwd}"),
        ("a/b/c", "a/b/c does not exist, looked for from {cwd}"),
        ("big code/starcoder", "'big code/starcoder' is neither a local folder nor a hub name"),
        ("train.py", "train.py is a file: name the folder that holds config.json"),
        ("recipes", "recipes has no config.json"),
    ],
)
def test_a_missing_model_path_is_never_a_hub_name(find, name, expected):
    one(find(f"model.name={name}"), "model.name: ", expected.format(cwd=Path.cwd()))


def test_a_hub_name_that_is_not_known_here_is_left_to_the_hub(find):
    assert find("model.name=someone/starcoder-clone") == []


def test_a_bad_config_is_a_mistake_of_its_file(find, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    one(find(f"model.name={tmp_path}"), f"{tmp_path}/config.json: model_type: 'llama' is not supported")


@pytest.mark.parametrize("result", ["adapter_config.json", "config.json"])
def test_a_finished_run_is_not_written_over(find, tmp_path, result):
    (tmp_path / "out").mkdir()
    assert find() == [], "a folder without a result may be used"
    (tmp_path / "out" / result).write_text("{}")
    one(find(), f"run.out: {tmp_path / 'out'} holds a finished run ({result})", "name another folder")


def test_a_file_is_no_folder_for_results(find, tmp_path):
    (tmp_path / "out").write_text("")
    one(find(), "run.out:", "is no folder: name one")


# Trackers


def test_a_tracker_that_is_not_installed_is_refused(find, monkeypatch):
    installed = {"tensorboard"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert find("run.trackers=[tensorboard]") == []
    one(find("run.trackers=[tensorboard, mlflow]"), "run.trackers: mlflow is not installed", "pip install mlflow, or remove it")


def test_a_tracker_without_a_key_is_refused(find, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    home = {"HOME": str(tmp_path)}
    one(find("run.trackers=[wandb]", environ=home), "run.trackers: wandb has no key", "wandb login")
    assert find("run.trackers=[wandb]", environ=home | {"WANDB_API_KEY": "key"}) == []
    assert find("run.trackers=[wandb]", environ=home | {"WANDB_MODE": "offline"}) == []
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert find("run.trackers=[wandb]", environ=home) == []
    one(find("run.trackers=[wandb]", environ=home | {"WANDB_BASE_URL": "https://wandb.example"}), "wandb has no key")
    assert find("run.trackers=[tensorboard]", environ={}) == []


# What has to be compiled


def test_nvme_needs_libaio_and_a_compiler(find):
    nvme = "zero3-nvme.json: zero_optimization.offload_param.device: nvme needs libaio's header"
    one(find(on="4xT4-zero3-nvme"), nvme, "apt-get install libaio-dev, or use accelerate_configs/4xT4-zero3-offload.yaml")
    one(find(on="4xT4-zero3-nvme", machine="4xT4,libaio=yes,compiler=no"), "DeepSpeedCPUAdam is compiled", "zero_force_ds_cpu_optimizer")
    assert find_notes(launch("4xT4-zero3-nvme")) and not find_notes(launch("4xT4-zero3-offload"))
    # Weights alone on the disk: no CPU Adam, and the asynchronous I/O is compiled all the same.
    weights = launch("4xT4-zero3-nvme")
    del weights.deepspeed["zero_optimization"]["offload_optimizer"]
    one(find(on=weights, machine="4xT4,libaio=yes,compiler=no"), "asynchronous I/O is compiled at its first use")


def test_the_shipped_offload_needs_no_compiler(find):
    assert find(on="4xT4-zero3-offload", machine="4xT4,compiler=no") == []


# The machine


def test_a_machine_in_words():
    machine = describe_machine("2xA100-40,host=120,compiler=no,libaio=yes")
    assert machine == Machine((A100, A100), 120 * GIB, False, True)
    assert describe_machine("4xT4").host_bytes == 192 * GIB and describe_machine("t4").gpus == (T4,)
    assert describe_machine("cpu").gpus == ()
    for text, what in [("4xT5", "'4xT5' is not known"), ("0xT4", "is not known"), ("4xT4,host=big", "'host=big' is not understood")]:
        with pytest.raises(Mistakes, match=what):
            describe_machine(text)


def test_nvidia_smi_is_read():
    gpus = parse_nvidia_smi(
        "GPU-1, 15360, 7.5, Tesla T4\nGPU-2, 40960, 8.0, NVIDIA A100-SXM4-40GB\nGPU-3, 81920, 8.0, NVIDIA A100-SXM4-80GB\n"
        "GPU-4, 16380, 8.9, NVIDIA GeForce RTX 4060 Ti\nGPU-5, [N/A], 7.5, Tesla T4\nNo devices were found\n"
    )
    assert [name for name, _ in gpus] == ["GPU-1", "GPU-2", "GPU-3", "GPU-4"]
    # What programs see of a known card; of others, what nvidia-smi says.
    assert [gpu.total_bytes for _, gpu in gpus] == [T4.total_bytes, A100.total_bytes, 81920 * 1024**2, 16380 * 1024**2]
    assert gpus[0][1] == T4 and gpus[3][1] == Gpu("NVIDIA GeForce RTX 4060 Ti", 16380 * 1024**2, (8, 9))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "abc"),
        ("", ""),
        ("-1", ""),
        ("0", "a"),
        ("2,0", "ca"),
        ("1,7,0", "b"),
        ("GPU-b", "b"),
        ("GPU-", ""),
        ("0,0", ""),
        ("1,-1,0", "b"),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible, expected):
    gpus = [(f"GPU-{name}", replace(T4, name=name)) for name in "abc"]
    assert "".join(gpu.name for gpu in select_visible(gpus, visible)) == expected


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


KERNEL = "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        # Control groups, version 2: a limit of the group or of one above it, whichever leaves less; cached files can be given up.
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "9000\n", "sys/fs/cgroup/a/memory.current": "4000\n"}, 5000),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "9000\n", "sys/fs/cgroup/memory.max": "7000\n"}, 7000),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "9000\n",
                "sys/fs/cgroup/memory.current": "9500\n",
                "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 700\n",
            },
            200,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "9000\n", "sys/fs/cgroup/memory.current": "9500\n"}, 0),
        # Above the control groups nothing is one.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/memory.max": "1\n"}, 1000 * 1024),
        # Version 1.
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:cpuset,memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9000\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 500\n",
                "sys/fs/cgroup/memory.max": "1\n",
            },
            6500,
        ),
    ],
)
def test_host_memory_is_what_a_container_may_still_take(tmp_path, files, expected):
    write(tmp_path, {"proc/meminfo": KERNEL} | files)
    assert available_host_bytes(tmp_path) == expected
    assert available_host_bytes(tmp_path / "none") == 0


def test_this_machine_is_looked_at(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def add(name: str, text: str = "") -> None:
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    machine = this_machine()
    assert machine.gpus == () and not machine.has_compiler and machine.host_bytes > 0
    add("g++")
    assert not this_machine().has_compiler, "ninja is missing"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert this_machine().has_compiler, "ninja as a Python package"
    (programs / "g++").unlink()
    assert not this_machine().has_compiler, "C++ is missing"
    add("my-c++")
    monkeypatch.setenv("CXX", "my-c++")
    assert this_machine().has_compiler
    add("ninja")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert this_machine().has_compiler, "ninja as a program"

    add("nvidia-smi", "echo 'GPU-1, 15360, 7.5, Tesla T4'; echo 'GPU-2, 15360, 7.5, Tesla T4'")
    assert this_machine().gpus == (T4, T4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine().gpus == (T4,)
    add("nvidia-smi", "echo 'driver mismatch'; exit 9")
    assert this_machine().gpus == ()


@pytest.mark.parametrize("variable", ["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CONDA_PREFIX"])
def test_libaio_is_looked_for_where_compilers_look(tmp_path, monkeypatch, variable):
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern] if Path(pattern).exists() and str(tmp_path) in pattern else [])
    write(tmp_path, {"include/libaio.h": ""})
    assert not this_machine().has_libaio
    monkeypatch.setenv(variable, str(tmp_path) if variable == "CONDA_PREFIX" else f":/nowhere:{tmp_path}/include")
    assert this_machine().has_libaio
