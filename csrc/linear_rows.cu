// (header follows)
#include "activation.cuh"
#include "quants.cuh"

#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef RESIDENT
#define RESIDENT(T, G) (T > 8 || (G == 2 && T > 1) ? 1 : 2)
#endif
#ifndef BATCH
#define BATCH 2
#endif

constexpr int kWarps = 8;               // of one tile
constexpr int kGroupThreads = kWarps * 32;
constexpr int kUnit = 256;              // columns of x with a common scale
constexpr int kPadBytes = 32;           // of a staged row beyond its own: so neighbouring rows lie in different banks
constexpr int kSquareWarps = 16;        // that share the sum of squares of a row: warp u has columns u * 256, (u + 16) * 256, ...

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

// a b + start over bytes; a: 16 weight rows x 32 (or 16) columns, signed or not, b: those columns x 8 digits of x.
template <bool kSigned>
__device__ __forceinline__ void mma_bytes32(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int start) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
  }
}
template <bool kSigned>
__device__ __forceinline__ void mma_bytes16(int (&c)[4], u32 a0, u32 a1, u32 b, int start) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(start));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(start));
  }
}

// Sums over bytes begin at the float 1.5 * 2^23, taken as an integer: as long as they stay below 2^22 the result, taken as a float, is that
// number plus the sum, and one subtraction converts it.
constexpr int kSumBase = 0x4b400000;
__device__ __forceinline__ float sum_value(int c) { return __fsub_rn(__int_as_float(c), 12582912.0f); }

// ---- copies of weights into shared memory, in flight ------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#ifdef BULK
__device__ __forceinline__ void barrier_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}
template <typename Q>
__device__ __forceinline__ void bulk_span(u32 to, const Planes& planes, u32 span, u32 bar) {
#pragma unroll
  for (int k = 0; k < kMaxPlanes; k++) {
    const int bytes = Q::kPlaneBytes[k];
    if (bytes == 0) continue;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(planes.at[k] + u64(span) * bytes), "r"(bytes), "r"(bar) : "memory");
    to += bytes;
  }
}
#endif

// One span of one tile, plane behind plane, by a warp.
template <typename Q>
__device__ __forceinline__ void copy_span(u32 to, const Planes& planes, u32 span, int lane) {
#pragma unroll
  for (int k = 0; k < kMaxPlanes; k++) {
    const int bytes = Q::kPlaneBytes[k];
    if (bytes == 0) continue;
    const u8* from = planes.at[k] + u64(span) * bytes + lane * 16;
#pragma unroll
    for (int o = 0; o < bytes; o += 512) {
      if (bytes - o >= 512 || lane * 16 < bytes - o) copy16(to + o + lane * 16, from + o);
    }
    to += bytes;
  }
}

