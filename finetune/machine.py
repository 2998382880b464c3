"""The machine: its visible GPUs, the host memory that is left, what can be compiled on it. Asked without torch, or described."""

import glob
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune.mistakes import Mistake, Mistakes

GIB = 1024**3
NVIDIA_SMI_SECONDS = 30.0  # a broken driver can make nvidia-smi wait for ever


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. `capability` is CUDA's compute capability, (7, 5) for a T4."""

    name: str
    total_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What a launch has to fit on. `host_bytes` is the memory that processes may still take, not what is built in."""

    gpus: tuple[Gpu, ...]
    host_bytes: int
    has_compiler: bool
    has_libaio: bool


# Totals as PyTorch sees them, which is less than the name says. The T4's is what a user's own 4xT4 machine reported, the H200's
# what one of those showed here; the others are the totals in out-of-memory messages of such cards, and were not read on one.
# Capabilities are from NVIDIA's table of CUDA GPUs.
KNOWN_GPUS = {
    "t4": Gpu("Tesla T4", int(14.62 * GIB), (7, 5)),
    "v100-16": Gpu("Tesla V100 16GB", int(15.77 * GIB), (7, 0)),
    "a4000": Gpu("NVIDIA RTX A4000", int(15.73 * GIB), (8, 6)),
    "l4": Gpu("NVIDIA L4", int(22.03 * GIB), (8, 9)),
    "a10g": Gpu("NVIDIA A10G", int(22.06 * GIB), (8, 6)),
    "a100-40": Gpu("NVIDIA A100 40GB", int(39.39 * GIB), (8, 0)),
    "h200": Gpu("NVIDIA H200", int(139.7 * GIB), (9, 0)),
}
# Of a described machine whose host memory is not given: AWS' g4dn.12xlarge has 192 GiB for four T4s.
DESCRIBED_HOST_GIB_PER_GPU = 48


def this_machine() -> Machine:
    """Look at the machine that this process runs on. Never fails: what cannot be seen is not there."""
    return Machine(_visible_gpus(os.environ), available_host_bytes(), _has_compiler(), _has_libaio())


def _visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return select_visible(parse_nvidia_smi(answer), environ.get("CUDA_VISIBLE_DEVICES"))


def parse_nvidia_smi(answer: str) -> list[tuple[str, Gpu]]:
    """(uuid, GPU) of each line of `nvidia-smi --query-gpu=uuid,memory.total,compute_cap,name`; other lines are no GPUs.

    nvidia-smi counts memory in MiB, and more of it than PyTorch can have: 15,360 MiB for a T4 whose programs see 14.62 GiB. The
    total of a known GPU is therefore cut to what is known of it.
    """
    gpus = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        capability = re.fullmatch(r"(\d+)\.(\d+)", fields[2]) if len(fields) == 4 else None
        if capability is None or not fields[1].isdigit():
            continue
        name, total_bytes = fields[3], int(fields[1]) * 1024**2
        # A card's name says T4, the table t4; the table's number after a hyphen is its memory.
        words = re.split(r"[\s-]", name.lower())
        known = next((gpu for key, gpu in KNOWN_GPUS.items() if key.partition("-")[0] in words), None)
        # 12 %: a card of the same name with another memory (A100 80 GB) is not the one that is known.
        if known is not None and known.total_bytes < total_bytes < 1.12 * known.total_bytes:
            total_bytes = known.total_bytes
        gpus.append((fields[0], Gpu(name, total_bytes, (int(capability[1]), int(capability[2])))))
    return gpus


def select_visible(gpus: list[tuple[str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows under CUDA_VISIBLE_DEVICES: indices or the beginnings of uuids, up to the first that is none.

    Args:
        gpus: (uuid, GPU) in nvidia-smi's order.
        visible: the variable's value; None where it is not set, and an empty text hides all.
    """
    if visible is None:
        return tuple(gpu for _, gpu in gpus)
    selected: list[Gpu] = []
    seen: set[int] = set()
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.isdigit():
            index = int(entry)
        else:
            matches = [place for place, (uuid, _) in enumerate(gpus) if entry and uuid.startswith(entry)]
            index = matches[0] if len(matches) == 1 else len(gpus)
        if index >= len(gpus):
            break
        if index in seen:
            return ()  # CUDA shows none where one is named twice
        seen.add(index)
        selected.append(gpus[index][1])
    return tuple(selected)


MOST_GPUS = 1024


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory in bytes that can still be taken: the kernel's MemAvailable, or less where a control group (container) limits it.

    Args:
        root: where `proc` and `sys` are.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit_name, used_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit_name, used_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdigit():  # and not "max"
                # Cached files count as used and are given up under pressure.
                cached = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
                free = int(limit) - int(used or 0) + (int(cached[1]) if cached else 0)
                available = min(available, max(0, free))
            if folder == top:
                break
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _has_compiler() -> bool:
    """What torch's extension builder, which DeepSpeed's CPU Adam and asynchronous I/O go through, needs: C++ and ninja."""
    has_ninja = shutil.which("ninja") or importlib.util.find_spec("ninja")
    return bool(has_ninja) and any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++"))


def _has_libaio() -> bool:
    folders = ["/usr/include", "/usr/local/include", "/usr/include/*-linux-gnu"]
    for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        folders += [folder for folder in os.environ.get(name, "").split(":") if folder]
    if prefix := os.environ.get("CONDA_PREFIX"):
        folders.append(f"{prefix}/include")
    return any(glob.glob(f"{folder}/libaio.h") for folder in folders)


def describe_machine(description: str) -> Machine:
    """A machine in words, so that a launch can be checked from a laptop: `4xT4`, or `4xT4,host=120,compiler=no,libaio=yes`.

    host is in GiB (48 a GPU where it is not given); a compiler is there and libaio is not, unless it is said.

    Raises:
        Mistakes: a GPU that is not known, or words that are none of these.
    """
    head, *options = [part.strip() for part in description.split(",")]
    match = re.fullmatch(r"(?:(\d{1,6})x)?([\w-]+)", head, re.IGNORECASE)
    count, name = (int(match[1] or 1), match[2].lower()) if match else (0, head.lower())
    mistakes = []
    if name == "cpu":
        gpus: tuple[Gpu, ...] = ()
    elif name in KNOWN_GPUS and 0 < count <= MOST_GPUS:
        gpus = (KNOWN_GPUS[name],) * count
    else:
        known = ", ".join(KNOWN_GPUS)
        fix = f"write a number, x and one of {known}, or cpu"
        mistakes.append(Mistake("command line", "--machine", f"{head!r} is not known", fix))
        gpus = ()
    given = {"host": str(DESCRIBED_HOST_GIB_PER_GPU * max(1, len(gpus))), "compiler": "yes", "libaio": "no"}
    for option in options:
        key, _, value = option.partition("=")
        if key not in given or not re.fullmatch(r"\d+" if key == "host" else "yes|no", value):
            fix = "write host=GiB, compiler=yes|no or libaio=yes|no"
            mistakes.append(Mistake("command line", "--machine", f"{option!r} is not understood", fix))
        else:
            given[key] = value
    if mistakes:
        raise Mistakes(*mistakes)
    return Machine(gpus, int(given["host"]) * GIB, given["compiler"] == "yes", given["libaio"] == "yes")
