"""Read documents: every file of a folder of source code, or every row of a JSONL file. What is left out is counted by reason."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.mistakes import Mistake, Mistakes

# What counts as source code or its prose. Data formats are left out: they would drown the code.
SUFFIXES = set(
    """.c .cc .cpp .cs .css .cu .cuh .dart .ex .exs .go .h .hpp .hs .html .java .jl .js .jsx .kt .lua .m .md .ml .mm .php .pl .proto
    .ps1 .py .pyi .r .rb .rs .rst .scala .sh .sql .swift .tf .toml .ts .tsx .vue .yaml .yml .zig""".split()
)
# Other people's code and generated files, by the folder's name. Names that begin with a dot are left out too.
VENDORED = {"node_modules", "site-packages", "vendor", "third_party", "build", "dist", "target", "__pycache__", "runs"}
LARGEST_BYTES = 1_000_000  # larger source files are nearly always generated
LONGEST_LINE = 1_000  # characters; longer lines mean minified or embedded data (The Stack's filter, arXiv:2211.15533, section 3)
TEXT_COLUMNS = ("text", "content")


@dataclass(frozen=True)
class Document:
    """One file or row: a name that stays the same when others are added, and its text."""

    name: str
    text: str


def read_documents(train: str) -> tuple[list[Document], Counter]:
    """All documents of `data.train` in a stable order, and how many were left out by reason.

    Raises:
        Mistakes: no such path, a row that is not JSON or has no text column (with file and line), or nothing left to use.
    """
    path, skipped = Path(train).expanduser(), Counter()
    if path.is_dir():
        candidates = _read_folder(path, skipped)
    elif path.is_file():
        candidates = _read_jsonl(path, skipped)
    else:
        raise Mistakes(Mistake("recipe", "data.train", f"{train} does not exist", f"paths are relative to {Path.cwd()}"))
    documents, seen = [], set()
    for document in candidates:
        digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
        if digest in seen:
            skipped["duplicate"] += 1
        else:
            seen.add(digest)
            documents.append(document)
    if not documents:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items()) or "it is empty"
        raise Mistakes(Mistake("recipe", "data.train", f"{train} holds nothing to train on ({reasons})", "point it at source code"))
    return documents, skipped


def _read_folder(root: Path, skipped: Counter) -> Iterator[Document]:
    for folder, subfolders, files in os.walk(root):  # symbolic links are not followed
        kept = [name for name in subfolders if not _is_foreign(Path(folder, name))]
        if foreign := len(subfolders) - len(kept):
            skipped["vendored or generated folder"] += foreign
        subfolders[:] = sorted(kept)
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix.lower() not in SUFFIXES or name.startswith("."):
                skipped["not source code"] += 1
            elif path.is_symlink():
                skipped["symbolic link"] += 1
            elif not path.is_file():
                skipped["not a regular file"] += 1  # a pipe would be waited for
            elif path.stat().st_size > LARGEST_BYTES:
                skipped[f"over {LARGEST_BYTES:,} bytes"] += 1
            else:
                text, reason = _read_text(path)
                if reason:
                    skipped[reason] += 1
                else:
                    yield Document(path.relative_to(root).as_posix(), text)


def _is_foreign(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in VENDORED or (folder / "pyvenv.cfg").exists() or folder.is_symlink()


def _read_text(path: Path) -> tuple[str, str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except OSError as error:
        return "", f"unreadable ({error.strerror})"
    if "\0" in text:
        return "", "binary"
    if not text.strip():
        return "", "empty"
    if max(map(len, text.splitlines())) > LONGEST_LINE:
        return "", f"a line over {LONGEST_LINE:,} characters"
    return text, ""


def _read_jsonl(path: Path, skipped: Counter) -> Iterator[Document]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError:  # JSON and Unicode errors both
            start = line[:80].decode("utf-8", "replace")
            raise Mistakes(Mistake(where, "", f"not a line of JSON: {start}", "write one JSON object on each line")) from None
        columns = list(row) if isinstance(row, dict) else []
        column = next((name for name in TEXT_COLUMNS if name in columns), None)
        if column is None:
            what = f"no column {' or '.join(TEXT_COLUMNS)} (there is {', '.join(columns) or type(row).__name__})"
            raise Mistakes(Mistake(where, "", what, "rename the column that holds the document to text"))
        if not isinstance(row[column], str) or not row[column].strip():
            skipped[f"{column} is empty or not text"] += 1
        else:
            yield Document(f"{path.name}:{number}", row[column])


def hold_out(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split into training and held-out documents by a hash of the name, so that adding data moves no document across.

    Args:
        documents: at least two.
        share: expected share of held-out documents; at least one is held out, and at least one is not.

    Raises:
        Mistakes: fewer than two documents.
    """
    if len(documents) < 2:
        raise Mistakes(Mistake("recipe", "data.train", "only one document", "one to train on and one to hold out are needed"))
    ranked = sorted(documents, key=_place)
    count = sum(_place(document) < share for document in ranked)
    count = min(max(count, 1), len(ranked) - 1)
    held_out = set(id(document) for document in ranked[:count])
    return [d for d in documents if id(d) not in held_out], [d for d in documents if id(d) in held_out]


def _place(document: Document) -> float:
    """Where in [0, 1) the document's name falls."""
    return int.from_bytes(hashlib.sha256(document.name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
