"""Tokens a second and memory of preparing a folder of source code, beside the loop of the usual fine-tuning scripts.

python benchmarks/prepare_data.py FOLDER OUT.json

The usual loop is `datasets`: load the files as text, map the tokenizer over them, map a function that joins token lists and cuts
them into rows. It reads the same files. It does neither near-duplicates nor a split nor fill-in-the-middle, and cuts documents
where a row ends. Each case runs in a process of its own with empty caches; memory is the peak of what the process and
its children hold for themselves together (USS), seen every 0.2 s.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from itertools import chain
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
MODEL, SEQ_LEN = ROOT / "models" / "tiny-starcoder", 1024


def usual_loop(files: list[str], cache: str) -> int:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer, cores = AutoTokenizer.from_pretrained(MODEL), len(os.sched_getaffinity(0))
    texts = load_dataset("text", data_files=files, sample_by="document", encoding_errors="replace", split="train", cache_dir=cache)
    tokens = texts.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"], num_proc=cores)

    def group(rows):
        joined = {name: list(chain(*rows[name])) for name in rows}
        length = len(joined["input_ids"]) // SEQ_LEN * SEQ_LEN
        out = {name: [ids[start : start + SEQ_LEN] for start in range(0, length, SEQ_LEN)] for name, ids in joined.items()}
        return out | {"labels": out["input_ids"].copy()}

    return len(tokens.map(group, batched=True, num_proc=cores)) * SEQ_LEN


def ours(folder: str, cache: str, fim_rate: float) -> int:
    from transformers import AutoTokenizer

    from finetune.corpus import prepare
    from finetune.recipe import Data

    data = Data.model_validate({"train": folder, "seq_len": SEQ_LEN, "fim_rate": fim_rate, "cache": cache})
    return prepare(data, AutoTokenizer.from_pretrained(MODEL), 0, 1024, 4096).manifest()["tokens"]


def run_case(name: str, folder: str, files: list[str], cache: str) -> int:
    return usual_loop(files, cache) if name == "usual loop" else ours(folder, cache, float(name.rpartition(" ")[2]))


def measure(name: str, folder: str, limit_bytes: int) -> dict:
    """Run a case in a new process on at most `limit_bytes` of the folder's files, linked into a folder of their own."""
    from finetune.folder import list_files

    with tempfile.TemporaryDirectory() as scratch:
        linked, size, files = Path(scratch, "code"), 0, []
        for path in list_files(Path(folder), lambda *_: None):
            if (size := size + path.stat().st_size) > limit_bytes:
                break
            target = linked / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            files.append(str(target))
        Path(scratch, "job.json").write_text(json.dumps([name, str(linked), files, str(Path(scratch, "cache"))]))
        process = psutil.Popen([sys.executable, __file__, "--case", f"{scratch}/job.json"], stdout=subprocess.PIPE, text=True)
        peaks = [0]

        def watch():
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                total = 0
                for each in [process, *process.children(recursive=True)]:
                    try:
                        total += each.memory_full_info().uss
                    except psutil.Error:
                        pass
                peaks[0] = max(peaks[0], total)
                time.sleep(0.2)

        watcher = threading.Thread(target=watch)
        watcher.start()
        output = process.communicate()[0]
        watcher.join()
        tokens, seconds = map(float, output.split()[-2:])
    megabytes = round(min(size, limit_bytes) / 1e6, 1)
    return {
        "case": name,
        "megabytes": megabytes,
        "files": len(files),
        "tokens": int(tokens),
        "seconds": round(seconds, 1),
        "tokens_per_second": int(tokens / seconds),
        "peak_memory_mib": round(peaks[0] / 2**20),
    }


def main(folder: str, out: str) -> None:
    import datasets
    import tokenizers

    results = []
    for limit in (100_000_000, 300_000_000):
        for name in ("usual loop", "ours, fill-in-the-middle 0.0", "ours, fill-in-the-middle 0.5"):
            results.append(measure(name, folder, limit))
            print(results[-1], flush=True)
    environment = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "datasets": datasets.__version__,
        "tokenizers": tokenizers.__version__,
        "tokenizer": "models/tiny-starcoder (4,096 entries)",
        "seq_len": SEQ_LEN,
        "data": "the source files among the installed Python packages, the first 100 and 300 MB by path",
    }
    command = "python benchmarks/prepare_data.py $(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))') OUT.json"
    Path(out).write_text(json.dumps({"command": command, "environment": environment, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        job = json.loads(Path(sys.argv[2]).read_text())
        started = time.monotonic()
        counted = run_case(*job)
        print(counted, time.monotonic() - started)
    else:
        main(*sys.argv[1:])
