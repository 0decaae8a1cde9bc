// A decode step's attention: one query row against the pages of one run, or of two that follow each other (the last pages staged from the tail, and the
// window: a launch more costs 7 us a layer); they may hold the step's own cell, not yet written. And the result, once all pages have been attended.
//
// Formula   The new cell's key and value go into its page (head_rows.cuh), rounded to the cache's types; then
//           part_out[page][h] = softmax(scale q[h] . K[cells of the page]) V, part_lse = logarithm of the sum of exponentials, over the
//           cells visible from position[0]; KV head h / G. A page without a visible cell gives (0, -inf). attn_merge.cuh makes `out` of them.
// Operands  qkv f32 [H*Dk + Hkv*Dk + Hkv*Dv]; table f32 [bands][pairs][2], how the query turns for pages from own_page on, from previous_page on and
//           older ones (rollkv/rope.py), and key_table f32 [pairs][2]; pool bytes [slot][K then V][Hkv][P][D]; part_out f32 [num_parts][H][Dv],
//           part_lse f32 [num_parts][H]; out f32 [H*Dv]; page i of the runs is part first_part + i, of the second from run_pages on.
//           Cells that are not visible may hold NaN: they are never loaded.
// Mapping   block = (page, KV head, up to 8 of its G heads), 4 warps; each page is reduced by itself in a fixed order, so it does not
//           matter how pages are divided into launches. A block finishes the queries of its heads itself, a warp a head; those of the newest page
//           also the new cell, for themselves from shared memory, and the first of them for later steps. So one launch is enough where append,
//           attention and merge would wait for each other.
//   scores  4 lanes share a cell, each with every fourth 8-element vector of its row, and take 4 cells at once against all heads of the
//           block: a q vector read from shared memory serves 4 cells. Two butterfly steps complete a score.
//   softmax a warp a head, over the page's scores in shared memory.
//   values  Dv/8 threads cover a row, each 8 columns of all heads; a row group takes 4 consecutive cells at once. The row groups' sums
//           are added in order through shared memory.
// Bound     device memory where G <= 8 (K and V are read once, coalesced, past L1): 2.5 multiply-adds a byte at G = 5 with 16-bit
//           caches, a third of what the CUDA cores do meanwhile. G > 8 reads them once per 8 heads, the second time from L2.
#include "attn_merge.cuh"
#include "head_rows.cuh"
#include "kv_page.cuh"

