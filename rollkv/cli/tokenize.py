"""`rollkv tokenize`: the ids and pieces of a text, as a run of the model would see them."""

import json
from typing import Annotated

import typer

from rollkv.cli import options
from rollkv.errors import UsageError


def tokenize(
    model: options.Model = None,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    pre_tokenizer: options.PreTokenizer = None,
    parse_special: Annotated[bool, typer.Option("--parse-special", help="Read control tokens written in the text as tokens.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Never add the begin-of-text token.")] = False,
    output: options.Output = "text",
) -> None:
    """Show the token ids of a text, one a line with its piece."""
    as_json = options.wants_json(output)
    text = options.read_prompt(prompt, file)
    if text is None:
        raise UsageError("no text: give -p TEXT or -f FILE")

    from rollkv import report
    from rollkv.models import default_model
    from rollkv.synth import open_model
    from rollkv.tokenizer import Tokenizer

    with open_model(model or default_model()) as opened:
        tokenizer = Tokenizer.from_metadata(opened.metadata, pre_tokenizer=pre_tokenizer)
    for message in tokenizer.warnings:
        report.warn(message)
    ids = tokenizer.encode(text, add_bos=False if no_bos else None, parse_special=parse_special)
    pieces = [tokenizer.piece(token) for token in ids]
    if as_json:
        report.write_json({"ids": ids, "pieces": pieces})
    else:
        report.write_text("".join(f"{token}\t{json.dumps(piece, ensure_ascii=False)}\n" for token, piece in zip(ids, pieces, strict=True)))
