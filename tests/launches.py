"""Start real launches from tests: each with its own port and time limit, and nothing left running afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
HANG_SECONDS = 900  # the slowest takes 60 s on two idle cores; on a crowded host it was seen to take six times as long


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(command: list[str], environ: dict[str, str] | None = None, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command in a process group of its own; all of it is killed when it ends or the time is over."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FINETUNE_")) and k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=inherited | {"MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"over {HANG_SECONDS} s: {command}\n{stdout[-4000:]}\n{stderr[-4000:]}") from None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def launch_file(path: Path, processes: int, deepspeed_json: str) -> Path:
    """A launch file for CPU processes with one of the repository's DeepSpeed files."""
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nmachine_rank: 0\n"
        f'num_processes: {processes}\nuse_cpu: true\ngpu_ids: "-1"\n'
        f"deepspeed_config:\n  deepspeed_config_file: ds_configs/{deepspeed_json}\n"
    )
    return path


def command_for(strategy: str, processes: int, folder: Path) -> list[str]:
    """The beginning of a command that starts `processes` CPU processes: plain, ddp, zero2, zero3."""
    if strategy == "plain":
        return [sys.executable]
    if strategy == "ddp":
        return [BIN / "torchrun", f"--nproc_per_node={processes}", f"--master_port={free_port()}"]
    file = launch_file(folder / f"{strategy}-{processes}.yaml", processes, f"{strategy}.json")
    return [BIN / "accelerate", "launch", "--config_file", file, "--main_process_port", free_port()]


def read_metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