constexpr int kThreads = 128;
constexpr int kMaxPageCells = 256;

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads <= 4 && sizeof(KeyType) + sizeof(ValueType) == 4 ? 4 : 3) attn_decode(
    const float* qkv,                  // [H*Dk + Hkv*Dk + Hkv*Dv]
    const float* __restrict__ q_norm,  // [Dk] or null
    const float* __restrict__ k_norm,  // [Dk] or null
    const float* table,                // [bands][pairs][2]
    const float* key_table,            // [pairs][2]
    const int* position,               // [1]
    u8* pool,                          // [num_slots][page_bytes]
    u8* next_pool,                     // [next_slots][page_bytes]
    float* part_out,                   // [num_parts][H][Dv]
    float* part_lse,                   // [num_parts][H]
    u32* arrivals,                     // [H], of which the first Hkv*chunks are used
    float* out,                        // [H*Dv]
    int num_slots, int first_slot, int run_pages, int next_slots, int next_first_slot, int first_page, int first_part, int num_parts, int previous_page, int own_page, int pairs, int interleaved, int group,
    int heads_a_block, int sliding_window, float eps, float scale, int page_cells, int chunks) {
  static_assert(kKeyDim % 16 == 0 && kValueDim % 16 == 0 && kKeyDim <= 256 && kValueDim <= 256 && kHeads <= 8, "unsupported shape");
  constexpr int kRowThreads = kValueDim / 8, kRows = kThreads / kRowThreads;
  constexpr int kQueryFloats = kHeads * kKeyDim, kScoreFloats = kHeads * kMaxPageCells, kSumFloats = kRows * kHeads * kValueDim;
  constexpr int kRowFloats = kQueryFloats + kThreads / 32 * kKeyDim;  // queries, and a row a warp while they are made
  constexpr int kFirstFloats = kQueryFloats + kScoreFloats > kRowFloats ? kQueryFloats + kScoreFloats : kRowFloats;
  constexpr int kFloats = kFirstFloats > kSumFloats ? kFirstFloats : kSumFloats;
  __shared__ __align__(16) float shared[kFloats];  // queries and scores; at the end the row groups' sums
  __shared__ __align__(16) KeyType new_key[kKeyDim];
  __shared__ __align__(16) ValueType new_value[kValueDim];
  __shared__ float2 angles[kKeyDim];
  __shared__ float row_m[kHeads], row_l[kHeads];
  float* const queries = shared;               // [heads][Dk]
  float* const scores = shared + kQueryFloats;  // [heads][256]

  const int index = blockIdx.x / chunks, chunk = blockIdx.x % chunks, kv_head = blockIdx.y;
  const int num_kv_heads = gridDim.y, num_heads = num_kv_heads * group;
  const int head = kv_head * group + chunk * heads_a_block, heads = min(heads_a_block, group - chunk * heads_a_block);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  let_next_begin();

  const i64 page_cell = i64(first_page + index) * page_cells;
  const int newest = fresh(position);
  const int begin = int(min(max(i64(first_cell(newest, sliding_window)) - page_cell, i64(0)), i64(page_cells)));
  const int end = int(max(min(i64(newest) + 1 - page_cell, i64(page_cells)), i64(begin)));
  const int new_row = newest >= page_cell && newest < page_cell + page_cells ? int(newest - page_cell) : -1;  // this step's cell, if it is of this page
  const bool next = index >= run_pages;
  const int at = next ? index - run_pages : index;  // in its run
  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{
      next ? next_pool : pool, next ? next_slots : num_slots, next ? next_first_slot : first_slot, num_kv_heads, page_cells};
  const KeyType* const keys = pages.keys(at, kv_head);
  const ValueType* const values = pages.values(at, kv_head);
  const int num_old = end - begin - (new_row >= 0);  // cells of earlier steps, which need not wait for the kernels before
  prefetch<kThreads>(keys + i64(begin) * kKeyDim, num_old * kKeyDim * int(sizeof(KeyType)));
  prefetch<kThreads>(values + i64(begin) * kValueDim, num_old * kValueDim * int(sizeof(ValueType)));
  wait_for_previous();

  {
    const int band = (first_page + index < own_page) + (first_page + index < previous_page);
    load_angles<kThreads>(angles, table + band * pairs * 2, new_row >= 0 ? key_table : nullptr, pairs);
    __syncthreads();
#pragma unroll 1
    for (int row = warp; row < heads + (new_row >= 0); row += kThreads / 32) {  // the last: the new key
      HeadRow<kKeyDim> x;
      x.load(qkv + i64(row < heads ? head + row : num_heads + kv_head) * kKeyDim);
      const Rotation rotation{row < heads ? angles : angles + pairs, pairs, interleaved != 0};
      norm_and_turn(x, row < heads ? q_norm : k_norm, eps, rotation, scores + warp * kKeyDim);
#pragma unroll
      for (int i = 0; i < x.kCount; i++) {
        const int d = x.element(i);
        if (d >= kKeyDim) continue;
        if (row < heads) {
          queries[row * kKeyDim + d] = x.x[i];
        } else {
          new_key[d] = from_float<KeyType>(x.x[i]);
          if (chunk == 0) const_cast<KeyType*>(keys)[i64(new_row) * kKeyDim + d] = new_key[d];
        }
      }
    }
    for (int e = heads * kKeyDim + threadIdx.x; e < kQueryFloats; e += kThreads) queries[e] = 0.0f;
    if (new_row >= 0) {
      const float* source = qkv + i64(num_heads + num_kv_heads) * kKeyDim + kv_head * kValueDim;
      for (int d = threadIdx.x; d < kValueDim; d += kThreads) {
        new_value[d] = from_float<ValueType>(fresh(source + d));
        if (chunk == 0) const_cast<ValueType*>(values)[i64(new_row) * kValueDim + d] = new_value[d];
      }
    }
  }
  __syncthreads();

  const int part_of_row = lane % 4;
  for (int base = warp * 8 + lane / 4; base < page_cells; base += kThreads) {  // this lane's cells: base, +32, +64, +96
    float dot[4][kHeads];
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
      for (int g = 0; g < kHeads; g++) dot[c][g] = 0.0f;
#pragma unroll 2
    for (int v = part_of_row; v < kKeyDim / 8; v += 4) {
      float x[4][8];
      Eight<KeyType> raw[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int cell = base + 32 * c;
        raw[c].load(keys + i64(cell) * kKeyDim, v, cell >= begin && cell < end && cell != new_row);
        if (cell == new_row) raw[c].take(new_key, v);
      }
#pragma unroll
      for (int c = 0; c < 4; c++) raw[c].unpack(x[c]);
#pragma unroll
      for (int g = 0; g < kHeads; g++) {
        const float4* source = reinterpret_cast<const float4*>(queries + g * kKeyDim + v * 8);
        const float4 low = source[0], high = source[1];
        const float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
          for (int i = 0; i < 8; i++) dot[c][g] = fmaf(y[i], x[c][i], dot[c][g]);
      }
    }
    __syncwarp();  // lanes may have left the loop at different times: head sizes that are no multiple of 32
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int cell = base + 32 * c;
      const bool visible = cell >= begin && cell < end;
#pragma unroll
      for (int g = 0; g < kHeads; g++) {
        const float score = lanes_sum<4>(dot[c][g]) * scale;
        if (part_of_row == c && cell < page_cells) scores[g * kMaxPageCells + cell] = visible ? score : -infinity();
      }
    }
  }
  __syncthreads();

  for (int g = warp; g < kHeads; g += kThreads / 32) {
    float* const row = scores + g * kMaxPageCells;
    float m = -infinity(), l = 0.0f;
    for (int cell = lane; cell < page_cells; cell += 32) m = fmaxf(m, row[cell]);
    m = warp_max(m);
    const float base = softmax_base(m);
    for (int cell = lane; cell < page_cells; cell += 32) {
      const float p = expf(row[cell] - base);
      row[cell] = p;
      l += p;
    }
    l = warp_sum(l);
    if (lane == 0) {
      row_m[g] = m;
      row_l[g] = l;
    }
  }
  __syncthreads();

  const int group_of_rows = threadIdx.x / kRowThreads, column = threadIdx.x % kRowThreads;
  float sum[kHeads][8];
