// The products of a step of 1 to 16 tokens: y = norm(x) W^T + bias, optionally added to what y holds, or gated; W in any type, on tensor
// cores, with float32 precision and batch-invariant bits.
//
// A float32 is the exact sum of three bf16 numbers (8 bits of its significand each), and the codes of every quantised type are exact in
// bf16 (F16 weights are the sum of two, F32 weights of three). So row t of x becomes three columns 3t, 3t+1, 3t+2 of the B operand, the
// codes of 16 weight rows are the A operand, every product of mma.m16n8k16 is exact, and what is rounded is the float32 summation alone. Per
// group of columns that share a scale: acc = fma(scale, mma sum, acc). For types with a shift the codes are centred and
// acc = fma(shift + centre * scale, sum of x over the group, acc), the sum being taken once when x is staged.
// One row of x fills 3 of the 8 columns: the tensor cores idle while memory is busy, and up to 16 rows cost hardly more than one.
//
// Norm      y = r (W (x * norm)) with r = 1 / sqrt(mean(x^2) + eps): the factor of the row comes last, so the sum of squares is off the way
//           to the first product. norm null: r is left out.
// Gate      activation != 0: the result is activation(gate) * up. With `paired`, W's tiles of 16 rows are gate and up by turns, N counts both and
//           y has N / 2 columns; else W is up alone, and y holds the gate and is overwritten.
// Operands  x f32 [rows][K]; norm f32 [K] or null; planes of TYPE, weight [N, K]; bias f32 [N] or null; y f32 [rows][ldy], ldy >= its columns.
// Mapping   a block of 8 warps takes tiles of 16 weight rows (pairs of them), one after another; warp w takes the spans w, w + 8, ... of the tile in
//           ascending order and keeps kDepth spans of weights in flight, across staging and across tiles; the first ones are on their way
//           before the kernels before this one have ended. x is staged in shared memory, k_tile columns at a time (once, where all of K
//           fits). Warp sums are added in the order of the warps, then the three parts from the smallest.
// Bits      a result depends on its weight row and its row of x alone: the order of operations is fixed by K and TYPE; T, kDepth, k_tile, the
//           grid and the column of the B operand do not enter. All rounding operations are written as intrinsics, so nothing is contracted differently
//           in different instances.
// Bound     memory: the weight's bytes. Issue slots are the second limit: about 2 a weight for 4-bit types, at full rate 60 of 128 a clock on sm_90.
// Rejected  float32 multiply-adds on the plain cores: 3.3 slots a weight at one row, and a row more costs a slot more; x split inside every
//           warp instead of once a block: more slots for x than for the weights.
// Oracle    float64 product with quants.dequantise
#include "activation.cuh"
#include "quants.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kPadColumns = 32;  // of a staged row: shifts neighbouring rows by 64 bytes, so that 16-byte reads meet no bank twice

// c += a b; a: 16 weight rows x 16 columns, b: 16 columns x 8 parts of x.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int TYPE, int T>
struct Product {
  using Q = Quant<TYPE>;
  static constexpr int kColumns = 3 * T;
  static constexpr int kBlocksN = (kColumns + 7) / 8;  // of 8 columns
  static constexpr int kSums = 8 * kBlocksN;
  static constexpr int kSteps = Q::kSpan / kStepColumns;

