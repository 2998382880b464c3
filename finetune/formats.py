"""From a record's columns to a document: stretches of text, each with whether it is learnt.

The four formats are text; prompt and completion; chat messages; and files that belong to a repository. A document can also
hold control text, in which special tokens are meant: it comes from this module or a chat template, never from data.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune.mistakes import Mistake, Mistakes
from finetune.sources import Record, Tally

TEXT_COLUMNS = ("text", "content", "code")
PROMPT_COLUMNS = (("prompt", "completion"), ("instruction", "output"), ("instruction", "response"))
REPOSITORY_COLUMNS = ("repo_name", "repository_name", "max_stars_repo_name", "repo")
PATH_COLUMNS = ("path", "file_path", "max_stars_repo_path")
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
# Stand for a message's content while the template is rendered, so that what the content holds cannot act as template or token.
_MARK = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True)
class Segment:
    """A stretch of a document; special tokens in it are plain text unless it is control text."""

    text: str
    learnt: bool
    is_control: bool = False


@dataclass(frozen=True)
class Document:
    """One document.

    name is its identity, which stays the same when other data is added: the path of a file, the hash of a row. repository is
    empty but in repository format, where documents of one repository are joined; path is its file's path there. where says where
    it was read.
    """

    name: str
    segments: tuple[Segment, ...]
    where: str
    repository: str = ""
    path: str = ""

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def recognise(record: Record, wanted: str, column: str) -> str:
    """The format of a source by its first record, or `wanted` if its columns are there.

    Args:
        wanted: `format` of the recipe's source.
        column: `column` of it.

    Raises:
        Mistakes: the columns that the format needs are missing; the message lists those present.
    """
    found = {
        "messages": "messages" in record.columns,
        "completion": _pick_prompt(record) is not None,
        "repository": _text_column(record, column) is not None
        and _first(record, REPOSITORY_COLUMNS) is not None
        and _first(record, PATH_COLUMNS) is not None
        and not record.is_file,  # a folder is joined only where that is asked for
        "text": _text_column(record, column) is not None,
    }
    if column and column not in record.columns:
        found = dict.fromkeys(found, False)
    if record.is_file:
        found["repository"] = wanted == "repository"
    format_name = next((name for name, there in found.items() if there), None) if wanted == "auto" else wanted
    if format_name is None or not found[format_name]:
        needed = f"its format {wanted}" if wanted != "auto" else "any format"
        what = f"{record.where} lacks the columns of {needed}; it has {', '.join(map(str, record.columns)) or 'none'}"
        fix = "name the text column: {source: …, column: NAME}; or have text, prompt and completion, or messages"
        raise Mistakes(Mistake("recipe", "data.train", what, fix))
    return format_name


def to_document(record: Record, format_name: str, column: str, template: "ChatTemplate", tally: Tally) -> Document | None:
    """The document of a record, or None where it was counted as left out."""
    if format_name == "messages":
        document = template.render(record.columns.get("messages"), record.where)
    elif format_name == "completion":
        document = _completion(record)
    else:
        document = _text(record, format_name, column)
    if isinstance(document, Document):
        return document
    tally.drop(document, record.where)
    return None


def _text(record: Record, format_name: str, column: str) -> Document | str:
    name = _text_column(record, column)
    text = record.columns.get(name) if name else None
    if reason := _unusable(text, name or column or "text"):
        return reason
    repository, path = "", ""
    if format_name == "repository":
        repository, path = (record.columns.get(_first(record, columns)) for columns in (REPOSITORY_COLUMNS, PATH_COLUMNS))
        if reason := _unusable(repository, "repository name") or _unusable(path, "path"):
            return reason
    identity = record.columns["path"] if record.is_file else _hash([text])
    return Document(identity, (Segment(text, learnt=True),), record.where, repository, path)


def _completion(record: Record) -> Document | str:
    names = _pick_prompt(record)
    if names is None:
        return "prompt or completion is missing"
    prompt, completion = (record.columns[name] for name in names)
    if reason := _unusable(prompt, names[0]) or _unusable(completion, names[1]):
        return reason
    segments = (Segment(prompt, learnt=False), Segment(completion, learnt=True))
    return Document(_hash([prompt, completion]), segments, record.where)


class ChatTemplate:
    """Renders chat messages; loss is on what stands in the template's `{% generation %}` blocks, which is the assistant's part."""

    def __init__(self, tokenizer):
        """The tokenizer's own template, or the one that ships here, for StarCoder has none."""
        self.text = tokenizer.chat_template or CHAT_TEMPLATE.read_text("utf-8")
        self.special_tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}

    def render(self, messages: object, where: str) -> Document | str:
        """The document of a list of {"role", "content"} mappings, or the reason why it is left out.

        Raises:
            Mistakes: the template does not mark what the assistant says.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if not re.search(r"\{%-?\s*generation\s*-?%\}", str(self.text)):
            what = "its tokenizer's chat template has no {% generation %} block, so what the assistant says cannot be told apart"
            fix = f"delete that template, and {CHAT_TEMPLATE.name} of this repository is used"
            raise Mistakes(Mistake("recipe", "model.name", what, fix))
        if not isinstance(messages, list) or not messages:
            return "messages is no list of messages"
        contents = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return "a message without role and content"
            if reason := _unusable(message.get("content"), "a message"):
                return reason
            contents.append(message["content"])
        marked = [{"role": message["role"], "content": f"\ue000{n}\ue001"} for n, message in enumerate(messages)]
        try:
            rendered, spans = render_jinja_template(
                [marked], chat_template=self.text, return_assistant_tokens_mask=True, **self.special_tokens
            )
        except TemplateError as error:
            return f"refused by the chat template ({error})"
        segments = tuple(_segments(rendered[0], spans[0], contents))
        if not any(segment.learnt for segment in segments):
            return "no message of the assistant"
        return Document(_hash(contents), segments, where)


def _segments(rendered: str, spans: Iterable[tuple[int, int]], contents: list[str]) -> Iterable[Segment]:
    """Cut the rendered template at the borders of generation blocks and of contents."""
    spans = list(spans)
    marks = {match.start(): match for match in _MARK.finditer(rendered)}
    cuts = {0, len(rendered), *(place for span in spans for place in span)}
    for match in marks.values():
        cuts |= {match.start(), match.end()}
    borders = sorted(cuts)
    for start, end in zip(borders, borders[1:], strict=False):
        learnt = any(first <= start and end <= last for first, last in spans)
        match = marks.get(start)
        yield Segment(contents[int(match[1])], learnt) if match else Segment(rendered[start:end], learnt, is_control=True)


def _unusable(value: object, name: str) -> str:
    if value is None:
        return f"{name} is null or missing"
    if not isinstance(value, str):
        return f"{name} is not text"
    if not value.strip():
        return f"{name} is empty"
    if "\0" in value:
        return "binary"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return "not UTF-8"  # a lone surrogate
    return ""


def _text_column(record: Record, column: str) -> str | None:
    return column or _first(record, TEXT_COLUMNS)


def _first(record: Record, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in record.columns), None)


def _pick_prompt(record: Record) -> tuple[str, str] | None:
    return next((names for names in PROMPT_COLUMNS if all(name in record.columns for name in names)), None)


def _hash(texts: list[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode("utf-8"), digest_size=16).hexdigest()
