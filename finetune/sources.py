"""Read what `data.train` names, record by record: a folder of source code, data files, or a data set in Hugging Face's format.

A reader can be asked for its position after any record and opened there again. What it leaves out is counted by reason in a
`Tally`; what stops it is a `Mistake` with file and line.
"""

import bz2
import csv
import glob
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from finetune import folder
from finetune.mistakes import Mistake, Mistakes, near_path
from finetune.recipe import Source

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # a lone name, without an owner, is taken for a mistyped path
PLACES_KEPT = 5  # of what is left out, to show where to look
csv.field_size_limit(2**31 - 1)  # what is too large is counted by data.largest_bytes, not refused by the parser


@dataclass
class Tally:
    """What was read of one source, and what was left out of it, by reason and with the first places."""

    read: int = 0
    dropped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)  # what was kept, and deserves a look
    places: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str, count: int = 1) -> None:
        self.dropped[reason] += count
        self._remember(reason, where)

    def note(self, reason: str, where: str) -> None:
        self.notes[reason] += 1
        self._remember(reason, where)

    def _remember(self, reason: str, where: str) -> None:
        places = self.places.setdefault(reason, [])
        if where and len(places) < PLACES_KEPT:
            places.append(where)


@dataclass(frozen=True)
class Record:
    """One file of a folder, or one row: where it stands, and its columns by name."""

    where: str
    columns: dict[str, Any]
    is_file: bool = False


def check_source(source: Source) -> list[Path] | None:
    """The files that a source names, its folder alone, or None for a data set on the hub. Reads nothing.

    What exists on this machine is never looked for on the hub, nor is anything that looks like a path.

    Raises:
        Mistakes: there is nothing of that name, or a file that does not hold rows.
    """
    path = Path(source.source)
    if path.is_dir():
        return [path]
    files = [path] if path.is_file() else sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    wrong = next((file for file in files or [path] if file.exists() and (_suffix(file) not in DATA_SUFFIXES or not file.is_file())), None)
    if wrong is not None:
        what = f"{wrong} is neither a folder nor a file of rows"
        raise Mistakes(Mistake("recipe", "data.train", what, f"name a folder of code, or {', '.join(DATA_SUFFIXES)} files"))
    if not files and not looks_like_hub_name(source.source):
        what = f"{source.source} does not exist, looked for from {Path.cwd()}"
        raise Mistakes(
            Mistake("recipe", "data.train", what, near_path(path, "name a folder of code, data files, or owner/name on the hub"))
        )
    return files or None


def open_source(source: Source, tally: Tally, position: Any, largest_bytes: int) -> "FolderReader | FileReader | HubReader":
    """The reader of one source, at its beginning or at a position that a reader of it gave.

    Args:
        largest_bytes: larger files of a folder are left out unread.

    Raises:
        Mistakes: see `check_source`; or a data set that cannot be opened.
    """
    files = check_source(source)
    if files is None:
        return HubReader(source, tally, position)
    if not files[0].is_dir():
        return FileReader(files, tally, position)
    saved = any((files[0] / name).exists() for name in ("state.json", "dataset_dict.json"))
    return HubReader(source, tally, position, files[0]) if saved else FolderReader(files[0], tally, position, largest_bytes)


def looks_like_hub_name(name: str) -> bool:
    """owner/name, and nothing that a mistyped path would be: no such folder as owner here, no suffix of a data file."""
    suffixes = Path(name).suffixes
    is_file = any(suffix.lower() in (*DATA_SUFFIXES, *COMPRESSIONS) for suffix in suffixes[-2:])
    return bool(HUB_NAME.fullmatch(name)) and not is_file and not Path(name).parent.is_dir()


def data_files(source: Source) -> str:
    """A pattern for the files of rows in a folder that was named as source code, or "" where there are none."""
    folders = Path(source.source)
    suffixes = sorted({path.suffix for path in folders.iterdir() if path.suffix in DATA_SUFFIXES}) if folders.is_dir() else []
    return f"{source.source.rstrip('/')}/*{suffixes[0]}" if suffixes else ""


