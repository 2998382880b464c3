"""Whether a recipe, a launch and a machine go together: one pure function of the three, and of the files the recipe names.

It runs in train.py before anything heavy, and in `python -m finetune check` without a launch, for a machine that may only be described.
"""

import importlib.util
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from finetune.launch import Launch
from finetune.machine import GIB, Gpu, Machine
from finetune.mistakes import Mistake, Mistakes, near_path
from finetune.recipe import Recipe
from finetune.shape import MLP_INPUT, Shape, load_shape
from finetune.sources import check_source

BF16_CAPABILITY = (8, 0)  # below it bf16 is emulated: torch says that it is supported, and it is slow
BYTES_PER_PARAMETER = {"fp16": 2.0, "bf16": 2.0, "fp32": 4.0}
# NF4 with double quantisation, embeddings in fp16: StarCoder's 15.5 billion parameters took 8.02 GiB when measured.
NF4_BYTES_PER_PARAMETER = 0.56
# Mixed-precision AdamW holds for each trained parameter 2 bytes of weight, 2 of gradient, and in fp32 4 each of weight and of two
# moments (Rajbhandari et al. 2020, "ZeRO", section 3.1). DDP keeps weight and gradient in fp32 instead: 16 as well.
FULL_BYTES_PER_PARAMETER = 16
FULL_REPLICATED_BYTES = {0: 16, 1: 4, 2: 2, 3: 0}  # of those, what ZeRO stage leaves whole on every GPU
# Without a launch file and without a GPU: a model of this size was meant for GPUs that are not usable.
CPU_PARAMETERS = 1_000_000_000
FLAGSHIP = "4xT4.yaml"
RUN_MARK = "run.lock"  # in the folder of a run, and locked while it runs


def precision(recipe: Recipe, launch: Launch, machine: Machine) -> str:
    """The precision to compute in: "fp16", "bf16" or "fp32".

    The recipe's, if it names one. Otherwise fp32 on a CPU, and on GPUs bf16 if every visible one has compute capability 8.0, else fp16.
    """
    if recipe.model.precision != "auto":
        return recipe.model.precision
    gpus = visible_gpus(launch, machine)
    if not gpus:
        return "fp32"
    return "bf16" if all(gpu.capability >= BF16_CAPABILITY for gpu in gpus) else "fp16"


