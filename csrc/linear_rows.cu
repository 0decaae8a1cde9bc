// The products of a step of 1 to 16 tokens: y = norm(x) W^T + bias, optionally added to what y holds, or gated; W in any type, on tensor
// cores. How, to which precision, and what bits depend on: csrc/linear_product.cuh.
//
// Norm      y = r (W (x * norm)) with r = 1 / sqrt(mean(x^2) + eps): the factor of the row comes last, so the sum of squares is off the way
//           to the first product. norm null: r is left out.
// Gate      activation != 0: the result is activation(gate) * up. With `paired`, W's tiles of 16 rows are gate and up by turns, N counts both and
//           y has N / 2 columns; else W is up alone, and y holds the gate and is overwritten.
// Operands  x f32 [rows][K]; norm f32 [K] or null; planes of TYPE, weight [N, K]; bias f32 [N] or null; y f32 [rows][ldy], ldy >= its columns.
// Mapping   a block has two teams of 8 warps, which share the staged x and its sums of squares. A team takes tiles of 16 weight rows (pairs of them), one after
//           another; warp w takes the spans w, w + 8, ... of the tile in ascending order and keeps a round of kDepth spans of weights in flight,
//           across staging and across tiles; the first ones are on their way before the kernels before this one have ended. x is staged in
//           shared memory, k_tile columns at a time (once, where all of K fits). Warp sums are added in the order of the warps.
// Bound     memory, behind a chain of 3 to 4 us that every launch has: until the kernel before is seen to have ended, until x is there and staged, the last
//           products, the sums of a tile, a block's start (docs/performance.md has the clocks). One row of whole units
//           before quantised weights has a kernel of its own where there are bulk copies: linear_row.cu.
// Rejected  weights through shared memory (cp.async, or bulk copies by one lane), 70 to 190 KB in flight, also beside the next kernel's on one
//           multiprocessor: 24576 x 4096 in Q8_0 takes 30 us, with the next kernel let in later 33 to 40 (two of its blocks may land on one
//           multiprocessor). Bulk prefetches into L2 ahead of the loads: 28 to 59 us. The next kernel's first weights asked into L2: slower.
// Oracle    float64 product with quants.dequantise
#include "activation.cuh"
#include "barriers.cuh"
#include "linear_product.cuh"