  // Columns c to c + 3 of a row of `known` columns, zeros behind its end.
  static __device__ __forceinline__ float4 four(const float* row, int c, int known, bool aligned) {
    if (aligned) return c < known ? fresh(reinterpret_cast<const float4*>(row + c)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return make_float4(c < known ? fresh(row + c) : 0.0f, c + 1 < known ? fresh(row + c + 1) : 0.0f, c + 2 < known ? fresh(row + c + 2) : 0.0f,
                       c + 3 < known ? fresh(row + c + 3) : 0.0f);
  }

  static __device__ __forceinline__ float add_squares(float sum, const float4& v) {
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
  }

  // Stages columns [first, first + length) of x * norm: bf16 parts [3T][pitch], within 32 columns in the order in which a lane reads them,
  // and group sums [length / kGroup][kSums] (non-zero in the columns of first parts only, so that they count once). At T = 1 returns this
  // thread's share of the sum of squares.
  static __device__ __forceinline__ float stage(
      const float* x, const float* norm, int rows, int columns, int first, int length, int pitch, u16* parts, float* sums) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float squares = 0.0f;
#pragma unroll 1
    for (int t = 0; t < T; t++) {
      const float* row = x + i64(t) * columns + first;
      const int known = t < rows ? min(length, columns - first) : 0;
#pragma unroll (T == 1 && Q::kSpan == 64 ? 4 : 2)
      for (int base = warp * 32; base < length / 4; base += kThreads) {
        const int c = (base + lane) * 4;
        float4 v = four(row, c, known, columns % 4 == 0);
        if (norm != nullptr) {
          if constexpr (T == 1) squares = add_squares(squares, v);
          const float4 w = four(norm + first, c, min(length, columns - first), columns % 4 == 0);
          v = make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
        }
        if (c < length) {
          float4 rest = v;
          u16* target = parts + (3 * t) * pitch + (c & ~31) + (c >> 2 & 3) * 8 + (c >> 4 & 1) * 4;
#pragma unroll
          for (int part = 0; part < 3; part++) {
            *reinterpret_cast<uint2*>(target + part * pitch) = make_uint2(bf16_pair(rest.x, rest.y), bf16_pair(rest.z, rest.w));
            rest = make_float4(bf16_rest(rest.x), bf16_rest(rest.y), bf16_rest(rest.z), bf16_rest(rest.w));
          }
        }
        if constexpr (Q::kHasShift) {
          float sum = __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w));
#pragma unroll
          for (int distance = 1; distance < Q::kGroup / 4; distance *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, distance));
          if (c < length && c % Q::kGroup == 0) sums[c / Q::kGroup * kSums + 3 * t] = sum;
        }
      }
    }
    return squares;
  }

  // acc += weights of one span times the staged columns, parts and sums beginning at the span. With many columns the steps are a loop, over
  // which the codes rotate through the registers: unrolled, the assembler decodes all steps early and runs out of registers.
  static constexpr bool kRolled = T > 2 && kSteps > 1;
  static __device__ __forceinline__ void multiply(Q& q, const u16* parts, const float* sums, int pitch, int lane, float (&acc)[kBlocksN][4]) {
    if constexpr (kRolled) {
#pragma unroll 1
      for (int step = 0; step < kSteps; step++) {
        multiply_step(q, 0, step, parts, sums, pitch, lane, acc);
        q.rotate();
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; step++) multiply_step(q, step, step, parts, sums, pitch, lane, acc);
    }
  }

  // codes_at: where the codes of the step are.
  static __device__ __forceinline__ void multiply_step(
      const Q& q, int codes_at, int step, const u16* parts, const float* sums, int pitch, int lane, float (&acc)[kBlocksN][4]) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < 2; s++) {  // 32 columns each
      const int group = step * 2 + s;
      u32 a[Q::kParts][8];
#pragma unroll
      for (int part = 0; part < Q::kParts; part++) {
#pragma unroll
        for (int r = 0; r < 8; r++) a[part][r] = q.fragment(codes_at, s * 8 + r, part);
      }
      constexpr int kRuns = 32 / Q::kGroup;  // scales of 32 columns
      float scale[2][kRuns], shift[2][kRuns];
#pragma unroll
      for (int i = 0; i < 2 * kRuns; i++) {
        const int h = i & 1, m = i >> 1;
        if constexpr (Q::kScaled) scale[h][m] = q.scale(h, step, s, m);
        if constexpr (Q::kHasShift) shift[h][m] = __fmaf_rn(float(Q::kZero), scale[h][m], q.shift(h, step, s, m));
      }
#pragma unroll
      for (int n = 0; n < kBlocksN; n++) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (n * 8 + g < kColumns) b = *reinterpret_cast<const uint4*>(parts + (n * 8 + g) * pitch + group * 32 + t * 8);
        float c[kRuns][4] = {};
#pragma unroll
        for (int part = Q::kParts - 1; part >= 0; part--) {
          mma_bf16(c[0], a[part], b.x, b.y);
          mma_bf16(c[kRuns - 1], a[part] + 4, b.z, b.w);
        }
#pragma unroll
        for (int m = 0; m < kRuns; m++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {  // columns 2t + (i & 1) of rows g + 8 (i >> 1)
            if constexpr (Q::kScaled) acc[n][i] = __fmaf_rn(scale[i >> 1][m], c[m][i], acc[n][i]);
            else acc[n][i] = __fadd_rn(acc[n][i], c[m][i]);
          }
          if constexpr (Q::kHasShift) {
            const float2 sum = *reinterpret_cast<const float2*>(sums + (group * kRuns + m) * kSums + n * 8 + t * 2);
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][i] = __fmaf_rn(shift[i >> 1][m], i & 1 ? sum.y : sum.x, acc[n][i]);
          }
        }
      }
    }
  }
};

