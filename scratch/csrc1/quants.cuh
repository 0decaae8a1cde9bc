// Quantised weights in their device form (rollkv/quants.py describes it): loading a lane's share of a span, and the weights in it.
//
// Quant<TYPE> holds, in registers, what one lane of a warp needs of one span (64 or 256 columns) of one tile of 16 rows. Lane (g, t) =
// g * 4 + t. In every step of 64 columns, register r = ((s * 2 + m) * 2 + j) * 2 + h and half e of it stand for column
// 32 s + 16 m + 4 t + 2 j + e of row g + 8 h: the A operand of mma.m16n8k16, four registers (m) after four.
// Common to all types:
//   kSpan       columns of a span            kGroup    neighbouring columns that share a scale
//   kScaled     weight = scale * code (+ shift), rounded as the oracle rounds; else a floating-point number
//   kHasShift   there is a shift
//   kZero       what the codes of `bytes` are less by, and the levels with them; 0 where there is a shift
//   kScaled:    bytes(step, s, m, h), four codes as signed bytes: columns 4 t + 0, 2, 1, 3 of 32 s + 16 m, row g + 8 h: the A operand of
//               mma.m16n8k32 over bytes, its k order permuted so that it takes least work to make
//   else:       kParts bf16 numbers whose sum is the weight, exactly: fragment(step, register, part)
// Registers and the step of codes are compile-time constants after unrolling, so nothing leaves the registers; the step of a scale need not be.
// rotate() makes step 1's codes step 0's, step 2's step 1's, and so on.
#pragma once
#include "common.cuh"

// The numbers that GGUF gives the types.
enum QuantType : int {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
  IQ4_XS = 23, BF16 = 30
};

constexpr int kTileRows = 16;
constexpr int kStepColumns = 64;
constexpr int kStepRegisters = 16;

// The planes of one matrix, in the order of the fields; a type uses as many as it has.
struct Planes {
  const u8* p0;
  const u8* p1;
  const u8* p2;
  const u8* p3;
};

// ---- words ------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load4(const u8* address) { return __ldg(reinterpret_cast<const u32*>(address)); }
__device__ __forceinline__ uint2 load8(const u8* address) { return __ldg(reinterpret_cast<const uint2*>(address)); }

// Four unsigned codes less kZero <= 32, as signed bytes: no byte borrows from its neighbour.
template <int kZero>
__device__ __forceinline__ u32 centre(u32 codes) {
  if constexpr (kZero == 0) return codes;
  return ((codes | 0x80808080u) - u32(kZero) * 0x01010101u) ^ 0x80808080u;
}

__device__ __forceinline__ u32 shifted(u32 word, int down) { return down >= 0 ? word >> down : word << -down; }

// 0 .. 2^23 - 1 as float, through the mantissa of 2^23: cheaper than a conversion.
__device__ __forceinline__ float small_int(u32 value, float minus = 0.0f) {
  return __fsub_rn(__uint_as_float(value | 0x4b000000u), 8388608.0f + minus);
}
__device__ __forceinline__ float byte_value(u32 word, int index, float minus = 0.0f) {
  return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | index)), 8388608.0f + minus);
}
__device__ __forceinline__ float low_half(u32 word) { return half_bits_to_float(u16(word)); }
__device__ __forceinline__ float high_half(u32 word) { return half_bits_to_float(u16(word >> 16)); }

// The 8 highest bits of a float's significand, and what is left of it; the sum is the float.
__device__ __forceinline__ float bf16_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }
__device__ __forceinline__ float bf16_rest(float x) { return __fsub_rn(x, bf16_part(x)); }
__device__ __forceinline__ u32 bf16_pair(float low, float high) { return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); }

// A lane's codes of one plane in one span.
template <int kBits, int kSteps>
struct CodeWords {
  static constexpr int kWords = kBits * kSteps;
  static constexpr int kChunk = kWords < 4 ? kWords : 4;
  u32 w[kWords];

