// Before a decode step's attention to coded or rotated pages: its queries as every band of pages asks for them, and the new cell into its page.
//
// Formula   head_rows.cuh; then rotate.cuh where the cache is rotated, and kv_codes.cuh: what qkv_append.cu does, in equal bits.
// Operands  qkv f32 [H*Dk + Hkv*Dk + Hkv*Dv]; q_norm, k_norm f32 [Dk] or null; table f32 [R][pairs][2] of queries, key_table f32 [pairs][2]; position i32 [1],
//           the new cell; pool bytes as in kv_page.cuh; q f32 [R][H*Dk].
// Mapping   block = a warp = a row: the first query_rows (R * H, or none) are queries, band by band; then, where the launch has them, Hkv keys and Hkv values.
// Bound     latency, for it stands before every layer's attention: all rows at once, and what does not depend on the kernel before is loaded while that runs.
// Oracle    qkv_append.cu; reference.rms_norm, reference.rope; rollkv/kv_codes.py
#include "head_rows.cuh"
#include "kv_codes.cuh"
#include "kv_page.cuh"
#include "rotate.cuh"

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(32) prepare_step(
    const float* qkv,                  // [H*Dk + Hkv*Dk + Hkv*Dv]
    const float* __restrict__ q_norm,  // [Dk] or null
    const float* __restrict__ k_norm,  // [Dk] or null
    const float* table,                // [R][pairs][2]
    const float* key_table,            // [pairs][2]
    const int* position,               // [1]
    u8* pool,                          // [num_slots][page_bytes]
    float* q,                          // [R][H*Dk]
    int num_slots, int first_slot, int first_page, int num_pages, int query_rows, int num_heads, int num_kv_heads, int page_cells, int pairs, int interleaved,
    int key_rotated, int value_rotated, float eps) {
  __shared__ __align__(16) float scratch[kKeyDim > kValueDim ? kKeyDim : kValueDim];
  __shared__ float norm[kKeyDim];
  __shared__ float2 angles[kKeyDim / 2];
  let_next_begin();

  const int row = blockIdx.x - query_rows;  // among those of the new cell, from 0 on
  const bool is_query = row < 0, is_value = row >= num_kv_heads;
  const float* const weight = is_query ? q_norm : k_norm;
  if (weight != nullptr) {
    for (int d = threadIdx.x; d < kKeyDim; d += 32) norm[d] = weight[d];
  }
  const int cell = fresh(position), page = cell / page_cells - first_page;
  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  wait_for_previous();

  if (!is_query && (page < 0 || page >= num_pages)) return;
  if (is_value) {
    HeadRow<kValueDim> x;
    x.load(qkv + (num_heads + num_kv_heads) * kKeyDim + (row - num_kv_heads) * kValueDim);
    if (value_rotated) rotate(x);
    store_row(x, pages.value_cells(page, row - num_kv_heads), cell % page_cells, scratch);
    return;
  }
  HeadRow<kKeyDim> x;
  x.load(qkv + (is_query ? blockIdx.x % num_heads : num_heads + row) * kKeyDim);
  load_angles<32>(angles, is_query ? table + i64(blockIdx.x / num_heads) * pairs * 2 : key_table, nullptr, pairs);
  __syncwarp();
  norm_and_turn(x, weight == nullptr ? nullptr : norm, eps, Rotation{angles, pairs, interleaved != 0}, scratch);
  if (key_rotated) rotate(x);
  if (is_query) {
    x.store(q + i64(blockIdx.x) * kKeyDim);
  } else {
    store_row(x, pages.key_cells(page, row), cell % page_cells, scratch);
  }
}
