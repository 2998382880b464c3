"""Whatever people bring: a right result with what was left out counted by reason, or one message with file and line."""

import bz2
import csv
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune import folder
from finetune.mistakes import Mistakes
from finetune.recipe import Source
from finetune.sources import Tally, check_source, open_source
from tests.corpora import CASES, documents, make, write_functions, write_rows

GOOD = [json.loads(line)["text"] for line in (CASES / "good.jsonl").read_text().splitlines()]


def source_of(corpus):
    return corpus.manifest()["sources"][0]


@pytest.mark.parametrize(
    ("case", "dropped", "line"),
    [
        ("good", {}, None),
        ("H2_mixed_types", {"text is not text": 2}, 65),
        ("H7_null_and_empty", {"text is null or missing": 2, "text is empty": 2}, 65),
        ("H5_truncated_tail", {"cut off at the end of the file": 1}, 65),
        ("H6_latin1", {"not UTF-8": 1}, 65),
        ("H6_bom_crlf", {}, None),
    ],
)
def test_the_good_rows_of_a_bad_file_are_kept_and_the_others_counted(tmp_path, case, dropped, line):
    corpus = make(tmp_path, str(CASES / f"{case}.jsonl"))
    assert documents(corpus) == GOOD
    assert source_of(corpus)["dropped"] == dropped
    assert line is None or any(f"{case}.jsonl:{line}" in places[0] for places in source_of(corpus)["places"].values())


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("H5_duplicate_key", ["1 usable document"]),
        ("H7_zero_bytes", ["0 usable documents", "left out: nothing"]),
        ("H7_only_empty", ["0 usable documents", "8 text is empty", "H7_only_empty.jsonl:1"]),
        ("H12_empty_completion", ["0 usable documents", "8 completion is empty"]),
        ("H12_prompt_longer_than_window", ["1 usable document", "duplicate"]),
        ("H15_one_row", ["1 usable document"]),
    ],
)
def test_a_file_with_nothing_to_learn_from_is_one_message(tmp_path, case, expected):
    with pytest.raises(Mistakes) as error:
        make(tmp_path, str(CASES / f"{case}.jsonl"), eval_share=0.3)
    assert len(error.value.mistakes) == 1
    for text in [f"{case}.jsonl", *expected]:
        assert text in str(error.value)


def test_few_rows_are_rows(tmp_path):
    corpus = make(tmp_path, str(CASES / "H15_three_rows.jsonl"))
    assert len(documents(corpus)) == 3
    assert len(corpus.batch(0, 8, rank=3, world_size=4, micro_batch=2)) == 1


def test_an_array_instead_of_lines_is_read(tmp_path):
    assert documents(make(tmp_path, str(CASES / "H5_array.jsonl"))) == ["a = 1", "b = 2"]


def test_the_last_of_two_equal_keys_counts_and_is_noted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text":"a","text":"b"}\n{"text":"c"}\n')
    corpus = make(tmp_path, str(path))
    assert documents(corpus) == ["b", "c"]
    assert source_of(corpus)["notes"]["a key twice, the last one counts"] == 1


