"""The rows of a run: prepared once for all ranks and runs that want the same, kept in a cache, and found by their number.

Rows come in parts, one after the other. A part is one pass over the data, with its own draws of fill-in-the-middle; of a stream
it is `data.buffer` documents. Which row stands at a place of the sequence depends on data, recipe and place alone. A part is
made when one of its rows is first asked for, by whichever process comes first; the others wait for it at a file lock, so that
no collective waits for data. Each part's beginning is written down, so that reading can start there.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from finetune import encode, fim, folder, formats, overlap, packing, sources, store, workers
from finetune.mistakes import Mistake, Mistakes
from finetune.packing import Part, PartWriter, Rows
from finetune.recipe import Data
from finetune.sources import Tally
from finetune.workers import Setting, Workers

REASONS = {workers.NEAR_DUPLICATE: "nearly a held-out document", workers.CONTAMINATED: "contains a benchmark's problem"}
REASONS_LATER = REASONS | {workers.HELD_OUT: "held out, and not evaluated on"}  # which is what comes first in a stream
ENDED = "ended"  # the position of a source that is behind a stream
UNLEARNABLE = ("longer than a row", "nothing to learn")
# Disk that a byte of text takes: the documents, and two parts of 4-byte tokens of about 3.5 bytes.
DISK_BYTES_A_BYTE = 3.5


class Corpus:
    """Training rows by place, and held-out rows. Made by `prepare`.

    Attributes:
        held_out: rows to evaluate on, at most `data.eval_rows`, left to right.
        infilling: likewise with the middle as the only labels; None where no document can be turned or the recipe turns none.
        fingerprint: of everything that the rows depend on.
    """

    def __init__(self, maker: "_Maker"):
        self._maker, self._parts, self._order = maker, {}, {}
        self.fingerprint = maker.fingerprint
        self.held_out = self._sample("held_out")
        self.infilling = self._sample("infilling") if (maker.path / "base" / "infilling").exists() else None
        self._part(0)
        maker.check_learnable()

    def batch(self, step: int, batch_rows: int, rank: int, world_size: int, micro_batch: int) -> list[Rows]:
        """A rank's micro batches of optimizer step `step` (from 0), which takes `batch_rows` rows over all ranks."""
        first = step * batch_rows
        # All ranks wait here for a part that any of them needs, none of them later in a collective.
        for place in (first, first + batch_rows - 1):
            self._part(self._find(place))
        shares = packing.share(batch_rows, rank, world_size, micro_batch)
        return [packing.mask(self._rows(first + places), counts) for places, counts in shares]

    def first_row(self) -> Rows:
        """The row at place 0, to look at."""
        return self._rows(np.zeros(1, np.int64))

    def position(self, rows: int) -> dict[str, Any]:
        """Where the sequence stands after `rows` rows, as plain data: enough to go on there, with an empty cache too."""
        number = self._find(rows)
        return {"rows": rows, "fingerprint": self.fingerprint, "part": number, "start": self._maker.start(number)}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on at a position that `position` gave: reading begins with the part there, none before it is made again.

        Raises:
            Mistakes: the position belongs to other data or another recipe.
        """
        if position["fingerprint"] != self.fingerprint:
            what = f"the position belongs to rows {position['fingerprint']}, and these are {self.fingerprint}"
            raise Mistakes(Mistake("recipe", "data", what, "go on with the data and the recipe that the run began with"))
        self._maker.starts[position["part"]] = position["start"]

    def manifest(self) -> dict[str, Any]:
        """What was read, kept and left out so far, by source and reason."""
        return self._maker.manifest()

    def write_manifest(self, out: Path) -> None:
        """Write the manifest to data.json in a run's folder. One rank calls it.

        Raises:
            Mistakes: the disk does not take it.
        """
        path = out / "data.json"
        try:
            path.write_text(json.dumps(self.manifest(), indent=2, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
        except OSError as error:
            raise Mistakes(Mistake(str(path), "", f"cannot be written ({error.strerror})", "free space there")) from None

    def digest(self) -> str:
        """A hash of the rows that are prepared, to compare between ranks."""
        return f"{self._part(0).facts['digest']}-{self._maker.part_of_base('held_out').facts['digest']}"

    def _sample(self, name: str) -> Rows:
        part = self._maker.part_of_base(name)
        order = np.random.default_rng(0).permutation(len(part))  # whatever the recipe's seed: losses are compared
        return part.rows(np.sort(order[: self._maker.data.eval_rows]))

    def _rows(self, places: np.ndarray) -> Rows:
        out = None
        numbers = np.array([self._find(place) for place in places.tolist()])
        for number in np.unique(numbers).tolist():
            inside, first = numbers == number, self._maker.start(number)["first_row"]
            rows = self._part(number).rows(self._order[number][places[inside] - first])
            if out is None:
                out = Rows(*(np.empty((len(places), rows.tokens.shape[1]), np.int32) for _ in range(3)))
            out.tokens[inside], out.positions[inside], out.labels[inside] = rows.tokens, rows.positions, rows.labels
        return out

    def _find(self, place: int) -> int:
        """The number of the part that holds a place."""
        number = max(number for number, start in self._maker.starts.items() if start["first_row"] <= place)
        while place >= self._maker.start(number + 1)["first_row"]:
            number += 1
        return number

    def _part(self, number: int) -> Part:
        if number not in self._parts:
            self._parts[number] = part = self._maker.part(number)
            self._order[number] = np.random.default_rng([self._maker.plan.seed, number]).permutation(len(part))
            for passed in [old for old in self._parts if old < number - 1]:
                del self._parts[passed], self._order[passed]
        return self._parts[number]


def prepare(data: Data, tokenizer, seed: int, positions: int, vocab_size: int) -> Corpus:
    """Read, split, screen, encode and pack what the recipe's data section names, or find it in the cache.

    Args:
        tokenizer: the model's, from transformers; a fast one.
        positions: of the model's table.
        vocab_size: rows of its embedding.

    Raises:
        Mistakes: of the sources and their rows, with file and line; nothing to train on; too many examples that do not fit;
            rows that the model cannot index; a tokenizer that lacks what is asked of it; a disk that is full.
    """
    if data.seq_len > positions:
        raise Mistakes(Mistake("recipe", "data.seq_len", f"{data.seq_len} is more than the model's {positions} positions", "lower it"))
    maker = _Maker(data, tokenizer, seed, vocab_size)
    try:
        maker.make_base()
        corpus = Corpus(maker)
    finally:
        maker.close()
    if "messages" in maker.facts["formats"]:
        tokenizer.chat_template = maker.template.text  # saved with the result, which answers only what it was taught
    return corpus


class _Maker:
    """Makes, in the cache and under its lock, what a corpus consists of.

    `base` holds what is read once: the documents with a verdict on each (of a stream: of its first part), the held-out rows, and
    the facts. `part-N` holds rows.
    """

    def __init__(self, data: Data, tokenizer, seed: int, vocab_size: int):
        self.data, self.vocab_size = data, vocab_size
        self.benchmarks = tuple(overlap.read_benchmarks(data.decontaminate))
        self.plan = encode.make_plan(data, tokenizer, seed, [source.format for source in data.train])
        self.template = formats.ChatTemplate(tokenizer)
        pad = tokenizer.convert_tokens_to_ids("<fim_pad>")
        # Padding is known by its place and could be any token; one of its own is seen for what it is in a decoded row.
        self.pad = tokenizer.eos_token_id if pad in (None, tokenizer.unk_token_id) else pad
        self.readers = [sources.open_source(source, Tally(), None, data.largest_bytes) for source in data.train]
        self.fingerprint = self._fingerprint()
        self.path = Path(data.cache) / self.fingerprint
        self.pool: Workers | None = None  # starting it takes seconds, so the base and the first part share it
        self.starts: dict[int, dict[str, Any]] = {0: {"first_row": 0, "pass": 0, "positions": None}}

    def make_base(self) -> None:
        """Make the base unless it is there."""
        with self._locked():
            if not (self.path / "base").exists():
                self._check_room()
                self._make("base", self._make_base)
            self.facts = json.loads((self.path / "base" / "facts.json").read_text("utf-8"))

    def close(self) -> None:
        """End the processes that prepare."""
        if self.pool is not None:
            self.pool.close()
        self.pool = None

    def part_of_base(self, name: str) -> Part:
        return self._checked(Part(self.path / "base" / name))

    def part(self, number: int) -> Part:
        """Part `number`, made unless it is there."""
        path = self.path / f"part-{number}"
        with self._locked():
            if not Part.is_whole(path):
                shutil.rmtree(path, ignore_errors=True)
                self._make(path.name, lambda unfinished: self._make_part(number, unfinished))
                # All ranks are past it, since they take a step together. Its facts stay.
                (self.path / f"part-{number - 2}" / "tokens.bin").unlink(missing_ok=True)
            part = Part(path)
        return self._checked(part)

    def start(self, number: int) -> dict[str, Any]:
        """The beginning of part `number`: its first row, the pass, and the positions of the sources."""
        if number not in self.starts:
            facts = self.path / f"part-{number - 1}" / "facts.json"
            known = json.loads(facts.read_text("utf-8")) if facts.exists() else self.part(number - 1).facts
            self.starts[number] = known["next"]
        return self.starts[number]

    def check_learnable(self) -> None:
        """Stop where much of a source cannot be used, instead of training on what is left.

        Raises:
            Mistakes: more than data.most_dropped of a source's examples are too long for a row or have nothing to learn.
        """
        mistakes = []
        for source in self.manifest()["sources"]:
            dropped = {reason: source["dropped"][reason] for reason in UNLEARNABLE if reason in source["dropped"]}
            share = sum(dropped.values()) / max(sum(dropped.values()) + source["documents"], 1)
            if share > self.data.most_dropped:
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
                what = f"{share:.0%} of the examples of {source['source']} cannot be learnt from ({reasons})"
                mistakes.append(Mistake("recipe", "data.train", what, "raise data.seq_len, shorten them, or raise data.most_dropped"))
        if mistakes:
            raise Mistakes(*mistakes)

    def _checked(self, part: Part) -> Part:
        if (largest := part.facts["largest_id"]) >= self.vocab_size:
            what = f"its tokenizer gives id {largest} and its embedding has {self.vocab_size} rows"
            raise Mistakes(Mistake("recipe", "model.name", what, "put the tokenizer beside the model that it belongs to"))
        return part

    def manifest(self) -> dict[str, Any]:
        # Another pass over the same documents says nothing new; another part of a stream does.
        paths = sorted(self.path.glob("part-*/facts.json")) if self.data.streaming else [self.path / "part-0" / "facts.json"]
        parts = [json.loads(path.read_text("utf-8")) for path in paths]
        rows, tokens, labels = (sum(part[name] for part in parts) for name in ("rows", "tokens", "labels"))
        each = zip(self.facts["sources"], *(part["sources"] for part in parts), strict=True)
        return {
            "fingerprint": self.fingerprint,
            "cache": str(self.path),
            "packing": self.data.packing,
            "seq_len": self.data.seq_len,
            "rows": rows,
            "tokens": tokens,
            "row_fill": tokens / max(rows * self.data.seq_len, 1),
            "label_share": labels / max(tokens, 1),
            "held_out_rows": len(self.part_of_base("held_out")),
            "sources": [_merge(facts) for facts in each],
        }

    def _fingerprint(self) -> str:
        settings = self.data.model_dump(exclude={"cache", "eval_rows", "most_dropped", "decontaminate"})
        modules = (encode, fim, folder, formats, overlap, packing, sources, store, workers)
        contents = [
            json.dumps(settings, sort_keys=True),
            # What is too large to hold is too large to hash: of a stream, sizes and times of the files stand for their content.
            *(reader.fingerprint(with_content=not self.data.streaming) for reader in self.readers),
            repr((self.plan, self.pad, self.template.text, self.template.special_tokens, self.benchmarks)),
            *(Path(module.__file__).read_text("utf-8") for module in modules),
            Path(__file__).read_text("utf-8"),
        ]
        digest = hashlib.blake2b(digest_size=10)
        for content in contents:
            digest.update(hashlib.blake2b(content.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time. One that is killed leaves nothing locked."""
        failure, asked = self.path / "failure.json", time.time()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(str(self.path / "lock"))
            try:
                lock.acquire(timeout=5.0)
            except Timeout:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print(f"waiting for the process that prepares the data in {self.path}", flush=True)
                lock.acquire()
            try:
                if failure.exists() and failure.stat().st_mtime > asked:
                    # What another process found wrong meanwhile, each rank in its turn need not find again.
                    raise Mistakes(*(Mistake(**mistake) for mistake in json.loads(failure.read_text("utf-8"))))
                yield
            except Mistakes as error:
                failure.write_text(json.dumps([vars(mistake) for mistake in error.mistakes]), "utf-8")
                raise
            finally:
                lock.release()
        except OSError as error:
            what = f"{error.filename or self.path} cannot be used ({error.strerror or error})"
            raise Mistakes(Mistake("recipe", "data.cache", what, "name a folder on a disk with room that you may write to")) from None

    def _make(self, name: str, make: Callable[[Path], dict[str, Any]]) -> None:
        """Make a folder of the cache, which is there when it is whole."""
        unfinished = self.path / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        (unfinished / "facts.json").write_text(json.dumps(make(unfinished)), "utf-8")
        for path in unfinished.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())  # a machine that is taken away must not leave a renamed folder of empty files
        unfinished.rename(self.path / name)

    def _check_room(self) -> None:
        needed = DISK_BYTES_A_BYTE * sum(reader.size_bytes() for reader in self.readers)
        free = shutil.disk_usage(self.path).free
        if needed > free and not self.data.streaming:
            what = f"preparing takes about {needed / 1e9:.1f} GB and {self.path} has {free / 1e9:.1f} GB free"
            raise Mistakes(Mistake("recipe", "data.cache", what, "name a larger disk, or set data.streaming: true"))

    def _make_base(self, path: Path) -> dict[str, Any]:
        documents, tallies, known = path / "documents.arrow", [Tally() for _ in self.data.train], [None] * len(self.data.train)
        following, places = self._collect(documents, self.starts[0], tallies, known)
        places = np.unique(places)
        if len(places) < 2:
            raise self._too_little(f"{len(places)} usable document{'s' * (len(places) != 1)}: one to train on and one to hold out", tallies)
        # At least one document is held out, and at least one is not.
        threshold = float(min(max(self.data.eval_share, (places[0] + places[1]) / 2), places[-1]))
        pool = self._workers(threshold, documents)
        signatures = pool.map(workers.sign_held_out, documents)
        np.save(path / "signatures.npy", np.concatenate(list(signatures)))
        verdicts = self._judge(pool, documents, path / "signatures.npy", tallies, REASONS)
        np.save(path / "verdicts.npy", verdicts)
        held_out = self._write(pool, path / "held_out", documents, verdicts, "held_out", 0)
        if self.plan.fim_rate > 0 and self._write(pool, path / "infilling", documents, verdicts, "infilling", 0)["rows"] == 0:
            shutil.rmtree(path / "infilling")
        if held_out["rows"] == 0:
            raise self._too_little("nothing that is held out can be evaluated on", tallies, held_out["sources"])
        sources_facts = [
            {"source": source.source, "format": format_name, **_facts(tally), "held_out_documents": encoded["documents"]}
            for source, format_name, tally, encoded in zip(self.data.train, known, tallies, held_out["sources"], strict=True)
        ]
        return {"threshold": threshold, "formats": known, "next": following, "sources": sources_facts}

    def _make_part(self, number: int, path: Path) -> dict[str, Any]:
        start, base, tallies = self.start(number), self.path / "base", [Tally() for _ in self.data.train]
        documents, following = base / "documents.arrow", self.facts["next"]
        read_on = self.data.streaming and number > 0
        if read_on:
            documents = path / "documents.arrow"
            following, _ = self._collect(documents, start, tallies, self.facts["formats"])
        elif number:
            following = {"pass": start["pass"] + 1, "positions": None}
        pool = self._workers(self.facts["threshold"], documents)
        verdicts = (
            self._judge(pool, documents, base / "signatures.npy", tallies, REASONS_LATER) if read_on else np.load(base / "verdicts.npy")
        )
        known = self._write(pool, path, documents, verdicts, "train", start["pass"])
        self.close()
        if number == 0 and known["rows"] == 0:
            raise self._too_little("nothing to train on", tallies, known["sources"])
        if read_on:
            documents.unlink()
        known["sources"] = [_merge([_facts(tally), facts]) for tally, facts in zip(tallies, known["sources"], strict=True)]
        return known | {"next": following | {"first_row": start["first_row"] + known["rows"]}}

    def _collect(self, path: Path, start: dict[str, Any], tallies: list[Tally], known: list[str | None]) -> tuple[dict[str, Any], array]:
        """Write the documents from `start` on, of each source in turn; return where the next begin, and the documents' places.

        Args:
            known: the format of each source, filled in where it is not known yet.
        """
        everything = self.data.buffer if self.data.streaming else sys.maxsize
        positions = start["positions"] or [None] * len(tallies)
        readers = {
            number: sources.open_source(self.data.train[number], tallies[number], position, self.data.largest_bytes)
            for number, position in enumerate(positions)
            if position != ENDED
        }
        going, seen, places = {number: iter(reader) for number, reader in readers.items()}, set(), array("d")
        unknown: dict[int, Mistakes] = {}
        with store.DocumentWriter(path) as writer:
            while going and writer.count < everything:
                for number in list(going):
                    record, source, tally = next(going[number], None), self.data.train[number], tallies[number]
                    if record is None:
                        del going[number]
                        if known[number] is None and number in unknown:
                            raise unknown[number]
                        continue
                    if known[number] is None:
                        try:
                            known[number] = formats.recognise(record, source.format, source.column)
                        except Mistakes as mistakes:  # of this source as a whole, if no row is better
                            unknown.setdefault(number, mistakes)
                            tally.drop("no column to learn from", record.where)
                            continue
                    document = formats.to_document(record, known[number], source.column, self.template, tally)
                    if document is None:
                        continue
                    content = document.text.encode("utf-8")
                    digest = hashlib.blake2b(content, digest_size=16).digest()
                    if len(content) > self.data.largest_bytes:
                        tally.drop(f"over {self.data.largest_bytes:,} bytes", document.where)
                    elif digest in seen:
                        tally.drop("duplicate", document.where)
                    else:
                        seen.add(digest)
                        writer.add(number, document)
                        places.append(store.place(document))
        if not going:
            return {"pass": start["pass"] + 1, "positions": None}, places
        positions = [readers[number].position() if number in going else ENDED for number in range(len(tallies))]
        return {"pass": start["pass"], "positions": positions}, places

    def _workers(self, threshold: float, documents: Path) -> Workers:
        if self.pool is not None:
            return self.pool
        weights = tuple(source.weight for source in self.data.train)
        self.pool = Workers(Setting(self.plan, threshold, weights, self.benchmarks), len(store.batch_sizes(documents)))
        return self.pool

    def _judge(self, pool: Workers, documents: Path, signatures: Path, tallies: list[Tally], reasons: dict[int, str]) -> np.ndarray:
        """The verdict on each document, uint8 [documents]; those that are a reason to leave it out are counted."""
        verdicts = list(pool.map(workers.judge, documents, signatures))
        for batch, each in enumerate(verdicts):
            if np.isin(each, list(reasons)).any():
                for (source, document), verdict in zip(store.read_batch(documents, batch), each.tolist(), strict=True):
                    if verdict in reasons:
                        tallies[source].drop(reasons[verdict], document.where)
        return np.concatenate(verdicts) if verdicts else np.zeros(0, np.uint8)

    def _write(self, pool: Workers, path: Path, documents: Path, verdicts: np.ndarray, kind: str, number: int) -> dict[str, Any]:
        """Write the rows of a kind of documents, and return what is known of them, by source too."""
        # A middle without its prefix and suffix would measure something else, so those are never cut.
        writer = PartWriter(path, self.data.seq_len, "best_fit" if kind == "infilling" else self.data.packing, self.pad)
        by_source = [{} for _ in self.data.train]
        ends = np.cumsum(store.batch_sizes(documents))
        for encoded in pool.map(workers.encode, documents, np.split(verdicts, ends[:-1]), kind, number):
            for source, each in enumerate(encoded):
                writer.add(each.stored, each.lengths)
                by_source[source] = _merge([by_source[source], each.facts])
        known = writer.finish() | {"sources": by_source}
        (path / "facts.json").write_text(json.dumps(known), "utf-8")
        return known

    def _too_little(self, what: str, tallies: list[Tally], encoded: list[dict] | None = None) -> Mistakes:
        dropped = sum((Counter(facts["dropped"]) for facts in [*map(_facts, tallies), *(encoded or [])]), Counter())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common()) or "nothing"
        places = [place for tally in tallies for places in tally.places.values() for place in places][:3]
        names = ", ".join(source.source for source in self.data.train)
        what = f"{names}: {what} (left out: {reasons}{'; see ' if places else ''}{', '.join(places)})"
        fix = "name more data, or raise data.seq_len where it is too long" + ("; or raise data.buffer" if self.data.streaming else "")
        for source in self.data.train:
            if rows := sources.data_files(source):
                fix = f"a folder is read as source code; its rows are read by name: data.train='{rows}'"
        return Mistakes(Mistake("recipe", "data.train", what, fix))


def _facts(tally: Tally) -> dict[str, Any]:
    return {"read": tally.read, "dropped": dict(tally.dropped), "notes": dict(tally.notes), "places": tally.places}


def _merge(facts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers added, whatever their depth; of anything else the first."""
    out = {}
    for each in facts:
        for name, value in each.items():
            if isinstance(value, dict):
                out[name] = _merge([out.get(name, {}), value])
            elif isinstance(value, int) and name in out:
                out[name] += value
            else:
                out.setdefault(name, value)
    return out
