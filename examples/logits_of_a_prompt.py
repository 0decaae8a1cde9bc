"""Prints what the model finds likely behind each token of a text: python examples/logits_of_a_prompt.py [MODEL.gguf] ["A text"]"""

import sys

import numpy as np

import rollkv


def main(model: str | None = None, text: str = "The capital of France is Paris, and the capital of Italy is") -> None:
    with rollkv.load(model, ctx_size=512) as engine:
        ids = engine.tokenizer.encode(text)
        rows = engine.logits(ids).astype(np.float64)  # [N, vocab]: row i is about token i + 1
        probabilities = np.exp(rows - rows.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        for position, row in enumerate(probabilities):
            best = np.argsort(-row)[:3]
            guesses = ", ".join(f"{engine.tokenizer.piece(int(token))!r} {row[token]:.2f}" for token in best)
            print(f"{position:4d} {engine.tokenizer.piece(ids[position])!r:16} -> {guesses}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
