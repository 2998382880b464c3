"""Load the model the way the launch shards it, in the precision of the hardware; put LoRA on it; checkpoint its activations.

Two ways in. Without ZeRO-3 every rank holds the whole model on its own device, and transformers' loader reads the safetensors
tensor by tensor straight to it. Under ZeRO-3 that loader would let rank 0 merge the whole checkpoint in host memory and would
report no unexpected or mismatched keys; there, each rank reads its own part of each tensor and nothing else.
"""

import json
import math
import re
from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, PreTrainedModel

from finetune import attention, recipe
from finetune.lora import use_lean_forward
from finetune.loss import use_loss_head
from finetune.mistakes import Mistake, Mistakes
from finetune.recompute import choose_recomputation

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"


def fetch(model: recipe.Model) -> Path:
    """The local folder with the model's files; a hub name is downloaded to the hub's cache first.

    Raises:
        Mistakes: the licence is not accepted, no such model or revision, no network, or no safetensors.
    """
    folder = Path(model.name)
    if not folder.is_dir():
        try:
            patterns = ["*.json", "*.txt", "*.model"] + ([] if model.random_weights else [WEIGHTS])
            folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=patterns))
        except GatedRepoError:
            fix = f"accept the licence at https://huggingface.co/{model.name}, then `export HF_TOKEN=` a token of that account"
            raise Mistakes(Mistake("recipe", "model.name", f"{model.name} is gated and your account may not read it", fix)) from None
        except RevisionNotFoundError:
            what = f"{model.name} has no revision {model.revision}"
            raise Mistakes(Mistake("recipe", "model.revision", what, "use a branch, tag or commit of the model's page")) from None
        except RepositoryNotFoundError:
            fix = "check the spelling; for a private or gated model set HF_TOKEN; for a local one give its folder"
            raise Mistakes(Mistake("recipe", "model.name", f"the hub has no model {model.name} that you may read", fix)) from None
        except Exception as error:  # of the network, of each layer its own
            fix = "check the network and the HF_* and *_PROXY variables, or give the path of a local folder"
            what = f"{model.name} could not be downloaded ({_first_line(error)})"
            raise Mistakes(Mistake("recipe", "model.name", what, fix)) from None
    if not model.random_weights and not any(folder.glob(WEIGHTS)):
        fix = "convert the checkpoint to safetensors; pickled weights can run code and are not read"
        raise Mistakes(Mistake("recipe", "model.name", f"{folder} holds no safetensors", fix))
    return folder


def load_tokenizer(folder: Path):
    """The model's fast tokenizer.

    Raises:
        Mistakes: the folder holds none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a damaged file makes its readers stumble over
        what = f"no tokenizer could be loaded ({_first_line(error)})"
        raise Mistakes(Mistake(str(folder), "", what, "put tokenizer.json and tokenizer_config.json beside config.json")) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def check_config(folder: Path) -> None:
    """Make the model without weights, which finds what is wrong with config.json in a second. Before there are processes.

    Raises:
        Mistakes: no model can be made of it.
    """
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(load_config(folder))
    except Exception as error:  # whatever a wrong value makes its readers stumble over
        fix = "take the config.json of the model's page"
        raise Mistakes(Mistake(str(folder / "config.json"), "", f"gives no model ({_first_line(error)})", fix)) from None


def load_config(folder: Path):
    """The model's config, set for training: no dropout but LoRA's, so that recomputed activations and every sharding agree."""
    config = AutoConfig.from_pretrained(folder)
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "residual_dropout", "embedding_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def load_model(
    model: recipe.Model, method: recipe.Method, folder: Path, precision: str, device: torch.device, deepspeed: dict | None
) -> PreTrainedModel:
    """Load the base model, or make it from random weights.

    Args:
        folder: from `fetch`.
        precision: fp16, bf16 or fp32.
        device: this rank's own.
        deepspeed: the DeepSpeed JSON with its stage, or None under DistributedDataParallel and a single process.

    Raises:
        Mistakes: a weight is missing, unexpected or of another shape, or a file is damaged.
    """
    dtype, config = DTYPES[precision], load_config(folder)
    if method.kind == "full" and deepspeed is None:
        dtype = torch.float32  # autocast's gradient scaler wants fp32 masters; DeepSpeed keeps its own
    options = {"attn_implementation": attention.NAME, "dtype": dtype}
    if deepspeed and deepspeed["zero_optimization"]["stage"] == 3:
        return _load_sharded(config, folder, options, deepspeed, model.random_weights)
    if model.random_weights:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, **options)
    if method.kind == "qlora":
        # float16 as the storage type would survive an fp16 engine's cast as uint8 does; other types are destroyed by it.
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=torch.uint8,
        )
    weight_files(folder)  # an index that names absent files is told apart from damage
    # Mismatched sizes are reported instead of raised, so that one comparison serves every kind of loading.
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, config=config, device_map={"": device}, **options)
    except (SafetensorError, OSError) as error:
        raise Mistakes(Mistake(str(folder), "", f"damaged weights ({error})", "download or copy them again")) from None
    if method.kind == "qlora" and device.type == "cpu":
        for module in loaded.modules():
            if isinstance(module, Linear4bit):
                # Else the first evaluation repacks the weights for a CPU kernel without a backward pass.
                module.support_avx512bf16_for_cpu = False
    _compare_keys(folder, set(report["missing_keys"]), set(report["unexpected_keys"]), {key for key, *_ in report["mismatched_keys"]})
    return loaded


def _load_sharded(config, folder: Path, options: dict, deepspeed_config: dict, random_weights: bool) -> PreTrainedModel:
    """Build the model sharded module by module, then fill this rank's part of every parameter from the files."""
    if random_weights:
        # transformers itself enters zero.Init here, and gathers a module at a time to initialise it.
        return AutoModelForCausalLM.from_config(config, **options)
    import deepspeed
    from transformers.initialization import no_init_weights
    from transformers.integrations.deepspeed import prevent_arange_dtype_change
    from transformers.modeling_utils import set_zero3_state

    with set_zero3_state(), no_init_weights(), prevent_arange_dtype_change():
        with deepspeed.zero.Init(config_dict_or_path=deepspeed_config, dtype=options["dtype"]):
            model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    _fill_shards(model, folder)
    return model


