"""Fine-tune a StarCoder model on the GPUs of one machine.

accelerate launch --config_file 4xT4.yaml train.py [recipes/NAME.yaml] [section.key=value ...]

Read it from top to bottom: `check` needs no torch and finds what is wrong with recipe, launch and machine; `train` is the run.
"""

import os
import sys
import time
from pathlib import Path

from finetune.launch import Launch, check_environment, find_launch, parent_command_lines
from finetune.machine import this_machine
from finetune.mistakes import Mistakes, exit_with, file_errors_are_mistakes
from finetune.preflight import find_mistakes, find_notes, precision
from finetune.quiet import end_with_parent, silence
from finetune.recipe import Recipe, load_recipe

FLAGSHIP = "recipes/starcoder-lora.yaml"


def check(arguments: list[str]) -> tuple[Recipe, Launch, str]:
    """Recipe, launch and precision of this process, or everything that is wrong with them. Before torch, which takes seconds.

    Raises:
        Mistakes: of the recipe and its overrides, of the launch, and between the two and the machine.
    """
    path = arguments.pop(0) if arguments and "=" not in arguments[0] else FLAGSHIP
    machine, mistakes, recipe, launch = this_machine(), [], None, None
    try:
        recipe = load_recipe(path, arguments)
    except Mistakes as error:
        mistakes += error.mistakes
    try:
        check_environment(os.environ)
        launch = find_launch(os.environ, parent_command_lines(), has_gpus=bool(machine.gpus))
    except Mistakes as error:
        mistakes += error.mistakes
    if recipe and launch:
        # The rehearsal of a large launch puts several ranks on one GPU on purpose.
        rehearsal = os.environ.get("FINETUNE_REHEARSAL") == "1"
        with file_errors_are_mistakes():
            mistakes += find_mistakes(recipe, launch, machine, path, rehearsal)
    if mistakes:
        raise Mistakes(*mistakes)
    return recipe, launch, precision(recipe, launch, machine)


