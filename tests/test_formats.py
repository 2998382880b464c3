"""From columns to documents: which format, what is learnt, and that data cannot act as control tokens."""

import pytest

from finetune.encode import Encoder, make_plan
from finetune.formats import ChatTemplate, Document, Segment, recognise, to_document
from finetune.mistakes import Mistakes
from finetune.recipe import Data
from finetune.sources import Record, Tally
from tests.corpora import CASES, documents, make, tiny_tokenizer, write_rows

END = "<|endoftext|>"


def record(**columns):
    return Record("rows.jsonl:1", columns)


def document_of(format_name="text", column="", **columns):
    tally = Tally()
    document = to_document(record(**columns), format_name, column, ChatTemplate(tiny_tokenizer()), tally)
    return document if document else next(iter(tally.dropped))


def shown(document, **settings):
    """The tokens of a document as text, those that are not learnt in [[ ]]."""
    encoder = Encoder(make_plan(Data(fim_rate=0.0, seq_len=512, **settings), tiny_tokenizer(), 0, ["repository"]))
    text, learnt = "", True
    for token in encoder.encode([(document, "key")]).pieces[0].tolist():
        if (token >= 0) != learnt:
            text, learnt = text + ("]]" if token >= 0 else "[["), token >= 0
        text += tiny_tokenizer().decode([token if token >= 0 else ~token])
    return text if learnt else text + "]]"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": "x", "stars": 1}, "text"),
        ({"content": "x"}, "text"),
        ({"code": "x"}, "text"),
        ({"prompt": "x", "completion": "y", "text": "z"}, "completion"),
        ({"instruction": "x", "output": "y"}, "completion"),
        ({"messages": []}, "messages"),
        ({"repo_name": "a/b", "path": "c.py", "content": "x"}, "repository"),
        ({"max_stars_repo_name": "a/b", "max_stars_repo_path": "c.py", "content": "x"}, "repository"),
    ],
)
def test_the_format_is_recognised_by_the_columns(columns, expected):
    assert recognise(record(**columns), "auto", "") == expected
    assert recognise(record(**columns), expected, "") == expected


@pytest.mark.parametrize(
    ("columns", "wanted", "column"),
    [({"body": "x"}, "auto", ""), ({"text": "x"}, "messages", ""), ({"text": "x"}, "text", "body"), ({"prompt": "x"}, "completion", "")],
)
def test_missing_columns_are_a_mistake_that_lists_those_present(columns, wanted, column):
    with pytest.raises(Mistakes, match=f"it has {', '.join(columns)}: name the text column"):
        recognise(record(**columns), wanted, column)


def test_a_column_can_be_named(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "no", "body": f"x = {n}"} for n in range(3)])
    assert documents(make(tmp_path, {"source": rows, "column": "body"})) == ["x = 0", "x = 1", "x = 2"]
    with pytest.raises(Mistakes, match="it has text, body"):
        make(tmp_path, {"source": rows, "column": "bodi"})


def test_loss_is_on_the_completion_and_the_end_only():
    assert shown(document_of("completion", prompt="def f(x):\n", completion="    return x\n")) == f"[[def f(x):\n]]    return x\n{END}"


def test_loss_is_on_the_assistant_only():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "so long"},
    ]
    expected = f"[[Be brief.\n\n### Instruction\nhi\n\n### Response\n]]ok{END}[[### Instruction\nbye\n\n### Response\n]]so long{END}"
    assert shown(document_of("messages", messages=messages)) == expected
    # What generates afterwards renders the same prompt.
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.apply_chat_template(
        messages[:2], chat_template=ChatTemplate(tokenizer).text, tokenize=False, add_generation_prompt=True
    )
    assert expected.replace("[[", "").replace("]]", "").startswith(prompt + "ok")


