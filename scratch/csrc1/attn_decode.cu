// One query row against the pages of one run: a partial attention state per page. Any cache types, any head sizes, float32 arithmetic.
//
// Formula   part_out[page][h] = softmax(scale q[h] . K[cells of the page]) V, part_lse = logarithm of the sum of exponentials, over the
//           cells visible from position[0]; KV head h / G. A page without a visible cell gives (0, -inf).
// Operands  q f32 [H*Dk]; pool bytes [slot][K then V][Hkv][P][D]; part_out f32 [parts][H][Dv], part_lse f32 [parts][H];
//           page i of the run is part first_part + i. Cells that are not visible may hold NaN: they are never loaded.
// Mapping   block = (page, KV head, up to 8 of its G heads), 4 warps; each page is reduced by itself in a fixed order, so it does not
//           matter how pages are divided into launches.
//   scores  4 lanes share a cell, each with every fourth 8-element vector of its row, and take 4 cells at once against all heads of the
//           block: a q vector read from shared memory serves 4 cells. Two butterfly steps complete a score.
//   softmax a warp a head, over the page's scores in shared memory.
//   values  Dv/8 threads cover a row, each 8 columns of all heads; a row group takes 4 consecutive cells at once. The row groups' sums
//           are added in order through shared memory.
// Bound     device memory where G <= 8 (K and V are read once, coalesced, past L1): 2.5 multiply-adds a byte at G = 5 with 16-bit
//           caches, a third of what the CUDA cores do meanwhile. G > 8 reads them once per 8 heads, the second time from L2.
#include "kv_page.cuh"
#include "online_softmax.cuh"

constexpr int kThreads = 128;
constexpr int kMaxPageCells = 256;

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads <= 4 && sizeof(KeyType) + sizeof(ValueType) == 4 ? 4 : 3) attn_decode(
    const float* q,       // [H*Dk]
    const int* position,  // [1]
    const u8* pool,       // [num_slots][page_bytes]
    float* part_out,      // [parts][H][Dv]
    float* part_lse,      // [parts][H]
    int num_slots, int first_slot, int first_page, int first_part, int page_cells, int group, int chunks, int sliding_window,
    float scale) {
  static_assert(kKeyDim % 16 == 0 && kValueDim % 16 == 0 && kKeyDim <= 256 && kValueDim <= 256 && kHeads <= 8, "unsupported shape");
  constexpr int kRowThreads = kValueDim / 8, kRows = kThreads / kRowThreads;
  constexpr int kQueryFloats = kHeads * kKeyDim, kScoreFloats = kHeads * kMaxPageCells, kSumFloats = kRows * kHeads * kValueDim;
  constexpr int kFloats = kQueryFloats + kScoreFloats > kSumFloats ? kQueryFloats + kScoreFloats : kSumFloats;
  __shared__ __align__(16) float shared[kFloats];  // queries and scores; at the end the row groups' sums
  __shared__ float row_m[kHeads], row_l[kHeads];
  float* const queries = shared;               // [heads][Dk]
  float* const scores = shared + kQueryFloats;  // [heads][256]

  const int index = blockIdx.x / chunks, chunk = blockIdx.x % chunks, kv_head = blockIdx.y;
  const int num_kv_heads = gridDim.y, num_heads = num_kv_heads * group;
  const int head = kv_head * group + chunk * kHeads, heads = min(kHeads, group - chunk * kHeads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 part = first_part + index, page_cell = i64(first_page + index) * page_cells;
  let_next_begin();
  wait_for_previous();
  const int newest = fresh(position);
  const int begin = int(max(i64(first_cell(newest, sliding_window)) - page_cell, i64(0)));
  const int end = int(min(i64(newest) + 1 - page_cell, i64(page_cells)));

  if (begin >= end) {
    for (int e = threadIdx.x; e < heads * kValueDim; e += kThreads) part_out[(part * num_heads + head) * kValueDim + e] = 0.0f;
    if (threadIdx.x < heads) part_lse[part * num_heads + head + threadIdx.x] = -infinity();
    return;
  }

  for (int e = threadIdx.x; e < kQueryFloats; e += kThreads) queries[e] = e < heads * kKeyDim ? fresh(q + i64(head) * kKeyDim + e) : 0.0f;
  __syncthreads();

  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  const KeyType* const keys = pages.keys(index, kv_head);
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
        raw[c].load(keys + i64(cell) * kKeyDim, v, cell >= begin && cell < end);
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
    for (int cell = lane; cell < page_cells; cell += 32) {
      const float p = expf(row[cell] - m);
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

  const ValueType* const values = pages.values(index, kv_head);
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
      for (int c = 0; c < 4; c++) raw[c].load(values + i64(cell + c) * kValueDim, column, cell + c >= begin && cell + c < end);
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
  for (int e = threadIdx.x; e < heads * kValueDim; e += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; r++) total += shared[r * kHeads * kValueDim + e];
    part_out[(part * num_heads + head) * kValueDim + e] = total * softmax_norm(row_l[e / kValueDim]);
  }
  if (threadIdx.x < heads) part_lse[part * num_heads + head + threadIdx.x] = softmax_lse(row_m[threadIdx.x], row_l[threadIdx.x]);
}