template <typename Q>
__device__ __forceinline__ void load_span(Q& q, const u8* slot, int lane) {
  Planes planes;
#pragma unroll
  for (int k = 0; k < kMaxPlanes; k++) {
    planes.at[k] = slot;
    slot += Q::kPlaneBytes[k];
  }
  q.load(planes, 0, lane);
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

__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ u32 magnitude_bits(const float4& v) {
  return max(max(magnitude_bits(v.x), magnitude_bits(v.y)), max(magnitude_bits(v.z), magnitude_bits(v.w)));
}

#ifdef STAMP
__device__ u64 stamps[40 * 264 * 8];
#define MARK(i) if (threadIdx.x == 0) { u64 now; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); stamps[((ldy - N) * 264 + blockIdx.x) * 8 + i] = now; }
#else
#define MARK(i)
#endif
// How x is staged, and multiplied by the weights of one span. A part of x is a column of the B operand: 3t, 3t+1, 3t+2 of row t.
template <int TYPE, int T, int kAllWarps>
struct Product {
  using Q = Quant<TYPE>;
  static constexpr bool kBytes = Q::kKind == Kind::kBytes, kScaledX = Q::kKind != Kind::kBf16;
  static constexpr int kColumns = 3 * T;
  static constexpr int kBlocksN = (kColumns + 7) / 8;  // of 8 columns
  static constexpr int kSteps = Q::kSpan / kStepColumns;
  static constexpr int kPartBytes = kBytes ? 1 : 2;  // of a part of one column of x
  static constexpr bool kHasShift = [] { if constexpr (kBytes) return Q::kHasShift; else return false; }();
  static constexpr bool kInteger = [] { if constexpr (kBytes) return Q::kInteger; else return false; }();
  static constexpr int kGroup = [] { if constexpr (kBytes) return Q::kGroup; else return 32; }();
  static constexpr int kOwnSquares = kSquareWarps / kAllWarps;  // of the kSquareWarps sums, by one warp

  // Shared memory of k_tile staged columns.
  struct Staged {
    u8* parts;      // [3T][pitch] bytes, within 32 columns in the order in which a lane reads them
    float* scales;  // [k_tile / kUnit][T], of the first digits
    float* sums;    // [k_tile / kGroup][T] sums of x
    int pitch;
    __device__ __forceinline__ Staged(u8* memory, int k_tile)
        : parts(memory), scales(reinterpret_cast<float*>(memory + kColumns * (k_tile * kPartBytes + kPadBytes))),
          sums(scales + (kScaledX ? (k_tile + kUnit - 1) / kUnit * T : 0)), pitch(k_tile * kPartBytes + kPadBytes) {}
    __device__ __forceinline__ float scale(int column, int part_column) const {
      return scales[column / kUnit * T + (T == 1 ? 0 : min(part_column / 3, T - 1))];
    }
  };

  struct Sums {
    float acc[kBlocksN][4];  // parts 2t + (i & 1) of rows g + 8 (i >> 1)
    float shift[T][2];       // of rows g and g + 8, this lane's groups
  };

  // Columns c to c + 3 of row t, as three numbers of 16 bits each.
  static __device__ __forceinline__ void put_parts(const Staged& to, int t, int c, int length, const float4& v) {
    if (c >= length) return;
    float4 rest = v;
    u8* target = to.parts + (3 * t) * to.pitch + ((c & ~31) + (c >> 2 & 3) * 8 + (c >> 4 & 1) * 4) * 2;
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

  // The same as three digits each, v being in units of the last one.
  static __device__ __forceinline__ void put_digits(const Staged& to, int t, int c, int length, const float4& v) {
    u32 digits[4];  // least digit in the low byte
    const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) digits[i] = u32(__float2int_rn(x[i]) + 0x808080) ^ 0x808080u;
    if (c >= length) return;
    u8* target = to.parts + (3 * t) * to.pitch + (c & ~31) + (c >> 2 & 3) * 8 + (c >> 4 & 1) * 4;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      const int byte = 2 - part, both = byte | (4 + byte) << 4;
      *reinterpret_cast<u32*>(target + part * to.pitch) =
          __byte_perm(__byte_perm(digits[0], digits[1], both), __byte_perm(digits[2], digits[3], both), 0x5410);
    }
  }

  // A unit of row t: lanes have columns c to c + 3 and c + 128 to c + 131.
  static __device__ __forceinline__ void put_unit(const Staged& to, int t, int unit, int lane, int length, float4 (&v)[2], int g_id = 0) {
    const int c = unit * kUnit + lane * 4;
    if constexpr (kHasShift) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float sum = lanes_sum<kGroup / 4>(__fadd_rn(__fadd_rn(v[i].x, v[i].y), __fadd_rn(v[i].z, v[i].w)));
        const int column = c + i * 128;
        if (column < length && column % kGroup == 0) to.sums[column / kGroup * T + t] = sum;
      }
    }
    if constexpr (kScaledX) {
      const u32 most = __reduce_max_sync(kAllLanes, max(magnitude_bits(v[0]), magnitude_bits(v[1])));
#ifdef STAMP
      if (threadIdx.x == 0 && unit == 0) { u64 now; asm volatile("mov.u64 %0, %%globaltimer; // %1" : "=l"(now) : "r"(most)); stamps[(g_id * 264 + blockIdx.x) * 8 + 6] = now; }
#endif
      const bool finite = most < 0x7f800000u;
      // Biased exponents: of 1 / scale (digits: times 65536), and of the scale.
      int exponent = max(int(most >> 23), 27) - (kBytes ? 6 : 14);  // bytes: largest / scale in [64, 128); halves: in [2^14, 2^15)
      if (kBytes && (most & 0x7fffffu) > 0x7e0000u) exponent++;     // above 127: [63.5, 64)
      const float factor = finite ? __uint_as_float(u32(254 + (kBytes ? 16 : 0) - exponent) << 23) : 0.0f;
      if (lane == 0) to.scales[unit * T + t] = finite ? __uint_as_float(u32(exponent) << 23) : __uint_as_float(0x7fc00000u);
#pragma unroll
      for (int i = 0; i < 2; i++) v[i] = finite ? times(v[i], factor) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (kBytes) {
        put_digits(to, t, c + i * 128, length, v[i]);
      } else {
        put_parts(to, t, c + i * 128, length, v[i]);
      }
    }
  }

  // Stages columns [first, first + length) of x * norm; at T = 1 adds this thread's share to the sums of squares.
  static __device__ __forceinline__ void stage(const float* x, const float* norm, int rows, int columns, int first, int length, const Staged& to,
                                               float (&squares)[kOwnSquares], int g_id = 0) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool aligned = columns % 4 == 0;
    const int inside = min(length, columns - first);
