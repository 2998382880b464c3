"""The launch: how many processes, and how DeepSpeed shards what they hold. Read from an accelerate YAML and the JSON it names.

Accelerate accepts several contradictions here in silence and turns others into a traceback in every rank. They are found by
reading, before a process is started and before torch is imported.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from finetune.mistakes import Mistake, Mistakes
from finetune.recipe import read_mapping

SUPPORTED_TYPES = ("DEEPSPEED", "MULTI_GPU", "MULTI_CPU", "NO")

# What Accelerate's ClusterConfig and its conversion of old files accept at the top of the YAML.
LAUNCH_KEYS = frozenset(
    """
    commands command_file compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_backend dynamo_config
    enable_cpu_affinity fp16 fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port main_training_function
    megatron_lm_config mixed_precision mpirun_config num_machines num_processes parallelism_config rdzv_backend same_network tpu_env
    tpu_name tpu_use_cluster tpu_use_sudo tpu_vm use_cpu
    """.split()
)
PRECISION_LAUNCH_KEYS = ("mixed_precision", "fp16", "fp8_config")
UNSUPPORTED_LAUNCH_KEYS = (
    "fsdp_config megatron_lm_config mpirun_config parallelism_config dynamo_config tpu_name tpu_vm commands command_file".split()
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

# DeepSpeed's own names, so that reading a file needs neither DeepSpeed nor torch. A test compares them with its models.
ZERO_KEYS = frozenset(
    """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks gather_16bit_weights_on_model_save
    ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings max_live_parameters
    max_reuse_distance memory_efficient_linear model_persistence_threshold module_granularity_threshold offload_optimizer
    offload_param overlap_comm override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint
    prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage
    stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
    """.split()
)
OFFLOAD_PARAM_KEYS = frozenset("buffer_count buffer_size device max_in_cpu nvme_path pin_memory".split())
OFFLOAD_OPTIMIZER_KEYS = frozenset(
    "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio super_offload".split()
)
FP16_KEYS = frozenset(
    """
    auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale
    loss_scale_window min_loss_scale
    """.split()
)
BF16_KEYS = frozenset("bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update".split())
# These DeepSpeed keys are only about sharding and communication. What else DeepSpeed knows is the recipe's, or is not used.
DEEPSPEED_KEYS = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping zero_optimization fp16 bf16
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type prescale_gradients gradient_predivide_factor
    steps_per_print wall_clock_breakdown memory_breakdown dump_state aio comms_logger flops_profiler checkpoint data_types
    """.split()
)
SECTIONS = {
    "zero_optimization": ZERO_KEYS,
    "zero_optimization.offload_param": OFFLOAD_PARAM_KEYS,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER_KEYS,
    "fp16": FP16_KEYS,
    "bf16": BF16_KEYS,
}
# Absent is not auto: Accelerate then takes 1 for the accumulation, and DeepSpeed no clipping at all.
AUTO_KEYS = {
    "train_batch_size": "optim.micro_batch x optim.grad_accum x processes",
    "train_micro_batch_size_per_gpu": "optim.micro_batch",
    "gradient_accumulation_steps": "optim.grad_accum",
    "gradient_clipping": "optim.clip",
}
# Accelerate resolves "auto" in these and leaves it as a text everywhere else.
RESOLVED_AUTO_KEYS = frozenset(
    [
        *AUTO_KEYS,
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]
)
TEXT_KEYS = frozenset(["device", "nvme_path", "communication_data_type"])

