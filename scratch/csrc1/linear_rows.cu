// The products of a step of 1 to 16 tokens: y = norm(x) W^T + bias, optionally added to what y holds, or gated; W in any type, on tensor
// cores, with float32 precision and batch-invariant bits.
//
// Quantised weights: codes are signed bytes, and so are the three digits of x: within 32 columns x = scale * (d0 + d1 / 256 + d2 / 65536), scale the power of
// two that brings the largest to [63.5, 127], rounded once at 2^-23 of it. Row t of x becomes the columns 3t, 3t+1, 3t+2 of the B operand, 16 weight
// rows are the A operand, and mma.m16n8k32 over bytes is exact; what is rounded further is the float32 summation alone: acc =
// fma(scale of the weights, scale of the digit * mma sum, acc). For types with a shift also acc = fma(shift, sum of x over
// the group, acc), the sum being taken once when x is staged. A column with an infinity or a NaN makes its row NaN.
// Other weights: a float32 is the exact sum of three bf16 numbers (8 bits of its significand each), F16 of two: exact products of mma.m16n8k16.
// One row of x fills 3 of the 8 columns: the tensor cores idle while memory is busy, and two rows cost no more than one.
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
// Bound     memory: the weight's bytes. Issue slots are the second limit: about 1 a weight (Q8_0: 0.25 to order the codes, 0.06 for the mma, 0.75 to
//           scale), 15 % of what sm_90 has at full rate.
// Rejected  codes and x as bf16 (codes exact, x in three parts): 3.3 slots a weight, 44 to 61 % of HBM. float32 multiply-adds on the plain
//           cores: 3.3 slots a weight at one row, and a row more costs a slot more; x split inside every warp instead of once a block: more
//           slots for x than for the weights.
// Oracle    float64 product with quants.dequantise
#include "activation.cuh"
#include "quants.cuh"

#ifndef PF
#define PF 0
#endif
#ifndef MINB
#define MINB 2
#endif
#ifndef CHUNK
#define CHUNK 2048
#endif
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kPadBytes = 32;  // of a staged row beyond its own: so neighbouring rows lie in different banks

// c += a b; a: 16 weight rows x 16 columns, b: 16 columns x 8 parts of x.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sums over bytes begin at the float 1.5 * 2^23, taken as an integer: as long as they stay below 2^22 the result, taken as a float, is that
// number plus the sum, and one subtraction converts it.
constexpr int kSumBase = 0x4b400000;
__device__ __forceinline__ float sum_value(int c) { return __fsub_rn(__int_as_float(c), 12582912.0f); }

