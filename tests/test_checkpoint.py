"""A result is whole or absent, and what is not what was trained is noticed when it is written."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from finetune.checkpoint import UNFINISHED, model_card, publish_result, take_folder, verify_adapter, verify_model
from finetune.mistakes import Mistakes
from finetune.recipe import Recipe

SHAPES = {"base.c_attn.lora_A.weight": (2, 8), "base.c_attn.lora_B.weight": (4, 2)}


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, tmp_path / "adapter_model.safetensors")
    return tmp_path


def change(folder, edit):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_a_whole_adapter_passes(adapter):
    verify_adapter(adapter, SHAPES)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda t: t.update({name: torch.zeros(0) for name in t}), r"lora_A.weight has shape \(0,\), not \(2, 8\)"),
        (lambda t: t.pop("base.c_attn.lora_B.weight"), "lora_B.weight was trained but is not in the file"),
        (lambda t: t.update(other=torch.ones(1)), "other is in the file but was not trained"),
        (lambda t: t["base.c_attn.lora_A.weight"].fill_(float("nan")), "lora_A.weight is not finite"),
        (lambda t: t["base.c_attn.lora_B.weight"].zero_(), "1 B matrices are zero, base.c_attn.lora_B.weight first"),
    ],
)
def test_an_adapter_that_is_not_what_was_trained_is_refused(adapter, edit, what):
    change(adapter, edit)
    with pytest.raises(Mistakes, match=what):
        verify_adapter(adapter, SHAPES)


def test_a_cut_or_absent_adapter_is_refused(adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Mistakes, match="damaged"):
        verify_adapter(adapter, SHAPES)
    path.unlink()
    with pytest.raises(Mistakes, match="holds no adapter"):
        verify_adapter(adapter, SHAPES)


def test_a_model_is_compared_over_all_its_shards(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    verify_model(tmp_path, {"a": (2,), "b": (3,)})
    with pytest.raises(Mistakes, match="c was trained"):
        verify_model(tmp_path, {"a": (2,), "b": (3,), "c": (1,)})
    with pytest.raises(Mistakes, match="b has shape"):
        verify_model(tmp_path, {"a": (2,), "b": (4,)})


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path):
    take_folder(tmp_path / "new" / "run")
    for out in ("/proc/run", "/dev/null/run"):
        with pytest.raises(Mistakes, match="run.out: .* cannot be written"):
            take_folder(Path(out))


def test_a_folder_is_one_run_s_at_a_time(tmp_path):
    lock = take_folder(tmp_path)
    with pytest.raises(Mistakes, match="run.out: another run is writing to"):
        take_folder(tmp_path)
    lock.release()
    take_folder(tmp_path).release()


def test_publishing_moves_what_makes_it_loadable_last(tmp_path, monkeypatch):
    from finetune import checkpoint

    unfinished = tmp_path / UNFINISHED
    unfinished.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", "recipe.yaml", "tokenizer.json"):
        (unfinished / name).write_text(name)
    moved, replace = [], checkpoint.os.replace
    monkeypatch.setattr(checkpoint.os, "replace", lambda source, target: (moved.append(source.name), replace(source, target)))
    publish_result(tmp_path)
    assert moved[-1] == "adapter_config.json" and len(moved) == 5
    assert not unfinished.exists() and (tmp_path / "adapter_model.safetensors").read_text() == "adapter_model.safetensors"


def test_the_card_says_what_it_was_made_from():
    card = model_card(Recipe(), {"eval_loss after": 1.25}, "7 documents", "rank 0")
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "peft",
        "base_model": "bigcode/starcoder",
        "tags": ["code", "starcoder"],
        "license": "bigcode-openrail-m",
    }
    for text in ("A LoRA adapter of `bigcode/starcoder`", "- eval_loss after: 1.25", "7 documents", "rank 0", "seq_len: 2048"):
        assert text in body
    assert yaml.safe_load(body.partition("```yaml\n")[2].partition("```")[0]) == Recipe().model_dump()
