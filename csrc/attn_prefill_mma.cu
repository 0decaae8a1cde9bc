// Causal attention of T query rows over one run of pages, on the tensor cores: half cells, one head size for keys and values.
//
// Formula, operands and bits as in attn_prefill.cu, with these differences: queries and softmax weights are rounded to half; the block of
//           work is kCells cells; the state is that of prefill_rows.cuh.
// Mapping   block = one head and kWarps * kTiles * 16 query rows; a warp owns kTiles times 16 rows. S = Q K^T and O += P V by mma
//           m16n8k16: K comes by ldmatrix, V by ldmatrix transposed, P straight from the registers of S, Q from registers as far as they
//           suffice, its last kSharedColumns columns by ldmatrix.
// Pipeline  asynchronous copies, zeros in place of cells that no row of the tile sees. kStages = 2: block j + 1 is brought while block j is
//           worked on. kStages = 1: K of the next block is brought during softmax and P V, V during Q K^T.
// Shared    Q, kStages of K and of V, at most 96 KiB: fits every card from compute capability 8.0 on.
// Bound     tensor cores fed through ldmatrix: a warp of 32 rows reads K and V half as often as one of 16. mma.sync reaches about half of
//           what wgmma does on sm_90, and all there is on sm_80 to sm_89. Figures are in docs/performance.md.
#include "kv_page.cuh"
#include "prefill_rows.cuh"

