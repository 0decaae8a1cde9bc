// The product of one token's row with a quantised weight, from compute capability 9.0 on: what csrc/linear_rows.cu computes for one row, to the same bits,
// with x brought by bulk copies: a load of x would come behind all weights that its multiprocessor asked for before it.
//
// Operands  as there, of one row: K whole units of 256 columns, all of them staged at once. x and norm begin on 16 bytes; where y
//           or bias is read, they do too, and N is whole tiles.
// Mapping   as there. The copy of a unit has a barrier of its own and is asked for by the warp that stages the unit; its digits, sums and scale take the place
//           of its floats, 1 KiB. Half of the first round of weights is asked for before the copies, which come the later the more it is, the other half
//           behind them. Where spans are units, a warp's columns are those that the two warps w stage: they wait for each other, not for the block, and
//           stage a round's columns right before its products. What y holds, and bias, come by copies as well, asked for when their tile begins.
// Shared    x, norm beside it, a barrier a unit; x begins on 128 bytes, so that copies take whole lines.
// Waits     the assembler lets all weights in flight, and whatever else is loaded across a branch, share one counter, and waits for it wherever a register
//           that such a load may write is used or written again, on whichever way. So no loads but those of weights; no two loads of weights, on different
//           ways, into the same registers before arrive(): the second would wait for all that is in flight.
// Bound     memory, behind a chain of 1.5 us that every launch has; issue slots for the last two spans of a warp.
// Rejected  by what a layer of the 8B shape takes in Q4_K, 31.5 us: x by loads 38; all of the first round before x, or none, 34.7; x on 16 bytes 33 (of an
//           earlier form); in one copy, beside its digits, y by loads: 1.5 to 6 more each. A warp's second span by bulk copies: faster by 0.1
//           to 0.3 in three products, slower by 0.1 where a team has two tiles, the same in all (docs/performance.md).
#include "activation.cuh"
#include "barriers.cuh"
#include "linear_product.cuh"

constexpr int kPairBarrier = kTeamBarrier + 2;  // of hardware: of the two warps 0; the others have the next

// A row that comes by copies, a unit to where its digits will be; norm, if any, and the barriers of units behind it.
template <int TYPE>
struct CopiedRow {
  using P = Product<TYPE, 1, true>;
  u8* memory;         // [K] floats, [K] of norm, [K / kUnit] barriers
  const float* norm;  // [K] or null
  int columns;

  __device__ __forceinline__ float* norm_copy(int unit) const { return reinterpret_cast<float*>(memory + (columns + unit * kUnit) * 4); }
  __device__ __forceinline__ u32 barrier(int unit) const {
    return shared_address(memory) + columns * (norm != nullptr ? 8 : 4) + unit * kBarrierBytes;
  }

