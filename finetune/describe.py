"""What a person sees of the data: what became of each source, and a row as the model gets it."""

from typing import Any

from finetune.packing import IGNORED, Rows

SHOWN_CHARACTERS = 800


def describe(manifest: dict[str, Any]) -> str:
    """The manifest of `Corpus.manifest` as a short table."""
    head = f"{'source':<28} {'format':<10} {'read':>9} {'train':>9} {'held out':>9} {'tokens':>12} {'labels':>7}"
    lines = [head]
    for source in manifest["sources"]:
        name = source["source"] if len(source["source"]) <= 28 else f"…{source['source'][-27:]}"
        share = source["learnt"] / max(source["tokens"], 1)
        counts = f"{source['read']:>9,} {source['documents']:>9,} {source['held_out_documents']:>9,} {source['tokens']:>12,} {share:>7.1%}"
        lines.append(f"{name:<28} {source['format'] or '?':<10} {counts}")
        for verb in ("dropped", "notes"):
            for reason, count in sorted(source[verb].items(), key=lambda item: -item[1]):
                places = source["places"].get(reason, [])
                lines.append(f"  {'left out' if verb == 'dropped' else 'kept'} {count:>9,}  {reason}{f': {places[0]}' if places else ''}")
    lines.append(
        f"{manifest['rows']:,} rows of {manifest['seq_len']:,} ({manifest['packing']}), {manifest['row_fill']:.1%} full, "
        f"{manifest['label_share']:.1%} of the tokens are labels; {manifest['held_out_rows']:,} rows held out; "
        f"data {manifest['fingerprint']} in {manifest['cache']}"
    )
    return "\n".join(lines)


def show_row(rows: Rows, tokenizer) -> str:
    """The first of `rows` decoded: a line before each piece, and [[ ]] around what is not learnt. Only its beginning."""
    tokens, positions, labels = rows.tokens[0], rows.positions[0], rows.labels[0]
    text, start = "", 0
    for place in range(1, len(tokens) + 1):
        # The first token of a piece is never a label; it is shown with what follows it.
        ends = place == len(tokens) or positions[place] == 0
        turns = not ends and positions[place] > 1 and (labels[place] == IGNORED) != (labels[place - 1] == IGNORED)
        if ends or turns:
            part = tokenizer.decode(tokens[start:place].tolist())
            begins = positions[start] == 0
            text += "--- piece ---\n" if begins else ""
            text += part if labels[place - 1] != IGNORED else f"[[{part}]]"
            text += "\n" if ends else ""
            start = place
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"