  __device__ __forceinline__ void load(const u8* plane, i64 span, int lane) {
    const u8* base = plane + span * (kWords * 128) + lane * (kChunk * 4);
#pragma unroll
    for (int c = 0; c < kWords / kChunk; c++) {
      const u8* at = base + c * (kChunk * 128);
      if constexpr (kChunk == 4) {
        const uint4 v = load16(at);
        w[4 * c] = v.x, w[4 * c + 1] = v.y, w[4 * c + 2] = v.z, w[4 * c + 3] = v.w;
      } else if constexpr (kChunk == 2) {
        const uint2 v = load8(at);
        w[0] = v.x, w[1] = v.y;
      } else {
        w[0] = load4(at);
      }
    }
  }

  // Brings the next step's words to the place of the first's.
  __device__ __forceinline__ void rotate() {
#pragma unroll
    for (int i = 0; i + kBits < kWords; i++) w[i] = w[i + kBits];
  }

  // Four codes, a byte each, shifted left by kUp: both j and both e of (s, m, h), in the order (j, e) = 00 10 01 11.
  template <int kUp = 0>
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    constexpr u32 kMask = ((1u << kBits) - 1) << kUp;
    if constexpr (kBits == 8) {
      const int at = step * 8 + (s * 2 + m) * 2;
      return __byte_perm(w[at], w[at + 1], h ? 0x7351 : 0x6240);
    } else if constexpr (kBits == 4) {
      return shifted(w[step * 4 + s * 2 + m], 4 * h - kUp) & (kMask * 0x01010101u);
    } else {
      // A byte of each half holds both j: copied, its codes for j = 0 are taken from the even bytes, for j = 1 from the odd ones.
      const int byte = kBits == 2 ? m : s, first = kBits == 2 ? 2 * h : 4 * m + h, second = first + 2 * kBits;
      const u32 both = __byte_perm(w[step * kBits + (kBits == 2 ? s : 0)], 0, byte * 0x0011 | (byte + 2) * 0x1100);
      return (shifted(both, first - kUp) & (kMask * 0x00010001u)) | (shifted(both, second - kUp) & (kMask * 0x01000100u));
    }
  }

  // The codes of both halves of a register, shifted left by kUp.
  template <int kUp = 0>
  __device__ __forceinline__ u32 pair(int step, int reg) const {
    if constexpr (kBits == 16) {
      return w[step * 16 + reg];
    } else {
      constexpr int kPerWord = 16 / kBits;
      constexpr u32 kMask = ((1u << kBits) - 1) * 0x10001u << kUp;
      const u32 word = w[step * kBits + reg / kPerWord];
      const int down = reg % kPerWord * kBits - kUp;
      return (down >= 0 ? word >> down : word << -down) & kMask;
    }
  }
};

__device__ __forceinline__ int half_row(int reg) { return reg & 1; }          // h
__device__ __forceinline__ int half_group(int reg) { return reg >> 2 & 1; }   // m
__device__ __forceinline__ int step_group(int reg) { return reg >> 3; }       // s
__device__ __forceinline__ int register_column(int reg, int t) {              // of e = 0, within the step
  return step_group(reg) * 32 + half_group(reg) * 16 + t * 4 + (reg >> 1 & 1) * 2;
}

template <int TYPE>
struct Quant;

// ---- floating point ---------------------------------------------------------------------------------------------------------------

template <>
struct Quant<BF16> {
  static constexpr int kSpan = 64, kGroup = 32, kParts = 1, kZero = 0;
  static constexpr bool kScaled = false, kHasShift = false;
  CodeWords<16, 1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) { q.load(p.p0, span, lane); }
  __device__ __forceinline__ u32 fragment(int step, int reg, int) const { return q.w[reg]; }
  __device__ __forceinline__ float value(int step, int reg, int e) const { return __uint_as_float(e ? q.w[reg] & 0xffff0000u : q.w[reg] << 16); }
};

