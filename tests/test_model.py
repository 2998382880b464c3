"""The model: attention and loss against transformers' own, documents that do not see each other, loading that compares everything."""

import json
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTBigCodeConfig, Starcoder2Config

from finetune import attention, lora, loss
from finetune import model as model_module
from finetune.loss import count_labels, sum_losses, to_batch, use_loss_head
from finetune.mistakes import Mistakes
from finetune.model import add_lora, check_first_loss, fetch, load_model, named_trainable, prepare_for_training
from finetune.packing import IGNORED, Rows
from finetune.recipe import Memory, Method, Model

CPU = torch.device("cpu")
WEIGHT = lora._weight
CONFIGS = {
    "multi-query": GPTBigCodeConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=100),
    "multi-head": GPTBigCodeConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=100, multi_query=False),
    "grouped-query": Starcoder2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=100
    ),
}

WINDOWED = Starcoder2Config(**(CONFIGS["grouped-query"].to_dict() | {"sliding_window": 4}))


def make(config, implementation: str = attention.NAME):
    torch.manual_seed(0)
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    use_loss_head(model)
    return model


def row_of(*documents: list[int]) -> Rows:
    """One row of documents that are kept apart."""
    tokens = np.array([[token for document in documents for token in document]], np.int32)
    positions = np.array([[place for document in documents for place in range(len(document))]], np.int32)
    return Rows(tokens, positions, np.where(positions == 0, IGNORED, tokens))


def save(folder: Path, config=CONFIGS["multi-query"], shard_size: str = "50GB") -> Path:
    make(config).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load(folder: Path, kind: str = "lora"):
    return load_model(Model(name=str(folder)), Method(kind=kind), folder, "fp32", CPU, None)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_that_of_eager(config, padded):
    ids = torch.arange(24).reshape(2, 12) % 100
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
    eager, ours = (make(config, name)(ids, attention_mask=mask).logits[mask.bool()] for name in ("eager", attention.NAME))
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_attention_never_asks_the_kernel_to_group_heads(config, monkeypatch):
    asked = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watch(query, key, value, *positional, **options):
        asked.append((query.shape[1] == key.shape[1] == value.shape[1], options.get("enable_gqa", False)))
        return original(query, key, value, *positional, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watch)
    make(config)(torch.arange(12)[None])
    assert asked == [(True, False)] * 2


@pytest.fixture
def math_kernel_allowed_again():
    yield
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_flash_sdp(True)


def test_the_math_kernel_is_forbidden(math_kernel_allowed_again):
    """On a CPU the flash kernel stands for a GPU's memory-efficient one: without it the math kernel would be taken, silently."""
    shape = mock.Mock(hidden_size=64, heads=4)
    assert attention.forbid_math_kernel(shape, torch.float32, CPU) == "flash_attention (one document), flash_attention (short documents)"
    torch.backends.cuda.enable_flash_sdp(False)
    with pytest.raises(RuntimeError, match="No viable backend"):
        make(CONFIGS["multi-query"])(torch.arange(12)[None])
    with pytest.raises(Mistakes, match="no attention kernel but the math one") as error:
        attention.forbid_math_kernel(shape, torch.float32, CPU)
    assert "memory-efficient attention" in error.value.mistakes[0].fix
    torch.backends.cuda.enable_math_sdp(True)
    make(CONFIGS["multi-query"])(torch.arange(12)[None])  # the kernel that it forbids


