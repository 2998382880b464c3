"""The launch: how many processes, and how DeepSpeed shards what they hold. Read from an accelerate YAML and the JSON it names.

Accelerate accepts several contradictions here in silence and turns others into a traceback in every rank. They are found by
reading, before a process is started and before torch is imported.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from finetune.mistakes import Mistake, Mistakes
from finetune.recipe import read_mapping

COMMAND = "accelerate launch --config_file 4xT4.yaml train.py"
# MULTI_CPU is not among them: Accelerate starts one process for it on one machine, whatever num_processes says.
SUPPORTED_TYPES = ("DEEPSPEED", "MULTI_GPU", "NO")

# What Accelerate's ClusterConfig and its conversion of old files accept at the top of the YAML.
LAUNCH_KEYS = frozenset(
    """
    command_file commands compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_backend dynamo_config
    enable_cpu_affinity fp16 fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port
    main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes parallelism_config
    rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone use_cpu
    """.split()
)
PRECISION_LAUNCH_KEYS = frozenset("fp16 fp8_config mixed_precision".split())
UNSUPPORTED_LAUNCH_KEYS = frozenset(
    """
    command_file commands dynamo_backend dynamo_config fsdp_config megatron_lm_config mpirun_config parallelism_config tpu_name
    tpu_vm
    """.split()
)
# Of Accelerate's nested keys two are left to this file; each of the others says what the DeepSpeed JSON or the recipe says.
NESTED_KEYS = ("deepspeed_config_file", "deepspeed_multinode_launcher")
NESTED_KEYS_WITH_ANOTHER_HOME = {
    "zero_stage": "zero_optimization.stage in the DeepSpeed JSON",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device in the DeepSpeed JSON",
    "offload_param_device": "zero_optimization.offload_param.device in the DeepSpeed JSON",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path in the DeepSpeed JSON",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path in the DeepSpeed JSON",
    "zero3_init_flag": "zero_optimization.stage in the DeepSpeed JSON: stage 3 is sharded from the first byte",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save in the DeepSpeed JSON",
    "gradient_accumulation_steps": "optim.grad_accum in the recipe",
    "gradient_clipping": "optim.clip in the recipe",
}

# What may stand in a DeepSpeed JSON: a section's dotted name and its keys. They are DeepSpeed's own, without those that it calls
# deprecated, so that reading a file needs neither DeepSpeed nor torch; a test compares them. At the top stand only those about
# sharding and communication: what else DeepSpeed knows is the recipe's, or is not used.
SECTIONS = {
    "": frozenset(
        """
        aio bf16 communication_data_type fp16 gradient_accumulation_steps gradient_clipping steps_per_print train_batch_size
        train_micro_batch_size_per_gpu wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        zero_optimization
        """.split()
    ),
    "zero_optimization": frozenset(
        """
        allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint
        enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
        memory_efficient_linear offload_optimizer offload_param overlap_comm override_module_apply parameter_alignment
        pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory
        stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters
        stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
        stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
        use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
        zero_quantized_nontrainable_weights zero_quantized_weights
        """.split()
    ),
    "zero_optimization.offload_param": frozenset("buffer_count buffer_size device max_in_cpu nvme_path pin_memory".split()),
    "zero_optimization.offload_optimizer": frozenset(
        """
        buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio super_offload
        """.split()
    ),
    "fp16": frozenset(
        """
        auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale
        loss_scale_window min_loss_scale
        """.split()
    ),
    "bf16": frozenset("bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update".split()),
    "aio": frozenset("block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds".split()),
}
# Absent is not auto: Accelerate then takes 1 for the accumulation, and DeepSpeed no clipping at all.
AUTO_KEYS = {
    "train_batch_size": "its home is the recipe (optim.micro_batch x optim.grad_accum x processes)",
    "train_micro_batch_size_per_gpu": "its home is the recipe (optim.micro_batch)",
    "gradient_accumulation_steps": "its home is the recipe (optim.grad_accum)",
    "gradient_clipping": "its home is the recipe (optim.clip)",
}
PRECISION_AUTO_KEYS = dict.fromkeys(("fp16.enabled", "bf16.enabled"), "precision follows the GPU")
# Accelerate resolves "auto" in these as well, and leaves it as a text everywhere else.
RESOLVED_AUTO_KEYS = frozenset(
    [
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]
)
TEXT_KEYS = frozenset(["device", "nvme_path", "communication_data_type"])
COUNT_KEYS = frozenset(
    """
    allgather_bucket_size block_size buffer_count buffer_size hysteresis initial_scale_power intra_op_parallelism loss_scale_window
    max_in_cpu parameter_alignment queue_depth reduce_bucket_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size steps_per_print sub_group_size zero_hpz_partition_size
    """.split()
)
NUMBER_KEYS = frozenset("cpuadam_cores_perc loss_scale min_loss_scale ratio".split())
COMMUNICATION_TYPES = ("fp16", "bf16", "fp32", "fp64", None)
# Known to DeepSpeed, and not to be had here.
UNSUPPORTED_KEYS = {
    "zero_optimization.zenflow": "it is DeepSpeed's own optimizer schedule, and train.py makes the optimizer",
    "zero_optimization.leaf_module": "no model that is trained here needs it",
    "zero_optimization.compute_grad_norm": "the gradient's norm is what optim.clip cuts",
}
SECOND_OWNERS = {"optimizer": "AdamW with the recipe's optim section", "scheduler": "the schedule of the recipe's optim section"}

# Flags of `accelerate launch` that outvote the file. --num_processes is compared by its effect instead.
OVERRIDING_FLAGS = frozenset(
    """
    --cpu --deepspeed_config_file --deepspeed_multinode_launcher --dynamo_backend --gpu_ids --gradient_accumulation_steps
    --gradient_clipping --mixed_precision --mpirun_hostfile --multi_gpu --num_machines --offload_optimizer_device
    --offload_optimizer_nvme_path --offload_param_device --offload_param_nvme_path --tpu --use_deepspeed --use_fsdp
    --use_megatron_lm --use_parallelism_config --zero3_init_flag --zero3_save_16bit_model --zero_stage
    """.split()
)
# How these programs show in a process's arguments: installed script, module or file.
ACCELERATE = re.compile(r"(.*/)?accelerate([./]commands[./]accelerate_cli(\.py)?)?")
ACCELERATE_LAUNCH = re.compile(r"(.*/)?(accelerate-launch|accelerate[./]commands[./]launch(\.py)?)")
TORCHRUN = re.compile(r"(.*/)?(torchrun|torch[./]distributed[./](run|launch)(\.py)?)")
# A program's name comes after the interpreter and its options; further on, the same word is somebody's argument.
PROGRAM_ARGUMENTS = 6

MOST_PROCESSES = 4096
TRUE, FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")
# Accelerate's switches in the environment for what this repository does not do, and its values where nothing is asked for.
SWITCHES_OFF = {f"ACCELERATE_USE_{name}" for name in ("FSDP", "MEGATRON_LM", "TP", "PARALLELISM_CONFIG", "IPEX", "XPU", "SAGEMAKER")}
EXPECTED_VALUES = {
    "ACCELERATE_DYNAMO_BACKEND": ("no",),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1",),
    "ACCELERATE_MIXED_PRECISION": ("no",),
}

Refuse = Callable[[str, str, str], None]  # key, what, fix of a mistake in a file that is known already


@dataclass(frozen=True)
class Launch:
    """How this job is started: processes over all machines, and the DeepSpeed JSON that shards it.

    `path` is empty where no launch file was used (torchrun, plain python). `deepspeed` is the JSON's content; it is None without
    DeepSpeed and, with `distributed_type` DEEPSPEED, where the JSON could not be read.
    """

    path: str
    processes: int
    machines: int
    distributed_type: str
    cpu: bool
    gpu_ids: str | None
    deepspeed: dict[str, Any] | None
    deepspeed_path: str

    @property
    def processes_per_machine(self) -> int:
        return self.processes // self.machines

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        stage = self._zero().get("stage", 0)
        return stage if isinstance(stage, int) else 0

    @property
    def strategy(self) -> str:
        """How the model's state is spread, in a word."""
        return f"ZeRO-{self.zero_stage}" if self.zero_stage else "DDP" if self.processes > 1 else "one process"

    @property
    def offloads_parameters(self) -> bool:
        return self._device("offload_param") in ("cpu", "nvme")

    @property
    def offloads_optimizer(self) -> bool:
        return self._device("offload_optimizer") in ("cpu", "nvme")

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self._device("offload_param"), self._device("offload_optimizer"))

    @property
    def builds_cpu_adam(self) -> bool:
        """Whether Accelerate exchanges AdamW for DeepSpeedCPUAdam, a C++ extension that is compiled at its first use."""
        return self.offloads_optimizer and self.deepspeed.get("zero_force_ds_cpu_optimizer", True) is not False

    def _zero(self) -> dict[str, Any]:
        section = (self.deepspeed or {}).get("zero_optimization")
        return section if isinstance(section, dict) else {}

    def _device(self, section: str) -> str:
        offload = self._zero().get(section)
        return offload.get("device", "none") if isinstance(offload, dict) else "none"