# Flags of `accelerate launch` that outvote the file. --num_processes is compared by its effect instead.
OVERRIDING_FLAGS = frozenset(
    """
    --cpu --multi_gpu --tpu --use_deepspeed --use_fsdp --use_megatron_lm --use_parallelism_config --mixed_precision --gpu_ids
    --num_machines --deepspeed_config_file --deepspeed_multinode_launcher --zero_stage --offload_optimizer_device
    --offload_param_device --offload_optimizer_nvme_path --offload_param_nvme_path --gradient_accumulation_steps
    --gradient_clipping --zero3_init_flag --zero3_save_16bit_model --dynamo_backend --mpirun_hostfile
    """.split()
)


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
        return self.offloads_optimizer and (self.deepspeed or {}).get("zero_force_ds_cpu_optimizer", True) is not False

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
    where = str(path)
    try:
        content = read_mapping(Path(folder) / path)
    except Mistakes as error:
        return None, error.mistakes
    mistakes = _find_unknown_keys(content, where)

    def refuse(key: str, what: str, fix: str) -> None:
        mistakes.append(Mistake(where, key, what, fix))

    for key in PRECISION_LAUNCH_KEYS:
        if content.get(key):
            refuse(key, f"precision ({content[key]}) is not a launch file's business", "remove it: precision follows the GPU's compute "
                   "capability; model.precision in the recipe overrides it")  # fmt: skip
    for key in UNSUPPORTED_LAUNCH_KEYS:
        if content.get(key):
            refuse(key, "not supported", "remove it: this repository shards with DeepSpeed alone")

    kind = content.get("distributed_type")
    if kind not in SUPPORTED_TYPES:
        if kind is False:
            refuse("distributed_type", "YAML reads NO without quotes as false", "write 'NO' in quotes")
        elif kind is None:
            refuse("distributed_type", "missing", "write DEEPSPEED, MULTI_GPU or 'NO'")
        else:
            refuse("distributed_type", f"{kind!r} is not supported", "write DEEPSPEED, MULTI_GPU or 'NO'")
        kind = "DEEPSPEED" if content.get("deepspeed_config") else "NO"

    machines = _read_count(content, "num_machines", 1, refuse)
    processes = _read_count(content, "num_processes", 1 if kind == "NO" else None, refuse)
    if kind in ("NO", "MULTI_CPU") and processes > 1:
        refuse("distributed_type", f"{kind!r} starts one process, whatever num_processes ({processes}) says",
               "write DEEPSPEED (sharded) or MULTI_GPU (a whole copy of the model on each GPU)")  # fmt: skip
    if kind == "MULTI_GPU" and processes == 1:
        refuse("num_processes", "MULTI_GPU with one process", "write the number of GPUs, or distributed_type: 'NO' for one")
    if processes % machines:
        refuse("num_processes", f"{processes} processes do not divide over {machines} machines",
               "num_processes counts the processes of all machines together")  # fmt: skip

    gpu_ids = content.get("gpu_ids")
    if gpu_ids is not None and not isinstance(gpu_ids, str):
        refuse("gpu_ids", f"{gpu_ids!r} is not text, and Accelerate fails on it", f'write it in quotes: "{gpu_ids}"')
        gpu_ids = str(gpu_ids)
    gpu_ids = None if gpu_ids == "all" else gpu_ids
    cpu = bool(content.get("use_cpu")) or gpu_ids == "-1"
    if cpu and gpu_ids != "-1":
        refuse("use_cpu", "does not hide this machine's GPUs from the processes", 'add gpu_ids: "-1"')

    deepspeed, deepspeed_path = None, ""
    nested = content.get("deepspeed_config")
    if kind == "DEEPSPEED":
        deepspeed, deepspeed_path = _examine_deepspeed_config(nested, where, Path(folder), machines, mistakes)
    elif nested:
        refuse("deepspeed_config", f"is never read with distributed_type {kind!r}", "write distributed_type: DEEPSPEED, or remove it")
    return Launch(where, processes, machines, kind, cpu, gpu_ids, deepspeed, deepspeed_path), mistakes


def _find_unknown_keys(content: dict[str, Any], where: str) -> list[Mistake]:
    return [Mistake(where, str(key), "no such key", _nearest(key, LAUNCH_KEYS)) for key in content if key not in LAUNCH_KEYS]


def _nearest(key: Any, candidates: frozenset[str] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(key), sorted(candidates), n=1)
    return f"did you mean {near[0]}?" if near else "remove it"


