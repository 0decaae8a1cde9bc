"""Attention and feed-forward blocks, written once over Backend and shared by the architecture families."""

from rollkv.backend import Array, PartStates, Projected
from rollkv.model.step import Model, Step
from rollkv.rope import query_bands
from rollkv.workspace import qkv_columns, state_shape


def attention(model: Model, step: Step, index: int, x: Array, out: Array, *, add: bool) -> None:
    """out = attn_output(softmax(q k^T) v) of norm(x), or out += that; appends this step's keys and values. x, out f32 [T, hidden]."""
    backend, layer, weights = model.backend, model.config.layers[index], model.weights.layers[index]
    qkv = model.workspace["qkv"].view((step.num_tokens, qkv_columns(layer)))
    model.cache.enter_layer(index)
    backend.linear(x, weights.attn_qkv, qkv, norm=weights.attn_norm, bias=weights.attn_qkv_bias)
    projected = Projected(qkv, layer, weights.attn_q_norm, weights.attn_k_norm, step.tables[layer.rope])
    attended = (_attend_one if step.num_tokens == 1 else _attend_many)(model, step, index, projected)
    backend.linear(attended, weights.attn_output, out, add=add)


def _attend_one(model: Model, step: Step, index: int, projected: Projected) -> Array:
    """Decode: a partial state for every visible page, wherever it lies, merged in page order. Queries are finished where they are used, so their
    array takes what was attended, f32 [1, H*Dv]."""
    layer, workspace = model.config.layers[index], model.workspace
    visible = model.cache.step_pages(index).visible
    first, num_parts = visible[0].first_page, visible[-1].end_page - visible[0].first_page
    part_out = workspace["attention.part_out"].view((num_parts, layer.num_heads, layer.value_dim))
    part_lse = workspace["attention.part_lse"].view((num_parts, layer.num_heads))
    q = workspace["attention.queries"].view((query_bands(layer.rope), layer.num_heads * layer.key_dim))
    parts = PartStates(first, num_parts, part_out, part_lse, workspace["attention.arrivals"].view((layer.num_heads,)), q)
    out = workspace["q"].view((1, layer.num_heads * layer.value_dim))
    for runs, page in model.cache.append_and_walk(index):
        model.backend.attend_step(projected, step.position_array, runs, page, model.config.attention_scale, parts, out)
    return out


def _attend_many(model: Model, step: Step, index: int, projected: Projected) -> Array:
    """Prefill: appends; then query tiles walk the pages from old to new, their running state carried from run to run, and turn anew where another
    band of pages begins. What was attended, f32 [T, H*Dv], takes the array of what was projected: rows are written from the run on that holds the step's
    first cell, and the band of its pages is the last."""
    layer, workspace = model.config.layers[index], model.workspace
    tokens = step.num_tokens
    q = workspace["q"].view((tokens, layer.num_heads * layer.key_dim))
    out = workspace["qkv"].view((tokens, layer.num_heads * layer.value_dim))
    state = workspace["attention.state"].view(state_shape(tokens, layer))
    turned = model.cache.append(index, projected, step.position_array, step.position, q)
    scale, scratch = model.config.attention_scale, workspace["attention.unpacked"]
    for run, page, band, last in model.cache.walk(index):
        if band != turned:
            model.backend.queries(projected, page, band, q)
            turned = band
        model.backend.attend_tile(q, step.position_array, run, layer, page, scale, state, scratch, last=last, out=out)
    return out


def feed_forward(model: Model, step: Step, index: int, x: Array, out: Array, *, add: bool) -> None:
    """out = ffn_down(activation(ffn_gate(norm(x))) * ffn_up(norm(x))), or out += that. x, out f32 [T, hidden]."""
    weights, scratch = model.weights.layers[index], model.workspace["feed_forward"].rows(step.num_tokens)
    model.backend.feed_forward(x, weights.ffn_norm, weights.ffn_gate_up, model.config.activation, weights.ffn_down, out, scratch, add=add)