class ParentCommand(NamedTuple):
    """A process above this one: its arguments and the folder in which it runs."""

    arguments: list[str]
    folder: str


def parent_command_lines() -> list[ParentCommand]:
    """Arguments and working directory of the processes above this one, nearest first; those that may not be read are left out."""
    import psutil

    commands = []
    for parent in psutil.Process().parents():
        try:
            commands.append(ParentCommand(parent.cmdline(), parent.cwd()))
        except psutil.Error:
            continue
    return commands


def read_launch(path: Path | str, folder: Path | str = ".") -> Launch:
    """Read a launch file and the DeepSpeed JSON that it names.

    Args:
        path: the accelerate YAML.
        folder: the directory in which `accelerate launch` runs: Accelerate looks for the DeepSpeed JSON from there, not from
            the YAML's own folder.

    Raises:
        Mistakes: all that is wrong with both files, at once.
    """
    launch, mistakes = examine_launch(path, folder)
    if mistakes:
        raise Mistakes(*mistakes)
    return launch


def examine_launch(path: Path | str, folder: Path | str = ".") -> tuple[Launch | None, list[Mistake]]:
    """Like `read_launch`, for a caller who has more to say: the launch as far as it can be understood, and its mistakes."""
    where, folder = str(path), Path(folder)
    try:
        content = read_mapping(folder / path)
    except Mistakes as error:
        return None, error.mistakes
    mistakes: list[Mistake] = []

    def refuse(key: str, what: str, fix: str) -> None:
        mistakes.append(Mistake(where, key, what, fix))

    for key, value in content.items():
        if key not in LAUNCH_KEYS:
            refuse(str(key), "no such key", _nearest(key, LAUNCH_KEYS))
        elif key in PRECISION_LAUNCH_KEYS and value:
            fix = "remove it: precision follows the GPU's compute capability; model.precision in the recipe overrides it"
            refuse(key, f"precision ({value}) is not a launch file's business", fix)
        elif key in UNSUPPORTED_LAUNCH_KEYS and value and value != "NO":
            refuse(key, "not supported", "remove it: this repository shards with DeepSpeed alone")

    kind = content.get("distributed_type")
    if kind not in SUPPORTED_TYPES:
        what = "missing" if kind is None else "YAML reads NO as false" if kind is False else f"{kind!r} is not supported"
        refuse("distributed_type", what, "write DEEPSPEED, MULTI_GPU or 'NO', which needs the quotes")
        kind = "DEEPSPEED" if content.get("deepspeed_config") else "NO"
    machines = _read_count(content, "num_machines", 1, refuse)
    processes = _read_count(content, "num_processes", 1 if kind == "NO" else None, refuse)
    if kind == "NO" and processes > 1:
        fix = "write DEEPSPEED (sharded) or MULTI_GPU (a whole copy of the model on each GPU)"
        refuse("distributed_type", f"'NO' starts one process, whatever num_processes ({processes}) says", fix)
    if kind == "MULTI_GPU" and processes == 1:
        refuse("num_processes", "MULTI_GPU with one process", "write the number of GPUs, or distributed_type: 'NO' for one")
    if processes % machines:
        what = f"{processes} processes do not divide over {machines} machines"
        refuse("num_processes", what, "num_processes counts the processes of all machines together")

    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        refuse("compute_environment", f"{content['compute_environment']!r} is not supported", "write LOCAL_MACHINE")
    port = content.get("main_process_port")
    if port is not None and (type(port) is not int or not 0 <= port < 65536):
        refuse("main_process_port", f"{port!r} is not a port", "write a number up to 65535, or remove it")
    machine_rank = content.get("machine_rank", 0)
    if type(machine_rank) is not int or not 0 <= machine_rank < machines:
        refuse("machine_rank", f"{machine_rank!r} is none of {machines} machines", "write 0 on the first machine, 1 on the next")
    if not isinstance(content.get("use_cpu", False), bool):
        refuse("use_cpu", f"{content['use_cpu']!r} is neither true nor false", "write true or false without quotes")

    gpu_ids = content.get("gpu_ids")
    if gpu_ids is not None and not isinstance(gpu_ids, str):
        refuse("gpu_ids", f"{gpu_ids!r} is not text, and Accelerate fails on it", f'write it in quotes: "{gpu_ids}"')
        gpu_ids = str(gpu_ids)
    gpu_ids = None if gpu_ids == "all" else gpu_ids
    names = [name.strip() for name in (gpu_ids or "").split(",")]
    if gpu_ids not in (None, "-1") and (
        len(set(names)) < len(names) or not all(re.fullmatch(r"\d+|GPU-[\w-]+|MIG-[\w-]+", n) for n in names)
    ):
        refuse("gpu_ids", f"{gpu_ids!r} does not name different GPUs", 'write their numbers, as in "0,1,2,3"')
    cpu = content.get("use_cpu") is True or gpu_ids == "-1"
    if cpu and gpu_ids != "-1":
        refuse("use_cpu", "does not hide this machine's GPUs from the processes", 'add gpu_ids: "-1"')
    if cpu and kind == "MULTI_GPU":
        refuse("distributed_type", "MULTI_GPU without a GPU", "write DEEPSPEED, as in accelerate_configs/smoke.yaml")

    deepspeed, deepspeed_path = None, ""
    nested = content.get("deepspeed_config")
    if kind == "DEEPSPEED":
        deepspeed_path, found = _examine_nested(nested if isinstance(nested, dict) else {}, where, folder, machines, refuse)
        if found is not None:
            deepspeed, more = examine_deepspeed(found, deepspeed_path)
            mistakes += more
    elif nested:
        fix = "write distributed_type: DEEPSPEED, or remove it"
        refuse("deepspeed_config", f"is never read with distributed_type {kind!r}", fix)
    return Launch(where, processes, machines, kind, cpu, gpu_ids, deepspeed, deepspeed_path), mistakes