def _read_count(content: dict[str, Any], key: str, default: int | None, refuse) -> int:
    count = content.get(key, default)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    refuse(key, "missing" if count is None else f"{count!r} is not a number from 1", "write how many there are")
    return 1


def _examine_deepspeed_config(
    nested: Any, where: str, folder: Path, machines: int, mistakes: list[Mistake]
) -> tuple[dict[str, Any] | None, str]:
    home = "deepspeed_config.deepspeed_config_file"
    if not isinstance(nested, dict):
        mistakes.append(Mistake(where, home, "missing", "name a DeepSpeed JSON, as in ds_configs/zero3.json"))
        return None, ""
    known = (*NESTED_KEYS, *NESTED_KEYS_WITH_ANOTHER_HOME)
    for key in nested:
        if key in NESTED_KEYS_WITH_ANOTHER_HOME:
            also = " beside a DeepSpeed file, which is a second source" if "deepspeed_config_file" in nested else ""
            fix = f"remove it: its home is {NESTED_KEYS_WITH_ANOTHER_HOME[key]}"
            mistakes.append(Mistake(where, f"deepspeed_config.{key}", f"given inline{also}", fix))
        elif key not in NESTED_KEYS:
            what = "no such key; Accelerate would ignore it and train un-sharded"
            mistakes.append(Mistake(where, f"deepspeed_config.{key}", what, _nearest(key, known)))
    if machines > 1 and nested.get("deepspeed_multinode_launcher") != "standard":
        what = f"{machines} machines, and DeepSpeed's own launcher would be asked to reach them"
        mistakes.append(Mistake(where, "deepspeed_config.deepspeed_multinode_launcher", what, "write standard"))

    path = nested.get("deepspeed_config_file")
    if not isinstance(path, str) or not path:
        mistakes.append(Mistake(where, home, "missing", "name a DeepSpeed JSON, as in ds_configs/zero3.json"))
        # Enough for a reader of the launch to go on with, though it will not be run.
        return ({"zero_optimization": {"stage": nested["zero_stage"]}} if isinstance(nested.get("zero_stage"), int) else None), ""
    found = folder / path
    if not found.is_file():
        mistakes.append(
            Mistake(where, home, f"{path} does not exist, looked for from {folder.resolve()}", _find_folder(where, path, folder))
        )
        return None, path
    deepspeed, found_mistakes = examine_deepspeed(found, path)
    mistakes += found_mistakes
    return deepspeed, path


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
    duplicates: list[str] = []

    def keep_last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        duplicates.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return dict(pairs)

    try:
        content = json.loads(found.read_text(encoding="utf-8"), object_pairs_hook=keep_last)
    except json.JSONDecodeError as error:
        what = f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        return None, [Mistake(where, "", what, "correct that line; JSON has no comments and no comma after the last entry")]
    except (OSError, UnicodeDecodeError) as error:
        return None, [Mistake(where, "", f"cannot be read: {error}", "save it as UTF-8 text")]
    if not isinstance(content, dict):
        return None, [Mistake(where, "", f"a {type(content).__name__} at the top", "write a mapping in braces")]

    mistakes = [Mistake(where, key, "given twice", "keep one") for key in duplicates]
    for key, owner in (("optimizer", "AdamW with the recipe's optim section"), ("scheduler", "the recipe's optim.schedule")):
        if key in content:
            mistakes.append(Mistake(where, key, "a second owner of it", f"remove it: train.py makes {owner}"))
    for key in content:
        if key not in DEEPSPEED_KEYS and key not in ("optimizer", "scheduler"):
            mistakes.append(Mistake(where, key, "no such key here", _nearest(key, DEEPSPEED_KEYS)))
    for key, owner in AUTO_KEYS.items():
        if key not in content:
            what = "absent, which is not the same as auto"
            mistakes.append(Mistake(where, key, what, f'write "{key}": "auto"; its home is the recipe ({owner})'))
        elif content[key] != "auto":
            mistakes.append(Mistake(where, key, f"{content[key]!r}", f'write "auto"; its home is the recipe ({owner})'))
    for key in ("fp16", "bf16"):
        section = content.get(key, {})
        if not isinstance(section, dict):
            mistakes.append(Mistake(where, key, f"{section!r} is not a section", 'write {"enabled": "auto"}'))
        elif key in content and section.get("enabled", False) != "auto":
            what = f"{section.get('enabled', 'absent')!r}"
            mistakes.append(Mistake(where, f"{key}.enabled", what, 'write "auto": precision follows the GPU'))
    for name, known in SECTIONS.items():
        mistakes += _check_section(content, name, known, where)
    mistakes += _check_values(content, "", where)
    return content, mistakes + _check_stage(content, where)