#pragma unroll 1
    for (int t = 0; t < T; t++) {
      const float* row = x + i64(t) * columns + first;
      const int known = t < rows ? inside : 0;
#pragma unroll 1
      for (int base = warp; base * kUnit < length; base += kSquareWarps) {
#pragma unroll
        for (int own = 0; own < kOwnSquares; own++) {
          const int unit = base + own * kAllWarps, c = unit * kUnit + lane * 4;
          if (unit * kUnit >= length) break;
          float4 v[2] = {four(row, c, known, aligned), four(row, c + 128, known, aligned)};
          if (norm != nullptr) {
            const float4 w[2] = {four(norm + first, c, inside, aligned), four(norm + first, c + 128, inside, aligned)};
            if constexpr (T == 1) squares[own] = add_squares(add_squares(squares[own], v[0]), v[1]);
            v[0] = times(v[0], w[0]), v[1] = times(v[1], w[1]);
          }
          put_unit(to, t, unit, lane, length, v, g_id);
        }
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
#pragma unroll
      for (int s = 0; s < 2; s++) multiply_block(q, s, x, column + s * 32, lane, sums);
    }
    if constexpr (kHasShift) add_shifts(q, x, column, lane & 3, sums);
  }

  static __device__ __forceinline__ uint2 digits_of(const Staged& x, int n, int first, int lane) {
    return *reinterpret_cast<const uint2*>(x.parts + min(n * 8 + (lane >> 2), kColumns - 1) * x.pitch + first + (lane & 3) * 8);
  }

  // 32 columns with a scale of their own.
  static __device__ __forceinline__ void multiply_block(const Q& q, int s, const Staged& x, int first, int lane, Sums& sums) {
    u32 a[4];
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = q.bytes(0, s, r >> 1, r & 1);
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) scale[h] = __fmul_rn(q.scale(h, s), 1.0f / float(1 << Q::up(h)));
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
      const uint2 b = digits_of(x, n, first, lane);
      int c[4];
      mma_bytes32<Q::kSigned>(c, a, b.x, b.y, kSumBase);
      const int part = n * 8 + (lane & 3) * 2;
      const float unit[2] = {x.scale(first, part), x.scale(first, part + 1)};
