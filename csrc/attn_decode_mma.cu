// A decode step's attention on the tensor cores: half cells, one head size for keys and values, pages of 256 cells.
//
// Formula and operands as in attn_decode.cu; the query and the softmax weights are rounded to half.
// Mapping   block (chunk, KV head, page) = one page of one KV head and up to 8 of its query heads, no staging of cells: 16-byte loads go straight into
//           the fragments of mma m16n8k16. The order of k inside a product is free as long as both operands agree on it:
//   S^T = K q^T   16 cells are the rows, 8 heads the columns; a lane's 16 bytes of its cell's row are the k pairs of two products.
//   O^T = V^T P^T 16 columns d are the rows; a lane loads 16 bytes (8 d) of 4 neighbouring cells, one byte permute a word pairs the cells;
//                 P^T is S^T transposed in registers. To that end row g of a tile is cell 4 (g / 2) + g % 2, row g + 8 the one 2 further.
//                 A warp has 64 columns and a share of the cells, so its sums take 16 registers whatever the head size.
//           The block's maximum is shared before the exponentials, so the sums of warps with the same columns simply add, in order.
// Pipeline  kBuffers buffers of 4 loads a lane, in the order they are written here. The first are asked for at once, before the kernels before this one
//           have ended and before it is known which cells are visible: those of earlier steps are in their pages, the new cell joins its fragments from
//           shared memory, and what else may lie in the page gets no weight.
// Bound     latency up to some 32 pages, then device memory. Tried: copies into a ring in shared memory that runs ahead from page to page, 63 us
//           instead of 47 at 32,768 cells.
#include "attn_merge.cuh"
#include "head_rows.cuh"
#include "kv_page.cuh"
#include "mma.cuh"

constexpr int kHeads = 8, kPageCells = 256, kTiles = kPageCells / 16;
constexpr float kLog2E = 1.4426950408889634f;

// O[16 d][8 heads] += V^T P^T for one word of d pairs: `a` to `d` are that word of four neighbouring cells.
__device__ __forceinline__ void add_values(float (&O)[4], u32 a, u32 b, u32 c, u32 d, uint2 P) {
  mma_f16(O, __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632), P.x, P.y);
}

// Blocks a multiprocessor that the compiler shall leave registers for: newer chips spill with four.
constexpr int leave_room(int blocks, int dim) { return __CUDA_ARCH__ < 1000 || blocks < 4 ? blocks : dim > 128 ? 2 : 3; }