template <>
struct Quant<F16> {
  static constexpr int kSpan = 64, kGroup = 32, kParts = 2, kZero = 0;
  static constexpr bool kScaled = false, kHasShift = false;
  CodeWords<16, 1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) { q.load(p.p0, span, lane); }
  __device__ __forceinline__ float value(int step, int reg, int e) const { return e ? high_half(q.w[reg]) : low_half(q.w[reg]); }
  __device__ __forceinline__ u32 fragment(int step, int reg, int part) const {
    const float low = value(step, reg, 0), high = value(step, reg, 1);
    return part == 0 ? bf16_pair(low, high) : bf16_pair(bf16_rest(low), bf16_rest(high));  // 11 bits of significand: 8 and 3
  }
};

template <>
struct Quant<F32> {
  static constexpr int kSpan = 64, kGroup = 32, kParts = 3, kZero = 0;
  static constexpr bool kScaled = false, kHasShift = false;
  CodeWords<16, 1> high, low;  // the upper and the lower 16 bits
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    high.load(p.p0, span, lane);
    low.load(p.p1, span, lane);
  }
  __device__ __forceinline__ float value(int step, int reg, int e) const {
    return __uint_as_float(__byte_perm(low.w[reg], high.w[reg], e ? 0x7632 : 0x5410));
  }
  __device__ __forceinline__ u32 fragment(int step, int reg, int part) const {
    if (part == 0) return high.w[reg];
    const float a = bf16_rest(value(step, reg, 0)), b = bf16_rest(value(step, reg, 1));
    return part == 1 ? bf16_pair(a, b) : bf16_pair(bf16_rest(a), bf16_rest(b));
  }
};

// ---- blocks of 32: one scale, at times one shift; the two blocks of a step lie side by side ---------------------------------------

struct BlockScale {  // d
  static constexpr bool kHasShift = false;
  uint2 d;  // rows g and g + 8: halves are s = 0 and 1
  __device__ __forceinline__ void load(const u8* plane, i64 span, int lane) { d = load8(plane + span * 64 + (lane >> 2) * 8); }
  __device__ __forceinline__ float scale(int h, int s) const {
    const u32 word = h ? d.y : d.x;
    return s ? high_half(word) : low_half(word);
  }
};

struct BlockScaleShift {  // d, m
  static constexpr bool kHasShift = true;
  uint4 dm;  // (row g, s = 0), (g, 1), (g + 8, 0), (g + 8, 1)
  __device__ __forceinline__ void load(const u8* plane, i64 span, int lane) {
    dm = __ldg(reinterpret_cast<const uint4*>(plane + span * 128 + (lane >> 2) * 16));
  }
  __device__ __forceinline__ u32 word(int h, int s) const { return h ? (s ? dm.w : dm.z) : (s ? dm.y : dm.x); }
  __device__ __forceinline__ float scale(int h, int s) const { return low_half(word(h, s)); }
  __device__ __forceinline__ float shift(int h, int s) const { return high_half(word(h, s)); }
};

template <>
struct Quant<Q8_0> : BlockScale {
  static constexpr int kSpan = 64, kGroup = 32, kZero = 0;
  static constexpr bool kScaled = true;
  CodeWords<8, 1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    BlockScale::load(p.p1, span, lane);
  }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.bytes(step, s, m, h); }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return float(static_cast<signed char>(q.pair(step, reg) >> (16 * e))); }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const { return BlockScale::scale(h, s); }
};

// 4-bit codes, and 5-bit ones whose fifth bit has a plane of its own.
template <int kZeroCode, bool kFifthBit, typename Scales>
struct Block4 : Scales {
  static constexpr int kSpan = 64, kGroup = 32, kZero = kZeroCode;
  static constexpr bool kScaled = true;
  CodeWords<4, 1> q;
  CodeWords<1, 1> fifth;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    if constexpr (kFifthBit) fifth.load(p.p1, span, lane);
    Scales::load(kFifthBit ? p.p2 : p.p1, span, lane);
  }
  __device__ __forceinline__ u32 pair(int step, int reg) const {
    if constexpr (kFifthBit) return q.pair(step, reg) | fifth.template pair<4>(step, reg);
    return q.pair(step, reg);
  }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    if constexpr (kFifthBit) return centre<kZero>(q.bytes(step, s, m, h) | fifth.template bytes<4>(step, s, m, h));
    return centre<kZero>(q.bytes(step, s, m, h));
  }
  __device__ __forceinline__ float level(int step, int reg, int e) const {
    return small_int(pair(step, reg) >> (16 * e) & 31, kZero);
  }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const { return Scales::scale(h, s); }
  __device__ __forceinline__ float shift(int h, int step, int s, int m) const { return Scales::shift(h, s); }
};

