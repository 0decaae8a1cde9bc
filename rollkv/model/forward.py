"""THE forward pass: tokens in, final hidden rows out; then rows to logits."""

from collections.abc import Callable

import numpy as np

from rollkv.backend import Array
from rollkv.config import SamplingParams
from rollkv.model import gemma3, llama
from rollkv.model.step import Model, Step
from rollkv.rope import rotations

LAYERS: dict[str, Callable[[Model, Step, int, Array], None]] = {
    "llama": llama.layer,
    "qwen2": llama.layer,
    "qwen3": llama.layer,
    "gemma3": gemma3.layer,
}


def enter(model: Model, tokens: np.ndarray, position: int) -> Step:
    """Puts tokens (int32 [T]) into the sequence at cells position .. position + T - 1, and the position into device memory."""
    model.backend.write(model.workspace["sequence"].rows(len(tokens), position), tokens)
    move_to(model, position)
    return step_at(model, len(tokens), position)


def move_to(model: Model, position: int) -> None:
    """Puts the position into device memory."""
    model.backend.write(model.workspace["position"], np.array([position], np.int32))


def announce(model: Model, prompt_cells: int) -> None:
    """Puts the length of the whole prompt into device memory."""
    model.backend.write(model.workspace["prompt_cells"], np.array([prompt_cells], np.int32))


def step_at(model: Model, num_tokens: int, position: int) -> Step:
    """The step of the tokens that the sequence holds at cells position .. position + num_tokens - 1; the device's position must stand there. If it
    is to attend, they lie in one chunk of every rotation (rope.bands)."""
    tables = {
        rope: model.workspace[f"rope.{number}"].view((rotations(rope), num_tokens, rope.dim // 2, 2))
        for number, rope in enumerate(model.ropes)
    }
    return Step(num_tokens, position, model.workspace["position"], tables)


def forward(model: Model, step: Step, after_layer: Callable[[int, Array], None] | None = None) -> Array:
    """Appends the step's tokens; returns the last layer's rows, f32 [T, hidden].

    after_layer(index, hidden) is called behind every layer, for inspection.
    """
    backend, config, workspace = model.backend, model.config, model.workspace
    hidden = workspace["hidden"].rows(step.num_tokens)
    layer = LAYERS[config.architecture]

    model.cache.begin_step(step.position, step.num_tokens)
    for rope, table in step.tables.items():
        backend.rope_table(rope, step.position_array, workspace["prompt_cells"], table)
    backend.embed(workspace["sequence"], step.position_array, model.weights.token_embd, config.embedding_scale, hidden)
    for index in range(config.num_layers):
        layer(model, step, index, hidden)
        if after_layer is not None:
            after_layer(index, hidden)
    return hidden


def logits(model: Model, hidden: Array) -> Array:
    """Output norm and output matrix over up to 16 rows: f32 [rows, vocab]. hidden f32 [rows, hidden]."""
    out = model.workspace["logits"].rows(hidden.shape[0])
    model.backend.linear(hidden, model.weights.output, out, norm=model.weights.output_norm)
    return out


def choose(model: Model, row: Array, sampling: SamplingParams) -> None:
    """Chooses the token behind the cell where the device's position stands, puts it into the sequence and moves the position on to it; what
    came of it is in workspace["outcome"]. row f32 [1, vocab]: that cell's logits."""
    workspace = model.workspace
    sequence, position, outcome = workspace["sequence"], workspace["position"], workspace["outcome"]
    model.backend.choose(row, sampling, sequence, position, outcome, workspace["choice.scratch"])
