"""Documents on disk between reading and encoding: an Arrow file, so that every worker takes its batch from it by number."""

import hashlib
from pathlib import Path

import pyarrow as pa

from finetune.formats import Document, Segment

SCHEMA = pa.schema(
    [
        ("source", pa.int32()),
        ("name", pa.string()),
        ("where", pa.string()),
        ("repository", pa.string()),
        ("path", pa.string()),
        ("texts", pa.list_(pa.large_string())),
        ("kinds", pa.list_(pa.int8())),  # of each text: 1 if it is learnt, plus 2 if it is control text
    ]
)
BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 1_000_000  # a worker's task: a second or less


class DocumentWriter:
    """Writes documents in batches of about one task; use as a context."""

    def __init__(self, path: Path):
        self.file, self.rows, self.characters, self.count = pa.OSFile(str(path), "wb"), [], 0, 0
        self.writer = pa.ipc.new_file(self.file, SCHEMA)

    def add(self, source: int, document: Document) -> None:
        texts = [segment.text for segment in document.segments]
        kinds = [segment.learnt + 2 * segment.is_control for segment in document.segments]
        self.rows.append((source, document.name, document.where, document.repository, document.path, texts, kinds))
        self.characters += sum(map(len, texts))
        self.count += 1
        if len(self.rows) >= BATCH_DOCUMENTS or self.characters >= BATCH_CHARACTERS:
            self._flush()

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(self, *_) -> None:
        self._flush()
        self.writer.close()
        self.file.close()

    def _flush(self) -> None:
        if self.rows:
            columns = zip(*self.rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
            self.writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self.rows, self.characters = [], 0


def batch_sizes(path: Path) -> list[int]:
    """How many documents each batch of a file has."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        return [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]


def read_batch(path: Path, number: int) -> list[tuple[int, Document]]:
    """The documents of a batch, each with the number of its source."""
    with pa.memory_map(str(path)) as file:
        rows = pa.ipc.open_file(file).get_batch(number).to_pylist()
    return [
        (
            row["source"],
            Document(
                row["name"],
                tuple(Segment(text, bool(kind & 1), bool(kind & 2)) for text, kind in zip(row["texts"], row["kinds"], strict=True)),
                row["where"],
                row["repository"],
                row["path"],
            ),
        )
        for row in rows
    ]


def place(document: Document) -> float:
    """Where in [0, 1) a document's identity falls; below a threshold it is held out. Other documents do not move it."""
    return int.from_bytes(hashlib.sha256(document.name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
