"""Write the result of a run so that it is whole or absent, and reopen it to see that it is.

Everything goes to a folder of its own inside `run.out` first. The files move up only after they were read back, and the one
without which nothing loads (`adapter_config.json` or `config.json`) moves last.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from finetune.mistakes import Mistake, Mistakes
from finetune.model import DTYPES, named_trainable, weight_files, whole_shape
from finetune.preflight import RUN_MARK
from finetune.recipe import Recipe, dump_recipe

UNFINISHED = ".unfinished"


def take_folder(out: Path) -> FileLock:
    """Make `run.out`, see that it takes files, and lock it for this run, on rank 0. The system releases it when the process ends.

    Raises:
        Mistakes: it cannot be written, or another run is writing there.
    """
    lock = FileLock(str(out / RUN_MARK))
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            lock.acquire(timeout=0)
            (out / RUN_MARK).write_bytes(b"1\n")  # as much as shows that the disk takes something
    except Timeout:
        raise Mistakes(Mistake("recipe", "run.out", f"another run is writing to {out}", "name another folder, or wait for it")) from None
    except OSError as error:
        what = f"{out} cannot be written ({error.strerror})"
        raise Mistakes(Mistake("recipe", "run.out", what, "name a folder on a disk with room that you may write to")) from None
    return lock


def gather_trainable(accelerator: Accelerator, model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The trained tensors, whole, on the host of rank 0; empty on the others. All ranks call it.

    One tensor at a time is gathered, so that a GPU holds no second model. DeepSpeed's fp32 masters are taken, not the 16-bit
    copies that it computes with.

    Args:
        dtype: what to cast to on the way; None keeps fp32.
    """
    from_engine = accelerator.deepspeed_plugin is not None
    if from_engine:
        from deepspeed.utils import safe_get_full_fp32_param
    state = {}
    for name, parameter in named_trainable(accelerator.unwrap_model(model)).items():
        tensor = safe_get_full_fp32_param(parameter) if from_engine else parameter.detach()
        if accelerator.is_main_process:
            state[name] = tensor.to(device="cpu", dtype=dtype or tensor.dtype, copy=True).view(whole_shape(parameter))
    return state


def write_result(accelerator: Accelerator, model: torch.nn.Module, tokenizer, recipe: Recipe, precision: str, card: str) -> None:
    """Write adapter or model, tokenizer, recipe and card to the unfinished folder of `run.out`, and verify them. All ranks call it.

    Raises:
        Mistakes: what was written is not whole (on rank 0), or the disk did not take it.
    """
    out, whole_model = Path(recipe.run.out) / UNFINISHED, recipe.method.kind == "full"
    saved = precision if recipe.run.save_dtype == "auto" else recipe.run.save_dtype
    state = gather_trainable(accelerator, model, DTYPES[saved] if whole_model else None)
    if accelerator.is_main_process:
        bare = accelerator.unwrap_model(model)
        expected = {name: whole_shape(parameter) for name, parameter in named_trainable(bare).items()}
        try:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            if whole_model:
                bare.config.dtype = DTYPES[saved]
                bare.save_pretrained(out, state_dict=state)
                verify_model(out, expected)
            else:
                bare.save_pretrained(out, state_dict=state)
                verify_adapter(out, {_adapter_key(name): shape for name, shape in expected.items()})
            _save_tokenizer(tokenizer, out)
            (out / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
            (out / "README.md").write_text(card, encoding="utf-8")
            for path in out.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise Mistakes(Mistake(str(out), "", f"the result could not be written ({error})", "free space there")) from None
    accelerator.wait_for_everyone()


def _save_tokenizer(tokenizer, out: Path) -> None:
    try:
        tokenizer.save_pretrained(out)
    except OSError:
        raise
    except Exception as error:  # its Rust part reports a full disk as a bare Exception
        raise OSError(str(error)) from None


def publish_result(out: Path) -> None:
    """Move the verified files from the unfinished folder into `out`. Rank 0 alone calls it, after `write_result`."""
    unfinished = out / UNFINISHED
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name in ("adapter_config.json", "config.json")):
        os.replace(path, out / path.name)
    unfinished.rmdir()