def gradients(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("shared", [1, 6, 512])
@pytest.mark.parametrize("config", [*CONFIGS.values(), WINDOWED], ids=[*CONFIGS, "sliding window"])
def test_blocks_are_a_dense_mask(config, shared, monkeypatch):
    """Two rows of documents of all lengths against transformers' eager attention under its own mask: loss and every gradient."""
    monkeypatch.setattr(attention, "SHARED_TOKENS", shared)
    rows = [
        row_of(*([token] * length for token, length in enumerate(lengths, 1))) for lengths in ([1, 2, 3, 7, 1, 10], [24], [5] * 4 + [4])
    ]
    rows = Rows(*(np.concatenate(arrays) for arrays in zip(*(vars(row).values() for row in rows), strict=True)))
    batch = to_batch(rows, CPU)
    model = make(config)
    sum_losses(model, batch).backward()
    eager = make(config, "eager")
    logits = eager(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum").backward()
    for ours, theirs in zip(gradients(model), gradients(eager), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert (shared == 1) == all(block.mask is None for block in batch["blocks"])


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("trainable_head", [True, False])
def test_the_chunked_loss_is_the_plain_one(chunk, trainable_head, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 16, requires_grad=True)
    head = torch.nn.Linear(16, 50, bias=False).requires_grad_(trainable_head)
    labels = torch.randint(0, 50, (2, 9))
    labels[0, 3:6] = labels[1, 0] = IGNORED
    plain = torch.nn.functional.cross_entropy(head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    wanted = [hidden, head.weight] if trainable_head else [hidden]
    expected = torch.autograd.grad(plain * 3, wanted)
    widest, logsumexp = [], torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda self, **options: widest.append(len(self)) or logsumexp(self, **options))
    head.__class__ = loss.LossHead
    with head.answering_with_the_loss(labels):
        ours = head(hidden)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours * 3, wanted), expected)
    assert max(widest) <= chunk
    assert head(hidden).shape == (2, 9, 50), "logits again"
    with torch.no_grad(), head.answering_with_the_loss(labels):
        torch.testing.assert_close(head(hidden), plain.detach())


def test_the_chunked_loss_computes_in_half_precision_and_sums_in_single():
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 40, 32, requires_grad=True), loss.LossHead(32, 60, bias=False)
    labels = torch.randint(0, 60, (1, 40))
    plain = torch.nn.functional.cross_entropy(head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    with torch.autocast("cpu", torch.bfloat16), head.answering_with_the_loss(labels):
        ours = head(hidden)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=0.1)
    for one, other in zip(torch.autograd.grad(ours, [hidden, head.weight]), torch.autograd.grad(plain, [hidden, head.weight]), strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() / other.norm() < 1e-2


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_documents_do_not_see_each_other(config):
    model, documents = make(config), [[5, 6, 7, 0], [8, 9, 10, 11, 12, 0], [13, 14, 0]]
    together = sum_losses(model, to_batch(row_of(*documents), CPU))
    apart = sum(sum_losses(model, to_batch(row_of(document), CPU)) for document in documents)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-6)
    batch = to_batch(row_of(*documents), CPU)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "blocks")}
    logits = model(**inputs, attention_mask=torch.empty(1, 1, 1, 1), use_cache=False).logits[0]
    alone = torch.cat([model(torch.tensor([document]), use_cache=False).logits[0] for document in documents])
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)
    assert count_labels(batch["labels"]).item() == sum(map(len, documents)) - len(documents)


def test_the_loss_is_transformers_own():
    model, ids = make(CONFIGS["multi-query"]), torch.arange(10)[None]
    batch = to_batch(row_of(list(range(10))), CPU)
    torch.testing.assert_close(sum_losses(model, batch) / count_labels(batch["labels"]), model(ids, labels=ids).loss)


@pytest.mark.parametrize("kind", ["lora", "full", "qlora"])
def test_what_is_trained_is_fp32_and_what_is_not_is_frozen(tmp_path, kind):
    model = load(save(tmp_path), kind)
    trainable = named_trainable(prepare_for_training(model, Method(kind=kind, rank=2), Memory()))
    assert trainable and all(parameter.dtype == torch.float32 for parameter in trainable.values())
    assert all("lora_" in name for name in trainable) == (kind != "full")
    modules = {name.rpartition(".lora")[0].rpartition(".")[2] for name in trainable} if kind != "full" else {"c_attn", "c_fc", "c_proj"}
    assert modules == {"c_attn", "c_fc", "c_proj"}