class FolderReader:
    """The files of a folder of source code, in the order of their paths. Its position is the path of the last one read."""

    def __init__(self, root: Path, tally: Tally, position: str | None, largest_bytes: int):
        self.root, self.tally, self.last, self.largest_bytes = root, tally, position, largest_bytes
        # Only the first reading counts what the listing leaves out.
        self.files = folder.list_files(root, tally.drop if position is None else lambda *_: None)

    def __iter__(self) -> Iterator[Record]:
        for path in self.files:
            if self.last is not None and path <= self.root / self.last:
                continue
            relative = path.relative_to(self.root).as_posix()
            self.last = relative
            self.tally.read += 1
            text, reason = folder.read_text(path, self.largest_bytes)
            if reason:
                self.tally.drop(reason, str(path))
            else:
                columns = {"content": text, "path": relative, "repo_name": self.root.resolve().name}
                # Names may be any bytes; what is kept of them is text.
                yield Record(_as_text(str(path)), {name: _as_text(value) for name, value in columns.items()}, is_file=True)

    def position(self) -> str | None:
        return self.last

    def fingerprint(self, with_content: bool) -> str:
        return _hash_files(self.files, self.root, with_content)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files if path.exists())


class FileReader:
    """Rows of data files, one file after the other. Its position is the file, the bytes or rows behind it there, and the lines."""

    def __init__(self, files: list[Path], tally: Tally, position: list | None = None):
        self.files, self.tally = files, tally
        name, self.offset, self.line = position or (str(files[0]), 0, 0)
        if Path(name) not in files:
            raise Mistakes(Mistake(name, "", "is gone, and was being read", "put it back"))
        self.number = files.index(Path(name))

    def __iter__(self) -> Iterator[Record]:
        while self.number < len(self.files):
            path = self.files[self.number]
            read = {".csv": self._csv, ".parquet": self._parquet}.get(_suffix(path), self._json)
            try:
                for where, columns in read(path):
                    self.tally.read += 1
                    if columns is not None:
                        yield Record(where, columns)
            except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                raise Mistakes(Mistake(str(path), "", f"cannot be read ({error})", "correct the file, or name another")) from None
            self.number, self.offset, self.line = self.number + 1, 0, 0

    def position(self) -> list:
        return [str(self.files[self.number]), self.offset, self.line]

    def fingerprint(self, with_content: bool) -> str:
        return _hash_files(self.files, None, with_content)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size * (5 if path.suffix in COMPRESSIONS else 1) for path in self.files)

    def _json(self, path: Path) -> Iterator[tuple[str, dict | None]]:
        """JSON lines, each read as it comes; or one array, which is read whole."""
        with _open(path) as file:
            start = file.read(64)
            if start.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise Mistakes(Mistake(str(path), "", "is UTF-16", f"iconv -f UTF-16 -t UTF-8 '{path}' > new{path.suffix}"))
            if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                yield from self._array(path, start + file.read())
                return
        with _open(path) as file:
            if path.suffix.lower() in COMPRESSIONS:
                for skipped in range(0, self.offset, 1 << 20):  # unpacked, since it cannot be sought
                    file.read(min(1 << 20, self.offset - skipped))
            else:
                file.seek(self.offset)
            while line := file.readline():
                self.line += 1
                self.offset += len(line)
                if line.strip():
                    where = f"{path}:{self.line}"
                    yield where, self._row(line, where, is_last=not line.endswith(b"\n"))

    def _array(self, path: Path, content: bytes) -> Iterator[tuple[str, dict | None]]:
        try:
            rows = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise Mistakes(Mistake(str(path), "", f"not JSON ({error})", "correct it there, or write one object a line")) from None
        for number, row in enumerate(rows[self.offset :], start=self.offset + 1):
            self.offset = number
            yield f"{path}:[{number}]", self._as_object(row, f"{path}:[{number}]")

    def _row(self, line: bytes, where: str, is_last: bool) -> dict | None:
        repeated = []

        def to_dict(pairs: list[tuple[str, Any]]) -> dict:
            row = dict(pairs)
            if len(row) != len(pairs):
                repeated.append(1)
            return row

        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=to_dict)
        except UnicodeDecodeError:
            self.tally.drop("not UTF-8", where)
            return None
        except (ValueError, RecursionError) as error:
            if is_last:
                self.tally.drop("cut off at the end of the file", where)
                return None
            start = line[:80].decode("utf-8", "replace").strip()
            what = f"not a line of JSON ({getattr(error, 'msg', error)}): {start}"
            raise Mistakes(Mistake(where, "", what, "write one JSON object on each line")) from None
        if repeated:
            self.tally.note("a key twice, the last one counts", where)
        return self._as_object(row, where)

    def _as_object(self, row: Any, where: str) -> dict | None:
        if isinstance(row, dict):
            return row
        self.tally.drop("not an object", where)
        return None

    def _csv(self, path: Path) -> Iterator[tuple[str, dict | None]]:
        with _open(path) as file:
            # Bytes that are no UTF-8 become surrogates, which are found in the row that they stand in.
            lines = csv.reader(io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""), strict=True)
            try:
                header = next(lines, [])
                for number, cells in enumerate(lines, start=1):
                    if number <= self.offset:
                        continue
                    self.offset = number
                    where = f"{path}:{lines.line_num}"
                    if len(cells) == len(header):
                        yield where, dict(zip(header, cells, strict=True))
                    elif cells:
                        self.tally.drop("another number of cells than the header", where)
                        yield where, None
            except csv.Error as error:
                raise Mistakes(Mistake(f"{path}:{lines.line_num}", "", f"not CSV ({error})", "correct that line")) from None

    def _parquet(self, path: Path) -> Iterator[tuple[str, dict | None]]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            first = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if first + count > self.offset:
                    number = first
                    for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                        for row in batch.to_pylist():
                            number += 1
                            if number > self.offset:
                                self.offset = number
                                yield f"{path}:row {number}", row
                first += count
        except pyarrow.ArrowException as error:
            message = str(error).splitlines()[0]
            raise Mistakes(Mistake(str(path), "", f"not a whole Parquet file ({message})", "write or download it again")) from None