def train(recipe: Recipe, launch: Launch, precision: str) -> dict[str, float]:
    """Train as the recipe says, on every process of the launch.

    Returns:
        What was measured, by name (losses in nats a token), the same on every rank.

    Raises:
        Mistakes: anything that the user can mend; other exceptions are faults of the code or the machine.
    """
    import torch  # here and below, so that a mistake in the recipe is answered at once
    from accelerate.utils import set_seed
    from tqdm import tqdm

    from finetune import attention, checkpoint, corpus, distributed, model, telemetry
    from finetune.describe import describe, show_row
    from finetune.evaluate import check_sample, complete, evaluate
    from finetune.loss import count_labels, sum_losses, to_batch
    from finetune.schedule import learning_rate
    from finetune.shape import read_shape

    optim, run, out = recipe.optim, recipe.run, Path(recipe.run.out)

    # Data. Prepared once, by the rank that comes first, and before there are collectives that could wait for it.
    folder = model.fetch(recipe.model)
    shape = read_shape(folder)
    model.check_config(folder)
    tokenizer = model.load_tokenizer(folder)
    data = corpus.prepare(recipe.data, tokenizer, run.seed, shape.positions, shape.vocab_size)
    check_sample(tokenizer, run, shape)

    # Processes. Whatever is wrong with model or data has been said by now, and nothing was written.
    lock = checkpoint.take_folder(out)
    accelerator = distributed.start(recipe, launch, precision)
    is_main, world = accelerator.is_main_process, accelerator.num_processes
    distributed.check_same(accelerator, "rows of data.train", data.digest())
    accelerator.print(f"{recipe.model.name}: {shape.parameters / 1e9:.3f} billion parameters, {recipe.method.kind}, {precision}")
    kernels = attention.forbid_math_kernel(shape, model.DTYPES[precision], accelerator.device)
    accelerator.print(f"attention kernels: {kernels}")
    accelerator.print(f"{launch.strategy}: {world} x {optim.micro_batch} x {optim.grad_accum} rows of {recipe.data.seq_len} tokens a step")
    if is_main:
        data.write_manifest(out)
    accelerator.print(describe(data.manifest()))
    accelerator.print(f"what is learnt, from the first row ([[ ]] is not):\n{show_row(data.first_row(), tokenizer)}")
    for note in find_notes(launch):
        accelerator.print(f"note: {note}")

    # Model. One seed on all ranks, so that ZeRO-3's shards of a random matrix belong together; afterwards one seed a rank.
    set_seed(run.seed)
    deepspeed = distributed.deepspeed_config(accelerator)
    base = model.load_model(recipe.model, recipe.method, folder, precision, accelerator.device, deepspeed)
    set_seed(run.seed)
    network = model.prepare_for_training(base, recipe.method, recipe.memory, in_engine=deepspeed is not None)
    set_seed(run.seed, device_specific=True)
    trainable = sum(torch.Size(model.whole_shape(p)).numel() for p in model.named_trainable(network).values())
    accelerator.print(f"{trainable:,} trainable parameters")

    # Optimizer. Accelerate wraps both in DistributedDataParallel or in the DeepSpeed engine, which shards their state.
    # Fused: the other forms hold a copy of the second moments during the step.
    groups = model.optimizer_groups(network, optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(0.9, 0.95), fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)
    distributed.check_prepared(accelerator, network, recipe, launch)

    def measure() -> dict[str, float]:
        """Losses on held-out documents: of all tokens left to right, and of middles given prefix and suffix."""
        losses = {"eval_loss": evaluate(accelerator, network, data.held_out, recipe)}
        return losses | ({"infilling_loss": evaluate(accelerator, network, data.infilling, recipe)} if data.infilling else {})

    # Before training: losses and a completion to compare with.
    metrics, guard = telemetry.Metrics(accelerator, recipe), telemetry.Guard(optim.stop_after_skips)
    first = last = measure()
    model.check_first_loss(first["eval_loss"], shape.vocab_size, recipe.model)
    before = complete(accelerator, network, tokenizer, recipe)
    metrics.log(0, first)
    accelerator.print(f"held-out loss before training: {first['eval_loss']:.4f}")

    # The loop. A global batch belongs to its step; ranks, micro batch and accumulation only divide it.
    batch_rows, applied, own_tokens, started = optim.micro_batch * optim.grad_accum * world, 0, 0, time.monotonic()
    progress = tqdm(range(1, optim.steps + 1), unit="step", disable=not is_main, dynamic_ncols=True)
    for step in progress:
        step_started, rate = time.monotonic(), learning_rate(optim, applied + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        share = data.batch(step - 1, batch_rows, accelerator.process_index, world, optim.micro_batch)
        batches = [to_batch(rows, accelerator.device) for rows in share]
        label_tokens = accelerator.reduce(sum(count_labels(batch["labels"]) for batch in batches))  # on the device: no wait
        loss_sum = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(network):
                loss = sum_losses(network, batch)
                # Accelerate divides by the accumulation and the ranks' gradients are averaged: undo both, so that the step
                # is the mean over the label tokens of the whole batch however it was divided.
                accelerator.backward(loss * (world * optim.grad_accum / label_tokens))
                loss_sum += loss.detach()
                if accelerator.sync_gradients:
                    gradient_norm = distributed.clip_gradients(accelerator, network, optim.clip)
                optimizer.step()
                optimizer.zero_grad()
        mean_loss = (accelerator.reduce(loss_sum) / label_tokens).item()
        skipped = distributed.step_was_skipped(accelerator, gradient_norm)
        guard.observe(step, mean_loss, gradient_norm, skipped)
        applied += not skipped
        if step in (1, optim.steps):
            distributed.check_step(accelerator, network, optimizer, step, rate)
        seconds, step_tokens = time.monotonic() - step_started, batch_rows * recipe.data.seq_len
        own_tokens += sum(rows.tokens.size for rows in share)
        if applied == 1 and not skipped:
            # What would fail at the end should fail in the first minute: a save, and a GPU that does not take part.
            checkpoint.write_result(accelerator, network, tokenizer, recipe, precision, card="")
            ranks = telemetry.table(telemetry.gather_ranks(accelerator, own_tokens, seconds))
            if is_main:
                progress.write(f"after the first step:\n{ranks}")
        values = {"loss": mean_loss, "lr": rate, "grad_norm": gradient_norm, "tokens_per_second": step_tokens / seconds}
        values |= {"tokens": step * step_tokens, "skipped_steps": guard.skipped, **telemetry.memory_now(accelerator.device)}
        if step % run.eval_every == 0 or step == optim.steps:
            values |= (last := measure())
        metrics.log(step, values)
        progress.set_postfix(loss=f"{mean_loss:.4f}", lr=f"{rate:.1e}", eval=f"{last['eval_loss']:.4f}")
    seconds = time.monotonic() - started

    # The end: what was reached, what each rank did, and the result.
    ranks = telemetry.table(telemetry.gather_ranks(accelerator, own_tokens, seconds))
    after = complete(accelerator, network, tokenizer, recipe)
    figures = {
        **{f"{name} before": loss for name, loss in first.items()},
        **{f"{name} after": loss for name, loss in last.items()},
        "steps": applied,
        "skipped_steps": guard.skipped,
        "tokens": optim.steps * step_tokens,
        "seconds": round(seconds, 1),
    }
    card = checkpoint.model_card(recipe, figures, describe(data.manifest()), ranks)
    checkpoint.write_result(accelerator, network, tokenizer, recipe, precision, card)
    if is_main:
        data.write_manifest(out)  # again: a stream has been read further
        checkpoint.publish_result(out)
    lock.release()
    metrics.close()
    accelerator.print(f"\n{ranks}")
    if run.sample_tokens:
        accelerator.print(f"\nbefore training: {run.sample}{before}\n\nafter training: {run.sample}{after}")
    for name, loss in last.items():
        accelerator.print(f"{name} {first[name]:.4f} -> {loss:.4f}")
    accelerator.print(f"result in {out}")
    return figures


def main() -> None:
    silence()
    end_with_parent()
    # A row length that needs new block sizes must not fail for memory that is reserved and unused. Read when torch starts CUDA.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        train(*check(sys.argv[1:]))
    except Mistakes as error:
        exit_with(error)
    except KeyboardInterrupt:
        sys.exit("stopped; no result was written")
    except BrokenPipeError:  # whoever read the output has gone
        os._exit(1)


if __name__ == "__main__":
    main()