template <int kDim, int kWarps, int kBuffers, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, leave_room(kBlocks, kDim)) attn_decode_mma(
    const float* qkv,                  // [H*D + Hkv*D + Hkv*D]
    const float* __restrict__ q_norm,  // [D] or null
    const float* __restrict__ k_norm,  // [D] or null
    const float* table,                // [bands][pairs][2]
    const float* key_table,            // [pairs][2]
    const int* position,               // [1]
    u8* pool,                          // [num_slots][page_bytes]
    u8* next_pool,                     // [next_slots][page_bytes]
    float* part_out,                   // [num_parts][H][D]
    float* part_lse,                   // [num_parts][H]
    u32* arrivals,                     // [H], of which the first Hkv*chunks are used
    float* out,                        // [H*D]
    int num_slots, int first_slot, int run_pages, int next_slots, int next_first_slot, int first_page, int first_part, int num_parts, int previous_page, int own_page, int pairs, int interleaved, int group,
    int heads_a_block, int sliding_window, float eps, float scale) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "unsupported shape");
  constexpr int kThreads = kWarps * 32, kKeyTiles = kTiles / kWarps;  // of a warp
  constexpr int kPieces = kDim / 64;                                  // of a row: 64 columns
  constexpr int kColumns = kPieces == 3 ? 4 : kPieces, kShares = kWarps / kColumns;  // warps beside each other in values, 64 columns each; shares of the cells
  constexpr int kValueTiles = kTiles / kShares;                                      // of a share
  constexpr int kKeyUnits = kPieces * kKeyTiles, kUnits = kKeyUnits + kValueTiles;    // of 4 loads a lane
  constexpr int kSumFloats = kShares * kHeads * (kDim + 4), kRowFloats = (kHeads + 2) * kDim;
  __shared__ __align__(16) float shared[kSumFloats > kRowFloats ? kSumFloats : kRowFloats];  // rows of the product; at the end the shares' sums
  __shared__ __align__(16) Half query[kHeads][kDim + 32];  // padded: 8 lanes read 16 bytes each of two rows
  __shared__ __align__(16) Half new_cell[2][kDim];         // key, value
  __shared__ uint2 weights[kTiles][32];                    // P^T of a tile as fragments
  __shared__ float warp_m[kWarps][kHeads], warp_l[kWarps][kHeads], norms[2][kDim];
  __shared__ float2 angles[kDim];
  auto sums = [&](int share, int h, int d) { return shared + (share * kHeads + h) * (kDim + 4) + d; };

  const int chunk = blockIdx.x, kv_head = blockIdx.y, index = blockIdx.z;
  const int num_kv_heads = gridDim.y, num_heads = num_kv_heads * group;
  const int head = kv_head * group + chunk * heads_a_block, heads = min(heads_a_block, group - chunk * heads_a_block);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // now the compiler knows that the warp agrees on it
  let_next_begin();

  const bool next = index >= run_pages;
  const int at = next ? index - run_pages : index;  // in its run
  const KvPages<Half, Half, kDim, kDim> pages{
      next ? next_pool : pool, next ? next_slots : num_slots, next ? next_first_slot : first_slot, num_kv_heads, kPageCells};
  const int column = warp % kColumns, share = warp / kColumns;
  const int key_row = warp * 16 * kKeyTiles + 4 * (g / 2) + g % 2, value_row = share * 16 * kValueTiles + 4 * t;  // this lane's, of tile 0
  const Half* const keys = pages.keys(at, kv_head) + key_row * kDim + 8 * t;
  const Half* const values = pages.values(at, kv_head) + value_row * kDim + column % kPieces * 64 + 8 * g;
  auto load_unit = [&](uint4(&r)[4], int unit) {
    if (unit < kKeyUnits) {  // the tiles of a piece of columns one after the other
      const int tile = unit % kKeyTiles, piece = unit / kKeyTiles;
      const Half* row = keys + tile * 16 * kDim + piece * 64;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        r[2 * k] = load16_in_order(row + 32 * k);
        r[2 * k + 1] = load16_in_order(row + 2 * kDim + 32 * k);
      }
    } else if (unit < kUnits) {
      const int tile = unit - kKeyUnits;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        r[c] = load16_in_order(values + (tile * 16 + c) * kDim);
      }
    }
  };
  uint4 buffers[kBuffers][4];
#pragma unroll
  for (int unit = 0; unit < kBuffers; unit++) load_unit(buffers[unit], unit);
  const i64 page_cell = i64(first_page + index) * kPageCells;
  const int newest = fresh(position);
  const int begin = int(max(i64(first_cell(newest, sliding_window)) - page_cell, i64(0)));  // rows of the page that are visible
  const int end = int(min(i64(newest) + 1 - page_cell, i64(kPageCells)));
  const int new_row = newest >= page_cell && newest < page_cell + kPageCells ? int(newest - page_cell) : -1;  // this step's cell, if it is of this page
  for (int d = threadIdx.x; d < kDim; d += kThreads) {
    if (q_norm != nullptr) norms[0][d] = q_norm[d];
    if (k_norm != nullptr) norms[1][d] = k_norm[d];
  }
  wait_for_previous();

  // Rows of the product: the queries, then the new key and the new value where this page takes them.
  const int num_rows = heads + (new_row >= 0 ? 2 : 0);
  for (int item = threadIdx.x; item < num_rows * (kDim / 4); item += kThreads) {
    const int row = item / (kDim / 4), at = row < heads ? head + row : num_heads + (row - heads) * num_kv_heads + kv_head;
    *reinterpret_cast<float4*>(shared + item * 4) = fresh(reinterpret_cast<const float4*>(qkv + i64(at) * kDim) + item % (kDim / 4));
  }
  const int band = (first_page + index < own_page) + (first_page + index < previous_page);
  load_angles<kThreads>(angles, table + band * pairs * 2, new_row >= 0 ? key_table : nullptr, pairs);
  __syncthreads();
