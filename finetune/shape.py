"""From a model's config.json to the size of every tensor, without torch: what the checks and the planner reckon with."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.mistakes import Mistake, Mistakes

# Configs of the models that the recipes name, so that they can be checked before anything is downloaded.
SHIPPED = Path(__file__).parent / "configs"
# The linear modules inside a layer, by the last part of their name.
LINEAR_NAMES = {
    "gpt_bigcode": ["c_attn", "c_fc", "c_proj"],
    "starcoder2": ["c_fc", "c_proj", "k_proj", "o_proj", "q_proj", "v_proj"],
}

MLP_INPUT = "c_fc"  # of both: from the hidden size to the MLP's, four times as wide


@dataclass(frozen=True)
class Shape:
    """A model's dimensions. `family` is transformers' model type; `positions` is the longest row; `tied` shares the embedding
    with the output layer."""

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    mlp_size: int
    vocab_size: int
    positions: int
    tied: bool
    bias: bool

    @property
    def parameters(self) -> int:
        """How many there are; a tied output layer is not counted again."""
        return sum(_numel(size) for size in self.tensors().values())

    @property
    def linear_names(self) -> list[str]:
        """Names that LoRA can target."""
        return LINEAR_NAMES[self.family]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every weight's size by its name in transformers' state dict, without a tied output layer."""
        bigcode = self.family == "gpt_bigcode"
        trunk, layers = ("transformer", "transformer.h") if bigcode else ("model", "model.layers")
        embedding = (self.vocab_size, self.hidden_size)
        tensors: dict[str, tuple[int, ...]] = {f"{trunk}.wte.weight" if bigcode else f"{trunk}.embed_tokens.weight": embedding}
        if bigcode:
            tensors[f"{trunk}.wpe.weight"] = (self.positions, self.hidden_size)
        norms = ("ln_1", "ln_2") if bigcode else ("input_layernorm", "post_attention_layernorm")
        for layer in range(self.layers):
            for name in norms:
                tensors |= self._norm(f"{layers}.{layer}.{name}")
            for name, (outputs, inputs) in self._linears().items():
                tensors[f"{layers}.{layer}.{name}.weight"] = (outputs, inputs)
                if self.bias:
                    tensors[f"{layers}.{layer}.{name}.bias"] = (outputs,)
        tensors |= self._norm(f"{trunk}.ln_f" if bigcode else f"{trunk}.norm")
        return tensors if self.tied else tensors | {"lm_head.weight": embedding}

    def lora_parameters(self, rank: int, targets: list[str]) -> int:
        """Parameters of LoRA's two matrices a module: rank x (inputs + outputs); no targets are all linear modules."""
        chosen = [size for name, size in self._linears().items() if not targets or name.rpartition(".")[2] in targets]
        return self.layers * rank * sum(map(sum, chosen))

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (self.hidden_size,), f"{name}.bias": (self.hidden_size,)}

    def _linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear module of a layer."""
        hidden, kv_size = self.hidden_size, self.hidden_size // self.heads * self.kv_heads
        mlp = {"mlp.c_fc": (self.mlp_size, hidden), "mlp.c_proj": (hidden, self.mlp_size)}
        if self.family == "gpt_bigcode":
            return {"attn.c_attn": (hidden + 2 * kv_size, hidden), "attn.c_proj": (hidden, hidden), **mlp}
        key_value = {f"self_attn.{name}_proj": (kv_size, hidden) for name in "kv"}
        return {"self_attn.q_proj": (hidden, hidden), **key_value, "self_attn.o_proj": (hidden, hidden), **mlp}

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str) -> "Shape":
        """Read a config.json's content.

        Args:
            where: the file's path, for messages.

        Raises:
            Mistakes: another model type than the two that are supported, or a dimension that is missing or no positive number.
        """
        family = config.get("model_type")
        if family not in LINEAR_NAMES:
            fix = f"take a model of {' or '.join(LINEAR_NAMES)}"
            raise Mistakes(Mistake(where, "model_type", f"{family!r} is not supported", fix))
        names = BIGCODE_KEYS if family == "gpt_bigcode" else STARCODER2_KEYS
        values = {field: config.get(key) for field, key in names.items()}
        if family == "gpt_bigcode":
            values["kv_heads"] = 1 if config.get("multi_query", True) else values["heads"]
            if values["mlp_size"] is None and isinstance(values["hidden_size"], int):
                values["mlp_size"] = 4 * values["hidden_size"]
        mistakes = [
            Mistake(where, names.get(field, field), f"{value!r} is not a positive number", "take the config.json of the model's page")
            for field, value in values.items()
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_DIMENSION
        ]
        if not mistakes and values["layers"] > MOST_LAYERS:
            mistakes.append(Mistake(where, names["layers"], f"{values['layers']:,} layers", "take the config.json of the model's page"))
        if not mistakes and (values["hidden_size"] % values["heads"] or values["heads"] % values["kv_heads"]):
            what = f"{values['heads']} heads do not divide {values['hidden_size']}, or {values['kv_heads']} do not divide them"
            mistakes.append(Mistake(where, names["heads"], what, "take the config.json of the model's page"))
        if config.get("quantization_config") is not None:
            what, fix = "the checkpoint is quantised already", "take the 16-bit model; method.kind: qlora quantises it"
            mistakes.append(Mistake(where, "quantization_config", what, fix))
        if mistakes:
            raise Mistakes(*mistakes)
        # starcoder2's key is use_bias; gpt_bigcode always has biases.
        bias = family == "gpt_bigcode" or config.get("use_bias", True)
        return cls(family=family, tied=config.get("tie_word_embeddings", True), bias=bias, **values)


MOST_LAYERS, LARGEST_DIMENSION = 1_000, 10**7  # of any model that was ever made, by far
BIGCODE_KEYS = {
    "hidden_size": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "mlp_size": "n_inner",
    "vocab_size": "vocab_size",
    "positions": "n_positions",
}
STARCODER2_KEYS = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
}


def _numel(size: tuple[int, ...]) -> int:
    numel = 1
    for length in size:
        numel *= length
    return numel


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a local folder.

    Raises:
        Mistakes: config.json is missing or not JSON; see `Shape.from_config`.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Mistakes(Mistake(str(path), "", error.strerror or "cannot be read", "name a folder that holds a model")) from None
    except (ValueError, RecursionError) as error:
        raise Mistakes(Mistake(str(path), "", f"not valid JSON ({error})", "take the config.json of the model's page")) from None
    if not isinstance(config, dict):
        raise Mistakes(Mistake(str(path), "", f"a {type(config).__name__} at the top", "take the config.json of the model's page"))
    return Shape.from_config(config, str(path))


def load_shape(name: str) -> Shape | None:
    """The shape of `model.name`: a local folder, or a hub model whose config ships here; None for any other hub model.

    Raises:
        Mistakes: see `read_shape`.
    """
    folder = Path(name)
    if folder.is_dir():
        return read_shape(folder)
    shipped = SHIPPED / name.rpartition("/")[2]
    return read_shape(shipped) if name.startswith("bigcode/") and shipped.is_dir() else None
