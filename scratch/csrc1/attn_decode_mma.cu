// One query row against the pages of one run on the tensor cores: half cells, one head size for keys and values, pages of 256 cells.
//
// Formula and operands as in attn_decode.cu; the query and the softmax weights are rounded to half.
// Mapping   block (chunk, KV head, page) = one page of one KV head and up to 8 of its query heads, 4 warps of 64 cells, no shared-memory staging: 16-byte loads go
//           straight into the fragments of mma m16n8k16. The order of k inside a product is free as long as both operands agree on it:
//   S^T = K q^T   16 cells are the rows, 8 heads the columns; a lane's 16 bytes of its cell's row are the k pairs of two products.
//   O^T = V^T P^T 16 columns d are the rows; a lane loads 16 bytes (8 d) of 4 neighbouring cells, one byte permute a word pairs the cells;
//                 P^T is S^T transposed in registers. To that end row g of a tile is cell 4 (g / 2) + g % 2, row g + 8 the one 2 further.
//           The block's maximum is shared before the exponentials, so the four warps' sums simply add, in order.
// Pipeline  two buffers of 8 loads a lane, in the order they are written here; the first loads of V are issued before the softmax.
// Bound     device memory. A sketch of this kernel reached 95 to 99 % of it at 128k cells (D = 128, G = 5) and 89 to 91 % (D = 256, G = 8).
//           Splits smaller than a page were slower even at 8k cells.
#include "kv_page.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"

constexpr int kThreads = 128, kWarps = 4, kHeads = 8;
constexpr int kPageCells = 256, kTiles = kPageCells / (kWarps * 16);
constexpr float kLog2E = 1.4426950408889634f;

// O[16 d][8 heads] += V^T P^T for one word of d pairs: `a` to `d` are that word of four neighbouring cells.
__device__ __forceinline__ void add_values(float (&O)[4], u32 a, u32 b, u32 c, u32 d, const u32 (&P)[2]) {
  mma_f16(O, __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632), P[0], P[1]);
}

template <int kDim, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) attn_decode_mma(
    const float* q,       // [H*D]
    const int* position,  // [1]
    const u8* pool,       // [num_slots][page_bytes]
    float* part_out,      // [parts][H][D]
    float* part_lse,      // [parts][H]
    int num_slots, int first_slot, int first_page, int first_part, int group, int heads_a_block, int sliding_window, float scale) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "unsupported shape");
  constexpr int kPieces = kDim / 64;               // of a tile's rows: 64 columns, 4 loads a lane
  constexpr int kFills = kTiles * kPieces / 2;     // of a buffer of two pieces
  constexpr bool kQueryShared = kDim > 128;        // its fragments; else in registers
  static_assert(kFills % 2 == 0, "the two buffers take turns");
  __shared__ float sums[kWarps][kHeads][kDim + 4];
  __shared__ float warp_m[kWarps][kHeads], warp_l[kWarps][kHeads];
  __shared__ uint4 shared_query[kDim / 32][32];

  const int chunk = blockIdx.x, kv_head = blockIdx.y, index = blockIdx.z;
  const int num_kv_heads = gridDim.y, num_heads = num_kv_heads * group;
  const int head = kv_head * group + chunk * heads_a_block, heads = min(heads_a_block, group - chunk * heads_a_block);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int warp = threadIdx.x / 32;
#if __CUDA_ARCH__ < 1000
  warp = __shfl_sync(kAllLanes, warp, 0);  // now the compiler knows that the warp agrees on it; without, sm_90 spills; with it, sm_100