#pragma unroll 1
  for (int row = warp; row < max(num_rows, kHeads); row += kWarps) {
    HeadRow<kDim> x;
    if (row < num_rows) x.take(shared + row * kDim);
    if (row <= heads && row < num_rows) {
      const float* norm = row < heads ? q_norm : k_norm;
      if (norm != nullptr) norm = norms[row < heads ? 0 : 1];
      norm_and_turn(x, norm, eps, Rotation{row < heads ? angles : angles + pairs, pairs, interleaved != 0}, shared + row * kDim);
    }
#pragma unroll
    for (int i = 0; i < x.kCount; i++) {
      const int d = x.element(i);
      const Half rounded = row < num_rows ? from_float<Half>(x.x[i]) : Half{0};
      if (row < kHeads) query[row][d] = rounded;  // those beyond the heads meet nobody's sums
      if (row >= heads && row < num_rows) {
        new_cell[row - heads][d] = rounded;
        const Half* cells = row == heads ? pages.keys(at, kv_head) : pages.values(at, kv_head);
        if (chunk == 0) const_cast<Half*>(cells)[new_row * kDim + d] = rounded;
      }
    }
  }
  __syncthreads();

  // The new cell's tile among this warp's, or -1, and where a tile's fragments hold it.
  const int new_key_tile = new_row >= 0 && new_row / (16 * kKeyTiles) == warp ? new_row / 16 % kKeyTiles : -1;
  const int new_value_tile = new_row >= 0 && new_row / (16 * kValueTiles) == share ? new_row / 16 % kValueTiles : -1;
  const int new_offset = new_row % 16;
  float S[kKeyTiles][4];
#pragma unroll
  for (int i = 0; i < kKeyTiles; i++) S[i][0] = S[i][1] = S[i][2] = S[i][3] = 0.0f;
#pragma unroll
  for (int unit = 0; unit < kKeyUnits; unit++) {
    const int tile = unit % kKeyTiles, piece = unit / kKeyTiles;
    uint4(&r)[4] = buffers[unit % kBuffers];
    if (tile == new_key_tile) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const uint4 x = *reinterpret_cast<const uint4*>(&new_cell[0][piece * 64 + 32 * k + 8 * t]);
        if (4 * (g / 2) + g % 2 == new_offset) r[2 * k] = x;
        if (4 * (g / 2) + g % 2 + 2 == new_offset) r[2 * k + 1] = x;
      }
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint4 x = load_shared(shared_address(&query[g][piece * 64 + 32 * k + 8 * t]));  // in its place: all at once would take all registers
      const uint4 low = r[2 * k], high = r[2 * k + 1];
      mma_f16(S[tile], low.x, high.x, low.y, high.y, x.x, x.y);
      mma_f16(S[tile], low.z, high.z, low.w, high.w, x.z, x.w);
    }
    load_unit(r, unit + kBuffers);
  }

  // S[i][0], S[i][1]: heads 2 t and 2 t + 1 of this lane's cell of tile i; S[i][2], S[i][3]: of the cell 2 further on.
  const float scale2 = scale * kLog2E;
  float m[2] = {-infinity(), -infinity()}, l[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kKeyTiles; i++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = key_row + 16 * i + e / 2 * 2;
      if (row < begin || row >= end) S[i][e] = -infinity();
      m[e % 2] = fmaxf(m[e % 2], S[i][e]);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) m[e] = fmaxf(m[e], __shfl_xor_sync(kAllLanes, m[e], step));
    if (g == 0) warp_m[warp][2 * t + e] = m[e];
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < 2; e++) {
#pragma unroll
    for (int w = 0; w < kWarps; w++) m[e] = fmaxf(m[e], warp_m[w][2 * t + e]);
    const float base = softmax_base(m[e]) * scale2;
#pragma unroll
    for (int i = 0; i < kKeyTiles; i++) {
      S[i][e] = exp2_approx(fmaf(S[i][e], scale2, -base));
      S[i][e + 2] = exp2_approx(fmaf(S[i][e + 2], scale2, -base));
      l[e] += S[i][e] + S[i][e + 2];
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) l[e] += __shfl_xor_sync(kAllLanes, l[e], step);
    if (g == 0) warp_l[warp][2 * t + e] = l[e];
  }