template <> struct Quant<Q4_0> : Block4<8, false, BlockScale> {};
template <> struct Quant<Q4_1> : Block4<0, false, BlockScaleShift> {};
template <> struct Quant<Q5_0> : Block4<16, true, BlockScale> {};
template <> struct Quant<Q5_1> : Block4<0, true, BlockScaleShift> {};

// ---- 4-bit codes of a table of 16 levels ------------------------------------------------------------------------------------------

// Levels of the non-linear 4-bit types, as signed bytes: -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113.
constexpr u32 kLevels0 = 0xbfad9881u, kLevels1 = 0xf6eaddcfu, kLevels2 = 0x26190d01u, kLevels3 = 0x71594535u;

// The levels of the four nibbles of `nibbles` (16 bits), one a byte. A selector's bit 3 would replicate a sign, so it picks the half afterwards.
__device__ __forceinline__ u32 table_levels(u32 nibbles) {
  const u32 low = __byte_perm(kLevels0, kLevels1, nibbles & 0x7777), high = __byte_perm(kLevels2, kLevels3, nibbles & 0x7777);
  return __byte_perm(low, high, 0x3210 | (nibbles & 0x8888) >> 1);
}

template <int kSteps>
struct TableCodes : CodeWords<4, kSteps> {
  // Signed bytes of both halves of a register, upper bits zero.
  __device__ __forceinline__ u32 levels(int step, int reg) const {
    const u32 word = this->w[step * 4 + reg / 4];
    return __byte_perm(table_levels(word & 0xffff), table_levels(word >> 16), reg % 4 | (4 + reg % 4) << 8) & 0x00ff00ffu;
  }
  // As CodeWords::bytes.
  __device__ __forceinline__ u32 level_bytes(int step, int s, int m, int h) const {
    const u32 word = this->w[step * 4 + s * 2 + m];
    return __byte_perm(table_levels(word & 0xffff), table_levels(word >> 16), h ? 0x7531 : 0x6420);
  }
};

template <>
struct Quant<IQ4_NL> : BlockScale {
  static constexpr int kSpan = 64, kGroup = 32, kZero = 0;
  static constexpr bool kScaled = true;
  TableCodes<1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    BlockScale::load(p.p1, span, lane);
  }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.level_bytes(step, s, m, h); }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return float(static_cast<signed char>(q.levels(step, reg) >> (16 * e))); }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const { return BlockScale::scale(h, s); }
};

template <>
struct Quant<IQ4_XS> {
  static constexpr int kSpan = 256, kGroup = 32, kZero = 0;
  static constexpr bool kScaled = true, kHasShift = false;
  TableCodes<4> q;
  uint4 meta;  // a row is (d, high bits of the scales) and their low nibbles
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    meta = __ldg(reinterpret_cast<const uint4*>(p.p1 + span * 128 + (lane >> 2) * 16));
  }
  __device__ __forceinline__ void rotate() { q.rotate(); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.level_bytes(step, s, m, h); }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return float(static_cast<signed char>(q.levels(step, reg) >> (16 * e))); }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const {
    const u32 d_high = h ? meta.z : meta.x, low = h ? meta.w : meta.y;
    const int group = step * 2 + s;
    return __fmul_rn(low_half(d_high), small_int((low >> (4 * group) & 15) | (d_high >> (16 + 2 * group) & 3) << 4, 32.0f));
  }
};

