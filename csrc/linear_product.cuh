// What the kernels of products with few rows share: x as the tensor cores take it, its products with the weights of a span, and their sums. Float32
// precision, and batch-invariant bits.
//
// Quantised weights: codes are bytes, and so are the three digits of x: within 256 columns x = scale * (d0 + d1 / 256 + d2 / 65536), scale the
// power of two that brings the largest to [63.5, 127], rounded once at 2^-23 of it. Row t of x becomes three columns of the B
// operand, 16 weight rows are the A operand, and mma.m16n8k32 over bytes is exact. The types of super-blocks have integer scales of 8 bits
// a group: their groups are weighted and added in integers too, exactly, and one float32 multiply-add follows for 256 columns; the others take
// one for 32 columns. Shifts are multiplied by the sums of x over their groups, taken once when x is staged, the groups of a row divided
// among its four lanes. A column with an infinity or a NaN makes its row NaN.
// F16: x = scale * (h0 + h1 + h2), three halves, the scale a power of two for 256 columns; exact products of mma.m16n8k16.
// BF16 and F32: a float32 is the exact sum of three bf16 numbers (8 bits of its significand each).
// The tensor cores idle while memory is busy, though one row of x fills 3 of the 8 columns.
//
// Bits      a result depends on its weight row and its row of x alone: the order of operations is fixed by K and TYPE; rows, depth, columns staged at a
//           time, the grid, the kernel and the column of the B operand do not enter. All rounding operations are written as intrinsics, so nothing is
//           contracted differently in different instances.
// Slots     of issue, the second limit behind memory: 1.2 instructions a weight of a lane in Q4_K, 1.5 in Q8_0, 1.8 in Q4_0, 2.4 in Q6_K, loads among them.
// Rejected  codes and x as bf16: 3.3 slots a weight. Scales of x for 32 columns and a float32 multiply-add a group: Q4_K 2 slots more a weight.
#pragma once

#include "quants.cuh"

constexpr int kWarps = 8;  // of a team
constexpr int kThreads = kWarps * 32;
constexpr int kTeamBarrier = 1;        // of hardware: of the first team; the second has the next
constexpr int kSquares = 16;           // sums that a row's sum of squares is added up from
constexpr int kUnit = 256;             // columns of x with a common scale
constexpr int kPadBytes = 32;          // of a staged row beyond its own: so neighbouring rows lie in different banks
constexpr int kUnitBytes = kUnit * 4;  // of a unit of one row: as it comes, and as digits, sums and scale, which take its place

// ---- tensor cores -----------------------------------------------------------------------------------------------------------------

// c += a b; a: 16 weight rows x 16 columns, b: 16 columns x 8 parts of x.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a b over bytes; a: 16 weight rows x 32 (or 16) columns, signed or not, b: those columns x 8 digits of x.
template <bool kSigned>
__device__ __forceinline__ void mma_bytes32(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
  }
}
template <bool kSigned>
__device__ __forceinline__ void mma_bytes16(int (&c)[4], u32 a0, u32 a1, u32 b) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
  }
}

// ---- x ----------------------------------------------------------------------------------------------------------------------------

// Columns c to c + 3 of a row of `known` columns, zeros behind its end.
__device__ __forceinline__ float4 four(const float* row, int c, int known, bool aligned) {
  if (aligned) return c < known ? fresh(reinterpret_cast<const float4*>(row + c)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return make_float4(c < known ? fresh(row + c) : 0.0f, c + 1 < known ? fresh(row + c + 1) : 0.0f, c + 2 < known ? fresh(row + c + 2) : 0.0f,
                     c + 3 < known ? fresh(row + c + 3) : 0.0f);
}

__device__ __forceinline__ float add_squares(float sum, const float4& v) {
  return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
}

__device__ __forceinline__ float4 times(const float4& v, const float4& w) {
  return make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
}
__device__ __forceinline__ float4 times(const float4& v, float w) { return times(v, make_float4(w, w, w, w)); }

// The larger magnitude, or NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(fabsf(a)), "f"(fabsf(b)));
  return most;
}
__device__ __forceinline__ float largest(const float4& v) { return larger(larger(v.x, v.y), larger(v.z, v.w)); }

// Teams of a block: two, except where 128 registers a thread do not hold codes and accumulators. A block fills a multiprocessor.
template <int TYPE, int T>
constexpr int kTeams = T == 16 || (T == 8 && (Quant<TYPE>::kSpan == 256 || Quant<TYPE>::kKind != Kind::kBytes)) || (T == 4 && TYPE == F32) ? 1 : 2;

