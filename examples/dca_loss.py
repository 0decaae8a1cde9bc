"""How well a real model reads on beyond the length it was trained for: the mean loss of the next token by position, with plain RoPE and with dual chunk
attention, in nats.

usage: python examples/dca_loss.py TEXT.txt [-m MODEL.gguf] [--edges 1k,4k,8k,12k,16k,20k,24k] [--dca-chunk C --dca-local L --rope-original-ctx N] [--backend auto|cuda|host]
TEXT holds at least as many tokens as the last edge. docs/dca.md uses The Adventures of Sherlock Holmes (Project Gutenberg, number 1661), which is in the
public domain. Both runs read the same tokens on one load of the weights. The last lines compare what lies beyond the trained length with the
last range before it. With dual chunk attention scores are raised by the length of the whole text from its first token on, if it is longer than the original
context; --rope-original-ctx N, of the length of the text, leaves that out.
"""

import argparse
from pathlib import Path

import numpy as np
from tabulate import tabulate

from rollkv.counts import parse_counts
from rollkv.dual_chunk import DualChunkRequest, short_words, with_dual_chunk
from rollkv.engine import Engine
from rollkv.models import default_model
from rollkv.report import PhaseProgress
from rollkv.startup import load
from rollkv.tasks.generate import cache_config, open_text_model


def losses(engine: Engine, ids: list[int], label: str) -> np.ndarray:
    """float64 [N - 1]: minus the log probability of every id behind the first."""
    found: list[float] = []
    with PhaseProgress(label) as progress:
        for rows in engine.logit_rows(ids):
            logits = rows.astype(np.float64)
            following = ids[len(found) + 1 : len(found) + 1 + len(logits)]  # the last row of all has none
            logits = logits[: len(following)]
            top = logits.max(axis=1)
            found += (top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(following)), following]).tolist()
            progress(len(found) + 1, len(ids))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--edges", default="1k,4k,8k,12k,16k,20k,24k")
    parser.add_argument("--dca-chunk", type=int)
    parser.add_argument("--dca-local", type=int)
    parser.add_argument("--rope-original-ctx", type=int)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ubatch", type=int, default=4096)
    options = parser.parse_args()

    model = open_text_model(options.model or default_model())
    edges = (0, *parse_counts(options.edges, "--edges"))
    ids = model.tokenizer.encode(options.text.read_text(encoding="utf-8-sig"))[: edges[-1] + 1]
    if len(ids) <= edges[-1]:
        parser.error(f"{options.text} has {len(ids)} tokens, {edges[-1] + 1} are wanted; give a longer text or lower --edges")
    request = DualChunkRequest("on", options.dca_chunk, options.dca_local, options.rope_original_ctx)
    configs = model.config, with_dual_chunk(model.config, request)
    cache = cache_config(len(ids), ubatch=options.ubatch)
    with load(model.path, cache, config=configs[0], backend=options.backend) as engine:
        found = []
        for config in configs:
            engine.replan(cache, None, config)
            found.append(losses(engine, ids, short_words(config)))

    trained = model.config.context_length
    ranges = list(zip(edges, edges[1:], strict=False))
    means = [[float(one[begin:end].mean()) for one in found] for begin, end in ranges]
    names = [short_words(config) for config in configs]
    print(f"{model.path.name}, trained for {trained} cells; {options.text.name}; mean loss of the next token in nats\n")
    print(
        tabulate(
            [(f"{begin} to {end}", *row) for (begin, end), row in zip(ranges, means, strict=True)], ["positions", *names], floatfmt=".3f"
        )
    )
    within = [row for (_, end), row in zip(ranges, means, strict=True) if end <= trained]
    beyond = [row for (begin, _), row in zip(ranges, means, strict=True) if begin >= trained]
    if within and beyond:
        for index, name in enumerate(names):
            most = max(row[index] for row in beyond) - within[-1][index]
            print(f"\n{name}: at most {most:+.3f} nats beyond {trained} cells, against the last range before", end="")
        print()


if __name__ == "__main__":
    main()