def _shown(value: Any) -> str:
    """A mistaken value, which can be of any size, in a few characters."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "that"


def _nearest(key: Any, candidates: Collection[str]) -> str:
    near = difflib.get_close_matches(str(key), sorted(candidates), n=1)
    return f"did you mean {near[0]}?" if near else "remove it"


def _read_count(content: dict[str, Any], key: str, default: int | None, refuse: Refuse) -> int:
    count = content.get(key, default)
    if type(count) is int and 1 <= count <= MOST_PROCESSES:
        return count
    refuse(key, "missing" if count is None else f"{_shown(count)} is not a number from 1 to {MOST_PROCESSES}", "write how many there are")
    return 1


def _examine_nested(nested: dict[str, Any], where: str, folder: Path, machines: int, refuse: Refuse) -> tuple[str, Path | None]:
    """Examine the launch file's `deepspeed_config`.

    Returns:
        The DeepSpeed JSON's path as it is written there, and where it was found; None where it was not.
    """
    home = "deepspeed_config.deepspeed_config_file"
    path = nested.get("deepspeed_config_file")
    for key in nested:
        if key in NESTED_KEYS_WITH_ANOTHER_HOME:
            what = "given inline beside a DeepSpeed file, which is a second source" if path else "given inline"
            refuse(f"deepspeed_config.{key}", what, f"remove it: its home is {NESTED_KEYS_WITH_ANOTHER_HOME[key]}")
        elif key not in NESTED_KEYS:
            near = difflib.get_close_matches(str(key), [*NESTED_KEYS, *NESTED_KEYS_WITH_ANOTHER_HOME], n=1)
            fix = f"did you mean {near[0]}?" if near else "remove it"
            if near and near[0] not in NESTED_KEYS:
                fix = f"remove it; if {near[0]} is meant, its home is {NESTED_KEYS_WITH_ANOTHER_HOME[near[0]]}"
            refuse(f"deepspeed_config.{key}", "no such key; Accelerate would ignore it and train with ZeRO-2", fix)
    if machines > 1 and nested.get("deepspeed_multinode_launcher") != "standard":
        what = f"{machines} machines, and DeepSpeed's own launcher would be asked to reach them"
        refuse("deepspeed_config.deepspeed_multinode_launcher", what, "write standard")
    if not isinstance(path, str) or not path:
        refuse(home, "missing", "name a DeepSpeed JSON, as in ds_configs/zero3.json")
        return "", None
    if not (folder / path).is_file():
        what = f"{path} does not exist, looked for from {folder.resolve()}"
        refuse(home, what, _find_folder(where, path, folder))
        return path, None
    return path, folder / path


def _find_folder(where: str, path: str, folder: Path) -> str:
    """What to do about a DeepSpeed JSON that is not where Accelerate looks: often only the working directory is another one."""
    for base in (folder / where).resolve().parents:
        if (base / path).is_file():
            return f"it is looked for from the working directory: cd {base} first"
    parent = (folder / path).parent
    near = difflib.get_close_matches(Path(path).name, [p.name for p in parent.glob("*.json")], n=1) if parent.is_dir() else []
    return f"did you mean {Path(path).parent / near[0]}?" if near else "correct the path; it is relative to the working directory"


def examine_deepspeed(found: Path, where: str) -> tuple[dict[str, Any] | None, list[Mistake]]:
    """Read a DeepSpeed JSON.

    Args:
        found: the file.
        where: its name in messages.

    Returns:
        Its content (None where it is no JSON mapping) and all its mistakes.
    """
    mistakes: list[Mistake] = []

    def refuse(key: str, what: str, fix: str) -> None:
        mistakes.append(Mistake(where, key, what, fix))

    def keep_last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            refuse(key, "given twice", "keep one")
        return dict(pairs)

    try:
        content = json.loads(found.read_text(encoding="utf-8"), object_pairs_hook=keep_last)
    except json.JSONDecodeError as error:
        what = f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        return None, [Mistake(where, "", what, "correct that line; JSON has no comments and no comma after the last entry")]
    except (OSError, UnicodeDecodeError) as error:
        return None, [Mistake(where, "", f"cannot be read: {error}", "save it as UTF-8 text")]
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        return None, [Mistake(where, "", f"not a DeepSpeed configuration ({error})", "take one of ds_configs/")]
    if not isinstance(content, dict):
        return None, [Mistake(where, "", f"a {type(content).__name__} at the top", "write a mapping in braces")]

    for key, home in AUTO_KEYS.items():
        if key not in content:
            refuse(key, "absent, which is not the same as auto", f'write "{key}": "auto"; {home}')
    for key in ("fp16", "bf16"):
        if isinstance(content.get(key), dict) and "enabled" not in content[key]:
            refuse(f"{key}.enabled", "absent, which means false", 'write "enabled": "auto"; precision follows the GPU')
    _check_section(content, "", refuse)
    _check_stage(content.get("zero_optimization", {}), refuse)
    return content, mistakes


def _check_section(section: dict[str, Any], prefix: str, refuse: Refuse) -> None:
    """Names, and numbers and switches as such: "8" and 8 look alike in an error message and are not equal to DeepSpeed."""
    known = SECTIONS.get(prefix.rstrip("."))
    for key, value in section.items():
        name = prefix + key
        if name in SECOND_OWNERS:
            refuse(name, "a second owner of it", f"remove it: train.py makes {SECOND_OWNERS[name]}")
        elif known is not None and key not in known:
            refuse(name, "no such key here", _nearest(key, known))
        elif home := AUTO_KEYS.get(name) or PRECISION_AUTO_KEYS.get(name):
            if value != "auto":
                refuse(name, repr(value), f'write "auto"; {home}')
        elif name == "zero_optimization.stage":
            continue  # compared with its values by _check_stage
        elif name in UNSUPPORTED_KEYS:
            refuse(name, "not supported", f"remove it: {UNSUPPORTED_KEYS[name]}")
        elif isinstance(value, dict) and name in SECTIONS:
            _check_section(value, f"{name}.", refuse)
        elif name in SECTIONS:
            refuse(name, f"{value!r} is not a section", "write a mapping in braces, or remove it")
        elif value == "auto" and name not in RESOLVED_AUTO_KEYS:
            refuse(name, '"auto" is not resolved here', "write a value")
        elif key == "device" and value not in ("none", "cpu", "nvme"):
            refuse(name, f"{value!r} is no device to offload to", "write none, cpu or nvme")
        elif isinstance(value, str) and value != "auto" and key not in TEXT_KEYS:
            refuse(name, f"the text {value!r}", "write a number, true or false without quotes")
        elif key == "communication_data_type":
            if value not in COMMUNICATION_TYPES:
                refuse(name, f"{value!r} is no type to communicate in", "write fp16, bf16, fp32 or null")
        elif value != "auto" and key in (COUNT_KEYS | NUMBER_KEYS):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
            if not is_number or (key in COUNT_KEYS and value != int(value)):
                kind = "a whole number" if key in COUNT_KEYS else "a number"
                refuse(name, f"{value!r} is not {kind} from 0", "write one, as in ds_configs/")
        elif value != "auto" and key not in TEXT_KEYS and not isinstance(value, bool):
            refuse(name, f"{value!r} is neither true nor false", "write true or false")


def _check_stage(zero: Any, refuse: Refuse) -> None:
    if not isinstance(zero, dict):
        return  # no section, which has been said
    stage = zero.get("stage")
    if type(stage) is not int or stage not in (1, 2, 3):
        what = "missing" if stage is None else f"{stage!r} is not a ZeRO stage"
        refuse("zero_optimization.stage", what, "write 2 (gradients and optimizer sharded) or 3 (weights too)")
        return
    for section in ("offload_param", "offload_optimizer"):
        offload = zero.get(section)
        if not isinstance(offload, dict):
            continue
        if section == "offload_param" and stage != 3 and offload.get("device", "none") != "none":
            what = f"parameters can be offloaded with stage 3 alone, and this is stage {stage}"
            refuse(f"zero_optimization.{section}.device", what, "write none, or stage 3")
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            what = "missing, and the device is nvme"
            refuse(f"zero_optimization.{section}.nvme_path", what, "write the folder of the fast disk")


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse variables that a launcher sets, where none or another one has set them, and those by which Accelerate outvotes files.

    Args:
        environ: `os.environ`.

    Raises:
        Mistakes: of each variable.
    """
    mistakes = []

    def refuse(name: str, what: str, fix: str = "unset it: a launcher sets it") -> None:
        mistakes.append(Mistake("environment", name, what, fix))

    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if name in environ:
            if re.fullmatch("[0-9]{1,6}", environ[name]):
                numbers[name] = int(environ[name])
            else:
                refuse(name, f"{environ[name]!r} is not such a number")
    present = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if present and not mistakes and (missing := [name for name in needed if name not in environ]):
        refuse(present[0], f"set, and {', '.join(missing)} not, as by no launcher", f"unset it, or use {COMMAND}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
            refuse(rank, f"{numbers[rank]} of {numbers[size]} ({size})")
    if not 0 < numbers.get("MASTER_PORT", 1) < 65536:
        refuse("MASTER_PORT", f"{numbers['MASTER_PORT']} is not a port")
    for name, value in environ.items():
        if name.startswith(("ACCELERATE_USE_", "ACCELERATE_DEBUG_MODE")) and value.lower() not in TRUE + FALSE:
            refuse(name, f"{value!r} is neither true nor false", "unset it")
        elif name in SWITCHES_OFF and value.lower() in TRUE:
            refuse(name, "set in the environment, and not supported here", "unset it")
        elif name in EXPECTED_VALUES and value.lower() not in EXPECTED_VALUES[name]:
            refuse(name, f"{value!r} in the environment would outvote the recipe", "unset it: the recipe is its home")
        elif name == "ACCELERATE_TORCH_DEVICE":
            refuse(name, "set in the environment would outvote the launch", "unset it")
        elif name.startswith("HF_") and name.endswith("_TIMEOUT") and not re.fullmatch("[0-9]{1,6}", value):
            refuse(name, f"{value!r} is not a number of seconds", "write one, or unset it")
    if mistakes:
        raise Mistakes(*mistakes)


def find_launch(environ: Mapping[str, str], command_lines: list[ParentCommand], has_gpus: bool = True) -> Launch:
    """Which launch this process belongs to, from the processes above it and its environment.

    Args:
        environ: `os.environ`.
        command_lines: `parent_command_lines()`.
        has_gpus: whether the machine has visible GPUs; decides what torchrun's processes are.

    Raises:
        Mistakes: a launch without a file, flags that outvote it, or an environment that contradicts it.
    """
    set_by_launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    wrong = [name for name in set_by_launcher if not environ.get(name, "1").isdigit() or environ.get(name) == "0" and "SIZE" in name]
    mistakes = [Mistake("environment", name, f"{environ[name]!r} is not such a number", "unset it: a launcher sets it") for name in wrong]
    if "RANK" in environ and "WORLD_SIZE" not in environ:
        mistakes.append(Mistake("environment", "RANK", "set, and WORLD_SIZE is not", f"unset it, or use {COMMAND}"))
    if mistakes:
        raise Mistakes(*mistakes)
    world_size = int(environ.get("WORLD_SIZE", "1"))
    uses_deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    for command in command_lines:
        options = _accelerate_options(command.arguments)
        if options is not None:
            launch = _read_accelerate(options, command.folder)
            _compare_with_environment(launch, environ, world_size, uses_deepspeed)
            return launch
        if "deepspeed.launcher.launch" in command.arguments:
            what = "started by DeepSpeed's own launcher, which reads no launch file"
            raise Mistakes(Mistake("launch", "", what, f"use {COMMAND}"))
        if any(TORCHRUN.fullmatch(argument) for argument in command.arguments[:PROGRAM_ARGUMENTS]):
            break
    if uses_deepspeed:
        what = "true in the environment, and no accelerate launch file stands behind it"
        raise Mistakes(Mistake("environment", "ACCELERATE_USE_DEEPSPEED", what, f"unset it, or use {COMMAND}"))
    distributed = "RANK" in environ or world_size > 1
    kind = ("MULTI_GPU" if has_gpus else "MULTI_CPU") if distributed else "NO"
    # torchrun's LOCAL_WORLD_SIZE tells how many of the processes are on this machine.
    machines = max(1, world_size // int(environ.get("LOCAL_WORLD_SIZE", world_size)))
    return Launch("", world_size, machines, kind, False, None, None, "")


def _accelerate_options(arguments: list[str]) -> list[str] | None:
    """What follows `accelerate launch` up to the script; None where this is another program."""
    for index, argument in enumerate(arguments[:PROGRAM_ARGUMENTS]):
        if ACCELERATE_LAUNCH.fullmatch(argument):
            options = arguments[index + 1 :]
        elif ACCELERATE.fullmatch(argument) and arguments[index + 1 : index + 2] == ["launch"]:
            options = arguments[index + 2 :]
        else:
            continue
        script = next((place for place, option in enumerate(options) if option.endswith(".py")), len(options))
        return options[:script]
    return None


def _read_accelerate(options: list[str], folder: str) -> Launch:
    path, overrides = "", []
    for index, option in enumerate(options):
        flag, equals, value = option.partition("=")
        if not flag.startswith("--"):
            continue
        flag = "--" + flag[2:].replace("-", "_")  # Accelerate takes both spellings
        if flag == "--config_file":
            path = value if equals else "".join(options[index + 1 : index + 2])
        elif flag in OVERRIDING_FLAGS:
            overrides.append(flag)
    if not path:
        what = "missing; a default file in the home directory, or else the number of GPUs, would silently decide"
        raise Mistakes(Mistake("accelerate launch", "--config_file", what, f"name one: {COMMAND}"))
    launch, mistakes = examine_launch(path, folder)
    for flag in overrides:
        fix = f"remove the flag and edit {path} or the file it names"
        mistakes.append(Mistake("accelerate launch", flag, f"would outvote {path}", fix))
    if mistakes:
        raise Mistakes(*mistakes)
    return launch


def _compare_with_environment(launch: Launch, environ: Mapping[str, str], world_size: int, uses_deepspeed: bool) -> None:
    mistakes = []
    if world_size != launch.processes:
        what = f"{launch.processes} in the file, and {world_size} processes are running (WORLD_SIZE)"
        mistakes.append(Mistake(launch.path, "num_processes", what, "edit the file instead of giving --num_processes"))
    wants_deepspeed = launch.distributed_type == "DEEPSPEED"
    if wants_deepspeed != uses_deepspeed:
        what = f"{launch.distributed_type} in the file, and ACCELERATE_USE_DEEPSPEED is {str(uses_deepspeed).lower()}"
        mistakes.append(Mistake(launch.path, "distributed_type", what, "unset it and start with accelerate launch --config_file"))
    # Accelerate sets it itself where the file means one process, on a CPU or not.
    uses_cpu = environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes", "on", "y", "t")
    if uses_cpu and (wants_deepspeed or not launch.cpu):
        what = "set in the environment: Accelerate would run plain processes on the CPU and never touch DeepSpeed or a GPU"
        mistakes.append(Mistake("environment", "ACCELERATE_USE_CPU", what, "unset it; a CPU launch file hides the GPUs instead"))
    if mistakes:
        raise Mistakes(*mistakes)