def weight_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor, from the index or from the headers of the files.

    Raises:
        Mistakes: a file is damaged, or the index names one that is not there.
    """
    held = {}
    for path in sorted(folder.glob(WEIGHTS)):
        try:
            with safe_open(path, framework="pt") as tensors:
                held |= dict.fromkeys(tensors.keys(), path)
        except (SafetensorError, OSError) as error:
            raise Mistakes(Mistake(str(path), "", f"damaged weights ({error})", "download or copy it again")) from None
    if not (folder / INDEX).exists():
        return held
    where, fix = str(folder / INDEX), "download or copy it again"
    try:
        content = json.loads((folder / INDEX).read_text("utf-8"))
        names = {str(name): str(file) for name, file in content["weight_map"].items()}
        content["metadata"].items()  # transformers reads it
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Mistakes(Mistake(where, "", "is no index of weights", fix)) from None
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        raise Mistakes(Mistake(where, "", f"names files outside its folder ({outside[0]})", "take the index of the model's page"))
    absent = sorted({file for file in names.values() if not (folder / file).exists()})
    if absent:
        raise Mistakes(Mistake(where, "", f"{', '.join(absent)} is not there", fix))
    misplaced = sorted(name for name, file in names.items() if name in held and held[name] != folder / file)
    if misplaced:
        what = f"{misplaced[0]} is not in {names[misplaced[0]]}, which is named for it, but in {held[misplaced[0]].name}"
        raise Mistakes(Mistake(where, "", what, fix))
    return {name: folder / file for name, file in names.items()}


def _fill_shards(model: PreTrainedModel, folder: Path) -> None:
    """Copy this rank's part of every tensor from the files into `ds_tensor`.

    ZeRO-3 flattens a parameter, pads it to a multiple of the world size and gives rank r the r-th slice. A slice of whole
    rows that covers the flat one is read, so host memory holds one part of one tensor at a time and no collective is needed.
    """
    files, opened = weight_files(folder), {}
    parameters = dict(model.named_parameters())
    tied = {name for name in model.state_dict(keep_vars=True) if name not in parameters}
    missing, mismatched = set(parameters) - set(files), set()
    for name, parameter in parameters.items():
        if name in missing:
            continue
        if files[name] not in opened:
            opened = {files[name]: safe_open(files[name], framework="pt")}  # one file at a time stays mapped
        tensor = opened[files[name]].get_slice(name)
        if tuple(tensor.get_shape()) != tuple(parameter.ds_shape):
            mismatched.add(name)
        elif parameter.ds_tensor.final_location is not None:  # on NVMe: only DeepSpeed's own way reaches it
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if torch.distributed.get_rank() == 0:
                    parameter.copy_(tensor[:])
        else:
            _copy_part(tensor, parameter)
    _compare_keys(folder, missing, set(files) - set(parameters) - tied, mismatched)


def _copy_part(tensor, parameter: torch.nn.Parameter) -> None:
    part = parameter.ds_tensor
    start = part.ds_numel * torch.distributed.get_rank()
    stop = min(start + part.ds_numel, parameter.ds_numel)
    if start >= stop:
        return  # the last ranks of a small tensor hold padding alone
    row_numel = parameter.ds_numel // parameter.ds_shape[0]
    first, last = start // row_numel, -(-stop // row_numel)
    flat = tensor[first:last].reshape(-1)
    with torch.no_grad():
        part.narrow(0, 0, stop - start).copy_(flat[start - first * row_numel : stop - first * row_numel])


def _compare_keys(folder: Path, missing: set[str], unexpected: set[str], mismatched: set[str]) -> None:
    mistakes = [
        Mistake(str(folder), "", f"{len(names)} weights {what}, {sorted(names)[0]} first", "the files are not of this config.json")
        for what, names in (
            ("that the model needs are missing", missing),
            ("are in the files that the model does not have", unexpected),
            ("have another shape than the model's", mismatched),
        )
        if names
    ]
    if mistakes:
        raise Mistakes(*mistakes)


def linear_names(model: torch.nn.Module) -> list[str]:
    """Last parts of the names of the linear modules inside the layers, which are those that LoRA can sit on."""
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module) and re.search(r"\.\d+\.", name)})


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)  # bitsandbytes' Linear4bit is one


def add_lora(model: PreTrainedModel, method: recipe.Method, in_engine: bool = False) -> PeftModel:
    """Freeze the base and put LoRA matrices on every module that `method.targets` names.

    Args:
        in_engine: leave the matrices in the base's precision, since DeepSpeed's optimizer has fp32 masters of its own; under ZeRO-3
            it would leave fp32 matrices as they are, and compute with them. Otherwise they are fp32, as the gradient scaler wants.

    Raises:
        Mistakes: a name matches nothing, which PEFT passes over in silence as long as another one matches.
    """
    names = linear_names(model)
    unknown = [target for target in method.targets if target not in names]
    if unknown:
        what = f"{', '.join(unknown)} matches no linear module; the model has {', '.join(names)}"
        raise Mistakes(Mistake("recipe", "method.targets", what, "name some of those, or leave the list empty for all"))
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=method.targets or names,
        task_type="CAUSAL_LM",
    )
    network = get_peft_model(model, config, autocast_adapter_dtype=not in_engine)
    use_lean_forward(network)
    return network


def prepare_for_training(model: PreTrainedModel, method: recipe.Method, memory: recipe.Memory, in_engine: bool = False) -> torch.nn.Module:
    """Put LoRA on the base or thaw all of it, checkpoint activations, and set training mode, without which nothing is checkpointed.

    Args:
        in_engine: the model goes to DeepSpeed's engine.

    Raises:
        Mistakes: see `add_lora`.
    """
    model.config.use_cache = False
    model.generation_config = GenerationConfig.from_model_config(model.config)  # not the folder's, which may hold anything
    use_loss_head(model)
    trainable = model.requires_grad_(True) if method.kind == "full" else add_lora(model, method, in_engine)
    if memory.checkpoint_activations:
        choose_recomputation(model, memory)
    return trainable.train()


def check_first_loss(loss: float, vocab_size: int, model: recipe.Model) -> None:
    """Refuse to train on weights that know less than nothing.

    Args:
        loss: of held-out text before the first step, nats a token. A code model on code has 1 to 3.
        vocab_size: guessing all tokens alike costs ln(vocab_size).

    Raises:
        Mistakes: the loss of loaded weights is above that, or not finite: they are not the ones that were saved.
    """
    if not model.random_weights and not loss <= math.log(vocab_size):
        what = f"held-out loss {loss:.2f} before the first step is above ln({vocab_size}) = {math.log(vocab_size):.2f}, that of guessing"
        fix = "check that weights, config.json and tokenizer belong together; for random weights set model.random_weights"
        raise Mistakes(Mistake("recipe", "model.name", what, fix))


def named_trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """A parameter's shape, also where ZeRO-3 left an empty placeholder in its stead."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def optimizer_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Decay matrices, not biases and norms. An empty group is dropped: DeepSpeed cannot take one."""
    parameters = list(named_trainable(model).values())
    matrices = [p for p in parameters if len(whole_shape(p)) > 1]
    vectors = [p for p in parameters if len(whole_shape(p)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
