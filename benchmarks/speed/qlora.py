"""Tokens a second and memory of QLoRA on StarCoder 15.5B on one GPU under a T4's rules: this project beside TRL's SFTTrainer.

python benchmarks/speed/qlora.py OUT.json [CASE ...]

A T4's rules: 14.62 GiB a process, fp16, no flash and no cuDNN attention (see rehearse_4xT4.py). Same random weights, same LoRA (rank
16 on c_attn, c_proj and c_fc), rows of full length, checkpointed activations, AdamW. This project runs its real train.py,
documents kept apart; TRL gets rows of one stream. Its adapters are made fp32 after it cast them to bf16, under which fp16 training fails.
Tokens a second are the median of the steps after the fourth. Model FLOPs are 4 x parameters a token (forward, and gradients of
activations), without the recomputation.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
STEPS, WARM_UP = 25, 4
PARAMETERS = 15.517e9
CASES = {  # trainer, row length, micro batch, offload of activations
    "ours 2048 x 1": ("ours", 2048, 1, False),
    "TRL 2048 x 1": ("trl", 2048, 1, False),
    "ours 4096 x 1": ("ours", 4096, 1, False),
    "ours 8192 x 1 offload": ("ours", 8192, 1, True),
    "ours 2048 x 4 offload": ("ours", 2048, 4, True),
    "ours 8192 x 1": ("ours", 8192, 1, False),
    "TRL 4096 x 1": ("trl", 4096, 1, False),
}


def ours(model: str, length: int, micro_batch: int, offload: bool, out: Path) -> list[float]:
    import train
    from benchmarks.rehearse_4xT4 import be_a_t4

    train.silence()
    overrides = (
        f"model.name={model} run.out={out} data.seq_len={length} optim.micro_batch={micro_batch} optim.steps={STEPS} optim.warmup_steps=2"
    )
    overrides += f" optim.grad_accum=1 data.eval_rows=2 run.sample_tokens=0 run.trackers=[] model.precision=fp16 data.cache={out}/cache"
    overrides += f" memory.offload_activations={str(offload).lower()} run.eval_every=1000"
    job = train.check(["recipes/starcoder-qlora.yaml", *overrides.split()])
    be_a_t4()
    train.train(*job)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["tokens_per_second"] for line in lines if "loss" in line]


def trl(model: str, length: int, micro_batch: int, offload: bool, out: Path) -> list[float]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from benchmarks.rehearse_4xT4 import be_a_t4

    be_a_t4()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = "<fim_pad>"
    text = "".join(path.read_text() for path in sorted(ROOT.rglob("*.py")))
    ids = tokenizer(text)["input_ids"]
    ids *= 1 + (STEPS * micro_batch * length) // len(ids)
    rows = [{"input_ids": ids[start : start + length]} for start in range(0, STEPS * micro_batch * length, length)]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float16
    )
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=quantization, dtype=torch.float16, device_map={"": 0})
    network = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM"))
    config = SFTConfig(
        output_dir=str(out),
        per_device_train_batch_size=micro_batch,
        max_steps=STEPS,
        max_length=length,
        fp16=True,
        bf16=False,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=2e-4,
        report_to="none",
        save_strategy="no",
        logging_steps=10,
    )
    seconds = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.cuda.synchronize()
            self.started = time.monotonic()

        def on_step_end(self, *_, **__):
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - self.started)

    trainer = SFTTrainer(network, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Clock()])
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainer.train()
    return [micro_batch * length / each for each in seconds]


def case(trainer: str, length: int, micro_batch: int, offload: bool, model: str, out: Path) -> None:
    import torch

    speeds = {"ours": ours, "trl": trl}[trainer](model, length, micro_batch, offload, out)
    steady = speeds[WARM_UP:]
    result = {"tokens_per_second": round(statistics.median(steady), 1), "steps": len(steady), "slowest": round(min(steady), 1)}
    for name, peak in (("allocated", torch.cuda.max_memory_allocated()), ("reserved", torch.cuda.max_memory_reserved())):
        result[f"peak_{name}_gib"] = round(peak / 2**30, 2)
    Path(out, "result.json").write_text(json.dumps(result))


def matrix_rate() -> float:
    """FLOP/s of fp16 matrix products, measured."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
    return 50 * 2 * 8192**3 / (time.monotonic() - started)


def main(out: Path, names: list[str]) -> None:
    import torch

    from benchmarks.rehearse_4xT4 import make_weights

    rate, work = matrix_rate(), Path(tempfile.mkdtemp())
    model = make_weights("bigcode/starcoder", work / "starcoder")
    torch.cuda.empty_cache()
    versions = {p: __import__(p).__version__ for p in ("torch", "transformers", "trl", "peft", "bitsandbytes")}
    environment = {"gpu": torch.cuda.get_device_name(), "fp16_matrix_tflops": round(rate / 1e12), **versions}
    results = {"command": "python benchmarks/speed/qlora.py OUT.json", "environment": environment | {"emulated": __doc__.split("\n\n")[2]}}
    for name in names or CASES:
        folder = work / name.replace(" ", "-")
        folder.mkdir()
        arguments = [sys.executable, __file__, "--case", name, str(model), str(folder)]
        started = time.monotonic()
        environ = os.environ | {"FINETUNE_REHEARSAL": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(["timeout", "240", *arguments], cwd=ROOT, capture_output=True, text=True, env=environ)
        path = folder / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {"exit_code": done.returncode, "stderr": done.stderr[-3000:]}
        if "tokens_per_second" in result:
            result["model_flops_utilisation"] = round(4 * PARAMETERS * result["tokens_per_second"] / rate, 3)
        results[name] = result | {"seconds": round(time.monotonic() - started)}
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, {key: value for key, value in result.items() if key != "stderr"}, result.get("stderr", "")[-700:], flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        case(*CASES[sys.argv[2]], sys.argv[3], Path(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