def test_qlora_is_double_quantised_nf4_and_evaluation_does_not_break_training(tmp_path):
    model = load(save(tmp_path), "qlora")
    state = model.transformer.h[0].attn.c_attn.weight.quant_state
    assert state.quant_type == "nf4" and state.nested
    model = prepare_for_training(model, Method(kind="qlora", rank=2), Memory())
    batch = to_batch(row_of(list(range(10))), CPU)
    with torch.no_grad():
        before = sum_losses(model.eval(), batch)
    loss = sum_losses(model.train(), batch)
    loss.backward()
    torch.testing.assert_close(loss, before)
    assert all(parameter.grad is not None for parameter in named_trainable(model).values())


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_lean_lora_forward_is_peft_s(tmp_path, kind, precision, checkpointed, monkeypatch):
    """PEFT's under autocast as it is used elsewhere, with and without a bias and dropout: loss and gradients."""
    batch, results = to_batch(row_of(list(range(10))), CPU), []
    save(tmp_path)
    for lean in (False, True):
        if not lean:
            monkeypatch.setattr(model_module, "use_lean_forward", lambda network: None)
        base = load_model(Model(name=str(tmp_path)), Method(kind=kind), tmp_path, precision, CPU, None)
        base.transformer.h[1].attn.c_attn.bias = None
        network = prepare_for_training(base, Method(kind=kind, rank=2), Memory(checkpoint_activations=checkpointed))
        monkeypatch.undo()
        torch.manual_seed(1)
        for parameter in named_trainable(network).values():
            assert parameter.dtype == torch.float32
            torch.nn.init.normal_(parameter, std=0.1)
        network.base_model.model.transformer.h[0].mlp.c_fc.lora_dropout["default"] = torch.nn.Dropout(0.3)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and not lean):
            torch.manual_seed(2)
            loss = sum_losses(network, batch)
        loss.backward()
        gradients = [parameter.grad for parameter in named_trainable(network).values()]
        assert all(gradient.dtype == torch.float32 and gradient.norm() > 0 for gradient in gradients)
        results.append((loss, torch.cat([gradient.flatten() for gradient in gradients])))
    (theirs, their_gradient), (ours, our_gradient) = results
    # In bf16 both are 0.02 to 0.035 from the gradient in fp32.
    rough = precision == "bf16"
    torch.testing.assert_close(ours, theirs, rtol=5e-3 if rough else 1e-6, atol=0.0)
    assert (our_gradient - their_gradient).norm() / their_gradient.norm() < (0.06 if rough else 1e-6)


def test_without_gradients_or_adapter_the_lean_forward_is_the_same(tmp_path):
    network = prepare_for_training(load(save(tmp_path)), Method(rank=2), Memory())
    for parameter in named_trainable(network).values():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        tuned = network(ids).logits
        with network.disable_adapter():
            base = network(ids).logits
    torch.testing.assert_close(network(ids).logits, tuned, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(base, make(CONFIGS["multi-query"])(ids).logits)
    assert not torch.allclose(base, tuned, atol=1e-2)


def test_a_lora_layer_keeps_its_input_once_and_the_base_s_product_nothing(tmp_path):
    network = prepare_for_training(load(save(tmp_path), "qlora"), Method(kind="qlora", rank=2), Memory(checkpoint_activations=False))
    layer = next(module for module in network.modules() if hasattr(module, "lora_A"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(torch.randn(3, 5, 32, requires_grad=True))
    assert sorted(tuple(tensor.shape) for tensor in kept) == [(2, 32), (15, 2), (15, 32), (48, 2)]
    held = [value for value in vars(out.grad_fn).values() if isinstance(value, torch.Tensor)]
    assert held == [], "nothing that saved-tensor hooks, and so checkpointing, would not see"


def count_products(network, monkeypatch) -> Counter:
    """How often each frozen product of a layer is computed from now on, forward or backward, by "layer.module"."""
    names, calls = {id(module): name for name, module in network.named_modules()}, Counter()

    def count(linear, dtype):
        calls[names[id(linear)].partition(".h.")[2].removesuffix(".base_layer")] += 1
        return WEIGHT(linear, dtype)

    monkeypatch.setattr(lora, "_weight", count)
    return calls


def test_recomputation_leaves_out_a_layer_s_last_product(tmp_path, monkeypatch):
    network = prepare_for_training(load(save(tmp_path), "qlora"), Method(kind="qlora", rank=2), Memory())
    calls = count_products(network, monkeypatch)
    sum_losses(network, to_batch(row_of(list(range(10))), CPU)).backward()
    assert len(calls) == 8
    assert calls == {name: 2 if name.endswith("mlp.c_proj") else 3 for name in calls}, "forward, recomputation, backward"


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("mlp", "layers"), [(1, 0), (2, 0), (0, 1), (1, 1)])
def test_what_layers_keep_is_not_computed_again_and_changes_nothing(tmp_path, mlp, layers, offload, kind, monkeypatch):
    save(tmp_path)
    batches = [to_batch(row_of(list(range(start, start + 10))), CPU) for start in (0, 50)]
    results = []
    for options in ({}, {"keep_mlp": mlp, "keep_layers": layers, "offload_activations": offload}):
        network = prepare_for_training(load(tmp_path, kind), Method(kind=kind, rank=2), Memory(**options))
        torch.manual_seed(1)
        for parameter in named_trainable(network).values():
            torch.nn.init.normal_(parameter, std=0.1)
        calls = count_products(network, monkeypatch)
        losses = [sum_losses(network, batch) for batch in batches]  # both kept at once
        sum(losses).backward()
        results.append([*losses, *(parameter.grad for parameter in named_trainable(network).values())])
    assert all(torch.equal(mine, plain) for plain, mine in zip(*results, strict=True))
    for layer in range(2):
        modules = ("attn.c_attn", "attn.c_proj", *(["mlp.c_fc"] if layer < 2 - layers - mlp else []))
        again = {f"{layer}.{module}" for module in modules} if layer < 2 - layers else set()
        assert {name for name, count in calls.items() if count == 6 and name.startswith(f"{layer}.")} == again
        assert all(calls[f"{layer}.{module}"] in (4, 6) for module in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))


def test_activations_are_checkpointed_only_as_asked(tmp_path):
    model = load(save(tmp_path))
    on = prepare_for_training(model, Method(rank=2), Memory())
    assert on.training and on.is_gradient_checkpointing and not on.config.use_cache
    assert not prepare_for_training(load(tmp_path), Method(rank=2), Memory(checkpoint_activations=False)).is_gradient_checkpointing


def test_dropouts_of_the_base_are_off(tmp_path):
    config = GPTBigCodeConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=100, resid_pdrop=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch, model = to_batch(row_of(list(range(10))), CPU), load(tmp_path).train()
    use_loss_head(model)
    assert sum_losses(model, batch) == sum_losses(model, batch)


def test_a_lora_name_that_matches_nothing_is_a_mistake():
    with pytest.raises(Mistakes, match="method.targets: q_attn matches no linear module; the model has c_attn, c_fc, c_proj"):
        add_lora(make(CONFIGS["multi-query"]), Method(targets=["c_attn", "q_attn"]))


def damage(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"), "1 weights that the model needs are missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "1 weights are in the files that the model does not have, extra"),
        (lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(5)}), "1 weights have another shape"),
    ],
)
def test_weights_that_do_not_match_are_fatal(tmp_path, change, what):
    damage(save(tmp_path), change)
    with pytest.raises(Mistakes, match=what):
        load(tmp_path)


