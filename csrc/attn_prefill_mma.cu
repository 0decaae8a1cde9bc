// Causal attention of T query rows over one run of pages, on the tensor cores: half cells, one head size for keys and values.
//
// Formula, operands, state and bits as in attn_prefill.cu, with these differences: queries and softmax weights are rounded to half; the
//           block of work is kCells cells; m moves only when a row's maximum grew by more than a factor 2^8 (so weights reach 2^8, far
//           from the 2^16 where half ends), decided row by row; l is kept as four sums, one per lane of the quad that owns the row: added
//           up before the end, they would depend on the division into launches.
//           state f32 [T][H][D + 8]: O, m, l of lanes 0 to 3, three unused.
// Mapping   block = one head and kWarps * kTiles * 16 query rows; a warp owns kTiles times 16 rows. S = Q K^T and O += P V by mma
//           m16n8k16: Q and K come by ldmatrix, V by ldmatrix transposed, P straight from the registers of S.
// Pipeline  asynchronous copies, zeros in place of cells that no row of the tile sees. kStages = 2: block j + 1 is brought while block j is
//           worked on. kStages = 1 (D = 256): K of the next block is brought during softmax and P V, V during Q K^T.
// Shared    Q, kStages of K and of V, at most 96 KiB: fits every card from compute capability 8.0 on.
// Bound     tensor cores fed through ldmatrix: a warp of 32 rows reads K and V half as often as one of 16. mma.sync reaches about half of
//           what wgmma does on sm_90 (a sketch of this kernel: 344 TFLOP/s at D = 128, against 601), and all there is on sm_80 to sm_89.
#include "kv_page.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"

constexpr int kFirst = 1, kLast = 2;
constexpr int kStateExtra = 8;
constexpr float kLog2E = 1.4426950408889634f;

// What a lane holds of the state of 16 rows: rows g and g + 8.
struct RowPair {
  float m[2], l[2];
};

// One block's online softmax over S[4 i + 2 r + e] = score of row r and cell 8 i + e, counted from this lane's first; scores become
// weights. Row r sees the `reach` cells before end + 8 r. Returns whether a row of the warp moved its m; keep is exactly 1 for rows that
// did not.
template <int kCells, bool kMasked>
__device__ __forceinline__ bool softmax_block(float (&S)[kCells / 2], RowPair& row, float (&keep)[2], float scale, float raise, int end, int reach) {
  bool moved = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = -infinity();
#pragma unroll
    for (int i = 0; i < kCells / 8; i++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& s = S[4 * i + 2 * r + e];
        if (kMasked) s = u32(8 * i + e - (end + 8 * r - reach)) < u32(reach) ? s : -infinity();
        most = fmaxf(most, s);
      }
    }
    most = lanes_max<4>(most);
    keep[r] = 1.0f;
    if (most > row.m[r] + raise) {
      keep[r] = exp2_approx(__fmul_rn(__fsub_rn(row.m[r], most), scale));
      row.m[r] = most;
      moved = true;
    }
    const float base = __fmul_rn(softmax_base(row.m[r]), scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCells / 8; i++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& s = S[4 * i + 2 * r + e];
        s = exp2_approx(fmaf(s, scale, -base));
        sum = __fadd_rn(sum, s);
      }
    }
    row.l[r] = fmaf(row.l[r], keep[r], sum);
  }
  return __any_sync(kAllLanes, moved);
}