def test_every_file_and_compression_holds_the_same_rows(tmp_path):
    rows = [{"text": text, "stars": str(number)} for number, text in enumerate(GOOD)]
    plain = Path(write_rows(tmp_path / "a.jsonl", rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "stars"])
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=10)
    for suffix, opener in ((".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)):
        with opener(f"{plain}{suffix}", "wb") as file:
            file.write(plain.read_bytes())
    import zstandard

    Path(f"{plain}.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    files = sorted(tmp_path.glob("a.*"))
    assert len(files) == 8
    for path in files:
        assert documents(make(tmp_path, str(path))) == GOOD, path


def test_several_files_and_a_glob_are_read_in_order(tmp_path):
    for name, texts in (("one", GOOD[:30]), ("two", GOOD[30:])):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    assert documents(make(tmp_path, str(tmp_path / "*.jsonl"))) == GOOD
    assert sorted(documents(make(tmp_path, [str(tmp_path / "two.jsonl"), str(tmp_path / "one.jsonl")]))) == sorted(GOOD)


def test_every_reader_goes_on_from_any_position(tmp_path):
    rows = [{"text": text} for text in GOOD]
    write_rows(tmp_path / "a1.jsonl", rows[:20])
    (tmp_path / "a2.json").write_text(json.dumps(rows[20:35]))
    pq.write_table(pa.Table.from_pylist(rows[35:50]), tmp_path / "a3.parquet", row_group_size=4)
    (tmp_path / "a4.csv").write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows[50:]))
    (tmp_path / "code").mkdir()
    for number in range(5):
        (tmp_path / "code" / f"{number}.py").write_text(f"x = {number}\n")
    for name, column in ((str(tmp_path / "a*.*"), "text"), (str(tmp_path / "code"), "content")):
        source = Source(source=name)
        reader = open_source(source, Tally(), None, 10**6)
        texts, positions = [], [None]
        for record in reader:
            texts.append(record.columns[column])
            positions.append(json.loads(json.dumps(reader.position())))
        assert len(texts) == (64 if column == "text" else 5)
        for done, position in enumerate(positions):
            rest = [record.columns[column] for record in open_source(source, Tally(), position, 10**6)]
            assert rest == texts[done:], (name, done)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "one"}\n{"text": \'two\'}\n{"text": "three"}\n', "rows.jsonl:2: not a line of JSON"),
        (b'{"text": "one"} {"text": "two"}\n{"text": "three"}\n', "rows.jsonl:1: not a line of JSON"),
        (b'[{"text": "one"},\n', "rows.jsonl: not JSON"),
        ('{"text": "one"}\n'.encode("utf-16"), "rows.jsonl: is UTF-16: iconv"),
        (b'{"body": "one"}\n{"body": "two"}\n', "lacks the columns of any format; it has body: name the text column"),
        (b'"one"\n[1]\n', "2 not an object"),
        (b"[" * 100_000 + b"\n{}\n", "rows.jsonl: not JSON"),
    ],
)
def test_what_cannot_be_read_is_one_message_with_its_line(tmp_path, content, expected):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(Mistakes) as error:
        make(tmp_path, str(tmp_path / "rows.jsonl"))
    assert expected in str(error.value) and len(error.value.mistakes) == 1


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b'text\n"one\n', "not CSV"),
        ("a.parquet", b"PAR1 no", "not a whole Parquet file"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n' * 1000)[:-20], "cannot be read"),
        ("a.txt", b"x", "neither a folder nor a file of rows"),
    ],
)
def test_damaged_files_are_one_message(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Mistakes, match=expected) as error:
        make(tmp_path, str(tmp_path / name))
    assert name in str(error.value)


def test_rows_of_another_schema_are_counted_wherever_they_stand(tmp_path):
    rows = [{"other": 1}, {"text": "a = 1"}, {"text": "b = 2", "new": [1]}, {"body": "c"}, {"text": "d = \ud800"}, {"text": 7}]
    corpus = make(tmp_path, write_rows(tmp_path / "rows.jsonl", rows))
    assert documents(corpus) == ["a = 1", "b = 2"]
    assert source_of(corpus)["dropped"] == {
        "no column to learn from": 1,
        "text is null or missing": 1,
        "not UTF-8": 1,
        "text is not text": 1,
    }


def test_a_line_of_50_mb_is_left_out_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for text in ("a = 1", "x" * 50_000_000, "b = 2"):
            file.write(json.dumps({"text": text}) + "\n")
    corpus = make(tmp_path, str(path))
    assert documents(corpus) == ["a = 1", "b = 2"]
    assert source_of(corpus)["dropped"] == {"over 1,000,000 bytes": 1}