// How x is staged, and multiplied by the weights of one span. Row t has the parts 3t, 3t + 1, 3t + 2.
// kByUnits: one row as digits, each unit in kUnitBytes of its own, so that its warp may write them over the unit's floats, which nobody else reads.
template <int TYPE, int T, bool kByUnits = false>
struct Product {
  using Q = Quant<TYPE>;
  static constexpr bool kBytes = Q::kKind == Kind::kBytes, kScaledX = Q::kKind != Kind::kBf16;
  static constexpr int kColumns = 3 * T;
  // A part is a column of the B operand, at one row every second one: then a lane has one of its two columns to add up.
  static constexpr int kStride = T == 1 ? 2 : 1;
  static constexpr int kBlocksN = (kColumns * kStride + 7) / 8;  // of 8 columns
  static constexpr int kSteps = Q::kSpan / kStepColumns;
  static constexpr int kPartBytes = kBytes ? 1 : 2;  // of a part of one column of x
  static constexpr int kStagers = kWarps * kTeams<TYPE, T>;  // warps that stage
  static constexpr bool kHasShift = [] { if constexpr (kBytes) return Q::kHasShift; else return false; }();
  static constexpr bool kInteger = [] { if constexpr (kBytes) return Q::kInteger; else return false; }();
  static constexpr int kGroup = [] { if constexpr (kBytes) return Q::kGroup; else return 32; }();

  static_assert(!kByUnits || (T == 1 && kBytes), "one row of digits");

  // Shared memory of k_tile staged columns; with kByUnits, of 256 of them, again and again.
  struct Staged {
    u8* parts;      // [3T][pitch] bytes, within 32 columns in the order in which a lane reads them
    float* scales;  // [k_tile / kUnit][T], of the first digits
    float* sums;    // [k_tile / kGroup][T] sums of x
    int pitch;
    __device__ __forceinline__ Staged(u8* memory, int k_tile)
        : parts(memory), pitch((kByUnits ? kUnit : k_tile) * kPartBytes + kPadBytes) {
      scales = reinterpret_cast<float*>(memory + kColumns * pitch);
      sums = scales + (kByUnits ? 1 : kScaledX ? (k_tile + kUnit - 1) / kUnit * T : 0);
    }
    // Where a column lies in a row of bytes.
    static __device__ __forceinline__ int place(int column) {
      return kByUnits ? int(u32(column) / kUnit * kUnitBytes + u32(column) % kUnit) : column * kPartBytes;
    }
    __device__ __forceinline__ float* sums_at(int column) const {
      return kByUnits ? sums + u32(column) / kUnit * (kUnitBytes / 4) + u32(column) % kUnit / kGroup : sums + column / kGroup * T;
    }
    __device__ __forceinline__ float& scale_at(int column, int t) const { return scales[u32(column) / kUnit * (kByUnits ? kUnitBytes / 4 : T) + t]; }
    __device__ __forceinline__ float scale(int column, int part_column) const {
      return scale_at(column, T == 1 ? 0 : min(part_column / 3, T - 1));
    }
  };
  static_assert(!kByUnits || kColumns * (kUnit + kPadBytes) + 4 + kUnit / kGroup * 4 <= kUnitBytes, "a unit keeps to its place");

  struct Sums {
    float acc[kBlocksN][4];  // parts 2t + (i & 1) of rows g + 8 (i >> 1)
    float shift[T][2];       // of rows g and g + 8, this lane's groups
  };

