"""Generates text from a program: python examples/generate_text.py [MODEL.gguf] ["A prompt"] [VRAM, such as 6GiB]"""

import sys

import rollkv


def main(model: str | None = None, prompt: str = "Name three rivers and a city on each.", vram_target: str | None = None) -> None:
    with rollkv.load(model, vram_target=vram_target, ctx_size=1024) as engine:
        generation = engine.generate(prompt, max_tokens=100, stop=["\n\n\n"])
        for piece in generation:
            print(piece, end="", flush=True)
        print(f"\n[{len(generation.ids)} tokens, ended by {generation.stop_reason}; {engine.engine.stats.window_cells} cells resident]")


if __name__ == "__main__":
    main(*sys.argv[1:4])