// ---- super-blocks of 256 ----------------------------------------------------------------------------------------------------------

// Two halves (scale and shift of the scales and shifts) and 8 + 8 six-bit numbers in 12 bytes.
struct PackedScales {
  uint4 row[2];
  __device__ __forceinline__ void load(const u8* plane, i64 span, int lane) {
    const uint4* at = reinterpret_cast<const uint4*>(plane + span * 256 + (lane >> 2) * 32);
    row[0] = __ldg(at);
    row[1] = __ldg(at + 1);
  }
  __device__ __forceinline__ float scale(int h, int group) const {
    const uint4& r = row[h];
    const u32 word = group < 4 ? r.y & 0x3f3f3f3fu : (r.w & 0x0f0f0f0fu) | (r.y >> 2 & 0x30303030u);
    return __fmul_rn(low_half(r.x), byte_value(word, group & 3));
  }
  __device__ __forceinline__ float shift(int h, int group) const {
    const uint4& r = row[h];
    const u32 word = group < 4 ? r.z & 0x3f3f3f3fu : (r.w >> 4 & 0x0f0f0f0fu) | (r.z >> 2 & 0x30303030u);
    return -__fmul_rn(high_half(r.x), byte_value(word, group & 3));
  }
};

template <bool kFifthBit>
struct SuperBlock4 {
  static constexpr int kSpan = 256, kGroup = 32, kZero = 0;
  static constexpr bool kScaled = true, kHasShift = true;
  CodeWords<4, 4> q;
  CodeWords<1, 4> fifth;
  PackedScales packed;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    if constexpr (kFifthBit) fifth.load(p.p1, span, lane);
    packed.load(kFifthBit ? p.p2 : p.p1, span, lane);
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    if constexpr (kFifthBit) fifth.rotate();
  }
  __device__ __forceinline__ u32 pair(int step, int reg) const {
    if constexpr (kFifthBit) return q.pair(step, reg) | fifth.template pair<4>(step, reg);
    return q.pair(step, reg);
  }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    if constexpr (kFifthBit) return q.bytes(step, s, m, h) | fifth.template bytes<4>(step, s, m, h);
    return q.bytes(step, s, m, h);
  }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return small_int(pair(step, reg) >> (16 * e) & 31); }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const { return packed.scale(h, step * 2 + s); }
  __device__ __forceinline__ float shift(int h, int step, int s, int m) const { return packed.shift(h, step * 2 + s); }
};

template <> struct Quant<Q4_K> : SuperBlock4<false> {};
template <> struct Quant<Q5_K> : SuperBlock4<true> {};

template <>
struct Quant<Q2_K> {
  static constexpr int kSpan = 256, kGroup = 16, kZero = 0;
  static constexpr bool kScaled = true, kHasShift = true;
  CodeWords<2, 4> q;
  uint4 scales[2];  // a byte a group of 16: scale in the low nibble, shift in the high one
  uint2 dm;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    const uint4* at = reinterpret_cast<const uint4*>(p.p1 + span * 256 + (lane >> 2) * 32);
    scales[0] = __ldg(at);
    scales[1] = __ldg(at + 1);
    dm = load8(p.p2 + span * 64 + (lane >> 2) * 8);
  }
  __device__ __forceinline__ void rotate() { q.rotate(); }
  __device__ __forceinline__ u32 scale_word(int h, int step) const {
    const uint4& r = scales[h];
    return step == 0 ? r.x : step == 1 ? r.y : step == 2 ? r.z : r.w;
  }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.bytes(step, s, m, h); }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return small_int(q.pair(step, reg) >> (16 * e) & 3); }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const {
    return __fmul_rn(low_half(h ? dm.y : dm.x), byte_value(scale_word(h, step) & 0x0f0f0f0fu, s * 2 + m));
  }
  __device__ __forceinline__ float shift(int h, int step, int s, int m) const {
    return -__fmul_rn(high_half(h ? dm.y : dm.x), byte_value(scale_word(h, step) >> 4 & 0x0f0f0f0fu, s * 2 + m));
  }
};