#endif
  const i64 page_cell = i64(first_page + index) * kPageCells;
  let_next_begin();
  wait_for_previous();
  const int newest = fresh(position);
  const int begin = int(max(i64(first_cell(newest, sliding_window)) - page_cell, i64(0)));
  const int end = int(min(i64(newest) + 1 - page_cell, i64(kPageCells)));

  if (begin >= end) {
    for (int e = threadIdx.x; e < heads * kDim; e += kThreads) part_out[(i64(first_part + index) * num_heads + head) * kDim + e] = 0.0f;
    if (threadIdx.x < heads) part_lse[i64(first_part + index) * num_heads + head + threadIdx.x] = -infinity();
    return;
  }

  const KvPages<Half, Half, kDim, kDim> pages{pool, num_slots, first_slot, num_kv_heads, kPageCells};
  const int key_row = warp * 16 * kTiles + 4 * (g / 2) + g % 2, value_row = warp * 16 * kTiles + 4 * t;  // this lane's, of tile 0
  const Half* const keys = pages.keys(index, kv_head) + key_row * kDim + 8 * t;
  const Half* const values = pages.values(index, kv_head) + value_row * kDim + 8 * g;
  const int key_cell = key_row - begin, value_cell = value_row - begin;
  const u32 num_visible = end - begin;
  auto visible = [&](int cell) { return u32(cell) < num_visible; };  // of a cell counted from the first visible one
  auto load_keys = [&](uint4(&r)[8], int fill) {
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const int tile = (2 * fill + u) / kPieces, piece = (2 * fill + u) % kPieces;
      const bool low = visible(key_cell + 16 * tile), high = visible(key_cell + 16 * tile + 2);
      const Half* row = keys + tile * 16 * kDim + piece * 64;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        r[4 * u + 2 * k] = load16_in_order(row + 32 * k, low);
        r[4 * u + 2 * k + 1] = load16_in_order(row + 2 * kDim + 32 * k, high);
      }
    }
  };
  auto load_values = [&](uint4(&r)[8], int fill) {
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const int tile = (2 * fill + u) / kPieces, piece = (2 * fill + u) % kPieces;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        r[4 * u + c] = load16_in_order(values + (tile * 16 + c) * kDim + piece * 64, visible(value_cell + 16 * tile + c));
      }
    }
  };
  uint4 A[8], B[8];
  load_keys(A, 0);

  auto query_fragment = [&](int k) {  // columns 32 k + 8 t on of head g
    if (g >= heads) return make_uint4(0, 0, 0, 0);
    const float4* source = reinterpret_cast<const float4*>(q + i64(head + g) * kDim + 32 * k + 8 * t);
    const float4 low = fresh(source), high = fresh(source + 1);
    return make_uint4(pack_half2(low.x, low.y), pack_half2(low.z, low.w), pack_half2(high.x, high.y), pack_half2(high.z, high.w));
  };
  for (int k = warp; k < kDim / 32; k += kWarps) shared_query[k][lane] = query_fragment(k);
  __syncthreads();
  uint4 query[kQueryShared ? 1 : kDim / 32];
  if constexpr (!kQueryShared) {
#pragma unroll
    for (int k = 0; k < kDim / 32; k++) query[k] = shared_query[k][lane];
  }

  float S[kTiles][4], O[kDim / 16][4];
#pragma unroll
  for (int i = 0; i < kTiles; i++) S[i][0] = S[i][1] = S[i][2] = S[i][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < kDim / 16; i++) O[i][0] = O[i][1] = O[i][2] = O[i][3] = 0.0f;
  auto dot = [&](const uint4(&r)[8], int fill) {
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const int tile = (2 * fill + u) / kPieces, piece = (2 * fill + u) % kPieces;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        uint4 x;
        if constexpr (kQueryShared) {
          x = shared_query[2 * piece + k][lane];
        } else {
          x = query[2 * piece + k];
        }
        const uint4 low = r[4 * u + 2 * k], high = r[4 * u + 2 * k + 1];
        mma_f16(S[tile], low.x, high.x, low.y, high.y, x.x, x.y);
        mma_f16(S[tile], low.z, high.z, low.w, high.w, x.z, x.w);
      }
    }
  };
