"""What ships fits together: recipes with the launch files that they name, the schema with the recipes, fields with the code."""

import ast
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from finetune.launch import read_launch
from finetune.machine import describe_machine
from finetune.preflight import find_mistakes
from finetune.recipe import Recipe, all_keys, load_recipe, schema_json

RECIPES = sorted(Path("recipes").glob("*.yaml"))
LAUNCH_FILES = sorted(Path("accelerate_configs").glob("*.yaml"))
LAUNCHED = re.compile(r"^# accelerate launch --config_file (\S+) train\.py (\S+)$", re.MULTILINE)
MACHINES = {"smoke.yaml": "cpu", "4xT4-zero3-nvme.yaml": "4xT4,libaio=yes"}


def header(path: Path) -> str:
    return "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))


def pairs():
    """(recipe, launch file) for each launch file that a recipe's header names, or whose own header names a recipe."""
    for recipe in RECIPES:
        for launch in re.findall(r"(?:accelerate_configs/)?[\w-]+\.yaml", header(recipe)):
            if not launch.startswith("recipes/") and Path(launch).exists():
                yield recipe, Path(launch)
    for launch in LAUNCH_FILES:
        named = LAUNCHED.search(header(launch))
        assert named and Path(named[1]).resolve() == launch.resolve(), f"{launch} has no command of its own"
        yield Path(named[2]), launch


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_headed_by_its_command(path):
    assert len(path.read_text().splitlines()) < 45
    own = [named for named in LAUNCHED.findall(header(path)) if named[1] == str(path)]
    assert own or f"# python train.py {path} " in header(path)
    assert len(yaml.safe_load(path.read_text())) <= 6
    assert "train: ." in path.read_text(), "runs as it is, on the repository's own source"


@pytest.mark.parametrize(("recipe", "launch"), sorted(set(pairs())), ids=str)
def test_every_recipe_goes_with_the_launch_files_that_it_names(recipe, launch, tmp_path):
    machine = describe_machine(MACHINES.get(launch.name, "4xT4"))
    assert find_mistakes(load_recipe(recipe, [f"run.out={tmp_path}"]), read_launch(launch), machine, str(recipe)) == []


def test_every_launch_file_is_named_by_a_recipe():
    named = {
        launch.resolve().name for recipe, launch in pairs() if launch.name in header(recipe) or launch.resolve().name in header(recipe)
    }
    # NVMe offload is not measured, so no recipe recommends it.
    assert named == {path.name for path in LAUNCH_FILES} - {"4xT4-zero3-nvme.yaml"}


def test_the_flagship_is_the_default():
    import train

    assert load_recipe(train.FLAGSHIP).model.name == Recipe().model.name
    assert Path("4xT4.yaml").is_symlink() and Path("4xT4.yaml").resolve() == Path("accelerate_configs/4xT4.yaml").resolve()


def test_the_schema_is_current_and_accepts_every_recipe():
    committed = Path("recipes/schema.json").read_text()
    assert committed == schema_json(), "python -m finetune.recipe > recipes/schema.json"
    for path in RECIPES:
        assert "yaml-language-server: $schema=schema.json" in header(path)
        jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(committed))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"optim": {"learning_rate": 1.0}}, json.loads(committed))


def fields_read(sources: list[str]) -> set[str]:
    """Dotted keys that code reads: `x.section.key`, or `y.key` where y was assigned `x.section` or is a parameter of its class."""
    read = set()
    for source in sources:
        tree, names = ast.parse(source), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                section = ast.unparse(node.annotation).rpartition(".")[2].lower()
                if section in Recipe.model_fields:
                    names.setdefault(node.arg, set()).add(section)
            if isinstance(node, ast.Assign):
                for target, value in _assigned(node):
                    if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and value.attr in Recipe.model_fields:
                        names.setdefault(target.id, set()).add(value.attr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                read.add(f"{node.value.attr}.{node.attr}")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                read |= {f"{section}.{node.attr}" for section in names.get(node.value.id, ())}
    return read


def _assigned(node: ast.Assign):
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def test_every_field_is_read_by_code():
    # preflight compares fields with each other; what it alone reads moves nothing, but for the precision, which it decides.
    files = [Path("train.py"), *(p for p in Path("finetune").glob("*.py") if p.name not in ("recipe.py", "preflight.py"))]
    assert set(all_keys()) - fields_read([path.read_text() for path in files]) == {"model.precision"}


def test_a_dead_field_would_be_found():
    assert "optim.lr" in fields_read(["optim, run = recipe.optim, recipe.run\nprint(optim.lr)"])
    assert "data.seq_len" in fields_read(["def f(data: Data): return data.seq_len"])
    assert "optim.lr" not in fields_read(["optim = recipe.data\nprint(optim.lr, other.lr)"])
