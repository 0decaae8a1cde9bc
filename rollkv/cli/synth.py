"""`rollkv synth`: a model of a known shape, with a retrieval circuit in it, as a GGUF file."""

from pathlib import Path
from typing import Annotated

import typer


def synth(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[:QTYPE]",
            help="Shape: qwen3-8b, qwen2.5-14b-1m, llama-3.1-8b, llama-3.2-1b, gemma-3-4b or tiny; weights Q8_0 (default), Q4_K or F16.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The GGUF file to write; it must not be there yet.")],
    architecture: Annotated[
        str | None, typer.Option(metavar="llama|qwen2|qwen3|gemma3", help="Layout of the layers, instead of the shape's own.")
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Number of layers.")] = None,
    hidden: Annotated[int | None, typer.Option(metavar="N", help="Columns of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Query heads of a layer.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="KV heads of a layer, a divisor of the query heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Elements of a head, a multiple of 16 from 64 to 256.")] = None,
    ffn: Annotated[int | None, typer.Option(metavar="N", help="Columns inside the feed-forward part.")] = None,
    vocab: Annotated[int | None, typer.Option(metavar="N", help="Tokens, 2048 or more; those that no text needs are unused.")] = None,
    context: Annotated[int | None, typer.Option(metavar="N", help="Context length that the file names.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Another seed gives other weights; 0 if not given.")] = None,
) -> None:
    """Write a synthetic model: random weights around a circuit that finds a needle if, and only if, attention over every cell is right.

    No file is needed to run one: '-m synth:NAME[:QTYPE][,key=value...]' makes the same weights on the fly.
    A prompt that works: any text with "The secret of zebra42 is 7316." in it, and "The secret of zebra42 is" at its end.
    Sizes that are not given are the shape's own.
    """
    from rollkv import report
    from rollkv.synth import open_synth, write_gguf
    from rollkv.units import format_size

    given = {
        "architecture": architecture,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab": vocab,
        "context": context,
        "seed": seed,
    }
    with open_synth(",".join([name, *(f"{key}={value}" for key, value in given.items() if value is not None)])) as file:
        size = write_gguf(file, output)
        report.write_text(f"{output}: {file.shape.spec}, {format_size(size)}\n")