  // What can be done before x may be read: the barriers, and norm.
  __device__ __forceinline__ void expect() const {
    if ((threadIdx.x & 31) == 0) {
#pragma unroll 1
      for (int unit = threadIdx.x >> 5; unit * kUnit < columns; unit += P::kStagers) barrier_init(barrier(unit), 1);
      publish_barriers();
#pragma unroll 1
      for (int unit = threadIdx.x >> 5; unit * kUnit < columns; unit += P::kStagers) {
        barrier_arrive_expecting(barrier(unit), norm != nullptr ? 2 * kUnitBytes : kUnitBytes);
        if (norm != nullptr) copy_bulk(shared_address(norm_copy(unit)), norm + unit * kUnit, kUnitBytes, barrier(unit));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy(const float* x) const {
    if ((threadIdx.x & 31) == 0) {
#pragma unroll 1
      for (int unit = threadIdx.x >> 5; unit * kUnit < columns; unit += P::kStagers) {
        copy_bulk(shared_address(memory + unit * kUnitBytes), x + unit * kUnit, kUnitBytes, barrier(unit));
      }
    }
    __syncwarp();
  }

  // Digits of a unit; adds to this lane's share of the sum of squares. The whole warp must call.
  __device__ __forceinline__ void stage(const typename P::Staged& to, int unit, float& squares) const {
    const int lane = threadIdx.x & 31;
    const float4* x = reinterpret_cast<const float4*>(memory + unit * kUnitBytes) + lane;
    barrier_wait(barrier(unit), 0);
    float4 v[2] = {x[0], x[32]};
    if (norm != nullptr) {
      const float4* weight = reinterpret_cast<const float4*>(norm_copy(unit)) + lane;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        squares = add_squares(squares, v[half]);
        v[half] = times(v[half], weight[half * 32]);
      }
    }
    __syncwarp();  // all lanes have read what is written over now
    P::template put_unit<true>(to, 0, unit, lane, 0, v);
  }
};

template <int TYPE, int kDepth>
__global__ void __launch_bounds__(2 * kThreads, 1) linear_row(
    const float* x,                                                                                              // [K]
    const float* norm,                                                                                           // [K] or null
    const u8* __restrict__ p0, const u8* __restrict__ p1, const u8* __restrict__ p2, const u8* __restrict__ p3,  // planes
    const float* bias,                                                                                           // [N] or null
    float* y,                                                                                                    // [N], [N / 2] if paired
    int N, int K, float eps, int activation, int paired, int add) {
  using P = Product<TYPE, 1, true>;
  using Q = Quant<TYPE>;
  constexpr int kRound = kDepth * kWarps;  // spans
  constexpr bool kPairs = Q::kSpan == kUnit;
  static_assert(kTeams<TYPE, 1> == 2 && P::kStagers == kSquares, "a warp that stages a sum of squares");
  static_assert(!kPairs || kRound == P::kStagers, "a round is a unit of each warp that stages");
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ float warp_sums[2][2][kWarps][kTileRows];  // by turns, so that a tile needs one barrier
  __shared__ float row_factors[2], squares_of[kSquares];
  __shared__ __align__(16) float read_of[2][2][2][kTileRows];  // of a tile, by turns: what y holds, and bias
  __shared__ __align__(8) u64 read_barriers[2];
  const typename P::Staged staged(dynamic, K);
  const CopiedRow<TYPE> row_copy{dynamic, norm, K};
  const int team = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, warp = thread >> 5, lane = threadIdx.x & 31;
  const int spans = K / Q::kSpan, units = K / kUnit, tiles = (N + kTileRows - 1) / kTileRows, teams = gridDim.x * 2;
  const int number_of_team = team * gridDim.x + blockIdx.x, first_tile = paired ? 2 * number_of_team : number_of_team;
  const bool reads_y = add || (activation != kNoActivation && !paired);
  const u32 read_barrier = shared_address(read_barriers + team);
  const Planes planes{{p0, p1, p2, p3}};
  const auto target_of = [&](int tile) { return y + (paired ? tile / 2 : tile) * kTileRows; };
  let_next_begin();

  Q weights[kDepth];
  const auto ask = [&](int begin, int end) {  // for spans of the first round
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      const int span = warp + d * kWarps;
      if (begin <= d && d < end && span < spans && first_tile < tiles) weights[d].load(planes, u32(first_tile) * spans + span, lane);
    }
  };
  constexpr int kBefore = (kDepth + 1) / 2;
  ask(0, kBefore);
  barrier_publish_if(thread == 0, read_barrier, 1);
  row_copy.expect();
  wait_for_previous();
  row_copy.copy(x);
  ask(kBefore, kDepth);

  float squares = 0.0f;
  const auto end_squares = [&] {
    squares = warp_sum(squares);
    if (lane == 0) squares_of[threadIdx.x >> 5] = squares;
  };
  if constexpr (!kPairs) {
#pragma unroll 1
    for (int unit = threadIdx.x >> 5; unit < units; unit += P::kStagers) row_copy.stage(staged, unit, squares);
    if (norm != nullptr) end_squares();
    __syncthreads();
    if (first_tile >= tiles) return;
  }
  // A team without tiles stages its columns all the same.
  int tile = first_tile, turn = 0;
  float gate = 0.0f;
  do {
    typename P::Sums sums = {};
    if (thread == 0 && tile < tiles && (reads_y || bias != nullptr)) {
      constexpr u32 kTileBytes = kTileRows * 4;
      barrier_arrive_expecting(read_barrier, (reads_y ? kTileBytes : 0) + (bias != nullptr ? kTileBytes : 0));
      if (reads_y) copy_bulk(shared_address(read_of[team][turn][0]), target_of(tile), kTileBytes, read_barrier);
      if (bias != nullptr) copy_bulk(shared_address(read_of[team][turn][1]), bias + tile * kTileRows, kTileBytes, read_barrier);
    }
    const bool staging = kPairs && tile == first_tile;
    for (int next = warp; next < (staging ? spans + warp : spans); next += kRound) {  // the span of weights[0]
      if constexpr (kPairs) {
        if (staging) {
          const int unit = next - warp + (threadIdx.x >> 5);
          if (unit < units) row_copy.stage(staged, unit, squares);
          if (norm != nullptr && next - warp + kRound >= spans) end_squares();
          named_wait(kPairBarrier + warp, 64);
          if (tile >= tiles || next >= spans) continue;
        }
      }
      // One wait for all the loads of the round, as in linear_rows.cu.
#pragma unroll
      for (int d = 0; d < kDepth; d++) weights[d].arrive();
      const Round ahead(next, kRound, warp, spans, tile, tiles, paired, teams);
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (next + d * kWarps < spans) P::multiply(weights[d], staged, (next + d * kWarps) * Q::kSpan, lane, sums);
        if (d * kWarps < ahead.known) weights[d].load(planes, ahead.number + d * kWarps, lane);
      }
    }
    if (kPairs && tile >= tiles) {
      if (norm != nullptr) __syncthreads();
      return;
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float value = P::collect(sums, 0, h, lane);
      if ((lane & 3) == 0) warp_sums[team][turn][warp][(lane >> 2) + 8 * h] = value;
    }
    if (kPairs && norm != nullptr && tile == first_tile) {
      __syncthreads();  // the sums of squares of both teams are there as well
    } else {
      named_wait(kTeamBarrier + team, kThreads);
    }
    if (norm != nullptr && tile == first_tile && warp == 0) {
      if (lane == 0) row_factors[team] = factor_of_row(squares_of, K, eps);
      __syncwarp();
    }
    if (thread < kTileRows && tile * kTileRows + thread < N) {
      float value = warp_sums[team][turn][0][thread];
#pragma unroll
      for (int w = 1; w < kWarps; w++) value = __fadd_rn(value, warp_sums[team][turn][w][thread]);
      if (norm != nullptr) value = __fmul_rn(value, row_factors[team]);
      if (reads_y || bias != nullptr) barrier_wait(read_barrier, turn);
      const float held = reads_y ? read_of[team][turn][0][thread] : 0.0f;
      if (bias != nullptr) value = __fadd_rn(value, read_of[team][turn][1][thread]);
      if (paired && tile % 2 == 0) {
        gate = value;
      } else {
        if (activation != kNoActivation) value = __fmul_rn(activate(activation, paired ? gate : held), value);
        target_of(tile)[thread] = add ? __fadd_rn(held, value) : value;
      }
    }
    __syncwarp();  // all lanes have seen the end of this phase of read_barrier before the next begins
    tile = following_tile(tile, paired, teams);
    turn ^= 1;
  } while (tile < tiles);
}