template <int kDim, int kCells, int kWarps, int kTiles, int kStages, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) attn_prefill_mma(
    const float* __restrict__ q,       // [T][H*D]
    const int* __restrict__ position,  // [1]
    const u8* __restrict__ pool,       // [num_slots][page_bytes]
    float* __restrict__ state,         // [T][H][D + 8]
    float* __restrict__ out,           // [T][H*D]
    int num_tokens, int num_heads, int num_kv_heads, int num_slots, int first_slot, int first_page, int num_pages, int page_cells,
    int sliding_window, int flags, float scale) {
  using Tile = SwizzledTile<kDim>;
  constexpr int kThreads = kWarps * 32, kRows = kWarps * kTiles * 16, kChunks = kDim / 8, kTileBytes = kCells * Tile::kRowBytes;
  static_assert(kDim % 16 == 0 && kCells % 16 == 0 && kCells * kChunks % kThreads == 0, "whole copies a thread");
  extern __shared__ uint4 shared[];
  const u32 queries = shared_address(shared);                       // [kRows][D]
  const u32 key_tiles = queries + kRows * Tile::kRowBytes;          // [kStages][kCells][D]
  const u32 value_tiles = key_tiles + kStages * kTileBytes;         // [kStages][kCells][D]

  const int group = num_heads / num_kv_heads, num_tiles = (num_tokens + kRows - 1) / kRows;
  const int kv_head = blockIdx.x / (group * num_tiles), rest = blockIdx.x % (group * num_tiles);
  const int head = kv_head * group + rest % group, q0 = (num_tiles - 1 - rest / group) * kRows;

  // Cells of the run that some row of the tile sees, counted from the run's first: [seen_begin, seen_end), in blocks [j0, j1).
  const int position0 = position[0], run_cell = first_page * page_cells;
  const int seen_begin = max(first_cell(position0 + q0, sliding_window) - run_cell, 0);
  const int seen_end = min(position0 + min(q0 + kRows, num_tokens) - run_cell, num_pages * page_cells);
  const int j0 = seen_begin / kCells, j1 = seen_end > seen_begin ? (seen_end + kCells - 1) / kCells : j0;
  if (j0 == j1 && flags == 0) return;  // nothing here for this tile: its state stands

  const KvPages<Half, Half, kDim, kDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  auto copy_rows = [&](u32 tile, const Half* rows, int cell) {
#pragma unroll
    for (int i = 0; i < kCells * kChunks / kThreads; i++) {
      const u32 e = threadIdx.x + i * kThreads, row = e / kChunks, chunk = e % kChunks;  // unsigned: signed division takes registers
      const int at = cell + int(row);
      copy16_async(tile + Tile::at(row, chunk), rows + row * kDim + chunk * 8, at >= seen_begin && at < seen_end);
    }
  };
  auto bring_keys = [&](int j) {
    const int cell = j * kCells;
    copy_rows(key_tiles + j % kStages * kTileBytes, pages.keys(cell / page_cells, kv_head) + cell % page_cells * kDim, cell);
  };
  auto bring_values = [&](int j) {
    const int cell = j * kCells;
    copy_rows(value_tiles + j % kStages * kTileBytes, pages.values(cell / page_cells, kv_head) + cell % page_cells * kDim, cell);
  };
  if (j0 < j1) {
    bring_keys(j0);
    if (kStages == 1) commit_copies();
    bring_values(j0);
    commit_copies();
    for (int e = threadIdx.x; e < kRows * kChunks; e += kThreads) {
      const int row = e / kChunks, chunk = e % kChunks, t = q0 + row;
      uint4 halves = make_uint4(0, 0, 0, 0);
      if (t < num_tokens) {
        const float4* source = reinterpret_cast<const float4*>(q + (i64(t) * num_heads + head) * kDim + chunk * 8);
        const float4 low = source[0], high = source[1];
        halves = make_uint4(pack_half2(low.x, low.y), pack_half2(low.z, low.w), pack_half2(high.x, high.y), pack_half2(high.z, high.w));
      }
      *reinterpret_cast<uint4*>(reinterpret_cast<u8*>(shared) + Tile::at(row, chunk)) = halves;
    }
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_row = q0 + warp * kTiles * 16;
  RowPair rows[kTiles];
  float O[kTiles][kDim / 2];  // 4 n + 2 r + e: row g + 8 r, column 8 n + 2 t + e
#pragma unroll
  for (int m = 0; m < kTiles; m++) {
#pragma unroll
    for (int i = 0; i < kDim / 2; i++) O[m][i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rows[m].m[r] = -infinity();
      rows[m].l[r] = 0.0f;
      const int token = warp_row + m * 16 + g + 8 * r;
      if (flags & kFirst || token >= num_tokens) continue;
      const float* saved = state + (i64(token) * num_heads + head) * (kDim + kStateExtra);
      rows[m].m[r] = saved[kDim];
      rows[m].l[r] = saved[kDim + 1 + t];
#pragma unroll
      for (int n = 0; n < kDim / 8; n++) {
        const float2 x = *reinterpret_cast<const float2*>(saved + 8 * n + 2 * t);
        O[m][4 * n + 2 * r] = x.x;
        O[m][4 * n + 2 * r + 1] = x.y;
      }
    }
  }

  // Row g of the warp sees the `reach` cells before warp_end + g. Blocks within [all_begin, all_end) are visible to every row of the warp.
  const int reach = sliding_window > 0 ? sliding_window : 1 << 30, warp_end = position0 + warp_row + 1 - run_cell;
  const int lane_end = warp_end + g - 2 * t;
  const int all_begin = warp_end + kTiles * 16 - 1 - reach, all_end = warp_end;
  const float scale2 = scale * kLog2E, raise = 8.0f / scale2;
  // This lane's row and chunk of the 16 x 16 pieces that ldmatrix brings: of Q and V (transposed) in one order, of K in the other.
  const int row = lane % 16, key_row = lane % 8 + lane / 16 * 8;
  const u32 chunk = Tile::row_chunk(row, lane / 16), key_chunk = Tile::row_chunk(key_row, lane / 8 % 2);
  const u32 lane_queries = queries + (warp * kTiles * 16 + row) * Tile::kRowBytes;
  for (int j = j0; j < j1; j++) {
    const u32 keys = key_tiles + j % kStages * kTileBytes + key_row * Tile::kRowBytes;
    const u32 values = value_tiles + j % kStages * kTileBytes + row * Tile::kRowBytes;
    if constexpr (kStages == 2) {
      if (j + 1 < j1) {  // its buffers were read in block j - 1, before the barrier at that block's end
        bring_keys(j + 1);
        bring_values(j + 1);
      }
      commit_copies();
    }
    wait_for_copies<1>();
    __syncthreads();

    float S[kTiles][kCells / 2];
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
      for (int i = 0; i < kCells / 2; i++) S[m][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
      u32 A[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; m++) load_matrices(A[m], lane_queries + m * 16 * Tile::kRowBytes + Tile::forward(chunk, k));
#pragma unroll
      for (int n = 0; n < kCells / 16; n++) {
        u32 B[4];
        load_matrices(B, keys + n * 16 * Tile::kRowBytes + Tile::forward(key_chunk, k));
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
          mma_f16(&S[m][8 * n], A[m][0], A[m][1], A[m][2], A[m][3], B[0], B[1]);
          mma_f16(&S[m][8 * n + 4], A[m][0], A[m][1], A[m][2], A[m][3], B[2], B[3]);
        }
      }
    }
    if constexpr (kStages == 1) {
      __syncthreads();  // every warp has read K
      if (j + 1 < j1) bring_keys(j + 1);
      commit_copies();
    }

    u32 P[kTiles][kCells / 4];
    const bool all = j * kCells >= all_begin && (j + 1) * kCells <= all_end;
#pragma unroll
    for (int m = 0; m < kTiles; m++) {
      float keep[2];
      const int end = lane_end + m * 16 - j * kCells;
      const bool moved = all ? softmax_block<kCells, false>(S[m], rows[m], keep, scale2, raise, end, reach)
                             : softmax_block<kCells, true>(S[m], rows[m], keep, scale2, raise, end, reach);
      if (moved) {
#pragma unroll
        for (int i = 0; i < kDim / 2; i++) O[m][i] *= keep[i / 2 % 2];
      }
#pragma unroll
      for (int i = 0; i < kCells / 4; i++) P[m][i] = pack_half2(S[m][2 * i], S[m][2 * i + 1]);
    }

    if constexpr (kStages == 1) {
      wait_for_copies<1>();
      __syncthreads();  // V is there
    }
#pragma unroll
    for (int k = 0; k < kCells / 16; k++) {
#pragma unroll
      for (int n = 0; n < kDim / 16; n++) {
        u32 B[4];
        load_matrices_transposed(B, values + k * 16 * Tile::kRowBytes + Tile::forward(chunk, n));
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
          mma_f16(&O[m][8 * n], P[m][4 * k], P[m][4 * k + 1], P[m][4 * k + 2], P[m][4 * k + 3], B[0], B[1]);
          mma_f16(&O[m][8 * n + 4], P[m][4 * k], P[m][4 * k + 1], P[m][4 * k + 2], P[m][4 * k + 3], B[2], B[3]);
        }
      }
    }
    __syncthreads();  // every warp has read V (and K)
    if constexpr (kStages == 1) {
      if (j + 1 < j1) bring_values(j + 1);
      commit_copies();
    }
  }

#pragma unroll
  for (int m = 0; m < kTiles; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = warp_row + m * 16 + g + 8 * r;
      const bool last = flags & kLast;
      const float norm = last ? softmax_norm(lanes_sum<4>(rows[m].l[r])) : 1.0f;
      if (token >= num_tokens) continue;
      const i64 row = i64(token) * num_heads + head;
      float* const target = last ? out + row * kDim : state + row * (kDim + kStateExtra);
#pragma unroll
      for (int n = 0; n < kDim / 8; n++) {
        const float x = O[m][4 * n + 2 * r], y = O[m][4 * n + 2 * r + 1];
        *reinterpret_cast<float2*>(target + 8 * n + 2 * t) = last ? make_float2(x * norm, y * norm) : make_float2(x, y);
      }
      if (last) continue;
      if (t == 0) target[kDim] = rows[m].m[r];
      target[kDim + 1 + t] = rows[m].l[r];
    }
  }
}