// Blocks of one multiprocessor: two, except where 128 registers a thread do not hold codes and accumulators.
template <int TYPE, int T>
constexpr int kMinBlocks = T == 16 || (T == 8 && TYPE == Q6_K) ? 1 : 2;

// A row's sum of squares has one order: within each 8,192 columns a thread takes quads thread, thread + 256, ...; the warp's sum is added to what
// the warp has of earlier columns; last come the warps' sums in their order. At T = 1 that is how x is staged.
constexpr int kSquareColumns = 8192;

__device__ __forceinline__ void add_to_warp(float squares, float (&warp_squares)[kWarps]) {
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) warp_squares[threadIdx.x / 32] = __fadd_rn(warp_squares[threadIdx.x / 32], squares);
}

__device__ __forceinline__ float factor_of_row(const float (&warp_squares)[kWarps], int K, float eps) {
  float sum = warp_squares[0];
#pragma unroll
  for (int w = 1; w < kWarps; w++) sum = __fadd_rn(sum, warp_squares[w]);
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(K)), eps)));
}

// A block's tiles, one after another: `stride` apart, or in pairs of neighbours.
__device__ __forceinline__ int following_tile(int tile, bool paired) {
  if (!paired) return tile + gridDim.x;
  return tile % 2 == 0 ? tile + 1 : tile - 1 + 2 * gridDim.x;
}

