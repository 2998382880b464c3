"""The layers hold: what must run without torch does not import it, and no module reaches up."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = {path.stem: path for path in Path("finetune").glob("*.py")}
WITHOUT_TORCH = {
    "mistakes": set(),
    "quiet": set(),
    "fim": {"mistakes"},
    "folder": set(),
    "sources": {"folder", "mistakes", "recipe"},
    "overlap": {"mistakes"},
    "store": {"formats"},
    "recipe": {"mistakes"},
    "shape": {"mistakes"},
    "machine": {"mistakes"},
    "schedule": {"recipe"},
    "launch": {"mistakes", "recipe"},
    "encode": {"fim", "formats", "mistakes", "recipe"},
    "packing": set(),
    "workers": {"encode", "formats", "mistakes", "overlap", "store"},
    "corpus": {"encode", "fim", "folder", "formats", "mistakes", "overlap", "packing", "recipe", "sources", "store", "workers"},
    "describe": {"packing"},
    "preflight": {"launch", "machine", "mistakes", "recipe", "shape", "sources"},
}
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "safetensors"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "finetune" else {node.module}
    return names


def siblings(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("finetune.")}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_modules_without_torch_import_only_what_lies_below(name):
    assert not {module.split(".")[0] for module in imports(MODULES[name])} & HEAVY
    assert siblings(MODULES[name]) <= WITHOUT_TORCH[name]


def test_there_is_no_circle():
    graph, done = {name: siblings(path) - {name} for name, path in MODULES.items()}, set()
    while ready := {name for name, below in graph.items() if name not in done and below <= done}:
        done |= ready
    assert done == set(graph), f"a circle among {set(graph) - done}"


def test_nothing_imports_train_and_nothing_is_called_utils():
    # But tests, and the benchmarks, which measure the run itself.
    for path in [*MODULES.values(), *Path("models").glob("*.py")]:
        assert "train" not in {name.split(".")[0] for name in imports(path)}, path
        assert "util" not in path.stem
    assert len(Path("train.py").read_text().splitlines()) <= 350


def test_checks_run_before_torch_is_imported():
    program = (
        "import sys, train; sys.argv=['train.py']\n"
        "try: train.check(['recipes/smoke.yaml'])\n"
        "except train.Mistakes: pass\n"
        "import finetune.__main__\n"
        f"print(sorted(set(sys.modules) & {HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_runs_code_from_a_model_or_spreads_layers_by_itself():
    for path in [Path("train.py"), *MODULES.values()]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "device_map", "weights_only"):
                assert node.arg == "device_map" and ast.unparse(node.value) == "{'': device}", f"{path}: {ast.unparse(node.value)}"
