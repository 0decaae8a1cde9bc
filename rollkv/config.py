"""Frozen facts about a model and a run. Foreign names (GGUF keys) become these in model_config.py and nowhere else."""

from dataclasses import dataclass, replace
from typing import Literal

from rollkv.kv_types import KV_TYPES

DEFAULT_PAGE_CELLS = 256
DEFAULT_UBATCH = 4096
SMALLEST_UBATCH = 256  # that a ubatch nobody asked for is halved to

Dtype = Literal["f32", "f16", "bf16", "i32", "u8"]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2"]
DTYPE_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "u8": 1}


@dataclass(frozen=True)
class DualChunk:
    """Dual chunk attention (An et al., arXiv 2402.17463): rotations by which no key is further than chunk_cells away, however long the context.

    Cells are numbered anew every stride_cells. Keys stand where their number says and are never rotated again; the query's place depends on how many
    chunks back a key lies: its own number in its own chunk, min(number + stride, chunk_cells) in the one before, min(2 stride - 1, chunk_cells) in
    all older ones.
    """

    chunk_cells: int  # the largest distance
    local_cells: int  # the newest cells, whose distances are true
    original_context: int  # behind which scores are raised by the square of 1 + 0.1 ln(length / original_context)

    @property
    def stride_cells(self) -> int:
        return self.chunk_cells - self.local_cells


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer."""

    dim: int  # rotated dimensions of a head, from its first; even
    style: Literal["interleaved", "halves"]  # pairs (2i, 2i+1), or (i, i + dim/2)
    theta: float = 10000.0
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0  # yarn: the length the model was trained for
    attention_factor: float = 1.0  # yarn: multiplies the default magnitude correction
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    frequency_factors: tuple[float, ...] | None = None  # dim/2 divisors of the frequencies (llama-3 style)
    dual_chunk: DualChunk | None = None  # never together with yarn, whose place it takes


@dataclass(frozen=True)
class LayerConfig:
    """Attention geometry of one layer."""

    num_heads: int
    num_kv_heads: int
    key_dim: int  # head_dim of queries and keys
    value_dim: int  # head_dim of values
    rope: RopeConfig
    sliding_window: int | None = None  # the model's own mask: visible cells, the query's own included

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass needs to know besides the weights."""

    architecture: str
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int  # the length the model was trained for
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    attention_scale: float  # multiplies q . k
    activation: Literal["silu", "gelu_tanh"]
    embedding_scale: float = 1.0
    qk_norm: bool = False
    attention_bias: bool = False  # attn_q, attn_k, attn_v carry a bias
    post_norms: bool = False  # post_attention_norm and post_ffw_norm before the residual additions
    tied_output: bool = False  # the output matrix is token_embd
    name: str = ""
    declared_dual_chunk: DualChunk | None = None  # by the file; dual_chunk.py makes rotations of it

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class PageFormat:
    """One page of one layer: [K then V][Hkv], and for a KV head [P][D] plain numbers, or words of codes u32 [P/4][words][4 cells] and scales f16
    [P/4][D / group][4 cells]. The same bytes wherever the page lies."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_type: KvType
    value_type: KvType
    page_cells: int
    key_rotated: bool = False  # held in the frame of kv_codes.rotate, plain numbers too
    value_rotated: bool = False

    @property
    def key_bytes(self) -> int:
        return self.num_kv_heads * self.page_cells * KV_TYPES[self.key_type].row_bytes(self.key_dim)

    @property
    def page_bytes(self) -> int:
        return self.key_bytes + self.num_kv_heads * self.page_cells * KV_TYPES[self.value_type].row_bytes(self.value_dim)

    @property
    def coded(self) -> bool:
        return KV_TYPES[self.key_type].coded or KV_TYPES[self.value_type].coded

    @property
    def unpacked(self) -> "PageFormat":
        """The same cells in f16."""
        return replace(self, key_type="f16", value_type="f16")


@dataclass(frozen=True)
class CacheConfig:
    """What the user asks of the KV cache."""

    ctx_size: int  # cells of the whole context
    page_cells: int = DEFAULT_PAGE_CELLS
    key_type: KvType = "f16"
    value_type: KvType = "f16"
    ubatch: int = DEFAULT_UBATCH
    residency: Literal["auto", "full", "window"] = "auto"
    window_cells: int | None = None  # None: as large as the cap allows
    smallest_ubatch: int | None = None  # that ubatch may be halved to where memory is short; None: it stands as it is
    tail_key_type: KvType | None = None  # of pages that have left the window; None: as in it
    tail_value_type: KvType | None = None
    kv_rotate: bool = False  # coded types are rotated, not the turbo types alone
    protect_layers: int = 0  # the first and the last so many layers keep f16 in place of coded types

    @property
    def types(self) -> tuple[KvType, ...]:
        """All that cells may be held in."""
        tail = self.tail_key_type or self.key_type, self.tail_value_type or self.value_type
        return (self.key_type, self.value_type, *tail)

    @property
    def kept(self) -> tuple[object, ...]:
        """All that decides in which numbers cells are held."""
        return (*self.types, self.kv_rotate, self.protect_layers)

    @property
    def recodes(self) -> bool:
        """Whether cells change their type when they leave the window."""
        return self.types[:2] != self.types[2:]

    @property
    def can_rotate(self) -> bool:
        """Whether kv_rotate concerns any of the types: turbo types are rotated anyway, plain ones never."""
        return any(KV_TYPES[name].coded and not KV_TYPES[name].rotated for name in self.types)

    @property
    def lossy(self) -> bool:
        """Whether some cells are held in fewer than 16 bits."""
        return any(KV_TYPES[name].coded for name in self.types)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last: int = 64
    seed: int = 0