#pragma unroll
      for (int i = 0; i < 4; i++) sums.acc[n][i] = __fmaf_rn(__fmul_rn(scale[i >> 1], unit[i & 1]), sum_value(c[i]), sums.acc[n][i]);
    }
  }

  // A super-block: all of it in integers, exactly, below 2^30.
  static __device__ __forceinline__ void multiply_integers(Q& q, const Staged& x, int column, int lane, Sums& sums) {
    int total[kBlocksN][4] = {};
    if constexpr (T > 2) {
#pragma unroll 1
      for (int step = 0; step < kSteps; step++) {
        multiply_step(q, 0, x, column + step * kStepColumns, lane, total);
        q.rotate();
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; step++) multiply_step(q, step, x, column + step * kStepColumns, lane, total);
    }
    const float d[2] = {__fmul_rn(q.d(0), 1.0f / float(1 << Q::up(0))), __fmul_rn(q.d(1), 1.0f / float(1 << Q::up(1)))};
#pragma unroll
    for (int n = 0; n < kBlocksN; n++) {
      const int part = n * 8 + (lane & 3) * 2;
      const float unit[2] = {x.scale(column, part), x.scale(column, part + 1)};
#pragma unroll
      for (int i = 0; i < 4; i++) sums.acc[n][i] = __fmaf_rn(__fmul_rn(d[i >> 1], unit[i & 1]), __int2float_rn(total[n][i]), sums.acc[n][i]);
    }
  }

  static __device__ __forceinline__ void multiply_step(const Q& q, int step, const Staged& x, int first, int lane, int (&total)[kBlocksN][4]) {
#pragma unroll
    for (int s = 0; s < 2; s++) {
      u32 a[4];
#pragma unroll
      for (int r = 0; r < 4; r++) a[r] = q.bytes(step, s, r >> 1, r & 1);
#pragma unroll
      for (int n = 0; n < kBlocksN; n++) {
        const uint2 b = digits_of(x, n, first + s * 32, lane);
        int c[4];
        if constexpr (kGroup == 32) {
          mma_bytes32<Q::kSigned>(c, a, b.x, b.y, 0);
#pragma unroll
          for (int i = 0; i < 4; i++) total[n][i] += c[i] * q.group_scale(step, s, 0, i >> 1);
        } else {
#pragma unroll
          for (int m = 0; m < 2; m++) {
            mma_bytes16<Q::kSigned>(c, a[2 * m], a[2 * m + 1], m ? b.y : b.x, 0);
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] += c[i] * q.group_scale(step, s, m, i >> 1);
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
        const float sum = x.sums[(column / kGroup + k + t) * T + token];
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
      const uint4 b = *reinterpret_cast<const uint4*>(x.parts + min(n * 8 + g, kColumns - 1) * x.pitch + (first + t * 8) * 2);
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
      for (int i = 0; i < 4; i++) {
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
      const int column = 3 * token + p;
      part[p] = __shfl_sync(kAllLanes, sums.acc[column / 8][h * 2 + column % 2], (lane & 28) + column % 8 / 2);
    }
    constexpr float kPart = kBytes ? 1.0f / 256 : 1.0f;
    const float value = __fmaf_rn(__fmaf_rn(part[2], kPart, part[1]), kPart, part[0]);
    if constexpr (kHasShift) return __fadd_rn(value, lanes_sum<4>(sums.shift[token][h]));
    return value;
  }
};

__device__ __forceinline__ float factor_of_row(const float (&warp_squares)[kSquareWarps], int K, float eps) {
  float sum = warp_squares[0];
#pragma unroll
  for (int w = 1; w < kSquareWarps; w++) sum = __fadd_rn(sum, warp_squares[w]);
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(K)), eps)));
}

// The tiles of a group of warps, one after another: so many groups apart, or in pairs of neighbours.
__device__ __forceinline__ int following_tile(int tile, int groups, bool paired) {
  if (!paired) return tile + groups;
  return tile % 2 == 0 ? tile + 1 : tile - 1 + 2 * groups;
}

__device__ __forceinline__ void group_barrier(int group) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory"); }