def _check_section(content: dict[str, Any], name: str, known: frozenset[str], where: str) -> list[Mistake]:
    section: Any = content
    for part in name.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    if section is None:
        return []
    if not isinstance(section, dict):
        return [] if name in ("fp16", "bf16") else [Mistake(where, name, f"{section!r} is not a section", "write a mapping in braces")]
    return [Mistake(where, f"{name}.{key}", "no such key", _nearest(key, known)) for key in section if key not in known]


def _check_values(section: dict[str, Any], prefix: str, where: str) -> list[Mistake]:
    """Numbers and switches as such: "8" and 8 look alike in an error message and are not equal to DeepSpeed."""
    mistakes = []
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name in AUTO_KEYS or name in ("fp16.enabled", "bf16.enabled", "optimizer", "scheduler"):
            continue
        if isinstance(value, dict):
            mistakes += _check_values(value, f"{name}.", where)
        elif value == "auto" and name not in RESOLVED_AUTO_KEYS:
            mistakes.append(Mistake(where, name, '"auto" is not resolved here', "write a value"))
        elif isinstance(value, str) and value != "auto" and key not in TEXT_KEYS and prefix in ("", "zero_optimization.", "fp16.", "bf16."):
            mistakes.append(Mistake(where, name, f"the text {value!r}", "write a number, true or false without quotes"))
        elif key == "device" and value not in ("none", "cpu", "nvme"):
            mistakes.append(Mistake(where, name, f"{value!r} is no device to offload to", "write none, cpu or nvme"))
    return mistakes


def _check_stage(content: dict[str, Any], where: str) -> list[Mistake]:
    zero = content.get("zero_optimization")
    if zero is None:
        return [Mistake(where, "zero_optimization", "missing", 'write {"stage": 3}')]
    if not isinstance(zero, dict):
        return []
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        what = "missing" if stage is None else f"{stage!r} is not a ZeRO stage"
        return [Mistake(where, "zero_optimization.stage", what, "write 2 (gradients and optimizer sharded) or 3 (weights too)")]
    mistakes = []
    for section in ("offload_param", "offload_optimizer"):
        offload = zero.get(section)
        if not isinstance(offload, dict):
            continue
        if section == "offload_param" and stage != 3 and offload.get("device", "none") != "none":
            what = f"parameters can be offloaded with stage 3 alone, and this is stage {stage}"
            mistakes.append(Mistake(where, f"zero_optimization.{section}.device", what, "write none, or stage 3"))
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            what, fix = "missing, and the device is nvme", "write the folder of the fast disk"
            mistakes.append(Mistake(where, f"zero_optimization.{section}.nvme_path", what, fix))
    return mistakes