def test_csv_cells_are_counted(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,stars\r\n"a\nb",1\r\nc\r\n\xe9,2\r\nd,3\r\n')
    corpus = make(tmp_path, str(tmp_path / "a.csv"))
    assert documents(corpus) == ["a\nb", "d"]
    assert source_of(corpus)["dropped"] == {"another number of cells than the header": 1, "not UTF-8": 1}


def test_a_source_tree_gives_its_good_files_and_counts_the_traps(tmp_path):
    root = tmp_path / "tree"
    subprocess.run([sys.executable, CASES / "make_source_tree.py", root], check=True)
    corpus = make(tmp_path, str(root))
    assert documents(corpus) == ["def a():\n    return 1\n", "Y = 2\n"]
    assert source_of(corpus)["dropped"] == {
        "not UTF-8": 2,
        "binary": 1,
        "empty": 1,
        "duplicate": 1,
        "symbolic link": 1,
        "vendored or generated folder": 4,  # node_modules, .git, dist and build
        "secret": 1,
        "not source code": 1,
    }


def test_more_traps_in_a_tree(tmp_path):
    root = tmp_path / "tree"
    for name, text in {
        "good.py": "x = 1\n",
        "also.c": "int x;\n",
        "minified.js": "x" * 2000,
        "huge.py": "x = 1\n" * 200_000,
        "api_pb2.py": "x = 2\n",
        "made.go": "// Code generated by protoc-gen-go. DO NOT EDIT.\npackage x\n",
        "key.py": "KEY = '''-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEAabcdefgh\n'''\n",
        "id_rsa": "x",
        "server.pem": "x",
        ".env.local": "x",
        "venv/pyvenv.cfg": "x",
        "venv/a.py": "x = 3\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    os.mkfifo(root / "pipe.py")
    (root / "link.py").symlink_to(root / "good.py")
    tally = Tally()
    texts = [record.columns["content"] for record in open_source(Source(source=str(root)), tally, None, 1_000_000)]
    assert texts == ["int x;\n", "x = 1\n"]
    assert tally.dropped == {
        "minified (a line over 1,000 characters)": 1,
        "over 1,000,000 bytes": 1,
        "generated": 2,
        "secret": 4,
        "vendored or generated folder": 1,
        "not a regular file": 1,
        "symbolic link": 1,
    }


def git(root: Path, *arguments: str) -> None:
    environ = os.environ | {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, env=environ)


def test_a_checkout_gives_what_git_tracks_and_other_folders_what_gitignore_leaves(tmp_path):
    root = tmp_path / "code"
    for name in ("tracked.py", "untracked.py", "out/tracked.py", "out/made.py", "sub/a.py", "sub/b.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / ".gitignore").write_text("out/\n*b.py\n")
    (root / "sub" / ".gitignore").write_text("!b.py\na.py\n")
    dropped = []

    def names(base=root):
        dropped.clear()
        return [path.relative_to(base).as_posix() for path in folder.list_files(base, lambda reason, where: dropped.append(reason))]

    assert names() == ["sub/b.py", "tracked.py", "untracked.py"]
    assert dropped.count("named by .gitignore") == 2  # out, with all that is in it, and sub/a.py
    git(root, "init")
    assert names() == ["sub/b.py", "tracked.py", "untracked.py"], "a checkout that tracks nothing yet is read as a folder"
    git(root, "add", "-f", "tracked.py", "out/tracked.py", "sub/a.py")
    git(root, "commit", "-m", "x")
    assert names() == ["out/tracked.py", "sub/a.py", "tracked.py"]
    assert names(root / "sub") == ["a.py"]
    (root / "tracked.py").unlink()
    assert names() == ["out/tracked.py", "sub/a.py"]


def test_names_may_be_any_bytes(tmp_path):
    root = tmp_path / "code"
    root.mkdir()
    for number, name in enumerate([b"a.py", b"\xff\xfe.py", "né日.py".encode(), b"new\nline.py"]):
        (root / os.fsdecode(name)).write_text(f"x = {number}\n")
    for settings in ({}, {"streaming": True, "buffer": 3}):
        corpus = make(tmp_path, {"source": str(root), "format": "repository"}, **settings)
        corpus.batch(0, 8, 0, 1, 1)
        assert source_of(corpus)["read"] >= 4 and source_of(corpus)["dropped"].get("not UTF-8") is None


def test_rows_in_a_folder_are_pointed_at(tmp_path):
    (tmp_path / "rows").mkdir()
    write_functions(tmp_path / "rows" / "a.jsonl", 9)
    with pytest.raises(Mistakes, match=r"its rows are read by name: data.train='.*/rows/\*.jsonl'"):
        make(tmp_path, str(tmp_path / "rows"))


def test_a_pipe_is_no_file_of_rows(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    for name in (tmp_path / "rows.jsonl", "/dev/null"):
        with pytest.raises(Mistakes, match="neither a folder nor a file of rows"):
            make(tmp_path, str(name))


def test_a_stream_goes_on_by_name_when_the_folder_changes(tmp_path):
    for name in "bcd":
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    reader = open_source(Source(source=str(tmp_path)), Tally(), None, 10**6)
    rows = iter(reader)
    next(rows), next(rows)
    (tmp_path / "a.py").write_text("a = 1\n")
    assert [record.columns["path"] for record in open_source(Source(source=str(tmp_path)), Tally(), reader.position(), 10**6)] == ["d.py"]
    one = write_functions(tmp_path / "one.jsonl", 3)
    reader = open_source(Source(source=one), Tally(), None, 10**6)
    next(iter(reader))
    Path(one).rename(tmp_path / "two.jsonl")
    with pytest.raises(Mistakes, match="one.jsonl: is gone, and was being read"):
        open_source(Source(source=str(tmp_path / "*.jsonl")), Tally(), reader.position(), 10**6)


def test_a_file_that_vanishes_is_counted(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    tally = Tally()
    reader = open_source(Source(source=str(tmp_path)), tally, None, 10**6)
    (tmp_path / "b.py").unlink()
    assert len(list(reader)) == 2
    assert tally.dropped == {"unreadable (No such file or directory)": 1}


@pytest.mark.parametrize("name", ["./rows", "rows.jsonl", "/no/where", "~/none", "tests/none", "a/b/c", "data/x.csv.gz", "*.jsonl", "lone"])
def test_what_looks_like_a_path_is_never_looked_for_on_the_hub(name, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(Mistakes, match="does not exist, looked for from"):
        check_source(Source(source=name))


def test_a_data_set_on_the_hub_is_streamed_by_name_subset_and_revision(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(name, subset, **options):
        asked.append((name, subset, options))
        return datasets.Dataset.from_list([{"content": text} for text in GOOD]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = {"source": "someone/some-code", "subset": "python", "split": "test", "revision": "abc"}
    assert documents(make(tmp_path, source)) == GOOD
    assert asked[0] == ("someone/some-code", "python", {"revision": "abc", "split": "test", "streaming": True})
    reader, seen = open_source(Source(**source), Tally(), None, 10**6), []
    for record in reader:
        seen.append(record.columns["content"])
        if len(seen) == 20:
            break
    rest = open_source(Source(**source), Tally(), json.loads(json.dumps(reader.position())), 10**6)
    assert [record.columns["content"] for record in rest] == GOOD[20:]


def test_a_hub_that_does_not_answer_is_one_message(tmp_path, monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(Mistakes, match="no-such-owner/no-such-data .split train. cannot be opened"):
        make(tmp_path, "no-such-owner/no-such-data")


def test_a_data_set_saved_to_disk_is_read(tmp_path):
    import datasets

    saved = datasets.Dataset.from_list([{"text": text} for text in GOOD])
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=saved).save_to_disk(str(tmp_path / "dict"))
    assert documents(make(tmp_path, str(tmp_path / "saved"))) == GOOD
    assert documents(make(tmp_path, str(tmp_path / "dict"))) == GOOD


def test_weights_say_how_often_a_document_is_seen(tmp_path):
    one, two = (
        write_functions(tmp_path / "one.jsonl", 200),
        write_rows(tmp_path / "two.jsonl", [{"text": f"y{n} = {n}"} for n in range(200)]),
    )
    corpus = make(tmp_path, [{"source": one, "weight": 2.0}, {"source": two, "weight": 0.5}], eval_share=0.01)
    first, second = corpus.manifest()["sources"]
    train = [source["read"] - source["held_out_documents"] - sum(source["dropped"].values()) for source in (first, second)]
    assert first["documents"] == 2 * train[0]
    assert 0.35 < second["documents"] / train[1] < 0.65