def _adapter_key(name: str) -> str:
    return name.replace(".default.", ".")  # PEFT leaves the adapter's name out of its files


def verify_adapter(folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Reopen an adapter and compare it with what was trained.

    Args:
        expected: shape of every tensor by its name in the file.

    Raises:
        Mistakes: keys or shapes differ (ZeRO-3 placeholders are saved with no elements and no error), a value is not finite,
            or a B matrix is zero, as it was before the first step.
    """
    path = folder / "adapter_model.safetensors"
    if not path.exists() or not (folder / "adapter_config.json").exists():
        raise Mistakes(Mistake(str(folder), "", "holds no adapter", "give the folder of a LoRA run"))
    mistakes, learnt = _verify_tensors(dict.fromkeys(_keys(path), path), expected)
    idle = [name for name, nonzero in learnt.items() if "lora_B" in name and not nonzero]
    if idle:
        what = f"{len(idle)} B matrices are zero, {idle[0]} first: no gradient has reached them"
        mistakes.append(Mistake(str(path), "", what, "report this: that part of the adapter has learnt nothing"))
    if mistakes:
        raise Mistakes(*mistakes)


def verify_model(folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Reopen a full model's safetensors and compare them with what was trained; arguments and errors as in `verify_adapter`."""
    mistakes, _ = _verify_tensors(weight_files(folder), expected)
    if mistakes:
        raise Mistakes(*mistakes)


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise Mistakes(Mistake(str(path), "", f"damaged ({error})", "take an earlier one, or train again")) from None


def _verify_tensors(files: dict[str, Path], expected: dict[str, tuple[int, ...]]) -> tuple[list[Mistake], dict[str, bool]]:
    """Mistakes of the files, and for each tensor whether anything in it is other than zero."""
    mistakes, nonzero = [], {}
    for name in sorted(set(expected) ^ set(files)):
        what = f"{name} was trained but is not in the file" if name in expected else f"{name} is in the file but was not trained"
        mistakes.append(Mistake(str(next(iter(files.values()), "")), "", what, "report this: the result cannot be used"))
    for name in sorted(set(expected) & set(files)):
        with safe_open(files[name], framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
        nonzero[name] = bool(tensor.any())
        if tuple(tensor.shape) != expected[name]:
            what = f"{name} has shape {tuple(tensor.shape)}, not {expected[name]}"
            mistakes.append(Mistake(str(files[name]), "", what, "report this: the result cannot be used"))
        elif not tensor.isfinite().all():
            mistakes.append(Mistake(str(files[name]), "", f"{name} is not finite", "lower optim.lr and train again"))
    return mistakes, nonzero


def model_card(recipe: Recipe, figures: dict, data: str, ranks: str) -> str:
    """The README.md of a result: what it was made from, how, and what it reached.

    Args:
        figures: measured values by name.
        data: the table of `describe`.
        ranks: the table of `telemetry.table`.
    """
    base, kind = recipe.model.name, recipe.method.kind
    header = f"library_name: {'transformers' if kind == 'full' else 'peft'}\nbase_model: {json.dumps(base)}\ntags: [code, starcoder]"
    if base.startswith("bigcode/"):
        header += "\nlicense: bigcode-openrail-m"  # it binds what is made from the models too
    made = {"lora": "A LoRA adapter", "qlora": "A LoRA adapter, trained on a 4-bit base,", "full": "A full fine-tune"}[kind]
    return f"""---
{header}
---

# {Path(recipe.run.out).name}

{made} of `{base}`, revision `{recipe.model.revision}`. Losses are in nats a token, on documents that were held out.

## Measured

{_list(figures)}

```
{ranks}
```

## Data

```
{data}
```

## Recipe

```yaml
{dump_recipe(recipe)}```
"""


def _list(values: dict) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())