// c += a b over bytes; a: 16 weight rows x 32 (or 16) columns, b: those columns x 8 digits of x.
__device__ __forceinline__ void mma_bytes32(int (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bytes16(int (&c)[4], const u32* a, u32 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Columns c to c + 3 of a row of `known` columns, zeros behind its end.
__device__ __forceinline__ float4 four(const float* row, int c, int known, bool aligned) {
  if (aligned) return c < known ? fresh(reinterpret_cast<const float4*>(row + c)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return make_float4(c < known ? fresh(row + c) : 0.0f, c + 1 < known ? fresh(row + c + 1) : 0.0f, c + 2 < known ? fresh(row + c + 2) : 0.0f,
                     c + 3 < known ? fresh(row + c + 3) : 0.0f);
}

__device__ __forceinline__ float add_squares(float sum, const float4& v) {
  return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
}

// Over kLanes neighbouring lanes, in a fixed order.
template <int kLanes>
__device__ __forceinline__ float lanes_total(float value) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// How x is staged, and multiplied by the codes of one span. A part of x is a column of the B operand: 3t, 3t+1, 3t+2 of row t.
template <int TYPE, int T>
struct Product {
  using Q = Quant<TYPE>;
  static constexpr int kColumns = 3 * T;
  static constexpr int kBlocksN = (kColumns + 7) / 8;  // of 8 columns
  static constexpr int kSums = 8 * kBlocksN;
  static constexpr int kSteps = Q::kSpan / kStepColumns;
  static constexpr int kPartBytes = Q::kScaled ? 1 : 2;  // of a part of one column of x

  // Shared memory of k_tile staged columns.
  struct Staged {
    u8* parts;      // [3T][pitch] bytes, within 32 columns in the order in which a lane reads them
    float* scales;  // [k_tile / 32][kSums] scales of the digits; zeros beside the columns that exist
    float* sums;    // [k_tile / kGroup][kSums] sums of x, in the columns of first parts only, so that they count once
    int pitch;
    __device__ __forceinline__ Staged(u8* memory, int k_tile)
        : parts(memory), scales(reinterpret_cast<float*>(memory + kColumns * (k_tile * kPartBytes + kPadBytes))),
          sums(scales + (Q::kScaled ? k_tile / 32 * kSums : 0)), pitch(k_tile * kPartBytes + kPadBytes) {}
  };

  static __device__ __forceinline__ void clear(const Staged& to, int k_tile) {
    if constexpr (Q::kScaled) {
      for (int i = threadIdx.x; i < k_tile / 32 * kSums; i += kThreads) to.scales[i] = 0.0f;
    }
    if constexpr (Q::kHasShift) {
      for (int i = threadIdx.x; i < k_tile / Q::kGroup * kSums; i += kThreads) to.sums[i] = 0.0f;
    }
  }

  // Columns c to c + 3 of row t, as three bf16 numbers each.
  static __device__ __forceinline__ void put_parts(const Staged& to, int t, int c, const float4& v) {
    float4 rest = v;
    u8* target = to.parts + (3 * t) * to.pitch + ((c & ~31) + (c >> 2 & 3) * 8 + (c >> 4 & 1) * 4) * 2;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      *reinterpret_cast<uint2*>(target + part * to.pitch) = make_uint2(bf16_pair(rest.x, rest.y), bf16_pair(rest.z, rest.w));
      rest = make_float4(bf16_rest(rest.x), bf16_rest(rest.y), bf16_rest(rest.z), bf16_rest(rest.w));
    }
  }

  // The same as three digits each: the 8 lanes of 32 columns agree on the scale. Called by whole warps; lanes behind `length` write nothing.
  static __device__ __forceinline__ void put_digits(const Staged& to, int t, int c, int length, const float4& v) {
    u32 most = max(max(magnitude_bits(v.x), magnitude_bits(v.y)), max(magnitude_bits(v.z), magnitude_bits(v.w)));
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, distance));
    const bool finite = most < 0x7f800000u;
    int exponent = max(int(most >> 23), 27) - 6;                                          // biased; largest / scale in [64, 128)
    if ((most & 0x7fffffu) > 0x7e0000u) exponent++;                                       // above 127: [63.5, 64)
    const float to_digits = finite ? __uint_as_float(u32(254 + 16 - exponent) << 23) : 0.0f;  // 65536 / scale
    u32 digits[4];  // least digit in the low byte
    const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) digits[i] = u32((finite ? __float2int_rn(__fmul_rn(x[i], to_digits)) : 0) + 0x808080) ^ 0x808080u;
    if (c >= length) return;
    u8* target = to.parts + (3 * t) * to.pitch + (c & ~31) + (c >> 2 & 3) * 8 + (c >> 4 & 1) * 4;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      const int byte = 2 - part, both = byte | (4 + byte) << 4;
      const u32 word = __byte_perm(__byte_perm(digits[0], digits[2], both), __byte_perm(digits[1], digits[3], both), 0x5410);
      *reinterpret_cast<u32*>(target + part * to.pitch) = word;
      if (c % 32 == 0) {
        to.scales[c / 32 * kSums + 3 * t + part] = finite ? __uint_as_float(u32(exponent - 8 * part) << 23) : __uint_as_float(0x7fc00000u);
      }
    }
  }

  // Stages columns [first, first + length) of x * norm. At T = 1 returns this thread's share of the sum of squares.
  static __device__ __forceinline__ float stage(const float* x, const float* norm, int rows, int columns, int first, int length, const Staged& to) {
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
        if constexpr (Q::kScaled) {
          put_digits(to, t, c, length, v);
        } else if (c < length) {
          put_parts(to, t, c, v);
        }
        if constexpr (Q::kHasShift) {
          const float sum = lanes_total<Q::kGroup / 4>(__fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w)));
          if (c < length && c % Q::kGroup == 0) to.sums[c / Q::kGroup * kSums + 3 * t] = sum;
        }
      }
    }
    return squares;
  }

  // acc += weights of one span times the columns staged from `column` on. With many columns the steps are a loop, over
  // which the codes rotate through the registers: unrolled, the assembler decodes all steps early and runs out of registers.
  static constexpr bool kRolled = T > 2 && kSteps > 1;
  static __device__ __forceinline__ void multiply(Q& q, const Staged& x, int column, int lane, float (&acc)[kBlocksN][4]) {
    if constexpr (kRolled) {
#pragma unroll 1
      for (int step = 0; step < kSteps; step++) {
        multiply_step(q, 0, step, x, column, lane, acc);
        q.rotate();
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; step++) multiply_step(q, step, step, x, column, lane, acc);
    }
  }

  // codes_at: where the codes of the step are.
  static __device__ __forceinline__ void multiply_step(
      const Q& q, int codes_at, int step, const Staged& x, int column, int lane, float (&acc)[kBlocksN][4]) {
#pragma unroll
    for (int s = 0; s < 2; s++) {  // 32 columns each
      const int first = column + (step * 2 + s) * 32;
      if constexpr (Q::kScaled) {
        multiply_codes(q, codes_at, step, s, x, first, lane, acc);
      } else {
        multiply_floats(q, s, x, first, lane, acc);
      }
    }
  }

  static __device__ __forceinline__ void multiply_codes(
      const Q& q, int codes_at, int step, int s, const Staged& x, int first, int lane, float (&acc)[kBlocksN][4]) {
    constexpr int kRuns = 32 / Q::kGroup;  // scales of 32 columns
    const int g = lane >> 2, t = lane & 3;
    u32 a[4];
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = q.bytes(codes_at, s, r >> 1, r & 1);
    float scale[2][kRuns], shift[2][kRuns];
#pragma unroll
    for (int i = 0; i < 2 * kRuns; i++) {
      const int h = i & 1, m = i >> 1;
      scale[h][m] = q.scale(h, step, s, m);
      if constexpr (Q::kHasShift) shift[h][m] = q.shift(h, step, s, m);
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
      uint2 b = make_uint2(0, 0);
      if (n * 8 + g < kColumns) b = *reinterpret_cast<const uint2*>(x.parts + (n * 8 + g) * x.pitch + first + t * 8);
      int c[kRuns][4];
#pragma unroll
      for (int i = 0; i < 4 * kRuns; i++) c[i / 4][i % 4] = kSumBase;
      if constexpr (kRuns == 1) {
        mma_bytes32(c[0], a, b.x, b.y);
      } else {
        mma_bytes16(c[0], a, b.x);
        mma_bytes16(c[1], a + 2, b.y);
      }
      const float2 digit = *reinterpret_cast<const float2*>(x.scales + first / 32 * kSums + n * 8 + t * 2);
#pragma unroll
      for (int m = 0; m < kRuns; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {  // columns 2t + (i & 1) of rows g + 8 (i >> 1)
          acc[n][i] = __fmaf_rn(scale[i >> 1][m], __fmul_rn(sum_value(c[m][i]), i & 1 ? digit.y : digit.x), acc[n][i]);
        }
        if constexpr (Q::kHasShift) {
          const float2 sum = *reinterpret_cast<const float2*>(x.sums + (first / Q::kGroup + m) * kSums + n * 8 + t * 2);
#pragma unroll
          for (int i = 0; i < 4; i++) acc[n][i] = __fmaf_rn(shift[i >> 1][m], i & 1 ? sum.y : sum.x, acc[n][i]);
        }
      }
    }
  }

  static __device__ __forceinline__ void multiply_floats(const Q& q, int s, const Staged& x, int first, int lane, float (&acc)[kBlocksN][4]) {
    const int g = lane >> 2, t = lane & 3;
    u32 a[Q::kParts][8];
#pragma unroll
    for (int part = 0; part < Q::kParts; part++) {
#pragma unroll
      for (int r = 0; r < 8; r++) a[part][r] = q.fragment(0, s * 8 + r, part);
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
      uint4 b = make_uint4(0, 0, 0, 0);
      if (n * 8 + g < kColumns) b = *reinterpret_cast<const uint4*>(x.parts + (n * 8 + g) * x.pitch + (first + t * 8) * 2);
      float c[4] = {};
#pragma unroll
      for (int part = Q::kParts - 1; part >= 0; part--) {
        mma_bf16(c, a[part], b.x, b.y);
        mma_bf16(c, a[part] + 4, b.z, b.w);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] = __fadd_rn(acc[n][i], c[i]);
    }
  }
};

