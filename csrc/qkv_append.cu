// From one layer's product to its attention: queries are normed and turned; keys likewise, and they and the values go into their pages, rounded to the
// cache's types (to nearest, ties to even) or encoded.
//
// Formula   head_rows.cuh; values are stored as they are. Where the cache is rotated, keys and values are before they are stored, and queries as the keys
//           are (rotate.cuh); kv_codes.cuh.
// Operands  qkv f32 [T][H*Dk + Hkv*Dk + Hkv*Dv]; q_norm, k_norm f32 [Dk] or null; table f32 [T][pairs][2], pairs <= Dk / 2, of queries, and key_table of
//           keys; position i32 [1] = cell of row 0; pool bytes as in kv_page.cuh; q f32 [T][H*Dk].
// Mapping   block (t, 8 heads), a warp a head, its row in shared memory. A launch serves one run of pages; tokens whose cell lies outside it are
//           left, queries and all, to the launch of another run.
// Bound     memory: T * (8 H Dk + Hkv (Dk + Dv) * (4 + 2)) bytes with 16-bit caches. A single token is finished where it is attended (attn_decode.cu), or by
//           prepare_step.cu.
// Oracle    reference.rms_norm, reference.rope; NumPy's rounding; rollkv/kv_codes.py
#include "head_rows.cuh"
#include "kv_codes.cuh"
#include "kv_page.cuh"
#include "rotate.cuh"

constexpr int kWarps = 8;

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kWarps * 32) qkv_append(
    const float* qkv,                  // [T][H*Dk + Hkv*Dk + Hkv*Dv]
    const float* __restrict__ q_norm,  // [Dk] or null
    const float* __restrict__ k_norm,  // [Dk] or null
    const float* table,                // [T][pairs][2]
    const float* key_table,            // [T][pairs][2]
    const int* position,               // [1]
    u8* pool,                          // [num_slots][page_bytes]
    float* q,                          // [T][H*Dk]
    int num_slots, int first_slot, int first_page, int num_pages, int num_heads, int num_kv_heads, int page_cells, int pairs, int interleaved, int key_rotated,
    int value_rotated, float eps) {
  __shared__ __align__(16) float scratch[kWarps][kKeyDim > kValueDim ? kKeyDim : kValueDim];
  __shared__ float2 angles[kKeyDim];
  const int t = blockIdx.x, warp = threadIdx.x / 32, head = blockIdx.y * kWarps + warp;
  let_next_begin();
  wait_for_previous();

  const int cell = fresh(position) + t;
  const int page = cell / page_cells - first_page;
  if (cell < 0 || page < 0 || page >= num_pages) return;
  const i64 first_angle = i64(t) * pairs * 2;
  load_angles<kWarps * 32>(angles, table + first_angle, key_table + first_angle, pairs);
  __syncthreads();
  if (head >= num_heads + 2 * num_kv_heads) return;
  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  const int row = cell % page_cells;
  const float* source = qkv + i64(t) * ((num_heads + num_kv_heads) * kKeyDim + num_kv_heads * kValueDim);

  if (head >= num_heads + num_kv_heads) {
    const int kv_head = head - num_heads - num_kv_heads;
    HeadRow<kValueDim> x;
    x.load(source + (num_heads + num_kv_heads) * kKeyDim + kv_head * kValueDim);
    if (value_rotated) rotate(x);
    store_row(x, pages.value_cells(page, kv_head), row, scratch[warp]);
    return;
  }

  const bool is_query = head < num_heads;
  const float* norm = is_query ? q_norm : k_norm;
  HeadRow<kKeyDim> x;
  x.load(source + head * kKeyDim);
  norm_and_turn(x, norm, eps, Rotation{is_query ? angles : angles + pairs, pairs, interleaved != 0}, scratch[warp]);
  if (key_rotated) rotate(x);
  if (is_query) {
    x.store(q + (i64(t) * num_heads + head) * kKeyDim);
  } else {
    store_row(x, pages.key_cells(page, head - num_heads), row, scratch[warp]);
  }
}
