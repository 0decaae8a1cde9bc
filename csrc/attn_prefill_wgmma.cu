// Causal attention of T query rows over one run of pages, on the tensor cores of sm_90a: half cells, one head size for keys and values.
//
// Formula, operands, state and bits as in attn_prefill_mma.cu; kCells divides the page. The pool comes as a tensor map.
// Mapping   block = one head and 128 query rows: two warpgroups of 64 rows that compute, and one that serves them: its warp 0 brings K and
//           its warp 1 V by bulk tensor copies, one box a tile, kStages deep. P comes from registers, Q too where they suffice.
// Pipeline  per block j: issue S_j = Q K_j^T and O += P_(j-1) V_(j-1), softmax of S_j while the second product runs, then rescale O where a
//           row's m moved (nearly never). kTurns: the two warpgroups issue in turns, so that one's softmax falls into the other's products.
// Poison    K of cells that no row of the tile sees meets the mask. V there may be NaN, and 0 x NaN is NaN: warp 2 overwrites such rows with
//           zeros before the tile is handed on.
// Shared    kStages of K and of V, and Q if not in registers: 128 KiB at D = 128, 192 KiB at D = 256.
// Bound     the card's power limit, as a large product of half matrices is. Figures are in docs/performance.md.
#include "kv_page.cuh"
#include "prefill_rows.cuh"
#include "wgmma.cuh"

constexpr int kRows = 128, kGroupThreads = 128, kThreads = 3 * kGroupThreads;
constexpr int kPlane = 64;  // columns of a swizzled plane

