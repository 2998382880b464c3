"""Start Accelerate as the launch file says, and prove that what runs is what was asked for, before and after `prepare`."""

import math
import os

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

from finetune.launch import Launch
from finetune.mistakes import Mistake, Mistakes
from finetune.recipe import Recipe


def start(recipe: Recipe, launch: Launch, precision: str) -> Accelerator:
    """Make the `Accelerator`: process group, device, precision and DeepSpeed's numbers from the recipe.

    Raises:
        Mistakes: the world that came up is not the one that the launch file asks for.
    """
    use_cpu = launch.cpu or not torch.cuda.is_available()
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=False, gradient_as_bucket_view=True),
        # A frozen base computes in its own precision and a LoRA layer casts its matrices itself (lora.py): autocast would only make
        # fp32 copies around each LayerNorm, which accumulates in fp32 inside its kernel anyway.
        AutocastKwargs(enabled=recipe.method.kind == "full"),
    ]
    if use_cpu and "RANK" in os.environ:
        # Without gloo each CPU process of a DeepSpeed launch believes that it is alone.
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
        if launch.deepspeed is not None:
            # An all-reduce through shared memory that DeepSpeed would compile at its first use: it fails without a compiler,
            # a killed build leaves a lock that the next run waits for, and gloo does the same.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = Accelerator(
        # Beside DeepSpeed this switch would turn the run into plain DistributedDataParallel and say nothing.
        cpu=use_cpu and launch.deepspeed is None,
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=recipe.optim.grad_accum,
        log_with=recipe.run.trackers or None,
        project_dir=recipe.run.out,
        kwargs_handlers=handlers,
    )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        # The recipe's numbers go in as numbers: there is no loader to derive "auto" from, "auto" clipping means 1.0, and
        # ZeRO-3 reads the batch while the model is built, before Accelerate has resolved anything.
        micro_batch, grad_accum = recipe.optim.micro_batch, recipe.optim.grad_accum
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro_batch
        plugin.deepspeed_config["gradient_accumulation_steps"] = grad_accum
        plugin.deepspeed_config["train_batch_size"] = micro_batch * grad_accum * accelerator.num_processes
        plugin.deepspeed_config["gradient_clipping"] = recipe.optim.clip
    _check_world(accelerator, launch, use_cpu)
    return accelerator