template <int kDim, int kCells, int kWarps, int kTiles, int kStages, int kBlocks, int kSharedColumns>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) attn_prefill_mma(
    const float* __restrict__ q,       // [T][H*D]
    const int* __restrict__ position,  // [1]
    const u8* __restrict__ pool,       // [num_slots][page_bytes]
    float* __restrict__ state,         // [H][groups of T][8][D + 8]: prefill_rows.cuh
    float* __restrict__ out,           // [T][H*D]
    int num_tokens, int num_heads, int num_kv_heads, int num_slots, int first_slot, int first_page, int num_pages, int page_cells,
    int sliding_window, float scale) {
  using Tile = SwizzledTile<kDim>;
  using QueryTile = SwizzledTile<kSharedColumns>;
  constexpr int kOwnColumns = kDim - kSharedColumns;  // of Q, in registers
  constexpr int kThreads = kWarps * 32, kRows = kWarps * kTiles * 16, kChunks = kDim / 8, kTileBytes = kCells * Tile::kRowBytes;
  static_assert(kDim % 16 == 0 && kCells % 16 == 0 && kCells * kChunks % kThreads == 0, "whole copies a thread");
  extern __shared__ uint4 shared[];
  const u32 queries = shared_address(shared);                     // [kRows][kSharedColumns]
  const u32 key_tiles = queries + kRows * QueryTile::kRowBytes;   // [kStages][kCells][D]
  const u32 value_tiles = key_tiles + kStages * kTileBytes;       // [kStages][kCells][D]

  const int group = num_heads / num_kv_heads, num_tiles = (num_tokens + kRows - 1) / kRows;
  const int kv_head = blockIdx.x / (group * num_tiles), rest = blockIdx.x % (group * num_tiles);
  const int head = kv_head * group + rest % group, q0 = (num_tiles - 1 - rest / group) * kRows;

  // Cells of the run that some row of the tile sees, counted from the run's first: [seen_begin, seen_end), in blocks [j0, j1).
  const int position0 = position[0], run_cell = first_page * page_cells;
  const int seen_begin = max(first_cell(position0 + q0, sliding_window) - run_cell, 0);
  const int seen_end = min(position0 + min(q0 + kRows, num_tokens) - run_cell, num_pages * page_cells);
  if (seen_begin >= seen_end) return;  // nothing here for this tile: it has yet to begin, or has ended
  const int j0 = seen_begin / kCells, j1 = (seen_end + kCells - 1) / kCells;
  // With its first cell a tile begins, with its last it ends: no state before, none behind.
  const bool begins = first_cell(position0 + q0, sliding_window) >= run_cell;

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
  bring_keys(j0);
  if (kStages == 1) commit_copies();
  bring_values(j0);
  commit_copies();
  if constexpr (kSharedColumns > 0) {
    for (int e = threadIdx.x; e < kRows * (kSharedColumns / 8); e += kThreads) {
      const int row = e / (kSharedColumns / 8), chunk = e % (kSharedColumns / 8);
      const uint4 halves = load_query_chunk<kDim>(q, {q0, num_tokens, num_heads, head}, row, kOwnColumns / 8 + chunk);
      store_shared(queries + QueryTile::at(row, chunk), halves);
    }
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = q0 + warp * kTiles * 16;
  RowPair rows[kTiles];
  float O[kTiles][kDim / 2];  // 4 n + 2 r + e: row g + 8 r, column 8 n + 2 t + e
  u32 Q[kTiles][kOwnColumns > 0 ? kOwnColumns / 4 : 1];
#pragma unroll
  for (int m = 0; m < kTiles; m++) {
    const RowPlace place{warp_row + m * 16, num_tokens, num_heads, head};
    load_rows<kDim>(rows[m], O[m], state, place, lane, begins);
    if constexpr (kOwnColumns > 0) load_queries<kDim, kOwnColumns>(Q[m], q, place, lane);
  }

  // Row g of the warp sees the `reach` cells before warp_end + g. Blocks within [all_begin, all_end) are visible to every row of the warp.
  const int reach = sliding_window > 0 ? sliding_window : 1 << 30, warp_end = position0 + warp_row + 1 - run_cell;
  const int lane_end = warp_end + lane / 4 - lane % 4 * 2;
  const int all_begin = warp_end + kTiles * 16 - 1 - reach, all_end = warp_end;
  const float scale2 = scale * kLog2E;
  // This lane's row and chunk of the 16 x 16 pieces that ldmatrix brings: of Q and V (transposed) in one order, of K in the other.
  const int row = lane % 16, key_row = lane % 8 + lane / 16 * 8;
  const u32 chunk = Tile::row_chunk(row, lane / 16), key_chunk = Tile::row_chunk(key_row, lane / 8 % 2);
  const u32 query_chunk = QueryTile::row_chunk(row, lane / 16), lane_queries = queries + (warp * kTiles * 16 + row) * QueryTile::kRowBytes;
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
      for (int m = 0; m < kTiles; m++) {
        if (16 * k < kOwnColumns) {
#pragma unroll
          for (int i = 0; i < 4; i++) A[m][i] = Q[m][4 * k + i];
        } else {
          load_matrices(A[m], lane_queries + m * 16 * QueryTile::kRowBytes + QueryTile::forward(query_chunk, k - kOwnColumns / 16));
        }
      }
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
      const bool moved = all ? softmax_block<kCells, false>(S[m], rows[m], keep, scale2, end, reach)
                             : softmax_block<kCells, true>(S[m], rows[m], keep, scale2, end, reach);
      if (__any_sync(kAllLanes, moved)) rescale_rows<kDim>(O[m], keep);
      pack_weights<kCells>(P[m], S[m]);
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

  // What is known from the tile's beginning, kept until here, spills registers at 128 columns.
  const int end_q0 = forgotten(q0), end_row = end_q0 + warp * kTiles * 16;
  const bool ends = forgotten(position)[0] + min(end_q0 + kRows, num_tokens) <= (first_page + num_pages) * page_cells;
#pragma unroll
  for (int m = 0; m < kTiles; m++) {
    const RowPlace place{end_row + m * 16, num_tokens, num_heads, head};
    if (ends) {
      write_rows<kDim>(rows[m], O[m], out, place, lane);
    } else {
      save_rows<kDim>(rows[m], O[m], state, place, lane);
    }
  }
}