#pragma unroll
  for (int g = 0; g < kHeads; g++)
#pragma unroll
    for (int i = 0; i < 8; i++) sum[g][i] = 0.0f;
  if (group_of_rows < kRows) {
    for (int cell = group_of_rows * 4; cell < page_cells; cell += kRows * 4) {
      Eight<ValueType> raw[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        raw[c].load(values + i64(cell + c) * kValueDim, column, cell + c >= begin && cell + c < end && cell + c != new_row);
        if (cell + c == new_row) raw[c].take(new_value, column);
      }
      float4 p[kHeads];
#pragma unroll
      for (int g = 0; g < kHeads; g++) p[g] = *reinterpret_cast<const float4*>(scores + g * kMaxPageCells + cell);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float x[8];
        raw[c].unpack(x);
#pragma unroll
        for (int g = 0; g < kHeads; g++) {
          const float weight = c == 0 ? p[g].x : c == 1 ? p[g].y : c == 2 ? p[g].z : p[g].w;
#pragma unroll
          for (int i = 0; i < 8; i++) sum[g][i] = fmaf(weight, x[i], sum[g][i]);
        }
      }
    }
  }
  __syncthreads();  // queries and scores have been read: their memory takes the sums [rows][heads][Dv]
  if (group_of_rows < kRows) {
#pragma unroll
    for (int g = 0; g < kHeads; g++) {
      float4* target = reinterpret_cast<float4*>(shared + (group_of_rows * kHeads + g) * kValueDim + column * 8);
      target[0] = make_float4(sum[g][0], sum[g][1], sum[g][2], sum[g][3]);
      target[1] = make_float4(sum[g][4], sum[g][5], sum[g][6], sum[g][7]);
    }
  }
  __syncthreads();
  const i64 part = i64(first_part + index) * num_heads + head;
  float* const target = num_parts == 1 ? out + i64(head) * kValueDim : part_out + part * kValueDim;
  for (int e = threadIdx.x; e < heads * kValueDim; e += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; r++) total += shared[r * kHeads * kValueDim + e];
    target[e] = total * softmax_norm(row_l[e / kValueDim]);
  }
  if (num_parts == 1) return;
  if (threadIdx.x < heads) part_lse[part + threadIdx.x] = softmax_lse(row_m[threadIdx.x], row_l[threadIdx.x]);
  const int launch_parts = gridDim.x / chunks;
  if (num_parts <= kMergedWithin && first_part + launch_parts == num_parts) {
    merge_when_last<kThreads, kValueDim>(
        part_out, part_lse, arrivals + kv_head * chunks + chunk, out, num_parts, launch_parts, num_heads, head, heads);
  }
}