template <int TYPE, int T, int kGroups, int kDepth>
__global__ void __launch_bounds__(kGroups * kGroupThreads, RESIDENT(T, kGroups)) linear_rows(
    const float* x,                                                                                              // [rows][K]
    const float* norm,                                                                                           // [K] or null
    const u8* __restrict__ p0, const u8* __restrict__ p1, const u8* __restrict__ p2, const u8* __restrict__ p3,  // planes
    const float* __restrict__ bias,                                                                              // [N] or null
    float* y,                                                                                                    // [rows][ldy]
    int rows, int N, int K, int ldy, int k_tile, float eps, int activation, int paired, int add) {
  constexpr int kAllWarps = kGroups * kWarps;
  using P = Product<TYPE, T, kAllWarps>;
  using Q = Quant<TYPE>;
  constexpr int kBuffers = T == 1 ? 2 : 1;
  constexpr int kBatch = Q::kSpan == 64 && P::kBytes ? BATCH : 1;
  constexpr int kSlotBytes = kBatch * kSpanBytes<Q>;
  extern __shared__ __align__(16) u8 dynamic[];
  __shared__ float warp_sums[kBuffers][kGroups][kWarps][T][kTileRows];
  __shared__ float row_factor[kGroups][T], warp_squares[kSquareWarps], gates[kGroups][T][kTileRows];
  const int group = kGroups == 1 ? 0 : threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = thread >> 5, lane = threadIdx.x & 31;
  const int spans = (K + Q::kSpan - 1) / Q::kSpan, staged_spans = k_tile / Q::kSpan, tiles = (N + kTileRows - 1) / kTileRows;
  const int groups = gridDim.x * kGroups;
  const int pair = paired ? 2 : 1, lead_tile = pair * blockIdx.x, first_tile = lead_tile + pair * group * gridDim.x;
  const Planes planes{{p0, p1, p2, p3}};
  MARK(0)
#ifndef TRIG
#define TRIG 0
#endif
  if (TRIG == 0) let_next_begin();
  bool told = TRIG != 2, waited = false;
#ifndef THRESH
#define THRESH total / 2
#endif
  const int per_tile = (spans - warp + kWarps - 1) / kWarps, total = per_tile * ((tiles - first_tile + groups - 1) / groups);
  const int threshold = max(kDepth + 1, THRESH);
  int issued = 0;

#ifdef REGS
  const typename P::Staged staged(dynamic, k_tile);
  const u32 zero = u32(rows) >> 16;
  Q weights[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    const int span = warp + d * kWarps;
    if (span < spans && first_tile < tiles) weights[d].load(planes, i64(first_tile) * spans + span, lane);
  }
#else
  u8* const ring = dynamic + (group * kWarps + warp) * (kDepth * kSlotBytes);
  const u32 ring_address = u32(__cvta_generic_to_shared(ring));
  const typename P::Staged staged(dynamic + kAllWarps * kDepth * kSlotBytes, k_tile);
  int ahead_tile = warp < spans ? first_tile : tiles, ahead = warp;
#ifdef BULK
  __shared__ u64 full[kAllWarps][kDepth];
  const u32 bar = u32(__cvta_generic_to_shared(full[group * kWarps + warp]));
  if (lane < kDepth) barrier_init(bar + lane * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
#endif
  auto copy_ahead = [&](int number) {
    if (ahead_tile < tiles) {
#ifdef BULK
      const int present = kBatch == 2 && ahead + kWarps >= spans ? 1 : kBatch;
      if (lane == 0) barrier_expect(bar + number * 8, present * kSpanBytes<Q>);
#endif
#pragma unroll
      for (int b = 0; b < kBatch; b++) {
        const int span = ahead + b * kWarps;
#ifdef BULK
        if (lane == 0 && (b == 0 || span < spans)) bulk_span<Q>(ring_address + number * kSlotBytes + b * kSpanBytes<Q>, planes, u32(ahead_tile * spans + span), bar + number * 8);
#else
        if (b == 0 || span < spans) copy_span<Q>(ring_address + number * kSlotBytes + b * kSpanBytes<Q>, planes, u32(ahead_tile * spans + span), lane);
#endif
      }
      ahead += kBatch * kWarps;
      if (ahead >= spans) ahead = warp, ahead_tile = following_tile(ahead_tile, groups, paired);
    }
#ifndef BULK
    commit_copies();
#endif
    issued++;
    if (TRIG == 4 && waited && threadIdx.x < 32 && issued == threshold) let_next_begin();
    if (TRIG == 2 && waited && !told && (paired ? (ahead_tile & ~1) + 2 * groups : ahead_tile + groups) >= tiles) told = true, let_next_begin();
  };
#pragma unroll
  for (int d = 0; d < kDepth; d++) copy_ahead(d);
  int slot = 0;
  u32 parity = 0;
#endif
  if (norm != nullptr) {
    for (int c = threadIdx.x * 32; c < K; c += kGroups * kGroupThreads * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + c));
  }
  float squares[P::kOwnSquares] = {};
#ifdef WARM
  if constexpr (T == 1) P::stage(x, norm, 0, K, 0, min(spans, staged_spans) * Q::kSpan, staged, squares);
#endif
  MARK(1)
#ifdef SYNC0
  __syncthreads();
#endif
  wait_for_previous();
  MARK(2)
  if (TRIG == 1) let_next_begin();
#ifndef REGS
  waited = true;
  if (TRIG == 4 && threadIdx.x < 32 && total <= kDepth) let_next_begin();
  if (TRIG == 2 && (paired ? (ahead_tile & ~1) + 2 * groups : ahead_tile + groups) >= tiles) told = true, let_next_begin();
#endif

  if constexpr (T > 1) {
    if (norm != nullptr) {
#pragma unroll 1
      for (int token = 0; token < rows; token++) {
        const float* row = x + i64(token) * K;
#pragma unroll 1
        for (int own = threadIdx.x / 32; own < kSquareWarps; own += kAllWarps) {
          float squares = 0.0f;
          for (int c = own * kUnit + lane * 4; c - lane * 4 < K; c += kSquareWarps * kUnit) {
            squares = add_squares(add_squares(squares, four(row, c, K, K % 4 == 0)), four(row, c + 128, K, K % 4 == 0));
          }
          squares = warp_sum(squares);
          if (lane == 0) warp_squares[own] = squares;
        }
        __syncthreads();
        if (thread == 0) row_factor[group][token] = factor_of_row(warp_squares, K, eps);
        __syncthreads();
      }
    }
  }

  int buffer = 0;
  for (int tile = first_tile, lead = lead_tile; lead < tiles; tile = following_tile(tile, groups, paired), lead = following_tile(lead, groups, paired)) {
    typename P::Sums sums = {};
    const bool summing = T == 1 && norm != nullptr && lead == lead_tile;
    int next = warp;
    for (int first = 0; first < spans; first += staged_spans) {
      const int end = min(spans, first + staged_spans);
      if (lead == lead_tile || staged_spans < spans) {
        if (staged_spans < spans) __syncthreads();
        P::stage(x, norm, rows, K, first * Q::kSpan, (end - first) * Q::kSpan, staged, squares, ldy - N);
        if (summing && end == spans) {
#pragma unroll
          for (int own = 0; own < P::kOwnSquares; own++) {
            const float sum = warp_sum(squares[own]);
            if (lane == 0) warp_squares[threadIdx.x / 32 + own * kAllWarps] = sum;
          }
        }
        __syncthreads();
        MARK(3)
      }
      if (tile < tiles) {
#ifdef REGS
        for (; next < end; next += kDepth * kWarps) {
          // One wait for all the loads of a round: the compiler's own waits would hold a span back for the loads issued just before it.
#pragma unroll
          for (int d = 0; d < kDepth; d++) weights[d].arrive(zero);
#pragma unroll
          for (int d = 0; d < kDepth; d++) {
            const int span = next + d * kWarps;
            if (span < end) P::multiply(weights[d], staged, (span - first) * Q::kSpan, lane, sums);
            const bool last = next + kDepth * kWarps >= spans;
            const int ahead = last ? warp + d * kWarps : span + kDepth * kWarps;
            const int ahead_tile = last ? following_tile(tile, groups, paired) : tile;
            if (ahead < spans && ahead_tile < tiles) weights[d].load(planes, i64(ahead_tile) * spans + ahead, lane);
          }
        }
#else
        for (; next < end; next += kBatch * kWarps) {
#ifdef BULK
          barrier_wait(bar + slot * 8, parity);
#else
          wait_copies<kDepth - 1>();
          __syncwarp();
#endif
          Q q[kBatch];
#pragma unroll
          for (int b = 0; b < kBatch; b++) load_span(q[b], ring + slot * kSlotBytes + b * kSpanBytes<Q>, lane);
          __syncwarp();
          copy_ahead(slot);
#pragma unroll
          for (int b = 0; b < kBatch; b++) {
            if (b == 0 || next + b * kWarps < end) P::multiply(q[b], staged, (next + b * kWarps - first) * Q::kSpan, lane, sums);
          }
          if (++slot == kDepth) slot = 0, parity ^= 1;
        }
#endif
      }
    }
    MARK(4)
    if (tile >= tiles) continue;
    if (summing && thread == 0) row_factor[group][0] = factor_of_row(warp_squares, K, eps);  // read behind the next barrier
#pragma unroll
    for (int token = 0; token < T; token++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float value = P::collect(sums, token, h, lane);
        if ((lane & 3) == (token & 3)) warp_sums[buffer][group][warp][token][(lane >> 2) + 8 * h] = value;
      }
    }
    group_barrier(group);
    const int row = thread % kTileRows, token = thread / kTileRows;
    if (token < T && token < rows && tile * kTileRows + row < N) {
      float value = warp_sums[buffer][group][0][token][row];
#pragma unroll
      for (int w = 1; w < kWarps; w++) value = __fadd_rn(value, warp_sums[buffer][group][w][token][row]);
      if (norm != nullptr) value = __fmul_rn(value, row_factor[group][token]);
      if (bias != nullptr) value = __fadd_rn(value, bias[tile * kTileRows + row]);
      if (paired && tile % 2 == 0) {
        gates[group][token][row] = value;  // read by the same thread
      } else {
        float* target = y + i64(token) * ldy + (paired ? tile / 2 : tile) * kTileRows + row;
        if (activation != kNoActivation) value = __fmul_rn(activate(activation, paired ? gates[group][token][row] : fresh(target)), value);
        *target = add ? __fadd_rn(fresh(target), value) : value;
      }
    }
#ifdef SYNC2
    group_barrier(group);
#endif
    if constexpr (kBuffers == 2) {
      buffer ^= 1;
    } else {
      group_barrier(group);
    }
  }
  MARK(5)
}
