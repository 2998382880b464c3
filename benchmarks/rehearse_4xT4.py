"""Rehearse the recipes of four T4s on one large GPU: real train.py, real launch files, each process held to a T4's memory and kernels.

python benchmarks/rehearse_4xT4.py OUT.json [NAME ...]

What is emulated: four processes share one GPU; each may allocate 14.62 GiB, which is what PyTorch reports as a T4's total; flash and
cuDNN attention are off, since a T4 has neither; precision is fp16. NCCL talks through loopback sockets, so nothing here says
anything about speed. Weights are random in the real models' shapes, and the tokenizer is the tiny StarCoder's.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
T4_BYTES = int(14.62 * 2**30)
LIMIT_SECONDS = 500
RESULT_ENV = "REHEARSAL_RESULT"
SHORT = "optim.steps=2 optim.warmup_steps=1 optim.grad_accum=1 data.eval_rows=4 run.sample_tokens=0 run.trackers=[] model.precision=fp16"
CASES = {  # name: (recipe, launch file)
    "starcoder-lora": ("recipes/starcoder-lora.yaml", "4xT4.yaml"),
    "starcoder-qlora": ("recipes/starcoder-qlora.yaml", "accelerate_configs/4xT4-zero2.yaml"),
    "starcoder-qlora, one GPU": ("recipes/starcoder-qlora.yaml", "accelerate_configs/1xGPU.yaml"),
    "starcoder2-15b-qlora": ("recipes/starcoder2-15b-qlora.yaml", "accelerate_configs/4xT4-ddp.yaml"),
    "starcoderbase-1b-full": ("recipes/starcoderbase-1b-full.yaml", "accelerate_configs/4xT4-zero2.yaml"),
    "starcoderbase-3b-lora": ("recipes/starcoderbase-3b-lora.yaml", "accelerate_configs/4xT4-ddp.yaml"),
    "starcoderbase-3b-lora, ZeRO-3": ("recipes/starcoderbase-3b-lora.yaml", "4xT4.yaml"),
}


def be_a_t4() -> None:
    """Must come before CUDA is first used in this process."""
    if "RANK" in os.environ:
        # NCCL refuses two ranks on one GPU unless each claims a host of its own; then it talks through sockets.
        os.environ |= {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}
        os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    import torch

    torch.cuda.set_per_process_memory_fraction(T4_BYTES / torch.cuda.get_device_properties(0).total_memory)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def rank() -> None:
    """One process of a rehearsal: train.py, then what each rank needed into the result file."""
    import train

    train.silence()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    job = train.check(sys.argv[2:])
    be_a_t4()
    from finetune import telemetry

    gathered, gather_ranks, memory_now = [], telemetry.gather_ranks, telemetry.memory_now
    telemetry.memory_now = lambda device: (
        memory_now(device) | {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    )
    telemetry.gather_ranks = lambda *arguments: gathered.append(gather_ranks(*arguments)) or gathered[-1]
    figures = train.train(*job)
    if os.environ.get("RANK", "0") == "0":
        steps = [json.loads(line) for line in (Path(job[0].run.out) / "metrics.jsonl").read_text().splitlines()]
        Path(os.environ[RESULT_ENV]).write_text(json.dumps({"ranks": gathered[-1], "figures": figures, "metrics": steps}))


def make_weights(name: str, folder: Path) -> Path:
    """Random fp16 weights of a model's shapes, on disk as the hub keeps them; the tiny tokenizer's tokens are likelier than others."""
    import torch
    from safetensors.torch import save_file

    from finetune.shape import SHIPPED, load_shape

    shape, source = load_shape(name), SHIPPED / name.rpartition("/")[2]
    folder.mkdir(parents=True)
    for path in (source / "config.json", *(ROOT / "models/tiny-starcoder").glob("tokenizer*.json")):
        shutil.copy(path, folder)
    torch.manual_seed(0)
    direction = torch.randn(shape.hidden_size, device="cuda").sign() / shape.hidden_size**0.5
    weight_map, shard, size, count = {}, {}, 0, 0

    def flush() -> None:
        nonlocal shard, size, count
        file = f"model-{count:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard, size, count = {}, 0, count + 1

    for tensor_name, tensor_shape in shape.tensors().items():
        if len(tensor_shape) == 1:
            is_final = tensor_name in ("transformer.ln_f.weight", "model.norm.weight")
            tensor = torch.full(tensor_shape, 0.05 if is_final else 1.0) if tensor_name.endswith("weight") else torch.zeros(tensor_shape)
            if tensor_name in ("transformer.ln_f.bias", "model.norm.bias"):
                tensor = 8 * direction
        else:
            tensor = torch.randn(tensor_shape, device="cuda", dtype=torch.float16) * 0.02
            if tensor_shape[0] == shape.vocab_size:
                tensor[:4096] += 0.5 * direction.half()
        shard[tensor_name] = tensor.half().cpu()
        size += shard[tensor_name].nbytes
        if size > 4e9:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def main(out: Path, names: list[str]) -> None:
    import torch

    results, made = json.loads(out.read_text()) if out.exists() else {}, {}
    work = Path(tempfile.mkdtemp())
    for name in names or CASES:
        recipe, launch = CASES[name]
        from finetune.recipe import load_recipe

        model_name = load_recipe(recipe).model.name
        if model_name not in made:
            for folder in made.values():
                shutil.rmtree(folder)  # the disk holds one large model
            made = {model_name: make_weights(model_name, work / model_name)}
        torch.cuda.empty_cache()
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            launch,
            "benchmarks/rehearse_4xT4.py",
            "--rank",
            recipe,
        ]
        overrides = [f"model.name={made[model_name]}", f"run.out={work / name.replace(' ', '-')}", *SHORT.split()]
        environ = os.environ | {"FINETUNE_REHEARSAL": "1", RESULT_ENV: str(work / "result.json")}
        started = time.monotonic()
        limited = ["timeout", "--kill-after=10", str(LIMIT_SECONDS), *command, *overrides]
        done = subprocess.run(limited, cwd=ROOT, env=environ, capture_output=True, text=True)
        result = {
            "command": " ".join(["python", *command[1:], *SHORT.split()]),
            "exit_code": done.returncode,
            "seconds": round(time.monotonic() - started, 1),
        }
        if done.returncode == 0:
            result |= json.loads((work / "result.json").read_text())
        else:
            result["stderr"] = done.stderr[-6000:]
        results[name] = result
        versions = {p: __import__(p).__version__ for p in ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")}
        environment = {"gpu": torch.cuda.get_device_name(), "python": sys.version.split()[0], **versions}
        results["environment"] = environment | {"emulated": __doc__.split("\n\n")[2].replace("\n", " ")}
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(
            name,
            done.returncode,
            result["seconds"],
            [round(r["peak_allocated_bytes"] / 2**30, 2) for r in result.get("ranks", [])],
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank()
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