template <int kDim, int kCells, int kStages, bool kTurns, bool kQueryInRegisters>
__global__ void __launch_bounds__(kThreads, 1) attn_prefill_wgmma(
    const float* __restrict__ q,             // [T][H*D]
    const int* __restrict__ position,        // [1]
    const __grid_constant__ TensorMap pool,  // of half [D/64][num_slots*2*Hkv*P][64], boxes [D/64][kCells][64]
    float* __restrict__ state,               // [H][groups of T][8][D + 8]: prefill_rows.cuh
    float* __restrict__ out,                 // [T][H*D]
    int num_tokens, int num_heads, int num_kv_heads, int num_slots, int first_slot, int first_page, int num_pages, int page_cells,
    int sliding_window, float scale) {
  constexpr int kPlanes = kDim / kPlane, kTileBytes = kCells * kDim * 2;
  constexpr int kQueryPlaneBytes = kRows * kPlane * 2, kQueryBytes = kQueryInRegisters ? 0 : kPlanes * kQueryPlaneBytes;
  static_assert(kDim % kPlane == 0 && kCells % 64 == 0, "whole planes");
  extern __shared__ u8 shared[];
  const u32 queries = (shared_address(shared) + 1023) & ~1023u;  // [D/64][kRows][64]
  const u32 key_tiles = queries + kQueryBytes;                   // [kStages][D/64][kCells][64]
  const u32 value_tiles = key_tiles + kStages * kTileBytes;      // the same
  const u32 barriers = value_tiles + kStages * kTileBytes;
  // Of each stage: filled, then read by all eight warps. `landed`: the first and the last tile of V, where they need zeros.
  const u32 key_filled = barriers, key_read = key_filled + 8 * kStages, value_filled = key_read + 8 * kStages;
  const u32 value_read = value_filled + 8 * kStages, landed = value_read + 8 * kStages;

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

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; stage++) {
      barrier_init(key_filled + 8 * stage, 1);
      barrier_init(key_read + 8 * stage, 8);
      barrier_init(value_filled + 8 * stage, 1);
      barrier_init(value_read + 8 * stage, 8);
    }
    barrier_init(landed, 1);
    barrier_init(landed + 8, 1);
    publish_barriers();
  }
  __syncthreads();

  // A tile of V with rows that nobody sees is handed on by warp 2, which overwrites them.
  const bool zeros_first = seen_begin % kCells != 0, zeros_last = seen_end % kCells != 0;
  if (warp < 4) {
    give_registers_up<24>();  // 168 a thread at the start = 240 + 240 + 24: what is given up must cover what is taken
    if (warp < 2 && lane == 0) {
      const bool values = warp == 1;
      const u32 filled = values ? value_filled : key_filled, read = values ? value_read : key_read, tiles = values ? value_tiles : key_tiles;
      const int page_rows = 2 * num_kv_heads * page_cells, cell = j0 * kCells;
      int in_page = cell % page_cells;
      int row = (first_slot + cell / page_cells) % num_slots * page_rows + (kv_head + (values ? num_kv_heads : 0)) * page_cells + in_page;
      int stage = 0, parity = 1;
#pragma unroll 1
      for (int j = j0; j < j1; j++) {
        u32 barrier = filled + 8 * stage;
        if (values && zeros_first && j == j0) {
          barrier = landed;
        } else if (values && zeros_last && j == j1 - 1) {
          barrier = landed + 8;
        }
        barrier_wait(read + 8 * stage, parity);
        barrier_arrive_expecting(barrier, kTileBytes);
        copy_box(tiles + stage * kTileBytes, pool, barrier, 0, row, 0);
        row += kCells;
        in_page += kCells;
        if (in_page == page_cells) {
          in_page = 0;
          row += page_rows - page_cells;
          if (row >= num_slots * page_rows) row -= num_slots * page_rows;
        }
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    } else if (warp == 2) {
#pragma unroll 1
      for (int j = j0; j < j1; j++) {
        const bool first = zeros_first && j == j0;
        if (!first && !(zeros_last && j == j1 - 1)) continue;
        const int stage = (j - j0) % kStages, begin = max(seen_begin - j * kCells, 0), end = min(seen_end - j * kCells, kCells);
        barrier_wait(first ? landed : landed + 8, 0);
#pragma unroll 1
        for (int e = lane; e < kCells * kDim / 8; e += 32) {  // in chunks of 16 bytes; a row of a plane has eight
          const int row = e / 8 % kCells;
          if (row < begin || row >= end) store_shared(value_tiles + stage * kTileBytes + e * 16, make_uint4(0, 0, 0, 0));
        }
        publish_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(value_filled + 8 * stage);
      }
    }
    return;
  }

  take_registers<240>();
  // Known to be the same in all lanes, it makes the addresses of matrices so: computed once a warp instead of in every lane and moved. At 256 columns a
  // product took ten instructions between, its 32 clocks did not cover them: 661 TFLOP/s became 690, and 615 became 640 at 128 columns, in one program that takes turns.
  const int warpgroup = same_in_all_lanes(warp / 4 - 1), t = lane % 4;
  const int tile_row = warpgroup * 64 + warp % 4 * 16;  // this warp's first
  const RowPlace place{q0 + tile_row, num_tokens, num_heads, head};
  RowPair rows;
  float O[kDim / 2], S[kCells / 2];
  u32 P[kCells / 4];
  load_rows<kDim>(rows, O, state, place, lane, begins);

  u32 Q[kQueryInRegisters ? kDim / 4 : 1];
  if constexpr (kQueryInRegisters) {
    load_queries<kDim, kDim>(Q, q, place, lane);
  } else {
    for (int e = threadIdx.x % kGroupThreads; e < 64 * (kDim / 8); e += kGroupThreads) {
      const int row = warpgroup * 64 + e / (kDim / 8), chunk = e % (kDim / 8);
      const uint4 halves = load_query_chunk<kDim>(q, {q0, num_tokens, num_heads, head}, row, chunk);
      store_shared(queries + chunk / 8 * kQueryPlaneBytes + row * kPlane * 2 + (chunk % 8 ^ row % 8) * 16, halves);
    }
    publish_shared();
    named_wait(3 + warpgroup, kGroupThreads);
  }
  const u64 query_matrix = describe_matrix(queries + warpgroup * 64 * kPlane * 2, 16);
  const u64 key_matrix = describe_matrix(key_tiles, 16), value_matrix = describe_matrix(value_tiles, kCells * kPlane * 2);
  auto multiply_keys = [&](int stage) {  // S = Q K^T
    const u64 keys = matrix_behind(key_matrix, stage * (kTileBytes / 16));
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
      const u64 part = matrix_behind(keys, k / 4 * (kCells * kPlane * 2 / 16) + k % 4 * 2);
      if constexpr (kQueryInRegisters) {
        if (k == 0) {
          Wgmma<kCells>::template from_registers<false, false>(S, Q[0], Q[1], Q[2], Q[3], part);
        } else {
          Wgmma<kCells>::template from_registers<true, false>(S, Q[4 * k], Q[4 * k + 1], Q[4 * k + 2], Q[4 * k + 3], part);
        }
      } else {
        const u64 query = matrix_behind(query_matrix, k / 4 * (kQueryPlaneBytes / 16) + k % 4 * 2);
        if (k == 0) {
          Wgmma<kCells>::template from_shared<false>(S, query, part);
        } else {
          Wgmma<kCells>::template from_shared<true>(S, query, part);
        }
      }
    }
    wgmma_commit();
  };
  auto add_values = [&](int stage) {  // O += P V
    const u64 values = matrix_behind(value_matrix, stage * (kTileBytes / 16));
#pragma unroll
    for (int k = 0; k < kCells / 16; k++) {
      const u64 part = matrix_behind(values, k * (16 * kPlane * 2 / 16));
      Wgmma<kDim>::template from_registers<true, true>(O, P[4 * k], P[4 * k + 1], P[4 * k + 2], P[4 * k + 3], part);
    }
    wgmma_commit();
  };

  // Row g of the warp sees the `reach` cells before row_end + g. Blocks [full_begin, full_end) are visible to every row of the warpgroup.
  const int reach = sliding_window > 0 ? sliding_window : 1 << 30, row_end = position0 + place.token + 1 - run_cell;
  const int lane_end = row_end + lane / 4 - 2 * t, group_end = position0 + q0 + warpgroup * 64 + 1 - run_cell;
  const int full_begin = (max(group_end + 63 - reach, 0) + kCells - 1) / kCells, full_end = max(group_end, 0) / kCells;
  const float scale2 = scale * kLog2E;
  float keep[2];
  int stage = 0, parity = 0;

  if (kTurns && warpgroup == 1) named_arrive(1, 2 * kGroupThreads);
  barrier_wait(key_filled, 0);
  pin(S);
  wgmma_begin();
  multiply_keys(0);
  wgmma_wait<0>();
  pin(S);
  if (lane == 0) barrier_arrive(key_read);
  const bool full = j0 >= full_begin && j0 < full_end;
  const bool moved = full ? softmax_block<kCells, false>(S, rows, keep, scale2, 0, 0)
                          : softmax_block<kCells, true>(S, rows, keep, scale2, lane_end - j0 * kCells, reach);
  if (__any_sync(kAllLanes, moved)) rescale_rows<kDim>(O, keep);
  pack_weights<kCells>(P, S);

  // At 256 columns the compiler would put the exponentials behind the wait for P V, which they should run beside: 661 TFLOP/s, not 683. A vote
  // that needs the sums, and a loop behind it (the wait for the next K), keep them before it. Sums are never negative. At 128 columns that
  // costs 4 %.
  constexpr bool kExponentialsFirst = kDim == 256;
  auto wait_for_keys = [&](int next) { barrier_wait(key_filled + 8 * (next % kStages), parity ^ next / kStages); };
  if (kExponentialsFirst && j0 + 1 < j1) wait_for_keys(1);
  auto step = [&](auto masked, int j) {
    const int before = stage, before_parity = parity;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (!kExponentialsFirst) barrier_wait(key_filled + 8 * stage, parity);
    if (kTurns) named_wait(1 + warpgroup, 2 * kGroupThreads);
    pin(S);
    wgmma_begin();
    multiply_keys(stage);
    barrier_wait(value_filled + 8 * before, before_parity);
    pin(O);
    pin(P);
    wgmma_begin();
    add_values(before);
    if (kTurns) named_arrive(2 - warpgroup, 2 * kGroupThreads);
    wgmma_wait<1>();
    pin(S);
    if (lane == 0) barrier_arrive(key_read + 8 * stage);
    const bool moved = softmax_block<kCells, decltype(masked)::value>(S, rows, keep, scale2, lane_end - j * kCells, reach);
    bool rescale = moved;
    if constexpr (kExponentialsFirst) {
      rescale = __any_sync(kAllLanes, moved || rows.l[0] < 0.0f || rows.l[1] < 0.0f);
      if (j + 1 < j1) wait_for_keys(stage + 1);
    }
    wgmma_wait<0>();
    pin(O);
    pin(P);
    if (lane == 0) barrier_arrive(value_read + 8 * before);
    if (kExponentialsFirst ? rescale : __any_sync(kAllLanes, rescale)) rescale_rows<kDim>(O, keep);
    pack_weights<kCells>(P, S);
  };
  for (int j = j0 + 1; j < j1; j++) {
    if (j >= full_begin && j < full_end) {
      step(Constant<false>{}, j);
    } else {
      step(Constant<true>{}, j);
    }
  }
  if (kTurns && warpgroup == 0) named_wait(1, 2 * kGroupThreads);
  barrier_wait(value_filled + 8 * stage, parity);
  pin(O);
  pin(P);
  wgmma_begin();
  add_values(stage);
  wgmma_wait<0>();
  pin(O);
  pin(P);
  const bool ends = position0 + min(q0 + kRows, num_tokens) <= (first_page + num_pages) * page_cells;
  if (ends) {
    write_rows<kDim>(rows, O, out, place, lane);
  } else {
    save_rows<kDim>(rows, O, state, place, lane);
  }
}
