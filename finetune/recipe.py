"""The recipe: what to train, on what, for how long. The schema, its defaults and its reader; nothing else holds a default.

`python -m finetune.recipe > recipes/schema.json` renews the JSON schema that editors complete from.
"""

import difflib
import json
import os
import re
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from finetune.mistakes import Mistake, Mistakes


class Section(BaseModel):
    """Strict: an unknown key or a value of another type is a mistake, never a guess."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


def _as_path(value: str) -> str:
    """A path as it is meant everywhere: ~ is a home folder, and nothing else is expanded."""
    path = os.path.expanduser(value)
    if "\0" in path or any(len(part.encode("utf-8")) > 255 for part in path.split("/")):
        raise ValueError("no file can have that name")
    if path.startswith("~"):
        raise ValueError("there is no such user's home folder")
    return path


def _as_new_path(value: str) -> str:
    """A path to write to, which would be made with a dollar sign in its name."""
    if "$" in value:
        raise ValueError("variables are not expanded in a recipe; write the path out")
    return _as_path(value)


Positive = Annotated[int, Field(gt=0, le=10**9)]
NotNegative = Annotated[int, Field(ge=0, le=10**9)]
FewPositive = Annotated[int, Field(gt=0, le=10**6)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_as_path)]
NewPath = Annotated[str, Field(min_length=1), AfterValidator(_as_new_path)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Precision = Literal["auto", "fp16", "bf16", "fp32"]


class Model(Section):
    name: Name = Field("bigcode/starcoder", description="a hub name, or a local folder with config.json")
    revision: str = Field("main", min_length=1, description="branch, tag or commit on the hub; pin a commit before publishing")
    precision: Precision = Field("auto", description="auto: bf16 from compute capability 8.0, fp16 below it, fp32 on a CPU")
    random_weights: bool = Field(False, description="start from random weights of the model's shapes; reads config and tokenizer only")


class Method(Section):
    kind: Literal["lora", "qlora", "full"] = Field("lora", description="qlora: LoRA on a base quantised to 4-bit NF4")
    rank: FewPositive = Field(16, description="rank of the LoRA matrices")
    alpha: FewPositive = Field(32, description="LoRA's scale is alpha / rank")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout before LoRA's A; the base model's own dropout is off")
    targets: list[str] = Field([], description="names of linear modules that get LoRA; empty: all of the model family's")


class Source(Section):
    source: Name = Field(description="a folder of source code; .jsonl, .json, .csv or .parquet files; or a hub data set")
    weight: float = Field(
        1.0, gt=0.0, le=100.0, description="how often each document is seen in one pass; 0.5 takes half, each pass another"
    )
    format: Literal["auto", "text", "completion", "messages", "repository"] = Field(
        "auto", description="auto: by the columns; repository joins the files of one repository"
    )
    column: str = Field("", description="the column that holds the text, where it is none of the usual names")
    subset: str = Field("", description="of a hub data set: its configuration")
    split: str = Field("train", min_length=1, description="of a hub or saved data set")
    revision: str = Field("main", min_length=1, description="of a hub data set: branch, tag or commit")


def _as_sources(value: Any) -> Any:
    """`train: code` and `train: [code, rows.jsonl]` as the list of sources that they mean."""
    items = value if isinstance(value, list) else [value]
    return [{"source": item} if isinstance(item, str) else item for item in items]


def _allow_short_sources(schema: dict[str, Any]) -> None:
    """The JSON schema of what `_as_sources` takes."""
    source = schema.pop("items")
    del schema["type"], schema["minItems"]
    one = [{"type": "string", "minLength": 1}, source]
    schema |= {"anyOf": [*one, {"type": "array", "minItems": 1, "items": {"anyOf": one}}], "default": "."}


class Data(Section):
    train: Annotated[list[Source], BeforeValidator(_as_sources), Field(min_length=1)] = Field(
        [Source(source=".")],
        description="a folder, files (also compressed, or a glob), or a hub data set; several as a list, with weights if wanted",
        json_schema_extra=_allow_short_sources,
    )
    seq_len: int = Field(2048, ge=8, description="tokens in a row; at most the model's positions")
    packing: Literal["best_fit", "concat", "none"] = Field(
        "best_fit", description="best_fit cuts no document that fits a row; concat is one stream cut into rows; none is one document a row"
    )
    fim_rate: Share = Field(0.5, description="share of documents turned to fill-in-the-middle; 0 is plain left to right")
    fim_spm_share: Share = Field(0.5, description="of those, the share in suffix-prefix-middle order")
    eval_share: float = Field(0.05, gt=0.0, lt=1.0, description="share of documents held out, chosen by a hash of their identity")
    eval_rows: FewPositive = Field(64, description="rows at most in one evaluation")
    largest_bytes: Positive = Field(1_000_000, description="larger documents are left out; large source files are nearly always generated")
    most_dropped: Share = Field(0.05, description="stop where more of a source's examples are too long or have nothing to learn")
    decontaminate: list[Name] = Field(
        [], description="JSONL files of benchmarks (HumanEval, MBPP); documents that contain one are left out"
    )
    streaming: bool = Field(False, description="read data.buffer documents at a time, for data too large to hold on the disk twice")
    buffer: Positive = Field(10_000, description="documents of a stream that are split, shuffled and packed together")
    cache: NewPath = Field("runs/cache", description="folder of prepared rows, by their fingerprint; may be deleted at any time")


class Optim(Section):
    lr: float = Field(2.0e-4, gt=0.0, description="peak learning rate of AdamW")
    steps: Positive = Field(1000, description="optimizer steps")
    warmup_steps: NotNegative = Field(30, description="steps of linear warm-up; fewer than steps")
    schedule: Literal["cosine", "linear"] = Field("cosine", description="how the rate falls to zero after the warm-up")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled; on matrices, never on biases and norms")
    micro_batch: FewPositive = Field(1, description="rows a GPU takes at once")
    grad_accum: FewPositive = Field(16, description="micro batches a GPU adds up before a step")
    clip: float = Field(1.0, gt=0.0, description="the gradient's norm is cut to this")
    stop_after_skips: Positive = Field(20, description="stop after so many fp16 overflows in a row")


class Memory(Section):
    checkpoint_activations: bool = Field(True, description="keep a layer's input alone and recompute the layer in the backward pass")
    offload_activations: bool = Field(False, description="keep those inputs in pinned host memory; for long rows")
    keep_layers: int = Field(0, ge=0, description="where memory is left: so many layers, the last ones, keep everything, not recomputed")
    keep_mlp: int = Field(
        0,
        ge=0,
        description="likewise: so many layers before those keep the MLP's first product, at a third of the memory (LoRA, not ZeRO-3)",
    )


class Run(Section):
    out: NewPath = Field("runs/starcoder-lora", description="folder of the results; never one that holds a finished run")
    seed: int = Field(0, ge=0, lt=2**32, description="of the adapter's first weights, the order of rows and fill-in-the-middle")
    eval_every: Positive = Field(100, description="steps between evaluations; there is one before and one after training too")
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        ["tensorboard"], description="where metrics go beside metrics.jsonl"
    )
    sample: str = Field("def read_jsonl(path):\n", min_length=1, description="prompt completed before and after training")
    sample_tokens: int = Field(24, ge=0, le=10**6, description="tokens of that completion; 0: none")
    save_dtype: Precision = Field("auto", description="of a full model's result; auto: the precision that it was trained in")


class Recipe(Section):
    """One training job, as `recipes/*.yaml` write it."""

    model: Model = Model()
    method: Method = Method()
    data: Data = Data()
    optim: Optim = Optim()
    memory: Memory = Memory()
    run: Run = Run()


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error, 1e-4 is a number (YAML 1.1 reads it as text), and 010 and 1:30 are none."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(None, None, f"{key_node.value} is given twice (line {line})", None)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_NUMBERS[0], re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _NUMBERS[1], re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"), list("-+.0123456789")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def read_mapping(path: Path | str) -> dict[str, Any]:
    """Read a YAML file whose top is a mapping (an empty file is an empty one).

    Raises:
        Mistakes: no such file, not text, not YAML, a key given twice, a Python tag, or another top than a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Mistakes(Mistake(str(path), "", f"not UTF-8 text (byte {error.start})", "save it as UTF-8")) from None
    except OSError as error:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"paths are relative to {Path.cwd()}"
        raise Mistakes(Mistake(str(path), "", error.strerror or "cannot be read", hint)) from None
    return {} if (content := _load_yaml(text, str(path))) is None else _as_mapping(content, str(path))