// Blocks of one multiprocessor: two, except where 128 registers a thread do not hold codes and accumulators.
template <int TYPE, int T>
constexpr int kMinBlocks = T == 16 || (TYPE == Q6_K && T >= 4) || (TYPE == Q3_K && T >= 2) ? 1 : 2;

// A row's sum of squares has one order: within as many columns as are staged at one row, a thread takes quads thread, thread + 256, ...; the warp's sum is added to what
// the warp has of earlier columns; last come the warps' sums in their order. At T = 1 that is how x is staged.
template <int TYPE>
constexpr int kSquareColumns = Quant<TYPE>::kScaled ? 12288 : 8192;

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

// A block's tiles, one after another: gridDim.x apart, or in pairs of neighbours.
__device__ __forceinline__ int following_tile(int tile, bool paired) {
  if (!paired) return tile + gridDim.x;
  return tile % 2 == 0 ? tile + 1 : tile - 1 + 2 * gridDim.x;
}

__device__ __forceinline__ void prefetch_plane(const u8* p, u32 bytes) {
  for (u32 o = threadIdx.x * CHUNK; o < bytes; o += kThreads * CHUNK)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p + o), "r"(min(u32(CHUNK), bytes - o)) : "memory");
}
template <int TYPE>
__device__ __forceinline__ void prefetch_tile(const Planes& p, int tile, int spans) {
  if constexpr (TYPE == Q8_0) {
    prefetch_plane(p.p0 + i64(tile) * spans * 1024, spans * 1024);
    prefetch_plane(p.p1 + i64(tile) * spans * 64, spans * 64);
  } else if constexpr (TYPE == Q4_K) {
    prefetch_plane(p.p0 + i64(tile) * spans * 2048, spans * 2048);
    prefetch_plane(p.p1 + i64(tile) * spans * 256, spans * 256);
  }
}
template <int TYPE, int T, int kDepth>
__global__ void __launch_bounds__(kThreads, MINB) linear_rows(
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
  const typename P::Staged staged(dynamic, k_tile);
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
#if PF > 0
  if (first_tile < tiles) prefetch_tile<TYPE>(planes, first_tile, spans);
  int pf_tile = first_tile;
#pragma unroll
  for (int i = 0; i < PF - 1; i++) {
    pf_tile = following_tile(pf_tile, paired);
    if (pf_tile < tiles) prefetch_tile<TYPE>(planes, pf_tile, spans);
  }
#endif
  P::clear(staged, k_tile);
  if (threadIdx.x < kWarps) warp_squares[threadIdx.x] = 0.0f;
  __syncthreads();
  wait_for_previous();

  if constexpr (T > 1) {
    if (norm != nullptr) {
#pragma unroll 1
      for (int token = 0; token < rows; token++) {
        const float* row = x + i64(token) * K;
#pragma unroll 1
        for (int first = 0; first < K; first += kSquareColumns<TYPE>) {
          float squares = 0.0f;
          for (int base = warp * 32; base < kSquareColumns<TYPE> / 4 && first + base * 4 < K; base += kThreads)
            squares = add_squares(squares, four(row + first, (base + lane) * 4, K - first, K % 4 == 0));
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
#if PF > 0
    pf_tile = following_tile(pf_tile, paired);
    if (pf_tile < tiles) prefetch_tile<TYPE>(planes, pf_tile, spans);
#endif
    int next = warp;  // the span of weights[0]
    const bool summing = T == 1 && norm != nullptr && tile == first_tile;
    for (int first = 0; first < spans; first += staged_spans) {
      const int end = min(spans, first + staged_spans);
      if (tile == first_tile || staged_spans < spans) {
        __syncthreads();
        const float squares = P::stage(x, norm, rows, K, first * Q::kSpan, (end - first) * Q::kSpan, staged);
        if (summing) add_to_warp(squares, warp_squares);
        __syncthreads();
      }
      for (; next < end; next += kDepth * kWarps) {
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          const int span = next + d * kWarps;
          if (span < end) P::multiply(weights[d], staged, (span - first) * Q::kSpan, lane, acc);
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
