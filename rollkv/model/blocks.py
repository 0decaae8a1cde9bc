"""Attention and feed-forward blocks, written once over Backend and shared by the architecture families."""

from rollkv.backend import Array
from rollkv.model.step import Model, Step
from rollkv.weights import LayerWeights
from rollkv.workspace import STATE_EXTRA


def attention(model: Model, step: Step, index: int, x: Array, out: Array) -> None:
    """out = attn_output(softmax(q k^T) v) of the normalised x; appends this step's keys and values. x, out f32 [T, hidden]."""
    backend, layer, weights = model.backend, model.config.layers[index], model.weights.layers[index]
    tokens = step.num_tokens
    q = model.workspace["q"].view((tokens, layer.num_heads * layer.key_dim))
    k = model.workspace["k"].view((tokens, layer.num_kv_heads * layer.key_dim))
    v = model.workspace["v"].view((tokens, layer.num_kv_heads * layer.value_dim))
    attended = model.workspace["attention"].view((tokens, layer.num_heads * layer.value_dim))

    backend.linear(x, weights.attn_q, q, weights.attn_q_bias)
    backend.linear(x, weights.attn_k, k, weights.attn_k_bias)
    backend.linear(x, weights.attn_v, v, weights.attn_v_bias)
    if weights.attn_q_norm is not None and weights.attn_k_norm is not None:
        backend.rms_norm(q, weights.attn_q_norm, model.config.rms_norm_eps, q)
        backend.rms_norm(k, weights.attn_k_norm, model.config.rms_norm_eps, k)
    backend.rope(q, layer.num_heads, step.tables[layer.rope], layer.rope)
    backend.rope(k, layer.num_kv_heads, step.tables[layer.rope], layer.rope)
    model.cache.append(index, k, v, step.position_array, step.position)
    (_attend_one if tokens == 1 else _attend_many)(model, step, index, q, attended)
    backend.linear(attended, weights.attn_output, out)


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


def feed_forward(model: Model, step: Step, weights: LayerWeights, x: Array, out: Array) -> None:
    """out = ffn_down(activation(ffn_gate(x)) * ffn_up(x)). x, out f32 [T, hidden]."""
    backend = model.backend
    gate, up = (model.workspace[name].rows(step.num_tokens) for name in ("gate", "up"))
    backend.linear(x, weights.ffn_gate, gate)
    backend.linear(x, weights.ffn_up, up)
    backend.glu(gate, up, model.config.activation, gate)
    backend.linear(gate, weights.ffn_down, out)