template <>
struct Quant<Q3_K> {
  static constexpr int kSpan = 256, kGroup = 16, kZero = 4;
  static constexpr bool kScaled = true, kHasShift = false;
  CodeWords<2, 4> q;
  CodeWords<1, 4> third;
  uint2 scales[3];  // 12 bytes of row g, then of row g + 8
  u32 d;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    third.load(p.p1, span, lane);
#pragma unroll
    for (int i = 0; i < 3; i++) scales[i] = load8(p.p2 + span * 192 + (lane >> 2) * 24 + i * 8);
    d = load4(p.p3 + span * 32 + (lane >> 2) * 4);
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    third.rotate();
  }
  __device__ __forceinline__ u32 pair(int step, int reg) const { return q.pair(step, reg) | third.pair<2>(step, reg); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    return centre<kZero>(q.bytes(step, s, m, h) | third.bytes<2>(step, s, m, h));
  }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return small_int(pair(step, reg) >> (16 * e) & 7, kZero); }
  __device__ __forceinline__ u32 scale_word(int h, int i) const {
    const int word = h * 3 + i;
    return word % 2 ? scales[word / 2].y : scales[word / 2].x;
  }
  // Six-bit scale i = 4 step + 2 s + m: low nibbles in 8 bytes (i mod 8, upper nibble from 8 on), upper pairs of bits in 4 bytes (i mod 4).
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const {
    const u32 low = (step & 1 ? scale_word(h, 1) : scale_word(h, 0)) >> (step & 2 ? 4 : 0) & 0x0f0f0f0fu;
    const u32 high = scale_word(h, 2) >> (2 * step) & 0x03030303u;
    return __fmul_rn(h ? high_half(d) : low_half(d), byte_value(low | high << 4, s * 2 + m, 32.0f));
  }
};

template <>
struct Quant<Q6_K> {
  static constexpr int kSpan = 256, kGroup = 16, kZero = 32;
  static constexpr bool kScaled = true, kHasShift = false;
  CodeWords<4, 4> q;
  CodeWords<2, 4> upper;
  uint4 scales[2];  // a signed byte a group of 16
  u32 d;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.p0, span, lane);
    upper.load(p.p1, span, lane);
    const uint4* at = reinterpret_cast<const uint4*>(p.p2 + span * 256 + (lane >> 2) * 32);
    scales[0] = __ldg(at);
    scales[1] = __ldg(at + 1);
    d = load4(p.p3 + span * 32 + (lane >> 2) * 4);
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    upper.rotate();
  }
  __device__ __forceinline__ u32 pair(int step, int reg) const { return q.pair(step, reg) | upper.pair<4>(step, reg); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    return centre<kZero>(q.bytes(step, s, m, h) | upper.bytes<4>(step, s, m, h));
  }
  __device__ __forceinline__ float level(int step, int reg, int e) const { return small_int(pair(step, reg) >> (16 * e) & 63, kZero); }
  __device__ __forceinline__ float scale(int h, int step, int s, int m) const {
    const uint4& r = scales[h];
    const u32 word = step == 0 ? r.x : step == 1 ? r.y : step == 2 ? r.z : r.w;
    return __fmul_rn(h ? high_half(d) : low_half(d), byte_value(word ^ 0x80808080u, s * 2 + m, 128.0f));
  }
};

// The weight in half e of a register, with the bits of the oracle (rollkv.quants.dequantise).
template <typename Q>
__device__ __forceinline__ float weight_value(const Q& q, int step, int reg, int e) {
  if constexpr (!Q::kScaled) {
    return q.value(step, reg, e);
  } else {
    const int h = half_row(reg), s = step_group(reg), m = half_group(reg);
    const float product = __fmul_rn(q.scale(h, step, s, m), q.level(step, reg, e));
    if constexpr (Q::kHasShift) return __fadd_rn(product, q.shift(h, step, s, m));
    return product;
  }
}
