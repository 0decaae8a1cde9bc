"""Attention and feed-forward blocks, written once over Backend and shared by the architecture families."""

from rollkv.backend import Array, Projected
from rollkv.model.step import Model, Step
from rollkv.workspace import STATE_EXTRA, qkv_columns


def attention(model: Model, step: Step, index: int, x: Array, out: Array, *, add: bool) -> None:
    """out = attn_output(softmax(q k^T) v) of norm(x), or out += that; appends this step's keys and values. x, out f32 [T, hidden]."""
    backend, layer, weights = model.backend, model.config.layers[index], model.weights.layers[index]
    tokens = step.num_tokens
    qkv = model.workspace["qkv"].view((tokens, qkv_columns(layer)))
    q = model.workspace["q"].view((tokens, layer.num_heads * layer.key_dim))
    attended = model.workspace["qkv"].view((tokens, layer.num_heads * layer.value_dim))  # what was projected has been read by then

    backend.linear(x, weights.attn_qkv, qkv, norm=weights.attn_norm, bias=weights.attn_qkv_bias)
    projected = Projected(qkv, q, layer, weights.attn_q_norm, weights.attn_k_norm, step.tables[layer.rope])
    model.cache.append(index, projected, step.position_array, step.position)
    (_attend_one if tokens == 1 else _attend_many)(model, step, index, q, attended)
    backend.linear(attended, weights.attn_output, out, add=add)


def _attend_one(model: Model, step: Step, index: int, q: Array, out: Array) -> None:
    """Decode: a partial state for every visible page, wherever it lies, then one merge in page order."""
    layer, page = model.config.layers[index], model.cache.formats[index]
    visible = model.cache.step_pages(index).visible
    base, parts = visible[0].first_page, visible[-1].end_page - visible[0].first_page
    part_out = model.workspace["attention.part_out"].view((parts, layer.num_heads, layer.value_dim))
    part_lse = model.workspace["attention.part_lse"].view((parts, layer.num_heads))
    for run, _ in model.cache.walk(index):
        model.backend.attend_rows(q, step.position_array, run, base, layer, page, model.config.attention_scale, part_out, part_lse)
    model.backend.merge_rows(part_out, part_lse, parts, layer, out)


def _attend_many(model: Model, step: Step, index: int, q: Array, out: Array) -> None:
    """Prefill: query tiles walk the pages from old to new, their running state carried from run to run."""
    layer, page = model.config.layers[index], model.cache.formats[index]
    state = model.workspace["attention.state"].view((step.num_tokens, layer.num_heads * (layer.value_dim + STATE_EXTRA)))
    first = True
    for run, last in model.cache.walk(index):
        model.backend.attend_tile(
            q, step.position_array, run, layer, page, model.config.attention_scale, state, first=first, last=last, out=out
        )
        first = False


def feed_forward(model: Model, step: Step, index: int, x: Array, out: Array, *, add: bool) -> None:
    """out = ffn_down(activation(ffn_gate(norm(x))) * ffn_up(norm(x))), or out += that. x, out f32 [T, hidden]."""
    weights, scratch = model.weights.layers[index], model.workspace["feed_forward"].rows(step.num_tokens)
    model.backend.feed_forward(x, weights.ffn_norm, weights.ffn_gate_up, model.config.activation, weights.ffn_down, out, scratch, add=add)