def deepspeed_config(accelerator: Accelerator) -> dict | None:
    """The DeepSpeed JSON as Accelerate completed it, or None without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return None if plugin is None else plugin.deepspeed_config


def expected_type(launch: Launch, use_cpu: bool) -> DistributedType:
    """What Accelerate has to report for this launch file."""
    if launch.deepspeed is not None:
        return DistributedType.DEEPSPEED
    if launch.processes == 1 and "RANK" not in os.environ:
        return DistributedType.NO
    return DistributedType.MULTI_CPU if use_cpu else DistributedType.MULTI_GPU


def _check_world(accelerator: Accelerator, launch: Launch, use_cpu: bool) -> None:
    seen = {
        "Accelerate": accelerator.num_processes,
        "the environment (WORLD_SIZE)": int(os.environ.get("WORLD_SIZE", "1")),
        "the process group": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    }
    wrong = {name: size for name, size in seen.items() if size != launch.processes}
    mistakes = []
    where = launch.path or "torchrun"
    if wrong:
        what = f"asks for {launch.processes} processes, but " + ", ".join(f"{name} sees {size}" for name, size in wrong.items())
        mistakes.append(Mistake(where, "num_processes", what, "the ranks would train apart; start with the command in the recipe's head"))
    expected = expected_type(launch, use_cpu)
    if accelerator.distributed_type != expected:
        what = f"means {expected.value}, but Accelerate runs {accelerator.distributed_type.value}"
        mistakes.append(Mistake(where, "distributed_type", what, "unset ACCELERATE_* variables and start again"))
    if mistakes:
        raise Mistakes(*mistakes)


def check_prepared(accelerator: Accelerator, model: torch.nn.Module, recipe: Recipe, launch: Launch) -> None:
    """Read back from the wrapper what it will really do, and compare with the recipe and the launch file.

    Raises:
        Mistakes: the model is not wrapped, or the engine's ZeRO stage, batch, accumulation or clipping differ.
    """
    expected = {DistributedType.DEEPSPEED: "DeepSpeedEngine", DistributedType.NO: type(accelerator.unwrap_model(model)).__name__}
    wrapper = expected.get(accelerator.distributed_type, "DistributedDataParallel")
    mistakes = []
    if accelerator.gradient_accumulation_steps != recipe.optim.grad_accum:
        what = (
            f"Accelerate adds up {accelerator.gradient_accumulation_steps} micro batches, and optim.grad_accum is {recipe.optim.grad_accum}"
        )
        mistakes.append(Mistake("environment", "", what, "unset the ACCELERATE_* variables"))
    if type(model).__name__ != wrapper:
        mistakes.append(Mistake(launch.path, "", f"the model is a {type(model).__name__}, not a {wrapper}", "the ranks would train apart"))
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        optim = recipe.optim
        rows = optim.micro_batch * optim.grad_accum * accelerator.num_processes
        for name, real, wanted in (
            ("ZeRO stage", model.zero_optimization_stage(), launch.zero_stage),
            ("train_micro_batch_size_per_gpu", model.train_micro_batch_size_per_gpu(), optim.micro_batch),
            ("gradient_accumulation_steps", model.gradient_accumulation_steps(), optim.grad_accum),
            ("train_batch_size", model.train_batch_size(), rows),
            ("gradient_clipping", model.gradient_clipping(), optim.clip),
            ("world size", torch.distributed.get_world_size(model.data_parallel_group), launch.processes),
        ):
            if real != wanted:
                what = f"DeepSpeed runs with {name} {real}, not {wanted}"
                mistakes.append(Mistake(launch.deepspeed_path, name, what, 'set it to "auto" in the JSON'))
    if accelerator.mixed_precision == "fp16" and accelerator.distributed_type != DistributedType.DEEPSPEED:
        half = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype != torch.float32]
        if half:
            mistakes.append(Mistake("recipe", "model.precision", f"{half[0]} is trained but not fp32", "load it in fp32"))
    if mistakes:
        raise Mistakes(*mistakes)


def clip_gradients(accelerator: Accelerator, model: torch.nn.Module, clip: float) -> float:
    """Cut the gradient's norm to `clip` when a step's gradients are complete, and return what it was before.

    DeepSpeed has clipped inside the backward pass, as `check_prepared` has seen, and only reports. Elsewhere the norm is added up
    in fp64, as DeepSpeed does: torch's own clipping adds in fp32, which on a CPU was off by 3e-4 for an embedding's gradient.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return float(model.get_global_grad_norm())
    accelerator.unscale_gradients()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in parameters]
    norm = torch.linalg.vector_norm(torch.stack(norms)).float()
    torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return norm.item()


def step_was_skipped(accelerator: Accelerator, gradient_norm: float) -> bool:
    """Whether an fp16 overflow kept the optimizer from stepping. The fused optimizer leaves a step out inside its kernel, which
    Accelerate does not see; it does so when a gradient is not finite, and then the norm is not."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.optimizer_step_was_skipped)
    return accelerator.scaler is not None and not math.isfinite(gradient_norm)


def check_step(accelerator: Accelerator, model: torch.nn.Module, optimizer, step: int, rate: float) -> None:
    """Compare what an optimizer step really used with the recipe: the learning rate, and how often gradients were exchanged.

    Args:
        step: optimizer steps so far by the loop's count.
        rate: the learning rate of that step.

    Raises:
        Mistakes: the optimizer inside the wrapper had another rate, or the engine counts other steps.
    """
    mistakes, inner = [], getattr(model, "basic_optimizer", None) or optimizer.optimizer
    rates = {group["lr"] for group in inner.param_groups}
    if rates != {rate}:
        mistakes.append(
            Mistake(f"step {step}", "optim.lr", f"the optimizer used {sorted(rates)}, not {rate}", "report this: the run is wrong")
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED and model.global_steps != step:
        what = f"DeepSpeed counts {model.global_steps} optimizer steps, not {step}"
        mistakes.append(Mistake(f"step {step}", "optim.grad_accum", what, "report this: the run is wrong"))
    if mistakes:
        raise Mistakes(*mistakes)


def check_same(accelerator: Accelerator, what: str, value: str) -> None:
    """Compare a fingerprint between all ranks.

    Raises:
        Mistakes: a rank has another one.
    """
    if accelerator.num_processes > 1:
        values = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(values, value)
        if len(set(values)) > 1:
            raise Mistakes(Mistake("recipe", "", f"the ranks do not agree on the {what}", "let no file change while the run starts"))