  // Columns c to c + 3 of row t, as three numbers of 16 bits each.
  static __device__ __forceinline__ void put_parts(const Staged& to, int t, int c, int length, const float4& v) {
    if (c >= length) return;
    float4 rest = v;
    u8* target = to.parts + 3 * t * to.pitch + Staged::place(c & ~31) + ((c >> 2 & 3) * 8 + (c >> 4 & 1) * 4) * 2;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      uint2 pair;
      if constexpr (Q::kKind == Kind::kBf16) {
        pair = make_uint2(bf16_pair(rest.x, rest.y), bf16_pair(rest.z, rest.w));
        rest = make_float4(bf16_rest(rest.x), bf16_rest(rest.y), bf16_rest(rest.z), bf16_rest(rest.w));
      } else {
        pair = make_uint2(pack_half2(rest.x, rest.y), pack_half2(rest.z, rest.w));
        rest = make_float4(__fsub_rn(rest.x, low_half(pair.x)), __fsub_rn(rest.y, high_half(pair.x)), __fsub_rn(rest.z, low_half(pair.y)),
                           __fsub_rn(rest.w, high_half(pair.y)));
      }
      *reinterpret_cast<uint2*>(target + part * to.pitch) = pair;
    }
  }

  // The same times factor, which makes the last digit the unit, as three digits each: the bytes of the sum with 0x808080, less 128.
  static __device__ __forceinline__ void put_digits(u8* target, int pitch, bool inside, const float4& v, float factor) {
    u32 sums[4];
    const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = u32(__float2int_rn(__fmul_rn(x[i], factor)) + 0x808080);
    if (!inside) return;
    const u32 low[2] = {__byte_perm(sums[0], sums[1], 0x5140), __byte_perm(sums[2], sums[3], 0x5140)};  // the two lower digits of two columns
    *reinterpret_cast<u32*>(target) = __byte_perm(__byte_perm(sums[0], sums[1], 0x0062), __byte_perm(sums[2], sums[3], 0x0062), 0x5410) ^ 0x80808080u;
    *reinterpret_cast<u32*>(target + pitch) = __byte_perm(low[0], low[1], 0x7632) ^ 0x80808080u;
    *reinterpret_cast<u32*>(target + 2 * pitch) = __byte_perm(low[0], low[1], 0x5410) ^ 0x80808080u;
  }

  // A unit of row t: lanes have columns c to c + 3 and c + 128 to c + 131. kWhole: all of them are known to be inside.
  template <bool kWhole = false>
  static __device__ __forceinline__ void put_unit(const Staged& to, int t, int unit, int lane, int length, float4 (&v)[2]) {
    const int c = unit * kUnit + lane * 4;
    if constexpr (kHasShift) {  // the even lanes of a group add up its first half's columns, the odd ones its second half's
      float sum[2];
#pragma unroll
      for (int i = 0; i < 2; i++) sum[i] = __fadd_rn(__fadd_rn(v[i].x, v[i].y), __fadd_rn(v[i].z, v[i].w));
      const int half = lane & 1, column = c + half * 128;
      float total = __fadd_rn(half ? sum[1] : sum[0], __shfl_xor_sync(kAllLanes, half ? sum[0] : sum[1], 1));
#pragma unroll
      for (int step = 2; step < kGroup / 4; step *= 2) total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, step));
      if ((kWhole || column < length) && lane % (kGroup / 4) < 2) to.sums_at(unit * kUnit)[(lane * 4 + half * 128) / kGroup * (kByUnits ? 1 : T) + t] = total;
    }
    float factor = 1.0f;
    if constexpr (kScaledX) {
      const u32 most = __reduce_max_sync(kAllLanes, __float_as_uint(larger(largest(v[0]), largest(v[1]))));
      const bool finite = most < 0x7f800000u;
      // Biased exponents: of 1 / scale (digits: times 65536), and of the scale.
      int exponent = max(int(most >> 23), 27) - (kBytes ? 6 : 14);  // bytes: largest / scale in [64, 128); halves: in [2^14, 2^15)
      if (kBytes && (most & 0x7fffffu) > 0x7e0000u) exponent++;     // above 127: [63.5, 64)
      factor = __uint_as_float(u32(254 + (kBytes ? 16 : 0) - exponent) << 23);
      if (lane == 0) to.scale_at(unit * kUnit, t) = finite ? __uint_as_float(u32(exponent) << 23) : __uint_as_float(0x7fc00000u);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (kBytes) {
        u8* row = to.parts + 3 * t * to.pitch + Staged::place(unit * kUnit);
        put_digits(row + i * 128 + (lane >> 3) * 32 + (lane & 3) * 8 + (lane >> 2 & 1) * 4, to.pitch, kWhole || c + i * 128 < length, v[i], factor);
      } else {
        put_parts(to, t, c + i * 128, length, kScaledX ? times(v[i], factor) : v[i]);
      }
    }
  }

  // Whether rows of x begin on 16 bytes; blocks of codes are 32 columns.
  static __device__ __forceinline__ bool is_aligned(int columns) { return kBytes || columns % 4 == 0; }

  // Stages columns [first, first + length) of x * norm; at T = 1 adds to this thread's share of the sum of squares.
  static __device__ __forceinline__ void stage(const float* x, const float* norm, int rows, int columns, int first, int length, const Staged& to,
                                               float& squares) {
    const int lane = threadIdx.x & 31, inside = min(length, columns - first);
    const bool aligned = is_aligned(columns);
#pragma unroll 1
    for (int t = 0; t < T; t++) {
#pragma unroll 1
      for (int unit = threadIdx.x >> 5; unit * kUnit < length; unit += kStagers) {
        float4 v[2];  // all on their way before the first is waited for
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int c = unit * kUnit + half * 128 + lane * 4;
          v[half] = four(x + i64(t) * columns + first, c, t < rows ? inside : 0, aligned);
        }
        if (norm != nullptr) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            if constexpr (T == 1) squares = add_squares(squares, v[half]);
            v[half] = times(v[half], four(norm + first, unit * kUnit + half * 128 + lane * 4, inside, aligned));
          }
        }
        put_unit<Q::kSpan == kUnit>(to, t, unit, lane, length, v);
      }
    }
  }

  // sums += weights of one span times the columns staged from `column` on. With many columns the steps are a loop, over
  // which the codes rotate through the registers: unrolled, the assembler decodes all steps early and runs out of registers.
  static __device__ __forceinline__ void multiply(Q q, const Staged& x, int column, int lane, Sums& sums) {
    q.open();
    if constexpr (!kBytes) {
#pragma unroll
      for (int s = 0; s < 2; s++) multiply_floats(q, s, x, column + s * 32, lane, sums);
    } else if constexpr (kInteger) {
      multiply_integers(q, x, column, lane, sums);
    } else {
      float unit[kBlocksN][2];
      units_of(x, column, lane, unit);
#pragma unroll
      for (int s = 0; s < 2; s++) multiply_block(q, s, x, Staged::place(column) + s * 32, lane, unit, sums);
    }
    if constexpr (kHasShift) add_shifts(q, x, column, lane & 3, sums);
  }

  // Scales of the columns of x that a span covers, for this lane's parts.
  static __device__ __forceinline__ void units_of(const Staged& x, int column, int lane, float (&unit)[kBlocksN][2]) {
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) unit[n][i] = x.scale(column, n * 8 + (lane & 3) * 2 + i);
    }
  }

  static __device__ __forceinline__ uint2 digits_of(const Staged& x, int n, int place, int lane) {
    return *reinterpret_cast<const uint2*>(x.parts + min((n * 8 + (lane >> 2)) / kStride, kColumns - 1) * x.pitch + place + (lane & 3) * 8);
  }

  // 32 columns with a scale of their own.
  static __device__ __forceinline__ void multiply_block(const Q& q, int s, const Staged& x, int place, int lane, const float (&unit)[kBlocksN][2],
                                                        Sums& sums) {
    u32 a[4];
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = q.bytes(0, s, r >> 1, r & 1);
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
      const uint2 b = digits_of(x, n, place, lane);
      int c[4];
      mma_bytes32<Q::kSigned>(c, a, b.x, b.y);
#pragma unroll
      for (int i = 0; i < 4; i += kStride) sums.acc[n][i] = __fmaf_rn(__fmul_rn(q.scale(i >> 1, s), unit[n][i & 1]), __int2float_rn(c[i]), sums.acc[n][i]);
    }
  }

  // A super-block: all of it in integers, exactly, below 2^30.
  static __device__ __forceinline__ void multiply_integers(Q& q, const Staged& x, int column, int lane, Sums& sums) {
    const int place = Staged::place(column);
    int total[kBlocksN][4] = {};
    if constexpr (T > 2) {
#pragma unroll 1
      for (int step = 0; step < kSteps; step++) {
        multiply_step(q, 0, x, place + step * kStepColumns, lane, total);
        q.rotate();
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; step++) multiply_step(q, step, x, place + step * kStepColumns, lane, total);
    }
    float unit[kBlocksN][2];
    units_of(x, column, lane, unit);
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
#pragma unroll
      for (int i = 0; i < 4; i += kStride) sums.acc[n][i] = __fmaf_rn(__fmul_rn(q.d(i >> 1), unit[n][i & 1]), __int2float_rn(total[n][i]), sums.acc[n][i]);
    }
  }

  static __device__ __forceinline__ void multiply_step(const Q& q, int step, const Staged& x, int place, int lane, int (&total)[kBlocksN][4]) {
#pragma unroll
    for (int s = 0; s < 2; s++) {
      u32 a[4];
#pragma unroll
      for (int r = 0; r < 4; r++) a[r] = q.bytes(step, s, r >> 1, r & 1);
#pragma unroll
      for (int n = 0; n < kBlocksN; n++) {
        const uint2 b = digits_of(x, n, place + s * 32, lane);
        int c[4];
        if constexpr (kGroup == 32) {
          mma_bytes32<Q::kSigned>(c, a, b.x, b.y);
#pragma unroll
          for (int i = 0; i < 4; i += kStride) total[n][i] += c[i] * q.group_scale(step, s, 0, i >> 1);
        } else {
#pragma unroll
          for (int m = 0; m < 2; m++) {
            mma_bytes16<Q::kSigned>(c, a[2 * m], a[2 * m + 1], m ? b.y : b.x);
#pragma unroll
            for (int i = 0; i < 4; i += kStride) total[n][i] += c[i] * q.group_scale(step, s, m, i >> 1);
          }
        }
      }
    }
  }

  // Shift times sum of x: lane t of a row has the groups t, t + 4, ...
  static __device__ __forceinline__ void add_shifts(const Q& q, const Staged& x, int column, int t, Sums& sums) {
    constexpr int kGroups = Q::kSpan / kGroup;
#pragma unroll
    for (int k = 0; k < kGroups; k += 4) {
      if (kGroups < 4 && t >= kGroups) break;
      const float shift[2] = {q.shift(0, k + t), q.shift(1, k + t)};
#pragma unroll
      for (int token = 0; token < T; token++) {
        const float sum = x.sums_at(column)[(k + t) * T + token];
#pragma unroll
        for (int h = 0; h < 2; h++) sums.shift[token][h] = __fmaf_rn(shift[h], sum, sums.shift[token][h]);
      }
    }
  }

  static __device__ __forceinline__ void multiply_floats(const Q& q, int s, const Staged& x, int first, int lane, Sums& sums) {
    const int g = lane >> 2, t = lane & 3;
    u32 a[2][Q::kParts][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int part = 0; part < Q::kParts; part++) {
#pragma unroll
        for (int r = 0; r < 4; r++) a[m][part][r] = q.pairs(s, m, r & 1, r >> 1, part);
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
      const uint4 b = *reinterpret_cast<const uint4*>(x.parts + min((n * 8 + g) / kStride, kColumns - 1) * x.pitch + Staged::place(first) + t * 16);
      float c[4] = {};
#pragma unroll
      for (int part = Q::kParts - 1; part >= 0; part--) {
        if constexpr (Q::kKind == Kind::kHalves) {
          mma_half(c, a[0][part], b.x, b.y);
          mma_half(c, a[1][part], b.z, b.w);
        } else {
          mma_bf16(c, a[0][part], b.x, b.y);
          mma_bf16(c, a[1][part], b.z, b.w);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i += kStride) {
        if constexpr (kScaledX) {
          sums.acc[n][i] = __fmaf_rn(x.scale(first, n * 8 + t * 2 + (i & 1)), c[i], sums.acc[n][i]);
        } else {
          sums.acc[n][i] = __fadd_rn(sums.acc[n][i], c[i]);
        }
      }
    }
  }

  // The sum for one row of x, of row g + 8 h, in all lanes of g.
  static __device__ __forceinline__ float collect(const Sums& sums, int token, int h, int lane) {
    float part[3];
#pragma unroll
    for (int p = 0; p < 3; p++) {
      const int column = (3 * token + p) * kStride;
      part[p] = __shfl_sync(kAllLanes, sums.acc[column / 8][h * 2 + column % 2], (lane & 28) + column % 8 / 2);
    }
    constexpr float kPart = kBytes ? 1.0f / 256 : 1.0f;
    float value = __fmaf_rn(__fmaf_rn(part[2], kPart, part[1]), kPart, part[0]);
    if constexpr (kBytes) value = __fmul_rn(value, 1.0f / float(1 << Q::up(h)));
    if constexpr (kHasShift) return __fadd_rn(value, lanes_sum<4>(sums.shift[token][h]));
    return value;
  }
};

__device__ __forceinline__ float factor_of_row(const float (&squares)[kSquares], int K, float eps) {
  float sum = squares[0];
#pragma unroll
  for (int w = 1; w < kSquares; w++) sum = __fadd_rn(sum, squares[w]);
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(K)), eps)));
}

// A team's tiles, one after another: `teams` apart, or in pairs of neighbours.
__device__ __forceinline__ int following_tile(int tile, bool paired, int teams) {
  if (!paired) return tile + teams;
  return tile % 2 == 0 ? tile + 1 : tile - 1 + 2 * teams;
}

// A warp's next round of spans: of this tile, or the first one of the team's next tile.
struct Round {
  u32 number;  // of its first span, in the weight
  int known;   // spans from there to the tile's end; none behind the last tile

  __device__ __forceinline__ Round(int next, int round, int warp, int spans, int tile, int tiles, bool paired, int teams) {
    const bool last = next + round >= spans;
    const int ahead_tile = last ? following_tile(tile, paired, teams) : tile, ahead = last ? warp : next + round;
    known = ahead_tile < tiles ? spans - ahead : 0;
    number = u32(ahead_tile) * spans + ahead;
  }
};