template <int TYPE, int T, int kDepth>
__global__ void __launch_bounds__(kThreads * kTeams<TYPE, T>, 1) linear_rows(
    const float* x,                                                                                              // [rows][K]
    const float* norm,                                                                                           // [K] or null
    const u8* __restrict__ p0, const u8* __restrict__ p1, const u8* __restrict__ p2, const u8* __restrict__ p3,  // planes
    const float* __restrict__ bias,                                                                              // [N] or null
    float* y,                                                                                                    // [rows][ldy]
    int rows, int N, int K, int ldy, int k_tile, float eps, int activation, int paired, int add) {
  using P = Product<TYPE, T>;
  using Q = Quant<TYPE>;
  extern __shared__ __align__(16) u8 dynamic[];
  __shared__ float warp_sums[kTeams<TYPE, T>][2][kWarps][T][kTileRows];  // by turns, so that a tile needs one barrier
  __shared__ float row_factors[kTeams<TYPE, T>][T], squares_of[kSquares], gates_of[kTeams<TYPE, T>][T][kTileRows];
  static_assert(T > 1 || P::kStagers == kSquares, "a warp that stages a sum of squares");
  const typename P::Staged staged(dynamic, k_tile);
  const int team = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, warp = thread >> 5, lane = threadIdx.x & 31;
  const int teams = gridDim.x * kTeams<TYPE, T>;
  float(&row_factor)[T] = row_factors[team];
  float(&gates)[T][kTileRows] = gates_of[team];
  const int spans = (K + Q::kSpan - 1) / Q::kSpan, staged_spans = k_tile / Q::kSpan, tiles = (N + kTileRows - 1) / kTileRows;
  const int number_of_team = team * gridDim.x + blockIdx.x, first_tile = paired ? 2 * number_of_team : number_of_team;
  const int behind = first_tile - int(paired ? 2 * blockIdx.x : blockIdx.x);  // the tile of the first team, which has one as long as any has
  const Planes planes{{p0, p1, p2, p3}};
  let_next_begin();

  Q weights[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    const int span = warp + d * kWarps;
    if (span < spans && first_tile < tiles) weights[d].load(planes, u32(first_tile) * spans + span, lane);
  }
  if (norm != nullptr && threadIdx.x == 0) {  // a line a block, for all
    for (int line = blockIdx.x; line * 32 < K; line += gridDim.x) prefetch_line(norm + line * 32);
  }
  wait_for_previous();

  // A row's sum of squares has one order: part w has the units w, w + 16, ... in ascending order; the parts are added in theirs. At T = 1
  // it is taken while x is staged.
  if constexpr (T > 1) {
    if (norm != nullptr) {
#pragma unroll 1
      for (int token = 0; token < rows; token++) {
        const float* row = x + i64(token) * K;
        const bool aligned = P::is_aligned(K);
#pragma unroll 1
        for (int part = threadIdx.x >> 5; part < kSquares; part += P::kStagers) {
          float squares = 0.0f;
          for (int first = part * kUnit; first < K; first += kSquares * kUnit) {
            const int c = first + lane * 4;
            squares = add_squares(add_squares(squares, four(row, c, K, aligned)), four(row, c + 128, K, aligned));
          }
          squares = warp_sum(squares);
          if (lane == 0) squares_of[part] = squares;
        }
        __syncthreads();
        if (thread == 0) row_factor[token] = factor_of_row(squares_of, K, eps);
        __syncthreads();
      }
    }
  }

  int turn = 0;
  for (int tile = first_tile; tile - behind < tiles; tile = following_tile(tile, paired, teams), turn ^= 1) {
    typename P::Sums sums = {};
    const bool summing = T == 1 && norm != nullptr && tile == first_tile;
    float squares = 0.0f;
    int next = warp;  // the span of weights[0]
    for (int first = 0; first < spans; first += staged_spans) {
      const int end = min(spans, first + staged_spans);
      if (tile == first_tile || staged_spans < spans) {
        if (staged_spans < spans) __syncthreads();
        P::stage(x, norm, rows, K, first * Q::kSpan, (end - first) * Q::kSpan, staged, squares);
        if (summing && end == spans) {
          squares = warp_sum(squares);
          if (lane == 0) squares_of[threadIdx.x >> 5] = squares;
        }
        __syncthreads();
      }
      for (; tile < tiles && next < end; next += kDepth * kWarps) {
        // One wait for all the loads of the round. Loads that are in flight at a time share a counter: a wait at a span's own place would be one
        // for the loads issued just before it too, behind the span before.
#pragma unroll
        for (int d = 0; d < kDepth; d++) weights[d].arrive();
        const Round ahead(next, kDepth * kWarps, warp, spans, tile, tiles, paired, teams);
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          if (next + d * kWarps < end) P::multiply(weights[d], staged, (next + d * kWarps - first) * Q::kSpan, lane, sums);
          if (d * kWarps < ahead.known) weights[d].load(planes, ahead.number + d * kWarps, lane);
        }
      }
    }
    if (tile >= tiles) continue;
    if (summing && thread == 0) row_factor[0] = factor_of_row(squares_of, K, eps);  // read behind the barrier

#pragma unroll
    for (int token = 0; token < T; token++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float value = P::collect(sums, token, h, lane);
        if ((lane & 3) == (token & 3)) warp_sums[team][turn][warp][token][(lane >> 2) + 8 * h] = value;
      }
    }
    named_wait(kTeamBarrier + team, kThreads);
    const int row = thread % kTileRows, token = thread / kTileRows;
    if (token < T && token < rows && tile * kTileRows + row < N) {
      float value = warp_sums[team][turn][0][token][row];
#pragma unroll
      for (int w = 1; w < kWarps; w++) value = __fadd_rn(value, warp_sums[team][turn][w][token][row]);
      if (norm != nullptr) value = __fmul_rn(value, row_factor[token]);
      if (bias != nullptr) value = __fadd_rn(value, bias[tile * kTileRows + row]);
      if (paired && tile % 2 == 0) {
        gates[token][row] = value;  // read by the same thread
      } else {
        float* target = y + i64(token) * ldy + (paired ? tile / 2 : tile) * kTileRows + row;
        if (activation != kNoActivation) {
          // Through shared memory either way: a register that loads may write would be waited for together with the next tile's weights.
          float* gate = &gates[token][row];
          if (!paired) *gate = fresh(target);
          value = __fmul_rn(activate(activation, *static_cast<volatile float*>(gate)), value);
        }
        *target = add ? __fadd_rn(fresh(target), value) : value;
      }
    }
  }
}