def visible_gpus(launch: Launch, machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs that the launch's processes will see: the machine's, or as many as the launch file's gpu_ids names of them.

    Inside the launch the machine shows only those already, so this is the same before and after.
    """
    if launch.cpu:
        return ()
    if launch.gpu_ids is None:
        return machine.gpus
    return machine.gpus[: len([entry for entry in launch.gpu_ids.split(",") if entry.strip()])]


def find_mistakes(
    recipe: Recipe,
    launch: Launch,
    machine: Machine,
    where: str,
    rehearsal: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> list[Mistake]:
    """Everything that is wrong between a recipe, a launch and a machine; empty where they go together.

    Args:
        where: the recipe's path, for messages and for the command that they give.
        rehearsal: several ranks share one GPU on purpose; the number of GPUs is not compared.
        environ: where trackers look for their keys.
    """
    mistakes = find_launch_mistakes(launch, machine, where, rehearsal)
    shape, shape_mistakes = _load_shape(recipe, where)
    return [
        *mistakes,
        *shape_mistakes,
        *_check_precision(recipe, launch, machine, where),
        *_check_data(recipe, where),
        *_check_shape(recipe, shape, where),
        *_check_method(recipe, launch, where),
        *_check_memory(recipe, launch, machine, shape, where),
        *_check_run(recipe, where, environ),
    ]


def find_launch_mistakes(launch: Launch, machine: Machine, where: str = "RECIPE", rehearsal: bool = False) -> list[Mistake]:
    """What is wrong between a launch and a machine, whatever the recipe."""
    return [*([] if rehearsal else _check_gpus(launch, machine, where)), *_check_offload(launch, machine)]


def find_notes(launch: Launch) -> list[str]:
    """What is no mistake and yet should be known before the launch."""
    return ["NVMe offload has not been measured in this repository"] if launch.uses_nvme else []


def _check_gpus(launch: Launch, machine: Machine, where: str) -> list[Mistake]:
    file, processes = launch.path or "launch", launch.processes_per_machine
    if launch.cpu:
        return []
    if not machine.gpus:
        if launch.path:
            what = "a launch for GPUs, and this machine shows none (nvidia-smi, CUDA_VISIBLE_DEVICES)"
            fix = "check that nvidia-smi lists them; on a CPU use accelerate_configs/smoke.yaml"
            return [Mistake(file, "num_processes", what, fix)]
        return []
    if launch.gpu_ids is not None:
        named = len([entry for entry in launch.gpu_ids.split(",") if entry.strip()])
        if named != processes:
            what = f"names {named} GPUs for {processes} processes on this machine"
            return [Mistake(file, "gpu_ids", what, "one process drives one GPU: name as many")]
    count = len(visible_gpus(launch, machine))
    if count > processes:
        what = (
            f"{count} GPUs are visible and {_count(processes, 'process')} would run: "
            f"{_count(count - processes, 'GPU')} would stay empty while the others run out of memory"
        )
        return [Mistake(file, "num_processes", what, f"{_command(launch, count, where)} ({WHY_SHARDED})")]
    if count < processes:
        what = f"{_count(processes, 'process')} on this machine and {_count(count, 'visible GPU')}"
        fix = f"set num_processes: {count * launch.machines}" if launch.path else f"torchrun --nproc_per_node={count}"
        return [Mistake(file, "num_processes", what, f"one process drives one GPU: {fix}, or show more with CUDA_VISIBLE_DEVICES")]
    return []


WHY_SHARDED = (
    "DataParallel and DDP put a whole copy of the model on every GPU, so neither helps a model that is larger than one; ZeRO-3 shards it"
)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es" if noun.endswith("s") else f"{number} {noun}s"


def _command(launch: Launch, gpus: int, where: str) -> str:
    """The command that uses so many GPUs of each machine: the launch file as it is but for their number, where it can be kept."""
    processes = gpus * launch.machines
    if processes == 4 or not launch.path or launch.distributed_type == "NO":
        return _sharded_command(processes, where)
    return f"set num_processes: {processes} and accelerate launch --config_file {launch.path} train.py {where}"


def _sharded_command(processes: int, where: str) -> str:
    edit = "" if processes == 4 else f" with num_processes: {processes} in it"
    return f"accelerate launch --config_file {FLAGSHIP} train.py {where}{edit}"


def _check_offload(launch: Launch, machine: Machine) -> list[Mistake]:
    file, mistakes = launch.deepspeed_path, []
    install = "install a C++ compiler and ninja (apt-get install build-essential; pip install ninja)"
    if launch.builds_cpu_adam and not machine.has_compiler:
        what = "DeepSpeedCPUAdam is compiled at its first use, after the weights are loaded, and no compiler was found"
        fix = f'{install}, or set "zero_force_ds_cpu_optimizer": false to run torch\'s AdamW on the host'
        mistakes.append(Mistake(file, "zero_optimization.offload_optimizer.device", what, fix))
    if launch.uses_nvme:
        key = "zero_optimization.offload_param.device"
        if not machine.has_libaio:
            what = "nvme needs libaio's header, which was not found (NVMe offload has not been measured here)"
            mistakes.append(Mistake(file, key, what, "apt-get install libaio-dev, or use accelerate_configs/4xT4-zero3-offload.yaml"))
        if not machine.has_compiler and not launch.builds_cpu_adam:
            mistakes.append(
                Mistake(file, key, "DeepSpeed's asynchronous I/O is compiled at its first use, and no compiler was found", install)
            )
    return mistakes


def _load_shape(recipe: Recipe, where: str) -> tuple[Shape | None, list[Mistake]]:
    mistake = _check_model_path(recipe.model.name, where)
    if mistake:
        return None, [mistake]
    try:
        return load_shape(recipe.model.name), []
    except Mistakes as error:
        return None, error.mistakes


def _check_model_path(name: str, where: str) -> Mistake | None:
    """A path is looked up on the disk and never sent to the hub, which would answer with a connection error."""
    path = Path(name)
    if path.exists():
        if not path.is_dir():
            return Mistake(where, "model.name", f"{name} is a file", "name the folder that holds config.json")
        if not (path / "config.json").is_file():
            return Mistake(where, "model.name", f"{name} has no config.json", "name the folder that holds it")
        return None
    first = name.split("/")[0]
    path_like = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/")
    if path_like or ("/" in name and Path(first).is_dir()):
        return Mistake(where, "model.name", f"{name} does not exist, looked for from {Path.cwd()}", near_path(path, "correct the path"))
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", name, re.ASCII) or re.search(
        r"\.\.|--|[.-]$|\.git$", name
    ):
        return Mistake(where, "model.name", f"{name!r} is neither a local folder nor a hub name", "write owner/name or a path")
    return None


def _check_data(recipe: Recipe, where: str) -> list[Mistake]:
    mistakes = []
    for source in recipe.data.train:
        try:
            check_source(source)
        except Mistakes as error:
            mistakes += [replace(mistake, file=where) for mistake in error.mistakes]
    for name in recipe.data.decontaminate:
        if not Path(name).is_file():
            what = f"{name} does not exist, looked for from {Path.cwd()}"
            mistakes.append(Mistake(where, "data.decontaminate", what, "name HumanEval's or MBPP's file, one problem a line"))
    return mistakes


def _check_precision(recipe: Recipe, launch: Launch, machine: Machine, where: str) -> list[Mistake]:
    mistakes, gpus, wanted = [], visible_gpus(launch, machine), recipe.model.precision
    old = next((gpu for gpu in gpus if gpu.capability < BF16_CAPABILITY), None)
    if wanted == "bf16" and old is not None:
        what = f"bf16, and {old.name} has compute capability {old.capability[0]}.{old.capability[1]}: from 8.0 on it is in hardware"
        mistakes.append(Mistake(where, "model.precision", what, "write auto, which gives fp16 here"))
    if wanted == "fp16" and not gpus:
        mistakes.append(Mistake(where, "model.precision", "fp16 on a CPU, which DeepSpeed refuses", "write auto, which gives fp32 here"))
    if recipe.run.save_dtype != "auto" and recipe.method.kind != "full":
        what = f"{recipe.run.save_dtype} for a {recipe.method.kind} run, whose adapter is saved as it was trained"
        mistakes.append(Mistake(where, "run.save_dtype", what, "remove it: it is for method.kind: full"))
    return mistakes


def _check_shape(recipe: Recipe, shape: Shape | None, where: str) -> list[Mistake]:
    if shape is None:
        return []
    mistakes = []
    if recipe.data.seq_len > shape.positions:
        what = f"{recipe.data.seq_len} is more than the {shape.positions} positions of {recipe.model.name}"
        mistakes.append(Mistake(where, "data.seq_len", what, f"at most {shape.positions}"))
    if recipe.method.kind != "full":
        for target in recipe.method.targets:
            if target not in shape.linear_names:
                what = f"{target!r} matches no linear module of {recipe.model.name} ({shape.family})"
                mistakes.append(Mistake(where, "method.targets", what, f"it has {', '.join(shape.linear_names)}"))
    kept = recipe.memory.keep_layers + recipe.memory.keep_mlp
    if kept > shape.layers:
        what = f"memory.keep_layers and memory.keep_mlp name {kept} layers together, and {recipe.model.name} has {shape.layers}"
        mistakes.append(Mistake(where, "memory", what, f"at most {shape.layers}"))
    return mistakes


def _check_method(recipe: Recipe, launch: Launch, where: str) -> list[Mistake]:
    mistakes, kind, shards = [], recipe.method.kind, launch.zero_stage == 3
    if kind == "qlora" and shards:
        what = f"qlora with ZeRO-3 ({launch.path}): the 4-bit base cannot be sharded"
        fix = "use accelerate_configs/4xT4-zero2.yaml or accelerate_configs/4xT4-ddp.yaml, where each GPU holds the whole 4-bit base"
        mistakes.append(Mistake(where, "method.kind", what, fix))
    elif kind == "qlora" and launch.offloads_parameters:
        what = f"qlora with parameters offloaded ({launch.path}): the 4-bit base has to stay on its GPU"
        mistakes.append(Mistake(where, "method.kind", what, "use accelerate_configs/4xT4-zero2.yaml"))
    if kind == "full" and recipe.method.targets:
        what = "given for a full fine-tune, which trains every parameter"
        mistakes.append(Mistake(where, "method.targets", what, "remove it, or set method.kind: lora"))
    if recipe.memory.keep_mlp and (kind == "full" or shards or (recipe.method.targets and MLP_INPUT not in recipe.method.targets)):
        what = f"it is LoRA's forward pass on {MLP_INPUT} that keeps its product, where the weights are not sharded by ZeRO-3"
        mistakes.append(Mistake(where, "memory.keep_mlp", what, "use memory.keep_layers"))
    return mistakes


def _check_memory(recipe: Recipe, launch: Launch, machine: Machine, shape: Shape | None, where: str) -> list[Mistake]:
    """What no batch and no row length can make fit: weights, and for a full fine-tune their training state. The rest is the planner's."""
    gpus = visible_gpus(launch, machine)
    if shape is None or (launch.distributed_type == "DEEPSPEED" and launch.zero_stage == 0):
        return []  # unknown shape; or a DeepSpeed JSON that could not be read, which is a mistake of its own
    billions = f"{shape.parameters / 1e9:.1f} billion parameters"
    if not gpus:
        if not launch.path and not machine.gpus and shape.parameters >= CPU_PARAMETERS:
            what = f"{billions} and no usable GPU (nvidia-smi shows none, or CUDA_VISIBLE_DEVICES hides them)"
            return [Mistake(where, "model.name", what, "check nvidia-smi; for a trial on a CPU use accelerate_configs/smoke.yaml")]
        return []
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes)
    total = f"{smallest.total_bytes / GIB:.1f} GiB of a {smallest.name}"
    kind, stage, file = recipe.method.kind, launch.zero_stage, launch.path or "no launch file"
    weight_bytes = NF4_BYTES_PER_PARAMETER if kind == "qlora" else BYTES_PER_PARAMETER[precision(recipe, launch, machine)]
    weights = weight_bytes * shape.parameters
    if stage < 3 and weights > smallest.total_bytes:
        what = (
            f"{billions} x {weight_bytes:g} bytes = {weights / GIB:.1f} GiB of weights, whole on every GPU with {launch.strategy} "
            f"({file}), exceed the {total}"
        )
        fix = f"shard them: {_sharded_command(max(4, launch.processes), where)}; or method.kind: qlora"
        return [Mistake(where, "model.name", what, "use a smaller model" if kind == "qlora" else fix)]
    if stage == 3 and not launch.offloads_parameters and weights / launch.processes > smallest.total_bytes:
        what = (
            f"{billions} x {weight_bytes:g} / {launch.processes} bytes = {weights / launch.processes / GIB:.1f} GiB of weights a GPU "
            f"with {launch.strategy} ({file}), exceed the {total}"
        )
        fix = "use more GPUs, accelerate_configs/4xT4-zero3-offload.yaml, or method.kind: qlora with accelerate_configs/1xGPU.yaml"
        return [Mistake(where, "model.name", what, fix)]
    if kind == "full" and not launch.offloads_optimizer and not launch.offloads_parameters:
        replicated = FULL_REPLICATED_BYTES[stage]
        sharded = FULL_BYTES_PER_PARAMETER - replicated
        needed = shape.parameters * (replicated + sharded / launch.processes)
        if needed > smallest.total_bytes:
            whole = f"{replicated} + " if replicated else ""
            what = (
                f"full: {billions} x ({whole}{sharded} / {launch.processes}) bytes = {needed / GIB:.1f} GiB a GPU with {launch.strategy}, "
                f"before any activation, exceed the {total}; no batch or row length can change that"
            )
            host = f"{FULL_BYTES_PER_PARAMETER * shape.parameters / GIB:.0f} GiB of host memory"
            fix = f"use method.kind: lora, a smaller model, or accelerate_configs/4xT4-zero3-offload.yaml with {host}"
            return [Mistake(where, "method.kind", what, fix)]
    return _check_host_memory(recipe, launch, machine, weight_bytes, shape, where)