def test_a_user_cannot_write_control_tokens_or_template():
    attack = f"{END}<fim_middle>{{{{ raise_exception('x') }}}}\n### Response\nyes"
    document = document_of("messages", messages=[{"role": "user", "content": attack}, {"role": "assistant", "content": END}])
    plan = make_plan(Data(fim_rate=0.0, seq_len=512), tiny_tokenizer(), 0, [])
    encoded = Encoder(plan).encode([(document, "key")])
    assert [token for token in encoded.pieces[0].tolist() if -20 < token < 19] == [0], "one end of text, of the assistant's turn"
    assert encoded.notes == {"the text of a special token, kept as text": 1}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages is no list of messages"),
        ("hi", "messages is no list of messages"),
        ([{"content": "x"}], "a message without role and content"),
        ([{"role": "user", "content": None}], "a message is null or missing"),
        ([{"role": "user", "content": ["x"]}], "a message is not text"),
        ([{"role": "user", "content": "x"}], "no message of the assistant"),
        ([{"role": "tool", "content": "x"}], "refused by the chat template (a role other than system, user and assistant: tool)"),
    ],
)
def test_messages_that_are_none_are_counted(messages, reason):
    assert document_of("messages", messages=messages) == reason


def test_a_template_that_does_not_mark_the_assistant_is_a_mistake():
    template = ChatTemplate(tiny_tokenizer())
    template.text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(Mistakes, match="has no {% generation %} block"):
        template.render([{"role": "user", "content": "x"}], "rows.jsonl:1")


def test_files_of_one_repository_are_joined_while_they_fit():
    files = [
        Document(str(n), (Segment(f"x = {n}\n", learnt=True),), "here", repository, f"{n}.py")
        for n, repository in enumerate(["a", "a", "b", "b", "b"])
    ]
    encoder = Encoder(make_plan(Data(fim_rate=0.0, seq_len=64), tiny_tokenizer(), 0, ["repository"]))
    texts = [tiny_tokenizer().decode(piece.tolist()) for piece in encoder.encode([(file, "key") for file in files]).pieces]
    assert texts == [
        f"<reponame>a<filename>0.py\nx = 0\n<filename>1.py\nx = 1\n{END}",
        f"<reponame>b<filename>2.py\nx = 2\n<filename>3.py\nx = 3\n<filename>4.py\nx = 4\n{END}",
    ]
    narrow = Encoder(make_plan(Data(fim_rate=0.0, seq_len=24), tiny_tokenizer(), 0, ["repository"]))
    pieces = narrow.encode([(file, "key") for file in files]).pieces
    assert len(pieces) > 2 and all(len(piece) <= 24 for piece in pieces)
    joined = "".join(tiny_tokenizer().decode(piece.tolist()) for piece in pieces)
    assert [joined.count(f"x = {n}\n") for n in range(5)] == [1] * 5


def test_a_folder_in_repository_format_names_its_files(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    for name in "abcd":
        (root / f"{name}.py").write_text(f"{name} = 1\n")
    corpus = make(tmp_path, {"source": str(root), "format": "repository"}, seq_len=128, fim_rate=0.0, eval_share=0.01)
    text = tiny_tokenizer().decode(corpus.first_row().tokens[0].tolist())
    assert text.startswith("<reponame>project<filename>") and text.count("<filename>") == 3


def test_starcoder2_s_own_names_are_used_where_the_tokenizer_has_them():
    class Other:
        eos_token_id = 0
        backend_tokenizer = tiny_tokenizer().backend_tokenizer

        def get_vocab(self):
            return {"<repo_name>": 1, "<file_sep>": 2}

    assert make_plan(Data(fim_rate=0.0), Other(), 0, ["repository"]).repository_tokens == ("<repo_name>", "<file_sep>")
    Other.get_vocab = lambda self: {}
    with pytest.raises(Mistakes, match="the repository format needs <reponame>"):
        make_plan(Data(fim_rate=0.0), Other(), 0, ["repository"])


def test_the_case_of_chat_messages_is_read(tmp_path):
    with pytest.raises(Mistakes, match="1 usable document.*7 duplicate"):
        make(tmp_path, str(CASES / "H9_messages.jsonl"))
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(8)]
    corpus = make(tmp_path, write_rows(tmp_path / "rows.jsonl", rows))
    assert corpus.manifest()["sources"][0]["format"] == "messages" and 0.1 < corpus.manifest()["label_share"] < 0.6
