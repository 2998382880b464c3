"""A recipe is read strictly: what is not understood is said, all at once, and nothing else is trained."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from finetune.mistakes import Mistakes
from finetune.recipe import Recipe, Source, all_keys, dump_recipe, load_recipe

CASES = Path("tests/cases/recipes")


def mistakes_of(path, overrides=()) -> list[str]:
    with pytest.raises(Mistakes) as error:
        load_recipe(path, list(overrides))
    for mistake in error.value.mistakes:
        assert mistake.file and mistake.what and mistake.fix, mistake
    return [str(mistake) for mistake in error.value.mistakes]


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unknown_key", ["optim.learning_rte: no such key: did you mean optim.lr?"]),
        ("device_map", ["model.device_map: no such key: remove it"]),
        ("duplicate_section", ["optim is given twice"]),
        ("not_yaml", ["not valid YAML at line"]),
        ("python_tag", ["not valid YAML"]),
        ("three_mistakes", ["method.kind: 'lorra'", "optim.lr: -1.0", "data.fim_rate: 1.5"]),
    ],
)
def test_bad_recipes_are_explained(name, expected):
    found = mistakes_of(CASES / f"{name}.yaml")
    assert len(found) == len(expected)
    for text in expected:
        assert any(text in mistake and f"{name}.yaml" in mistake for mistake in found), found
    assert not Path("pwned").exists()


def test_an_empty_recipe_is_the_flagship():
    assert load_recipe(CASES / "empty.yaml") == Recipe()
    assert Recipe().model.name == "bigcode/starcoder" and Recipe().method.kind == "lora"


def test_numbers_without_a_point_are_numbers(tmp_path):
    assert load_recipe(CASES / "lr_is_text.yaml").optim.lr == 1e-4
    assert load_recipe(write(tmp_path, "optim: {lr: 2E-5}")).optim.lr == 2e-5
    assert load_recipe(write(tmp_path, "optim: {clip: 1}")).optim.clip == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {steps: '100'}", "optim.steps: '100'"),
        ("optim: {steps: 1.5}", "optim.steps: 1.5"),
        ("optim: {steps: true}", "optim.steps: True"),
        ("optim: {steps: 10, warmup_steps: 10}", "optim.warmup_steps: 10 is not less than"),
        ("data: {seq_len: 4}", "data.seq_len: 4"),
        ("method: {targets: c_attn}", "method.targets: 'c_attn'"),
        ("method: {targets: [c_attn, 3]}", "method.targets.1: 3"),
        ("model: {random_weights: true}\nmethod: {kind: qlora}", "model.random_weights"),
        ("optm: {lr: 1.0}", "optm: no such key: did you mean optim?"),
        ("optim: 3", "optim: a section is expected"),
        ("- a\n- b", "a list at the top"),
        ("optim: {lr: .nan}", "optim.lr"),
        ("optim: {lr: .inf}", "optim.lr: inf"),
        ("1: 2", "1: no such key"),
        ("null: 2", "None: no such key"),
        ("optim: {3: 4}", "optim.3: no such key"),
        ("run: {trackers: [tensorbord]}", "did you mean tensorboard?"),
        ("method: {r: 8}", "method.r: no such key"),
        ("method: {zzz: 8}", "method.zzz: no such key: method has kind, rank, alpha, dropout, targets"),
        ("zzz: {lr: 1.0}", "zzz: no such key: the sections are model, method, data"),
        ("training: {learning_rate: 1.0}", "training: no such key"),
    ],
)
def test_other_mistakes_are_explained(tmp_path, text, expected):
    found = mistakes_of(write(tmp_path, text))
    assert any(expected in mistake for mistake in found), found


def test_files_that_are_no_recipe(tmp_path):
    assert "No such file" in mistakes_of("recipes/starcoder-lorra.yaml")[0]
    assert "did you mean recipes/starcoder-lora.yaml?" in mistakes_of("recipes/starcoder-lorra.yaml")[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in mistakes_of(tmp_path / "binary.yaml")[0]
    assert "directory" in mistakes_of(tmp_path)[0]


def test_overrides_win_and_are_typed():
    overrides = ["optim.lr=1e-4", "data.seq_len=4096", "method.targets=[c_attn]", "run.out=runs/other", "model.random_weights=true"]
    recipe = load_recipe("recipes/starcoder-lora.yaml", overrides)
    assert (recipe.optim.lr, recipe.data.seq_len, recipe.method.targets) == (1e-4, 4096, ["c_attn"])
    assert (recipe.run.out, recipe.model.random_weights) == ("runs/other", True)
    assert recipe.optim.grad_accum == load_recipe("recipes/starcoder-lora.yaml").optim.grad_accum


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr", "command line: optim.lr: not an override"),
        ("lr=1", "command line: lr=1: not an override"),
        ("optim.learning_rate=1", "command line: optim.learning_rate: no such key: did you mean optim.lr?"),
        ("optim.steps=many", "command line: optim.steps: 'many'"),
        ("optim.steps=[", "command line: optim.steps: not valid YAML"),
        ("optim.lr=", "command line: optim.lr: None"),
        ("method.targets=[c_attn, 3]", "command line: method.targets.1: 3"),
    ],
)
def test_bad_overrides_are_explained(override, expected):
    found = mistakes_of("recipes/smoke.yaml", [override, "optim.clip=-1"])
    assert any(expected in mistake for mistake in found) and "optim.clip" in "".join(found), "all are said at once"


@pytest.mark.parametrize("override", ["memory.offload_activations=true", "memory.keep_layers=1", "memory.keep_mlp=1"])
def test_choices_of_checkpointing_without_checkpointing(override):
    load_recipe("recipes/smoke.yaml", [override])
    (mistake,) = mistakes_of("recipes/smoke.yaml", [override, "memory.checkpoint_activations=false"])
    assert override.partition("=")[0] in mistake and "memory.checkpoint_activations is off" in mistake


sections = {
    "optim": st.fixed_dictionaries(
        {},
        optional={
            "lr": st.floats(1e-9, 1.0),
            "warmup_steps": st.integers(0, 99),
            "steps": st.integers(100, 10**6),
            "schedule": st.sampled_from(["cosine", "linear"]),
        },
    ),
    "data": st.fixed_dictionaries({}, optional={"fim_rate": st.floats(0, 1), "seq_len": st.integers(8, 10**5)}),
    "run": st.fixed_dictionaries({}, optional={"sample": st.text(min_size=1) | st.just("\x85\u2028 x"), "trackers": st.just([])}),
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("5", "data.train.0: a path or a hub name is expected, not 5"),
        ("[]", r"data.train: \[\]: value should have at least 1 item"),
        ("{source: x, weigth: 2}", "data.train.0.weigth: no such key: did you mean weight?"),
        ("{source: x, zzz: 2}", "data.train.0.zzz: no such key: a source has source, weight, format"),
        ("{weight: 2}", "data.train.0.source: .*field required: source is a folder of source code"),
        ("[{source: a, weight: -1.0}, b]", "data.train.0.weight: -1.0: input should be greater than 0: weight is how often"),
        ("{source: a, format: mesages}", "data.train.0.format: 'mesages' is none of .*: did you mean messages?"),
    ],
)
def test_mistakes_of_a_source_are_explained(value, expected):
    with pytest.raises(Mistakes, match=expected):
        load_recipe("recipes/smoke.yaml", [f"data.train={value}"])


def test_sources_are_written_short_or_in_full():
    for value in ("a", "[a]", "{source: a}", "[{source: a, weight: 1.0}]"):
        assert load_recipe("recipes/smoke.yaml", [f"data.train={value}"]).data.train == [Source(source="a")]


@given(st.fixed_dictionaries({}, optional=sections))
def test_a_recipe_that_is_written_out_reads_back_equal(tmp_path_factory, mapping):
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(dump_recipe(Recipe.model_validate(mapping)), encoding="utf-8")
    assert load_recipe(path) == Recipe.model_validate(mapping)
    assert {f"{section}.{key}" for section, keys in yaml.safe_load(path.read_text("utf-8")).items() for key in keys} == set(all_keys())