def find_launch(environ: Mapping[str, str], command_lines: list[ParentCommand], has_gpus: bool = True) -> Launch:
    """Which launch this process belongs to, from the processes above it and its environment.

    Args:
        environ: `os.environ`.
        command_lines: `parent_command_lines()`.
        has_gpus: whether the machine has visible GPUs; decides what torchrun's processes are.

    Raises:
        Mistakes: a launch without a file, flags that outvote it, or an environment that contradicts it.
    """
    world_size = int(environ.get("WORLD_SIZE", "1"))
    uses_deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    for command in command_lines:
        options = _accelerate_options(command.arguments)
        if options is not None:
            launch = _read_accelerate(options, command.folder)
            _compare_with_environment(launch, environ, world_size, uses_deepspeed)
            return launch
        if "deepspeed.launcher.launch" in command.arguments:
            fix = "use accelerate launch --config_file 4xT4.yaml train.py"
            raise Mistakes(Mistake("launch", "", "started by DeepSpeed's own launcher, which reads no launch file", fix))
        if _is_torchrun(command.arguments):
            break
    if uses_deepspeed:
        what = "true in the environment, and no accelerate launch file stands behind it"
        raise Mistakes(
            Mistake("environment", "ACCELERATE_USE_DEEPSPEED", what, "unset it, or use accelerate launch --config_file 4xT4.yaml")
        )
    distributed = "RANK" in environ or world_size > 1
    kind = ("MULTI_GPU" if has_gpus else "MULTI_CPU") if distributed else "NO"
    # torchrun's LOCAL_WORLD_SIZE tells how many of the processes are on this machine.
    machines = max(1, world_size // int(environ.get("LOCAL_WORLD_SIZE", world_size)))
    return Launch("", world_size, machines, kind, False, None, None, "")


def _accelerate_options(arguments: list[str]) -> list[str] | None:
    """What follows `accelerate launch` up to the script; None where this is another program."""
    names = [os.path.basename(argument) for argument in arguments]
    for index, name in enumerate(names[:4]):
        module = index > 0 and arguments[index - 1] == "-m"
        after = arguments[index + 1 :]
        if name in ("accelerate", "accelerate_cli.py") or (module and name in ("accelerate", "accelerate.commands.accelerate_cli")):
            if after[:1] != ["launch"]:
                return None
            after = after[1:]
        elif not (name in ("accelerate-launch", "launch.py") and (name != "launch.py" or "accelerate" in arguments[index])) and not (
            module and name == "accelerate.commands.launch"
        ):
            continue
        script = next((place for place, argument in enumerate(after) if argument.endswith(".py")), len(after))
        return after[:script]
    return None


def _is_torchrun(arguments: list[str]) -> bool:
    names = [os.path.basename(argument) for argument in arguments[:4]]
    return bool({"torchrun", "torch.distributed.run", "torch.distributed.launch"}.intersection(names)) or any(
        argument.endswith("torch/distributed/run.py") for argument in arguments[:4]
    )


def _read_accelerate(options: list[str], folder: str) -> Launch:
    path, overrides = None, []
    for index, option in enumerate(options):
        if not option.startswith("--"):
            continue
        flag, equals, value = option.partition("=")
        # Accelerate takes --config-file too, and argparse any beginning that is unique.
        flag = flag.replace("-", "_").replace("__", "--", 1)
        if flag.startswith("--conf") and "--config_file".startswith(flag):
            path = value if equals else (options[index + 1] if index + 1 < len(options) else None)
        elif flag in OVERRIDING_FLAGS:
            overrides.append(flag)
    if not path:
        fix = "name one: accelerate launch --config_file 4xT4.yaml train.py"
        what = "missing; a default file in the home directory, or else the number of GPUs, would silently decide"
        raise Mistakes(Mistake("accelerate launch", "--config_file", what, fix))
    launch, mistakes = examine_launch(path, folder)
    for flag in overrides:
        mistakes.append(
            Mistake("accelerate launch", flag, f"would outvote {path}", f"remove the flag and edit {path} or the file it names")
        )
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
        what = f"{launch.distributed_type} in the file, and ACCELERATE_USE_DEEPSPEED is {str(uses_deepspeed).lower()} in the environment"
        mistakes.append(Mistake(launch.path, "distributed_type", what, "unset it and start with accelerate launch --config_file"))
    if wants_deepspeed and environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes"):
        what = "set in the environment: Accelerate would run plain MULTI_CPU and never touch DeepSpeed"
        mistakes.append(Mistake("environment", "ACCELERATE_USE_CPU", what, "unset it; a CPU launch file hides the GPUs instead"))
    if mistakes:
        raise Mistakes(*mistakes)