class HubReader:
    """Rows of a data set in Hugging Face's format, from the hub or saved to disk. Its position is what `datasets` gives.

    Rows are streamed: nothing but what is read goes to the disk.
    """

    def __init__(self, source: Source, tally: Tally, position: dict | None = None, saved: Path | None = None):
        import datasets

        self.source, self.tally, self.saved, self.count = source, tally, saved, 0
        datasets.disable_progress_bars()
        try:
            if saved is None:
                self.rows = datasets.load_dataset(
                    source.source, source.subset or None, revision=source.revision, split=source.split, streaming=True
                )
            else:
                data = datasets.load_from_disk(str(saved))
                data = data[source.split] if isinstance(data, datasets.DatasetDict) else data
                self.rows = data.to_iterable_dataset()
        except Exception as error:  # of many libraries: the hub's, the reader's, the network's
            what = (
                f"{source.source} (split {source.split}) cannot be opened: {str(error).strip().splitlines()[0] if str(error) else error!r}"
            )
            fix = "name an existing data set, split and subset; for a gated one accept its terms and set HF_TOKEN"
            raise Mistakes(Mistake("recipe", "data.train", what, fix)) from None
        if position:
            self.count = position["count"]
            self.rows.load_state_dict(position["rows"])

    def __iter__(self) -> Iterator[Record]:
        rows = iter(self.rows)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # of the network and of the readers of many formats
                what = f"reading stopped after row {self.count:,}: {(str(error) or repr(error)).strip().splitlines()[0]}"
                raise Mistakes(Mistake(self.source.source, "", what, "start again; where it recurs, the data set is damaged")) from None
            if row is None:
                return
            self.count += 1
            self.tally.read += 1
            yield Record(f"{self.source.source}:row {self.count}", row)

    def position(self) -> dict:
        return {"count": self.count, "rows": self.rows.state_dict()}

    def fingerprint(self, with_content: bool) -> str:
        if self.saved is not None:
            return _hash_files(sorted(path for path in self.saved.rglob("*") if path.is_file()), self.saved, with_content)
        from huggingface_hub import HfApi

        try:  # a branch moves; its commit says what was read
            return HfApi().dataset_info(self.source.source, revision=self.source.revision).sha
        except Exception:  # without a network, of which each layer has its own error, rows prepared from that branch serve on
            return self.source.revision

    def size_bytes(self) -> int:
        return 0  # unknown before it is read


def _as_text(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _suffix(path: Path) -> str:
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path.name).suffix.lower()


def _open(path: Path) -> BinaryIO:
    """The content of a file, unpacked as its name says."""
    if path.suffix.lower() == ".zst":
        frames = zstandard.ZstdDecompressor().stream_reader(open(path, "rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(frames)
    return {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix.lower(), open)(path, "rb")


def _hash_files(files: list[Path], root: Path | None, with_content: bool) -> str:
    """A hash of names with contents, or with sizes and times."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(f"\0{path.relative_to(root) if root else path.name}\0".encode("utf-8", "surrogateescape"))
        try:
            if with_content:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
            else:
                status = path.stat()
                digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        except OSError as error:
            digest.update(str(error.errno).encode())  # counted when it is read
    return digest.hexdigest()
