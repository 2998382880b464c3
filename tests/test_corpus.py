"""Rows by place: the same for every rank, run and restart, prepared once, and held-out documents held out for good."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from finetune import corpus as corpus_module
from finetune.corpus import prepare
from finetune.describe import describe, show_row
from finetune.mistakes import Mistakes
from finetune.packing import IGNORED
from finetune.recipe import Data
from finetune.workers import Workers
from tests.corpora import CASES, die, documents, make, tiny_tokenizer, write_functions, write_rows
from tests.launches import ROOT, command_for, read_metrics, run

STREAM = {"streaming": True, "buffer": 40}


def rows_of(corpus, steps, batch_rows=6, world_size=1, micro_batch=2):
    """All tokens and labels of the batches of `steps`, over all ranks in the order of the global batch."""
    out = []
    for step in steps:
        for rank in range(world_size):
            for rows in corpus.batch(step, batch_rows, rank, world_size, micro_batch):
                real = (rows.labels != IGNORED).any(axis=1)
                out += [(tokens.tobytes(), labels.tobytes()) for tokens, labels in zip(rows.tokens[real], rows.labels[real], strict=True)]
    return out


@pytest.fixture
def functions(tmp_path):
    return write_functions(tmp_path / "functions.jsonl", 150)


@pytest.mark.parametrize("settings", [{}, STREAM, {"packing": "concat"}, {"packing": "none"}], ids=str)
def test_rows_are_the_same_whatever_the_ranks(tmp_path, functions, settings):
    corpus = make(tmp_path, functions, **settings)
    expected = rows_of(corpus, range(30))
    for world_size, micro_batch in ((2, 1), (3, 2), (4, 3)):
        assert rows_of(corpus, range(30), world_size=world_size, micro_batch=micro_batch) == expected


@pytest.mark.parametrize("settings", [{}, STREAM, {**STREAM, "buffer": 1000}], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_stopping_anywhere_and_going_on_is_the_same_as_never_stopping(tmp_path, functions, settings, world_size):
    """With shuffling, fill-in-the-middle, several epochs, an empty cache, and another number of ranks."""
    whole = make(tmp_path / "a", functions, **settings)
    steps, batches = 60, {}
    for step in range(steps):
        batches[step] = rows_of(whole, [step])
    assert whole.position(6 * steps)["start"]["pass"] >= 2, "several epochs"
    for stop in (0, 1, 7, 28, 43, 59):
        position = json.loads(json.dumps(make(tmp_path / "a", functions, **settings).position(6 * stop)))
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        resumed = make(tmp_path / "b", functions, **settings)
        resumed.seek(position)
        for step in range(stop, min(stop + 5, steps)):
            assert rows_of(resumed, [step], world_size=world_size) == batches[step], (stop, step)


def test_going_on_reads_from_the_part_and_not_from_the_beginning(tmp_path, functions, monkeypatch):
    whole = make(tmp_path / "a", functions, **STREAM)
    position = whole.position(100)
    assert position["part"] >= 2
    resumed = make(tmp_path / "b", functions, **STREAM)
    made = []
    original = corpus_module._Maker._make_part
    monkeypatch.setattr(corpus_module._Maker, "_make_part", lambda self, number, path: made.append(number) or original(self, number, path))
    resumed.seek(position)
    resumed.batch(100 // 5, 5, 0, 1, 1)
    assert min(made) == position["part"] and len(made) <= 2


def test_a_position_of_other_data_is_refused(tmp_path, functions):
    position = make(tmp_path, functions).position(3)
    with pytest.raises(Mistakes, match="the position belongs to rows"):
        make(tmp_path, functions, seed=1).seek(position)


@pytest.mark.parametrize("settings", [{}, STREAM, {"packing": "concat"}, {"packing": "none"}], ids=str)
def test_every_document_is_in_every_pass_once(tmp_path, settings):
    """Token conservation from text to rows: what is read is held out, counted as dropped, or in the rows exactly once."""
    rows = [{"text": f"only{n}x = {n}\n" + "y = 1\n" * (n % 23)} for n in range(150)]
    corpus = make(tmp_path, write_rows(tmp_path / "rows.jsonl", rows), fim_rate=0.0, **settings)
    tokenizer, found = tiny_tokenizer(), Counter()
    last = next(number for number in range(99) if corpus._part(number).facts["next"]["pass"] == 1)
    for number in range(last + 1):
        part = corpus._part(number)
        out = part.rows(np.arange(len(part)))
        for tokens, positions in zip(out.tokens, out.positions, strict=True):
            text = tokenizer.decode([token for token in tokens.tolist() if token != 4])
            found += Counter(word for word in text.replace("\n", " ").replace("<|endoftext|>", " ").split(" ") if word.startswith("only"))
            assert (positions < 32).all()
    if settings.get("packing") != "concat":  # whose rows cut words
        manifest = corpus.manifest()["sources"][0]
        assert set(found.values()) == {1}
        kept = manifest["documents"]
        assert len(found) == kept
        assert kept + manifest["held_out_documents"] + sum(manifest["dropped"].values()) == manifest["read"] == 150
    facts = [corpus._part(number).facts for number in range(last + 1)]
    assert sum(fact["tokens"] for fact in facts) == sum(fact["sources"][0]["tokens"] for fact in facts)


def test_each_pass_draws_anew_and_each_row_comes_once_a_pass(tmp_path, functions):
    corpus = make(tmp_path, functions)
    first, second = corpus._part(0), corpus._part(1)
    assert first.facts["digest"] != second.facts["digest"]
    rows = rows_of(corpus, range(len(first)), batch_rows=1, micro_batch=1)
    assert len(set(rows)) == len(first)
    plain = make(tmp_path, functions, fim_rate=0.0)
    assert plain._part(0).facts["digest"] == plain._part(1).facts["digest"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_uneven_shards_are_streamed_without_loss_in_equal_steps(tmp_path, world_size):
    settings = {"streaming": True, "buffer": 7, "packing": "none", "fim_rate": 0.0}
    corpus = make(tmp_path, str(CASES / "F4_uneven" / "*.jsonl"), **settings)
    shares = [[corpus.batch(step, 4, rank, world_size, 1) for step in range(12)] for rank in range(world_size)]
    assert len({tuple(map(len, share)) for share in shares}) == 1
    total = next(start for number in range(99) if (start := corpus._maker.start(number))["pass"] == 1)["first_row"]
    seen = rows_of(corpus, range(total), batch_rows=1, micro_batch=1)
    assert len(set(seen)) == total
    manifest = corpus.manifest()["sources"][0]
    assert manifest["documents"] + manifest["held_out_documents"] + sum(manifest["dropped"].values()) == manifest["read"]
    base = json.loads((Path(corpus.manifest()["cache"]) / "base" / "facts.json").read_text())
    parts = [corpus._part(number).facts for number in range(99) if corpus._maker.start(number)["pass"] == 0]
    assert base["sources"][0]["read"] + sum(part["sources"][0]["read"] for part in parts) == 44
    assert 30 < total < 44


def test_a_second_run_finds_what_the_first_prepared(tmp_path, functions, monkeypatch):
    first = make(tmp_path, functions)
    monkeypatch.setattr(corpus_module._Maker, "_collect", lambda *_: pytest.fail("read again"))
    assert make(tmp_path, functions, eval_rows=3).digest() == first.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 48},
        {"fim_rate": 0.4},
        {"fim_spm_share": 0.4},
        {"packing": "concat"},
        {"eval_share": 0.1},
        {"largest_bytes": 9999},
        {"seed": 1},
    ],
    ids=str,
)
def test_whatever_rows_depend_on_is_in_the_fingerprint(tmp_path, functions, change):
    assert make(tmp_path, functions).fingerprint != make(tmp_path, functions, **change).fingerprint


def test_the_content_of_data_tokenizer_and_benchmarks_is_in_the_fingerprint(tmp_path, functions):
    before = make(tmp_path, functions).fingerprint
    benchmark = write_rows(tmp_path / "benchmark.jsonl", [{"prompt": "one two three four five six seven eight nine"}])
    assert make(tmp_path, functions, decontaminate=[benchmark]).fingerprint != before
    other = tiny_tokenizer().__class__.from_pretrained("models/tiny-starcoder")
    other.add_tokens(["def f"])
    data = Data.model_validate({"train": functions, "seq_len": 32, "cache": str(tmp_path / "cache")})
    assert prepare(data, other, 0, 1024, 5000).fingerprint != before
    stamp = os.stat(functions)
    Path(functions).write_text(Path(functions).read_text().replace("return", "yields"))
    os.utime(functions, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert make(tmp_path, functions).fingerprint != before


def prepare_in_process(folder, name, queue):
    queue.put(make(folder, name).digest())


def test_processes_that_share_a_cache_prepare_once(tmp_path, functions):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=prepare_in_process, args=(tmp_path, functions, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    digests = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert digests == {make(tmp_path, functions).digest()}


def test_a_killed_preparation_leaves_nothing_that_looks_whole(tmp_path, functions):
    program = (
        "import time; from tests import corpora; from finetune import corpus;"
        "corpus._Maker._make_part = lambda *_: (print('there', flush=True), time.sleep(60));"
        f"corpora.make(corpora.Path({str(tmp_path)!r}), {functions!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout.readline() == b"there\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    started = time.monotonic()
    expected = make(tmp_path / "other", functions).digest()
    assert make(tmp_path, functions).digest() == expected
    assert time.monotonic() - started < 20


def test_workers_give_what_one_process_gives(tmp_path, monkeypatch):
    root = tmp_path / "code"
    root.mkdir()
    for number in range(700):
        (root / f"{number}.py").write_text(f"def f{number}(x):\n    return x * {number * number}\n" * 40)
    alone = []
    monkeypatch.setattr("finetune.workers.BATCHES_WORTH_WORKERS", 10**9)
    one = make(tmp_path / "one", str(root))
    monkeypatch.setattr("finetune.workers.BATCHES_WORTH_WORKERS", 1)
    original = Workers.map
    monkeypatch.setattr(Workers, "map", lambda self, *job: alone.append(self.pool is None) or original(self, *job))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    many = make(tmp_path / "many", str(root))
    assert alone and not any(alone)
    assert one.digest() == many.digest() and one.manifest()["sources"] == many.manifest()["sources"]


def test_a_killed_worker_is_one_message(tmp_path, functions, monkeypatch):
    monkeypatch.setattr("finetune.workers.BATCHES_WORTH_WORKERS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("finetune.workers.judge", die)
    with pytest.raises(Mistakes, match="killed, most likely for want of host memory"):
        make(tmp_path, functions)


def test_held_out_documents_stay_held_out_when_data_is_added(tmp_path):
    def split(count):
        rows = write_functions(tmp_path / f"{count}.jsonl", count)
        corpus = make(tmp_path, rows, eval_share=0.2, eval_rows=1000, packing="none", fim_rate=0.0, seq_len=64)
        texts = [tiny_tokenizer().decode(row.tolist()).split("<|endoftext|>")[0] for row in corpus.held_out.tokens]
        return set(texts), set(documents(corpus)) - set(texts)

    held_out, train = split(200)
    more_held_out, more_train = split(300)
    assert held_out <= more_held_out and train <= more_train
    assert 25 < len(held_out) < 60


def test_files_are_known_by_their_path(tmp_path):
    root = tmp_path / "code"
    root.mkdir()
    for number in range(40):
        (root / f"{number}.py").write_text(f"x{number} = {number}\n")

    def held_out():
        corpus = make(tmp_path, str(root), eval_share=0.3, packing="none", seq_len=64)
        return {tiny_tokenizer().decode(row.tolist()).split("_")[0].split(" ")[0] for row in corpus.held_out.tokens}

    before = held_out()
    for number in range(40):
        (root / f"{number}.py").write_text(f"x{number} = {number} # edited\n")
    assert held_out() == before


def test_near_duplicates_of_held_out_documents_are_not_trained_on(tmp_path):
    """Of each document there is a copy with one word changed: where one is held out, the other is left out or held out too."""
    words = [f"word{n}" for n in range(3000)]
    draw = np.random.default_rng(0)
    texts = []
    for number in range(100):
        body = draw.choice(words, 100).tolist()
        for copy in range(2):
            body[5] = f"changed{copy}"
            texts.append(f"# family{number} {' '.join(body)}")
    for settings in ({}, {"streaming": True, "buffer": 1000}):
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
        corpus = make(tmp_path, rows, eval_share=0.2, eval_rows=1000, seq_len=1000, packing="none", fim_rate=0.0, **settings)

        def families(part):
            tokens = part.rows(np.arange(len(part))).tokens
            return {tiny_tokenizer().decode(row.tolist()).split()[1] for row in tokens}

        held_out, train = families(corpus._maker.part_of_base("held_out")), families(corpus._part(0))
        assert held_out and train and not held_out & train
        dropped = corpus.manifest()["sources"][0]["dropped"]["nearly a held-out document"]
        assert 10 < dropped <= len(held_out)
        # Nothing else was lost: documents that only share words are no near-duplicates.
        assert len(train) + len(held_out) == 100


def test_examples_that_share_a_prompt_or_an_answer_are_no_duplicates(tmp_path):
    draw = np.random.default_rng(0)
    shared = " ".join(draw.choice([f"word{n}" for n in range(900)], 60))

    def chat(question, answer):
        roles = (("system", shared), ("user", question), ("assistant", answer))
        return {"messages": [{"role": role, "content": content} for role, content in roles]}

    def own(number, count):
        return " ".join(f"{part}{number}" for part in [f"p{n}x" for n in range(count)])

    def dropped(rows):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        return make(tmp_path, path, eval_share=0.3, seq_len=1000, fim_rate=0.0).manifest()["sources"][0]["dropped"]

    assert dropped([chat(own(n, 3), own(n, 12)) for n in range(40)]) == {}, "the system prompt alone is the same"
    assert dropped([{"prompt": own(n, 30), "completion": "yes, that is so"} for n in range(40)]) == {}, "the answer alone is the same"
    nearly = [chat(own(n, 3), f"{own(n, 40)} {end}") for n in range(40) for end in ("a", "b")]
    assert dropped(nearly)["nearly a held-out document"] > 5


def test_benchmarks_are_left_out_wherever_they_stand(tmp_path):
    prose = "Return whether all the values in the list are below the limit."
    prompt = f'def below(values, limit):\n    """{prose}\n    >>> below([1], 2)\n    True\n    """\n'
    solution = "    for value in values:\n        if value >= limit:\n            return False\n    return True\n"
    human_eval = write_rows(
        tmp_path / "h.jsonl", [{"task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": solution, "test": "x"}]
    )
    mbpp = write_rows(
        tmp_path / "m.jsonl", [{"text": "Write a function to find the shared elements from the given two lists.", "code": "f"}]
    )
    clean = [f"def clean_{n}(a):\n    return a - {n * 31}\n" for n in range(20)]
    dirty = [
        f"import os\n{prompt}{solution}",
        f"x = 1\n{solution}",
        "# return whether all the VALUES\n# in the list are below the limit.",
        "'''write a function to find the shared elements from the given two lists'''\n",
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in clean + dirty])
    corpus = make(tmp_path, rows, decontaminate=[human_eval, mbpp], seq_len=128)
    assert corpus.manifest()["sources"][0]["dropped"] == {"contains a benchmark's problem": 4}
    assert make(tmp_path, rows, seq_len=128).manifest()["sources"][0]["dropped"] == {}
    for content, expected in (("{", "cannot be read"), ('{"a": 1}\n', "has no column")):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(Mistakes, match=expected):
            make(tmp_path, rows, decontaminate=[str(tmp_path / "bad.jsonl")])


def test_much_that_cannot_be_learnt_stops_the_run(tmp_path):
    rows = [{"prompt": f"p{n} " * (200 if n % 5 == 0 else 1), "completion": f"c{n}"} for n in range(100)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(Mistakes, match=r"1\d%|2\d% of the examples of .* cannot be learnt from \(\d+ longer than a row\)"):
        make(tmp_path, path)
    corpus = make(tmp_path, path, most_dropped=0.3)
    assert 10 <= corpus.manifest()["sources"][0]["dropped"]["longer than a row"] <= 20


def test_a_row_is_shown_as_it_is_learnt(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"ask {n}:", "completion": f" answer {n}"} for n in range(50)])
    corpus = make(tmp_path, rows, seq_len=64)
    shown = show_row(corpus.first_row(), tiny_tokenizer())
    assert "--- piece ---\n[[ask " in shown and ":]] answer " in shown and "<|endoftext|>" in shown
    table = describe(corpus.manifest())
    assert "completion" in table and corpus.fingerprint in table and f"{corpus.manifest()['row_fill']:.1%} full" in table


def test_what_the_model_cannot_index_is_a_mistake(tmp_path, functions):
    data = Data.model_validate({"train": functions, "seq_len": 64, "cache": str(tmp_path / "cache")})
    with pytest.raises(Mistakes, match="data.seq_len: 64 is more than the model's 63 positions"):
        prepare(data, tiny_tokenizer(), 0, 63, 4096)
    with pytest.raises(Mistakes, match="model.name: its tokenizer gives id .* and its embedding has 100 rows"):
        prepare(data, tiny_tokenizer(), 0, 64, 100)


def test_a_disk_that_is_too_small_is_a_mistake_before_it_is_full(tmp_path, functions, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(Mistakes, match="data.cache: preparing takes about .* GB"):
        make(tmp_path, functions)
    (tmp_path / "file").write_text("")
    with pytest.raises(Mistakes, match="data.cache: .* cannot be used .Not a directory.: name a folder"):
        make(tmp_path, functions, cache=str(tmp_path / "file"))


def test_what_one_process_finds_wrong_the_waiting_ones_say_too(tmp_path, monkeypatch):
    """Each of many ranks would otherwise read all of the data in its turn to find the same."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{broken\n{"text": "b"}\n')
    with pytest.raises(Mistakes) as first:
        make(tmp_path, str(tmp_path / "rows.jsonl"))
    (failure,) = (tmp_path / "cache").glob("*/failure.json")
    os.utime(failure, (time.time() + 100, time.time() + 100))  # found while we waited
    monkeypatch.setattr(corpus_module._Maker, "_collect", lambda *_: pytest.fail("read again"))
    with pytest.raises(Mistakes) as second:
        make(tmp_path, str(tmp_path / "rows.jsonl"))
    assert str(second.value) == str(first.value)


def test_no_collective_waits_for_a_slow_rank_s_data(tmp_path, functions):
    """Rank 0 takes longer than any collective may, before the first step and again where a new part begins."""
    arguments = ["recipes/smoke.yaml", f"data.train={functions}", "data.seq_len=32", "data.streaming=true", "data.buffer=40"]
    arguments += [
        f"data.cache={tmp_path / 'cache'}",
        f"run.out={tmp_path / 'out'}",
        "optim.steps=6",
        "optim.warmup_steps=1",
        "optim.grad_accum=2",
    ]
    done = run([*command_for("ddp", 2, tmp_path), ROOT / "tests/slow_rank.py", "8", "5", *arguments, "run.sample_tokens=0"])
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("_make_part takes long") >= 2 and "_collect takes long" in done.stdout
    assert len(read_metrics(tmp_path / "out")) == 7
    manifest = json.loads((tmp_path / "out" / "data.json").read_text())
    assert manifest["rows"] > 30 and manifest["sources"][0]["read"] >= 80