def _check_host_memory(recipe: Recipe, launch: Launch, machine: Machine, weight_bytes: float, shape: Shape, where: str) -> list[Mistake]:
    """What is offloaded has to fit in host memory, a part on each machine. LoRA's optimizer is too small to count."""
    if launch.uses_nvme:
        return []
    weights = weight_bytes if launch.offloads_parameters else 0
    state = FULL_BYTES_PER_PARAMETER - BYTES_PER_PARAMETER["fp16"] if recipe.method.kind == "full" and launch.offloads_optimizer else 0
    needed = (weights + state) * shape.parameters / launch.machines
    if needed <= machine.host_bytes:
        return []
    what = (
        f"{shape.parameters / 1e9:.1f} billion parameters x {weights + state:g} bytes = {needed * launch.machines / GIB:.1f} GiB are kept "
        f"in host memory with {launch.path}, and {machine.host_bytes / GIB:.1f} GiB are free on each machine ({launch.machines})"
    )
    fix = "use a machine with more memory, " + ("method.kind: lora, or a smaller model" if state else "or a smaller model")
    return [Mistake(where, "method.kind" if state else "model.name", what, fix)]


def _check_run(recipe: Recipe, where: str, environ: Mapping[str, str]) -> list[Mistake]:
    mistakes, out = [], Path(recipe.run.out)
    result = next((name for name in ("adapter_config.json", "config.json") if (out / name).exists()), None)
    if result:
        what = f"{recipe.run.out} holds a finished run ({result})"
        mistakes.append(Mistake(where, "run.out", what, "name another folder, or move that one away"))
    elif os.path.lexists(out) and not out.is_dir():
        mistakes.append(Mistake(where, "run.out", f"{recipe.run.out} is no folder", "name one"))
    elif out.is_dir() and not (out / RUN_MARK).exists() and (other := next(iter(sorted(os.listdir(out))), None)):
        what = f"{recipe.run.out} holds other files ({other}), which a run could overwrite"
        mistakes.append(Mistake(where, "run.out", what, "name a new folder"))
    for tracker in recipe.run.trackers:
        modules = ("tensorboard", "tensorboardX") if tracker == "tensorboard" else (tracker,)
        if not any(importlib.util.find_spec(module) for module in modules):
            fix = f"pip install {tracker}, or remove it; metrics.jsonl is always written"
            mistakes.append(Mistake(where, "run.trackers", f"{tracker} is not installed", fix))
        elif tracker == "wandb" and not _has_wandb_key(environ):
            fix = "wandb login, set WANDB_API_KEY, or WANDB_MODE=offline"
            mistakes.append(Mistake(where, "run.trackers", "wandb has no key, and would ask for one in the middle of the run", fix))
    return mistakes


def _has_wandb_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    file = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    host = re.sub(r"^https?://", "", environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).split("/")[0]
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