template <int TYPE, int T, int kDepth>
__global__ void __launch_bounds__(kThreads, (kMinBlocks<TYPE, T>)) linear_rows(
    const float* x,                                                                                              // [rows][K]
    const float* norm,                                                                                           // [K] or null
    const u8* __restrict__ p0, const u8* __restrict__ p1, const u8* __restrict__ p2, const u8* __restrict__ p3,  // planes
    const float* __restrict__ bias,                                                                              // [N] or null
    float* y,                                                                                                    // [rows][ldy]
    int rows, int N, int K, int ldy, int k_tile, float eps, int activation, int paired, int add) {
  using P = Product<TYPE, T>;
  using Q = Quant<TYPE>;
  constexpr int kGroupN = P::kBlocksN < 2 ? P::kBlocksN : 2;  // blocks of columns reduced over the warps at a time
  extern __shared__ __align__(16) u8 dynamic[];
  __shared__ float warp_sums[kWarps][kTileRows][kGroupN * 8 + 1];
  __shared__ float totals[kTileRows][P::kSums + 1];
  __shared__ float row_factor[T], warp_squares[kWarps], gates[T][kTileRows];
  const int pitch = k_tile + kPadColumns;
  u16* parts = reinterpret_cast<u16*>(dynamic);                                // [3T][pitch]
  float* sums = reinterpret_cast<float*>(dynamic + P::kColumns * pitch * 2);  // [k_tile / kGroup][kSums]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int spans = (K + Q::kSpan - 1) / Q::kSpan, staged_spans = k_tile / Q::kSpan, tiles = (N + kTileRows - 1) / kTileRows;
  const int first_tile = paired ? 2 * blockIdx.x : blockIdx.x;
  const Planes planes{p0, p1, p2, p3};
  let_next_begin();

  Q weights[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    const int span = warp + d * kWarps;
    if (span < spans && first_tile < tiles) weights[d].load(planes, i64(first_tile) * spans + span, lane);
  }
  if constexpr (Q::kHasShift) {
    for (int i = threadIdx.x; i < k_tile / Q::kGroup * P::kSums; i += kThreads) sums[i] = 0.0f;
  }
  if (threadIdx.x < kWarps) warp_squares[threadIdx.x] = 0.0f;
  __syncthreads();
  wait_for_previous();

  if constexpr (T > 1) {
    if (norm != nullptr) {
#pragma unroll 1
      for (int token = 0; token < rows; token++) {
        const float* row = x + i64(token) * K;
#pragma unroll 1
        for (int first = 0; first < K; first += kSquareColumns) {
          float squares = 0.0f;
          for (int base = warp * 32; base < kSquareColumns / 4 && first + base * 4 < K; base += kThreads)
            squares = P::add_squares(squares, P::four(row + first, (base + lane) * 4, K - first, K % 4 == 0));
          add_to_warp(squares, warp_squares);
        }
        __syncthreads();
        if (threadIdx.x == 0) row_factor[token] = factor_of_row(warp_squares, K, eps);
        __syncthreads();
        if (threadIdx.x < kWarps) warp_squares[threadIdx.x] = 0.0f;
        __syncthreads();
      }
    }
  }

  for (int tile = first_tile; tile < tiles; tile = following_tile(tile, paired)) {
    float acc[P::kBlocksN][4] = {};
    int next = warp;  // the span of weights[0]
    const bool summing = T == 1 && norm != nullptr && tile == first_tile;
    for (int first = 0; first < spans; first += staged_spans) {
      const int end = min(spans, first + staged_spans);
      if (tile == first_tile || staged_spans < spans) {
        __syncthreads();
        const float squares = P::stage(x, norm, rows, K, first * Q::kSpan, (end - first) * Q::kSpan, pitch, parts, sums);
        if (summing) add_to_warp(squares, warp_squares);
        __syncthreads();
      }
      for (; next < end; next += kDepth * kWarps) {
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          const int span = next + d * kWarps;
          if (span < end) {
            const int column = (span - first) * Q::kSpan;
            P::multiply(weights[d], parts + column, sums + column / Q::kGroup * P::kSums, pitch, lane, acc);
          }
          // The same slot's next span: of this tile, or the first one of the block's next tile.
          const bool last = next + kDepth * kWarps >= spans;
          const int ahead = last ? warp + d * kWarps : span + kDepth * kWarps;
          const int ahead_tile = last ? following_tile(tile, paired) : tile;
          if (ahead < spans && ahead_tile < tiles) weights[d].load(planes, i64(ahead_tile) * spans + ahead, lane);
        }
      }
    }
    if (summing && threadIdx.x == 0) row_factor[0] = factor_of_row(warp_squares, K, eps);  // read behind the next barriers

#pragma unroll
    for (int n0 = 0; n0 < P::kBlocksN; n0 += kGroupN) {
#pragma unroll
      for (int n = n0; n < n0 + kGroupN && n < P::kBlocksN; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) warp_sums[warp][g + (i >> 1) * 8][(n - n0) * 8 + t * 2 + (i & 1)] = acc[n][i];
      }
      __syncthreads();
      const int row = threadIdx.x % kTileRows, column = threadIdx.x / kTileRows;
      if (column < kGroupN * 8 && n0 * 8 + column < P::kSums) {
        float sum = warp_sums[0][row][column];
#pragma unroll
        for (int w = 1; w < kWarps; w++) sum = __fadd_rn(sum, warp_sums[w][row][column]);
        totals[row][n0 * 8 + column] = sum;
      }
      __syncthreads();
    }
    const int row = threadIdx.x % kTileRows, token = threadIdx.x / kTileRows;
    if (token < T && token < rows && tile * kTileRows + row < N) {
      float value = __fadd_rn(__fadd_rn(totals[row][3 * token + 2], totals[row][3 * token + 1]), totals[row][3 * token]);
      if (norm != nullptr) value = __fmul_rn(value, row_factor[token]);
      if (bias != nullptr) value = __fadd_rn(value, bias[tile * kTileRows + row]);
      if (paired && tile % 2 == 0) {
        gates[token][row] = value;  // read by the same thread
      } else {
        float* target = y + i64(token) * ldy + (paired ? tile / 2 : tile) * kTileRows + row;
        if (activation != kNoActivation) value = __fmul_rn(activate(activation, paired ? gates[token][row] : fresh(target)), value);
        *target = add ? __fadd_rn(fresh(target), value) : value;
      }
    }
  }
}
