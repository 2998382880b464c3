"""The shapes that are reckoned with are those of the real models."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, GPTBigCodeConfig, Starcoder2Config

from finetune.mistakes import Mistakes
from finetune.model import linear_names
from finetune.shape import SHIPPED, Shape, load_shape, read_shape

BIGCODE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100}
STARCODER2 = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
CONFIGS = {path.name: AutoConfig.from_pretrained(path) for path in sorted(SHIPPED.iterdir())}
SMALL = {
    "multi-query": GPTBigCodeConfig(**BIGCODE),
    "multi-head": GPTBigCodeConfig(**BIGCODE, multi_query=False),
    "other MLP": GPTBigCodeConfig(**BIGCODE, n_inner=48),
    "grouped-query": Starcoder2Config(**STARCODER2),
    "untied, no bias": Starcoder2Config(**STARCODER2, tie_word_embeddings=False, use_bias=False),
}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("config", [*CONFIGS.values(), *SMALL.values()], ids=[*CONFIGS, *SMALL])
def test_tensors_are_those_of_transformers(config):
    shape, model = Shape.from_config(config.to_dict(), "config.json"), on_meta(config)
    assert shape.tensors() == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.linear_names == linear_names(model)


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_lora_parameters_are_those_of_peft(config):
    shape = Shape.from_config(config.to_dict(), "config.json")
    for targets in ([], ["c_proj"], shape.linear_names[:2]):
        lora = get_peft_model(on_meta(config), LoraConfig(r=3, target_modules=targets or shape.linear_names))
        assert shape.lora_parameters(3, targets) == lora.get_nb_trainable_parameters()[0]


def test_starcoder_is_as_large_as_published():
    shape = load_shape("bigcode/starcoder")
    assert round(shape.parameters / 1e9, 3) == 15.517
    assert round(shape.lora_parameters(16, ["c_attn", "c_proj", "c_fc"]) / 1e6, 1) == 55.2
    assert shape.positions == 8192
    assert {name: round(load_shape(f"bigcode/{name}").parameters / 1e9, 1) for name in CONFIGS} == {
        "starcoder": 15.5,
        "starcoderbase": 15.5,
        "starcoderbase-1b": 1.1,
        "starcoderbase-3b": 3.0,
        "starcoderbase-7b": 7.3,
        "starcoder2-3b": 3.0,
        "starcoder2-7b": 7.2,
        "starcoder2-15b": 16.0,
    }


def test_local_folders_and_unknown_models(tmp_path):
    assert load_shape("someone/unknown") is None
    assert load_shape("models/tiny-starcoder").positions == 1024
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(Mistakes, match="config.json: model_type: 'llama' is not supported: .*gpt_bigcode"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "not valid JSON"),
        ("[]", "a list at the top"),
        ('{"model_type": "gpt_bigcode", "n_embd": "32"}', "n_embd: '32' is not a positive number"),
        ('{"model_type": "starcoder2", "hidden_size": 32}', "num_key_value_heads: None is not a positive number"),
    ],
)
def test_a_bad_config_is_a_mistake(tmp_path: Path, content, what):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Mistakes, match=what):
        read_shape(tmp_path)