def test_damaged_and_absent_files_are_mistakes(tmp_path):
    folder = save(tmp_path / "cut")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(Mistakes, match="damaged"):
        load(folder)
    folder = save(tmp_path / "shards", shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(Mistakes, match="is not there"):
        load(folder)


def test_pickled_weights_are_not_read(tmp_path):
    folder = save(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Mistakes, match="holds no safetensors"):
        fetch(Model(name=str(folder)))


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    folder = save(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "trap.Trap"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text("raise SystemExit('this ran')")
    assert type(load(folder)).__name__ == "GPTBigCodeForCausalLM"


@pytest.mark.parametrize(
    ("error", "key", "fix"),
    [
        ("GatedRepoError", "model.name", "accept the licence at https://huggingface.co/bigcode/starcoder.*HF_TOKEN"),
        ("RepositoryNotFoundError", "model.name", "check the spelling.*HF_TOKEN.*folder"),
        ("RevisionNotFoundError", "model.revision", "branch, tag or commit"),
        ("LocalEntryNotFoundError", "model.name", "network.*local folder"),
    ],
)
def test_a_model_that_cannot_be_downloaded_says_what_to_do(monkeypatch, error, key, fix):
    from huggingface_hub import errors

    from finetune import model

    def fail(*_, **__):
        kind = getattr(errors, error)
        if error == "LocalEntryNotFoundError":
            raise kind("offline")
        raise kind("refused", response=mock.MagicMock())

    monkeypatch.setattr(model, "snapshot_download", fail)
    with pytest.raises(Mistakes, match=f"{key}: .*{fix}"):
        fetch(Model())


def test_weights_that_know_less_than_nothing_are_refused():
    check_first_loss(8.0, 4096, Model(name="x"))
    check_first_loss(9.0, 4096, Model(name="x", random_weights=True))
    for bad in (8.4, float("nan")):
        with pytest.raises(Mistakes, match="before the first step"):
            check_first_loss(bad, 4096, Model(name="x"))


def test_the_tiny_starcoder_is_one():
    folder = Path("models/tiny-starcoder")
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gpt_bigcode" and config["multi_query"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = """<|endoftext|> <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <gh_stars> <issue_start> <issue_comment>
    <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output> <commit_before> <commit_msg>
    <commit_after> <reponame>""".split()
    assert tokenizer.convert_tokens_to_ids(names) == list(range(19)) and tokenizer.convert_ids_to_tokens(range(19)) == names
    assert tokenizer.encode("x = 1234", add_special_tokens=False)[-4:] == tokenizer.convert_tokens_to_ids(list("1234"))
    for text in ("déjà vu\n\t", "def f(x):\n    return x  # 数字\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