#pragma unroll
  for (int i = 0; i < kKeyTiles; i++) {
    weights[warp * kKeyTiles + i][lane] =
        make_uint2(transpose_matrix(pack_half2(S[i][0], S[i][1])), transpose_matrix(pack_half2(S[i][2], S[i][3])));
  }
  __syncthreads();

  float O[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) O[i][0] = O[i][1] = O[i][2] = O[i][3] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kValueTiles; tile++) {
    uint4(&r)[4] = buffers[(kKeyUnits + tile) % kBuffers];
    if (begin > 0 || end < kPageCells) {  // what lies in rows that are not visible may be no number, which no weight makes 0
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int row = value_row + 16 * tile + c;
        if (row < begin || row >= end) r[c] = make_uint4(0, 0, 0, 0);
      }
    }
    if (tile == new_value_tile) {
      const uint4 x = *reinterpret_cast<const uint4*>(&new_cell[1][column % kPieces * 64 + 8 * g]);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (4 * t + c == new_offset) r[c] = x;
      }
    }
    const uint2 P = weights[share * kValueTiles + tile][lane];
    add_values(O[0], r[0].x, r[1].x, r[2].x, r[3].x, P);
    add_values(O[1], r[0].y, r[1].y, r[2].y, r[3].y, P);
    add_values(O[2], r[0].z, r[1].z, r[2].z, r[3].z, P);
    add_values(O[3], r[0].w, r[1].w, r[2].w, r[3].w, P);
    load_unit(r, kKeyUnits + tile + kBuffers);
  }
  if (column < kPieces) {
#pragma unroll
    for (int o = 0; o < 4; o++) {  // O[o]: columns d (elements 0, 1) and d + 1 (2, 3) of heads 2 t and 2 t + 1
      const int d = column * 64 + 8 * g + 2 * o;
      *reinterpret_cast<float2*>(sums(share, 2 * t, d)) = make_float2(O[o][0], O[o][2]);
      *reinterpret_cast<float2*>(sums(share, 2 * t + 1, d)) = make_float2(O[o][1], O[o][3]);
    }
  }
  __syncthreads();

  const i64 part = i64(first_part + index) * num_heads + head;
  float* const target = num_parts == 1 ? out + i64(head) * kDim : part_out + part * kDim;
  for (int item = threadIdx.x; item < heads * (kDim / 4); item += kThreads) {
    const int h = item / (kDim / 4), d = item % (kDim / 4) * 4;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kShares; i++) {
      const float4 x = *reinterpret_cast<const float4*>(sums(i, h, d));
      total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
    }
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) sum += warp_l[w][h];
    const float norm = softmax_norm(sum);
    *reinterpret_cast<float4*>(target + item * 4) = make_float4(total.x * norm, total.y * norm, total.z * norm, total.w * norm);
    if (d == 0 && num_parts > 1) {
      float most = warp_m[0][h];
#pragma unroll
      for (int w = 1; w < kWarps; w++) most = fmaxf(most, warp_m[w][h]);
      part_lse[part + h] = softmax_lse(most * scale, sum);
    }
  }
  if constexpr (kBlocks == 1) {  // the form for few pages
    if (num_parts > 1 && num_parts <= kMergedWithin && first_part + gridDim.z == num_parts) {
      merge_when_last<kThreads, kDim>(
          part_out, part_lse, arrivals + kv_head * gridDim.x + chunk, out, num_parts, gridDim.z, num_heads, head, heads);
    }
  }
}
