"""What the model does on held-out text: its loss, and a completion to look at."""

import torch
from accelerate import Accelerator

from finetune.loss import count_labels, sum_losses, to_batch
from finetune.mistakes import Mistake, Mistakes
from finetune.packing import Rows, mask, share
from finetune.recipe import Recipe, Run
from finetune.shape import Shape


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, rows: Rows, recipe: Recipe) -> float:
    """Mean loss over the label tokens of `rows`, nats, the same on every rank. All ranks call it.

    Sums are added up, never means of means, and no logits are kept.
    """
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    model.eval()
    for places, counts in share(len(rows), accelerator.process_index, accelerator.num_processes, recipe.optim.micro_batch):
        batch = to_batch(mask(rows.take(places), counts), accelerator.device)
        total += torch.stack([sum_losses(model, batch).double(), count_labels(batch["labels"]).double()])
    model.train()
    loss_sum, label_tokens = accelerator.reduce(total).tolist()
    return loss_sum / label_tokens


def check_sample(tokenizer, run: Run, shape: Shape) -> None:
    """Compare the sample with the model's tables, before any weight is loaded.

    Raises:
        Mistakes: prompt and completion together are longer than the table of positions, or a token is not in the embedding.
    """
    if not run.sample_tokens:
        return
    ids = tokenizer(run.sample)["input_ids"]
    if (length := len(ids) + run.sample_tokens) > shape.positions:
        what = f"with run.sample_tokens it has {length:,} tokens, more than the model's {shape.positions:,} positions"
        raise Mistakes(Mistake("recipe", "run.sample", what, "shorten it"))
    if max(ids) >= shape.vocab_size:
        what = f"it holds token {max(ids)} of the tokenizer, and the embedding has {shape.vocab_size} rows"
        raise Mistakes(Mistake("recipe", "run.sample", what, "leave that token out, or put the model's own tokenizer beside it"))


@torch.no_grad()
def complete(accelerator: Accelerator, model: torch.nn.Module, tokenizer, recipe: Recipe) -> str:
    """The most likely `run.sample_tokens` tokens after `run.sample`, as text. All ranks call it: under ZeRO-3 each holds a part."""
    if not recipe.run.sample_tokens:
        return ""
    prompt = tokenizer(recipe.run.sample, return_tensors="pt").to(accelerator.device)
    model.eval()
    ids = accelerator.unwrap_model(model).generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=recipe.run.sample_tokens,
        do_sample=False,
        use_cache=True,
        synced_gpus=accelerator.num_processes > 1,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.train()
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
