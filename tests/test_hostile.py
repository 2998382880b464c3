"""What no recipe, launch, folder or environment may do: end in a traceback, hang, or train something else than it says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from finetune.evaluate import check_sample
from finetune.launch import check_environment, examine_deepspeed, examine_launch
from finetune.mistakes import Mistakes
from finetune.model import check_config, load_tokenizer, weight_files
from finetune.recipe import load_recipe
from finetune.shape import read_shape
from tests.launches import BIN, ROOT, free_port, launch_file, read_metrics, run

TINY = ROOT / "models" / "tiny-starcoder"
TRAIN = [
    sys.executable,
    "train.py",
    "recipes/smoke.yaml",
    "optim.steps=4",
    "optim.warmup_steps=1",
    "data.seq_len=64",
    "run.sample_tokens=0",
]
TRAIN += ["data.train=finetune", "data.eval_rows=2", "optim.micro_batch=1", "run.trackers=[]"]


@pytest.mark.parametrize(
    "text",
    [
        "a: !!bool x\n",
        "a: !!int ''\n",
        "a: !!float ''\n",
        "a: !!timestamp x\n",
        "optim: !!map [1]\n",
        "optim: !!set [1]\n",
        '"\\ud800": 1\n',
        "optim: {steps: 010}\n",
        "optim: {steps: 1:30}\n",
        f"optim: {{steps: {'9' * 9000}}}\n",
        "optim: {steps: 1" + "0" * 30 + "}\n",
        "optim: {micro_batch: 1000000000000}\n",
        "optim: {grad_accum: 1000000000000000}\n",
        "method: {rank: 1000000000}\n",
        "method: {alpha: 1" + "0" * 400 + "}\n",
        "run: {out: ~nosuchuser/x}\n",
        'run: {out: "a\\0b"}\n',
        "run: {out: $HOME/x}\n",
        f"run: {{out: {'x' * 300}}}\n",
        f"model: {{name: {'x' * 300}}}\n",
        "data: {train: ~nosuchuser/x}\n",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{k}: &{k} [{','.join([f'*{j}'] * 9)}]\n" for j, k in zip("abcdefgh", "bcdefghi", strict=True))
        + "model: *i\n",
    ],
    ids=lambda text: text[:40],
)
def test_no_yaml_gets_through_or_breaks_the_reader(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(Mistakes) as error:
        load_recipe(tmp_path / "recipe.yaml")
    assert time.monotonic() - started < 5 and len(str(error.value)) < 5000


def test_home_is_one_place_and_a_mistake_on_the_command_line_is_said_to_be_there(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    recipe = load_recipe("recipes/smoke.yaml", ["run.out=~/run", "model.name=~/model", "data.train=~/code"])
    assert (recipe.run.out, recipe.model.name, recipe.data.train[0].source) == ("/somewhere/run", "/somewhere/model", "/somewhere/code")
    with pytest.raises(Mistakes, match="^command line: x: no such key"):
        load_recipe("recipes/smoke.yaml", ["x.y=3"])


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ({"ACCELERATE_DYNAMO_BACKEND": "eager"}, "ACCELERATE_DYNAMO_BACKEND"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "ACCELERATE_MIXED_PRECISION"),
        ({"ACCELERATE_USE_CPU": "foo"}, "ACCELERATE_USE_CPU"),
        ({"ACCELERATE_DEBUG_MODE": "foo"}, "ACCELERATE_DEBUG_MODE"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM"),
        ({"ACCELERATE_TORCH_DEVICE": "cuda"}, "ACCELERATE_TORCH_DEVICE"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE"),
        ({"RANK": "5", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "foo"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "abc"}, "HF_HUB_DOWNLOAD_TIMEOUT"),
    ],
    ids=str,
)
def test_the_environment_outvotes_nothing(environ, key):
    with pytest.raises(Mistakes) as error:
        check_environment(environ)
    assert [mistake.key for mistake in error.value.mistakes] == [key]


def test_what_launchers_set_is_accepted():
    check_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    check_environment({"ACCELERATE_USE_CPU": "False", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"})


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("compute_environment: AMAZON_SAGEMAKER", "compute_environment"),
        ("main_process_port: abc", "main_process_port"),
        ("main_process_port: 99999", "main_process_port"),
        ("machine_rank: 5", "machine_rank"),
        ('use_cpu: "no"', "use_cpu"),
        ('gpu_ids: "0,0,0,0"', "gpu_ids"),
        ('gpu_ids: "a,b,c,d"', "gpu_ids"),
        ('gpu_ids: "0,1,2,-1"', "gpu_ids"),
        ("num_processes: 1" + "0" * 30, "num_processes"),
    ],
)
def test_values_of_a_launch_file_are_looked_at(tmp_path, line, key):
    lines = [each for each in Path("4xT4.yaml").read_text().splitlines() if not each.startswith(key)]
    (tmp_path / "launch.yaml").write_text("\n".join([*lines, line]))
    _, mistakes = examine_launch(tmp_path / "launch.yaml", ".")
    assert [mistake.key for mistake in mistakes] == [key]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reduce_bucket_size", -5),
        ("reduce_bucket_size", None),
        ("sub_group_size", 0.5),
        ("stage3_max_live_parameters", float("nan")),
        ("overlap_comm", 3),
        ("offload_param", {"device": {}}),
        ("zenflow", {}),
        ("stage", 3.0),
        ("contiguous_gradients", [1]),
    ],
)
def test_values_of_a_deepspeed_json_are_looked_at(tmp_path, key, value):
    content = json.loads(Path("ds_configs/zero3.json").read_text())
    content["zero_optimization"][key] = value
    (tmp_path / "ds.json").write_text(json.dumps(content))
    _, mistakes = examine_deepspeed(tmp_path / "ds.json", "ds.json")
    assert len(mistakes) == 1 and mistakes[0].key.startswith(f"zero_optimization.{key}")


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"steps_per_print": ' + "9" * 5000 + "}"])
def test_a_deepspeed_json_of_any_depth_and_width_is_a_message(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    assert examine_deepspeed(tmp_path / "ds.json", "ds.json")[1]


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model in two shards with an index."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in shards.items():
        save_file({name: tensors[name] for name in some}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in shards.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_index_reaches_nothing_outside_its_folder(model):
    index = model / "model.safetensors.index.json"
    assert len(weight_files(model)) > 10
    original = json.loads(index.read_text())
    name = sorted(original["weight_map"])[0]
    for file, expected in (
        ("../outside.safetensors", "outside its folder"),
        ("/tmp/x.safetensors", "outside its folder"),
        ("c.safetensors", "is not there"),
        ("b.safetensors", "which is named for it, but in a.safetensors"),
    ):
        edit(index, weight_map=original["weight_map"] | {name: file})
        with pytest.raises(Mistakes, match=expected):
            weight_files(model)
    for text in ("{", "[]", "3", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(Mistakes, match="is no index of weights"):
            weight_files(model)


def test_weights_that_are_no_file_are_a_message(model):
    (model / "a.safetensors").unlink()
    (model / "a.safetensors").mkdir()
    with pytest.raises(Mistakes, match="damaged weights"):
        weight_files(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"eos_token": 3}', '{"model": []}'])
def test_a_damaged_tokenizer_is_a_message(model, name, text):
    (model / name).write_text(text)
    try:
        load_tokenizer(model)
    except Mistakes as error:
        assert "no tokenizer could be loaded" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 10**7},
        {"n_head": 5},
        {"activation_function": "nope"},
        {"layer_norm_epsilon": "x"},
        {"resid_pdrop": "x"},
        {"dtype": "nope"},
        {"quantization_config": {"quant_method": "gptq"}},
        {"vocab_size": 10**30},
    ],
    ids=str,
)
def test_a_config_that_gives_no_model_is_a_message(model, changes):
    edit(model / "config.json", **changes)
    with pytest.raises(Mistakes, match="config.json"):
        read_shape(model)
        check_config(model)


def test_a_sample_outside_the_embedding_is_a_message(model):
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    sample = load_recipe("recipes/smoke.yaml", ["run.sample=<|user|>def f"]).run
    with pytest.raises(Mistakes, match="run.sample: it holds token 4096 of the tokenizer, and the embedding has 4096 rows"):
        check_sample(tokenizer, sample, read_shape(model))


def test_a_folder_with_other_files_is_left_alone_and_an_unfinished_run_s_is_not(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    done = run([*TRAIN, f"run.out={tmp_path}"])
    assert done.returncode == 2 and "holds other files (README.md), which a run could overwrite" in done.stderr
    assert os.listdir(tmp_path) == ["README.md"]
    (tmp_path / "README.md").unlink()
    done = run([*TRAIN, f"run.out={tmp_path}", "optim.lr=1e30"])
    assert done.returncode == 2 and (tmp_path / "run.lock").exists(), done.stderr
    done = run([*TRAIN, f"run.out={tmp_path}"])
    assert done.returncode == 0 and (tmp_path / "adapter_config.json").exists(), done.stderr[-2000:]


def test_one_process_under_torchrun_is_a_launch(tmp_path):
    command = [BIN / "torchrun", "--nproc_per_node=1", f"--master_port={free_port()}", *TRAIN[1:], f"run.out={tmp_path / 'out'}"]
    done = run(command)
    assert done.returncode == 0 and (tmp_path / "out" / "adapter_config.json").exists(), done.stderr[-2000:]


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    """And while they run, no other run may write where they do."""
    file = launch_file(tmp_path / "launch.yaml", 2, "zero2.json")
    out = tmp_path / "out"
    arguments = [*TRAIN[1:], f"run.out={out}", "optim.steps=100000"]
    command = [BIN / "accelerate", "launch", "--config_file", file, "--main_process_port", str(free_port()), *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    devnull = subprocess.DEVNULL
    process = subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env=environ, stdout=devnull, stderr=devnull, start_new_session=True
    )
    ranks = []
    try:
        limit = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < 2:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.2)
        done = run([*TRAIN, f"run.out={out}"])
        assert done.returncode == 2 and "another run is writing to" in done.stderr, done.stderr
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not (out / "adapter_config.json").exists()


def test_text_that_the_terminal_cannot_show_and_a_reader_that_leaves(tmp_path):
    environ = {"PYTHONIOENCODING": "ascii"}
    done = run([*TRAIN, f"run.out={tmp_path / 'out'}", 'run.sample="# é"', "run.sample_tokens=2"], environ=environ)
    assert done.returncode == 0 and "before training: # \\xe9" in done.stdout
    check = f"{sys.executable} -m finetune check recipes/smoke.yaml --launch accelerate_configs/smoke.yaml | true"
    done = run(["bash", "-c", check])
    assert "Traceback" not in done.stderr


def test_a_full_disk_while_the_tokenizer_is_saved_is_a_message(tmp_path):
    from finetune import checkpoint

    class Full:
        def save_pretrained(self, _):
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left"):
        checkpoint._save_tokenizer(Full(), tmp_path)


@pytest.mark.parametrize("program", [TRAIN[:3], [sys.executable, "-m", "finetune", "data", "recipes/smoke.yaml"]], ids=["train", "data"])
def test_data_that_cannot_be_read_is_one_message_and_leaves_nothing(tmp_path, program):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": \'b\'}\n{"text": "c"}\n')
    overrides = [f"data.train={tmp_path / 'rows.jsonl'}", f"run.out={tmp_path / 'out'}", f"data.cache={tmp_path / 'cache'}"]
    done = run([*program, *overrides])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1 and "rows.jsonl:2: not a line of JSON" in done.stderr
    assert not (tmp_path / "out").exists()


def test_data_are_shown_without_training(tmp_path):
    command = [sys.executable, "-m", "finetune", "data", "recipes/smoke.yaml", "data.train=finetune", f"data.cache={tmp_path / 'cache'}"]
    done = run(command)
    assert done.returncode == 0 and "--- piece ---" in done.stdout and "rows of 256 (best_fit)" in done.stdout, done.stderr