#pragma unroll
  for (int n = 0; n < kFills; n += 2) {
    load_keys(B, n + 1);
    dot(A, n);
    if (n + 2 < kFills) {
      load_keys(A, n + 2);
    } else {
      load_values(A, 0);
    }
    dot(B, n + 1);
  }
  load_values(B, 1);

  // S[i][0], S[i][1]: heads 2 t and 2 t + 1 of this lane's cell of tile i; S[i][2], S[i][3]: of the cell 2 further on.
  const float scale2 = scale * kLog2E;
  float m[2] = {-infinity(), -infinity()}, l[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (!visible(key_cell + 16 * i + e / 2 * 2)) S[i][e] = -infinity();
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
  u32 P[kTiles][2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    m[e] = fmaxf(fmaxf(warp_m[0][2 * t + e], warp_m[1][2 * t + e]), fmaxf(warp_m[2][2 * t + e], warp_m[3][2 * t + e]));
    const float base = m[e] * scale2;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      S[i][e] = exp2_approx(fmaf(S[i][e], scale2, -base));
      S[i][e + 2] = exp2_approx(fmaf(S[i][e + 2], scale2, -base));
      l[e] += S[i][e] + S[i][e + 2];
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) l[e] += __shfl_xor_sync(kAllLanes, l[e], step);
    if (g == 0) warp_l[warp][2 * t + e] = l[e];
  }
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    P[i][0] = transpose_matrix(pack_half2(S[i][0], S[i][1]));
    P[i][1] = transpose_matrix(pack_half2(S[i][2], S[i][3]));
  }

  auto accumulate = [&](const uint4(&r)[8], int fill) {
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const int tile = (2 * fill + u) / kPieces, piece = (2 * fill + u) % kPieces;
      const uint4 a = r[4 * u], b = r[4 * u + 1], c = r[4 * u + 2], d = r[4 * u + 3];
      add_values(O[4 * piece], a.x, b.x, c.x, d.x, P[tile]);
      add_values(O[4 * piece + 1], a.y, b.y, c.y, d.y, P[tile]);
      add_values(O[4 * piece + 2], a.z, b.z, c.z, d.z, P[tile]);
      add_values(O[4 * piece + 3], a.w, b.w, c.w, d.w, P[tile]);
    }
  };
#pragma unroll
  for (int n = 0; n < kFills; n += 2) {
    accumulate(A, n);
    if (n + 2 < kFills) load_values(A, n + 2);
    accumulate(B, n + 1);
    if (n + 3 < kFills) load_values(B, n + 3);
  }

#pragma unroll
  for (int o = 0; o < kDim / 16; o++) {  // O[o]: columns d (elements 0, 1) and d + 1 (2, 3) of heads 2 t and 2 t + 1
    const int d = o / 4 * 64 + 8 * g + 2 * (o % 4);
    *reinterpret_cast<float2*>(&sums[warp][2 * t][d]) = make_float2(O[o][0], O[o][2]);
    *reinterpret_cast<float2*>(&sums[warp][2 * t + 1][d]) = make_float2(O[o][1], O[o][3]);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < heads * kDim; e += kThreads) {
    const int h = e / kDim, d = e % kDim;
    const float total = sums[0][h][d] + sums[1][h][d] + sums[2][h][d] + sums[3][h][d];
    part_out[(i64(first_part + index) * num_heads + head) * kDim + e] = total * softmax_norm(warp_l[0][h] + warp_l[1][h] + warp_l[2][h] + warp_l[3][h]);
  }
  if (threadIdx.x < heads) {
    const int h = threadIdx.x;
    const float most = fmaxf(fmaxf(warp_m[0][h], warp_m[1][h]), fmaxf(warp_m[2][h], warp_m[3][h]));
    part_lse[i64(first_part + index) * num_heads + head + h] = softmax_lse(most * scale, warp_l[0][h] + warp_l[1][h] + warp_l[2][h] + warp_l[3][h]);
  }
}
