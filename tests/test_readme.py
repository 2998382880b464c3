"""Every command of the README is one that the programs understand, and every path in it exists."""

import re
import shlex
from pathlib import Path

import pytest

from finetune.__main__ import parse_arguments
from finetune.launch import find_launch, read_launch
from finetune.recipe import load_recipe

DOCUMENTS = [Path("README.md"), Path("models/tiny-starcoder/README.md"), *sorted(Path("recipes").glob("*.yaml"))]
DOCUMENTS += sorted(Path("accelerate_configs").glob("*.yaml"))
OURS = ("accelerate launch", "python -m finetune", "python train.py", "torchrun ")
PLACEHOLDER = "my-code.yaml"  # made by the `cp` in the line above it


def commands() -> list[tuple[str, str]]:
    """(document, command) of every line or code span that starts one of our programs."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        spans = [line.lstrip("# ") for line in text.splitlines()] + re.findall(r"`([^`\n]+)`", text)
        for span in spans:
            found += [(str(path), part.strip()) for part in span.split("&&") if part.strip().startswith(OURS)]
    return sorted(set(found))


def test_the_two_commands_are_there():
    text = Path("README.md").read_text()
    launch = "accelerate launch --config_file accelerate_configs/smoke.yaml train.py recipes/smoke.yaml"
    assert f"\npip install -r requirements.txt && {launch}\n" in text
    assert "\npip install -r requirements-dev.txt && pytest\n" in text
    assert len(commands()) > 15


@pytest.mark.parametrize(("document", "command"), commands())
def test_every_command_parses(document, command):
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "finetune"]:
        arguments = parse_arguments(words[3:])
        load_recipe(arguments.recipe, arguments.overrides)
        assert words[3] == "data" or read_launch(arguments.launch).processes
        return
    script = words.index("train.py")
    if words[0] == "accelerate":
        read_launch(words[words.index("--config_file") + 1])
    elif words[0] == "torchrun":
        assert find_launch({"WORLD_SIZE": "4", "RANK": "0"}, []).processes == 4 and "--nproc_per_node=4" in words
    rest = words[script + 1 :]
    if rest and "=" not in rest[0]:
        recipe = rest.pop(0)
        load_recipe("recipes/starcoder-lora.yaml" if recipe.endswith(PLACEHOLDER) else recipe, rest)
    else:
        load_recipe("recipes/starcoder-lora.yaml", rest)


@pytest.mark.parametrize(
    "document", [path for path in Path(".").glob("**/README.md") if not path.parts[0].startswith((".", "runs"))], ids=str
)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_every_launch_file_and_recipe_is_in_the_readme():
    text = Path("README.md").read_text()
    for path in [*Path("recipes").glob("*.yaml"), *Path("accelerate_configs").glob("*.yaml")]:
        assert path.name in text or f"[{path.stem}]" in text, path
    assert "**not been measured**" in text and "libaio-dev" in text