def _load_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # beside its own, YAML's constructors let through whatever a wrong tag or number raises in them
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or f"{type(error).__name__} {error}"
        raise Mistakes(Mistake(where, "", f"not valid YAML{line}: {problem}", "correct that line")) from None


def _as_mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise Mistakes(Mistake(where, "", f"a {type(content).__name__} at the top", "write `section:` with `key: value` lines below it"))
    return content


def load_recipe(path: Path | str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe and put dotted overrides (`optim.lr=1e-4`) over it.

    Raises:
        Mistakes: all that is wrong with the file and the overrides, at once.
    """
    mapping, mistakes, from_command_line = read_mapping(path), [], set()
    in_file = set(mapping)
    for override in overrides or []:
        key, equals, value = override.partition("=")
        parts = key.split(".")
        if not equals or len(parts) != 2 or not all(parts):
            mistakes.append(Mistake("command line", override, "not an override", "write section.key=value, as in optim.lr=1e-4"))
            continue
        section = mapping.setdefault(parts[0], {})
        if section is None:
            section = mapping[parts[0]] = {}
        if isinstance(section, dict):
            try:
                section[parts[1]] = _load_yaml(value, f"command line: {key}")
            except Mistakes as error:
                mistakes += error.mistakes
            from_command_line.add(key)
    # `data:` with nothing below it is an empty section, as it reads.
    mapping = {key: {} if value is None else value for key, value in mapping.items()}
    try:
        recipe = Recipe.model_validate(mapping)
    except ValidationError as error:
        for entry in error.errors():
            key = ".".join(str(part) for part in entry["loc"])
            given_there = ".".join(str(part) for part in entry["loc"][:2]) in from_command_line or not in_file.issuperset(entry["loc"][:1])
            where = "command line" if given_there else str(path)
            mistakes.append(_explain(where, key, entry))
        raise Mistakes(*mistakes) from None
    if recipe.optim.warmup_steps >= recipe.optim.steps:
        what = f"{recipe.optim.warmup_steps} is not less than optim.steps ({recipe.optim.steps})"
        mistakes.append(Mistake(str(path), "optim.warmup_steps", what, "the rate would never reach its peak; lower it"))
    if recipe.memory.offload_activations and not recipe.memory.checkpoint_activations:
        what = "it is the checkpointed inputs that go to the host, and memory.checkpoint_activations is off"
        mistakes.append(Mistake(str(path), "memory.offload_activations", what, "set both, or neither"))
    for key in ("keep_layers", "keep_mlp"):
        if getattr(recipe.memory, key) and not recipe.memory.checkpoint_activations:
            what = "it is for layers that are recomputed, and memory.checkpoint_activations is off: every layer keeps everything"
            mistakes.append(Mistake(str(path), f"memory.{key}", what, "leave it out, or switch checkpointing on"))
    if recipe.model.random_weights and recipe.method.kind == "qlora":
        what = "random weights are not quantised: 4-bit weights are made while a checkpoint is read"
        mistakes.append(Mistake(str(path), "model.random_weights", what, "set method.kind to lora or full"))
    if mistakes:
        raise Mistakes(*mistakes)
    return recipe


# Keys of other trainers that name one of ours, or a decision that has its home elsewhere.
ELSEWHERE = {
    "device_map": "remove it: a device map trains one GPU at a time; how a model is sharded is the launch file's business",
    "load_in_4bit": "remove it and set method.kind: qlora",
    "load_in_8bit": "remove it: 4-bit is offered (method.kind: qlora), 8-bit is not",
    "attn_implementation": "remove it: the attention kernel follows the GPU",
    "bf16": "remove it: precision follows the GPU; model.precision overrides it",
    "fp16": "remove it: precision follows the GPU; model.precision overrides it",
    "num_processes": "remove it: it is in the launch file (accelerate_configs/)",
    "trust_remote_code": "remove it: code that comes with a model is never run",
    "learning_rate": "did you mean optim.lr?",
    "max_steps": "did you mean optim.steps?",
    "max_seq_length": "did you mean data.seq_len?",
    "gradient_accumulation_steps": "did you mean optim.grad_accum?",
    "output_dir": "did you mean run.out?",
    "target_modules": "did you mean method.targets?",
}


def all_keys() -> list[str]:
    """Every key of a recipe, dotted."""
    return [f"{name}.{key}" for name, field in Recipe.model_fields.items() for key in field.annotation.model_fields]


_SHOWN = reprlib.Repr()  # a mistaken value can be of any size
_SHOWN.maxstring = _SHOWN.maxother = 100
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict = 2, 4, 4


def _explain(where: str, key: str, entry: dict[str, Any]) -> Mistake:
    kind, context, given = entry["type"], entry.get("ctx", {}), _SHOWN.repr(entry.get("input"))
    if not key:
        return Mistake(where, "", f"cannot be read ({entry['msg']})", "correct it")
    in_source = re.match(r"data\.train\.\d+(\.|$)", key)
    if in_source and kind == "model_type":
        return Mistake(where, key, f"a path or a hub name is expected, not {given}", "or {source: NAME, ...}")
    if in_source and kind == "extra_forbidden":
        near = difflib.get_close_matches(key[in_source.end() :], Source.model_fields, n=1)
        return Mistake(where, key, "no such key", f"did you mean {near[0]}?" if near else f"a source has {', '.join(Source.model_fields)}")
    if kind in ("extra_forbidden", "invalid_key"):
        return Mistake(where, key, "no such key", _nearest(key))
    if kind == "model_type":
        return Mistake(where, key, f"a section is expected, not {given}", f"write `{key}:` with `key: value` lines below it")
    message = entry["msg"].removeprefix("Value error, ")
    what = f"{given}: {message[0].lower()}{message[1:]}"
    if kind == "literal_error":
        near = difflib.get_close_matches(given.strip("'"), re.findall(r"'(\w+)'", context["expected"]), n=1)
        return Mistake(where, key, f"{given} is none of {context['expected']}", f"did you mean {near[0]}?" if near else "choose one")
    section, _, name = key.partition(".")
    name = key[in_source.end() :] if in_source else name.split(".")[0]
    field = (Source if in_source else Recipe.model_fields[section].annotation).model_fields.get(name)
    return Mistake(where, key, what, f"{name} is {field.description}" if field else "correct it")


def _nearest(key: str) -> str:
    section, _, name = key.rpartition(".")
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    candidates = all_keys()
    same_section = [candidate for candidate in candidates if candidate.startswith(f"{section}.")]
    names = {candidate.partition(".")[2]: candidate for candidate in reversed(candidates)}
    near = difflib.get_close_matches(key, same_section, n=1, cutoff=0.75) or [
        names[match] for match in difflib.get_close_matches(name, list(names), n=1, cutoff=0.75)
    ]
    for known, advice in ELSEWHERE.items():
        if not near and difflib.get_close_matches(name, [known], cutoff=0.85):
            return advice
    if near:
        return f"did you mean {near[0]}?"
    if section and same_section:
        return f"{section} has {', '.join(candidate.partition('.')[2] for candidate in same_section)}"
    near = difflib.get_close_matches(key, list(Recipe.model_fields), n=1)
    return f"did you mean {near[0]}?" if near else f"the sections are {', '.join(Recipe.model_fields)}"


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that `load_recipe` reads back to an equal one."""
    # Escaped beyond ASCII: YAML reads some Unicode line ends back as spaces.
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False)


def schema_json() -> str:
    """The JSON schema of a recipe, as committed in `recipes/schema.json`."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(schema_json(), end="")
