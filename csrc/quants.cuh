// Quantised weights in their device form (rollkv/quants.py describes it): a lane's share of a span, and the weights in it.
//
// Quant<TYPE> holds, in registers, what one lane of a warp needs of one span (64 or 256 columns) of one tile of 16 rows. Lane (g, t) =
// g * 4 + t has, in every step of 64 columns, the quads (s, m, h): columns 32 s + 16 m + 4 t + i, i = 0 to 3, of row g + 8 h. That is the A
// operand of mma.m16n8k32 over bytes, a quad a register, and of two m16n8k16 over 16 bits, whose k order is permuted alike in A and B.
// Common to all types:
//   kSpan       columns of a span
//   kKind       what is multiplied: bytes, halves, or bf16 numbers
//   load        raw words, nothing else: they may be in flight for long; arrive() waits for them; open() takes small fields apart, before use
// Bytes:
//   kGroup      neighbouring columns that share a scale
//   bytes(step, s, m, h)   a quad of codes as bytes, signed or not (kSigned), shifted left by up(h): codes are taken where they lie, and
//               signed ones are centred by one exclusive or where their highest bit is the byte's
//   kInteger    weight = d(h) * group_scale(step, s, m, h) * code (+ shift), the group's scale a byte; else scale(h, s) * code (+ shift)
//   kHasShift   there is a shift(h, group)
// Others:       kParts numbers of 16 bits whose sum is the weight, exactly: pairs(s, m, h, j, part) of columns 4 t + 2 j and the next
// Steps, s, m and h are compile-time constants after unrolling, so nothing leaves the registers; t and a group need not be. rotate() makes
// step 1's codes and scales step 0's, step 2's step 1's, and so on.
#pragma once
#include "common.cuh"

// The numbers that GGUF gives the types.
enum QuantType : int {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
  IQ4_XS = 23, BF16 = 30
};

constexpr int kTileRows = 16;
constexpr int kStepColumns = 64;

enum class Kind { kBytes, kHalves, kBf16 };

// The planes of one matrix, in the order of the fields; a type uses as many as it has.
struct Planes {
  const u8* at[4];
};

template <int TYPE>
struct Quant;

// ---- words ------------------------------------------------------------------------------------------------------------------------

// Weights, read once. Not by the path of constant data: the assembler would move such reads behind wait_for_previous().
__device__ __forceinline__ u32 weights4(const u8* address) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ uint2 weights8(const u8* address) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}
__device__ __forceinline__ uint4 weights16(const u8* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ u32 shifted(u32 word, int down) { return down >= 0 ? word >> down : word << -down; }

__device__ __forceinline__ float byte_value(u32 word, int index) {  // through the mantissa of 2^23: cheaper than a conversion
  return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | index)), 8388608.0f);
}
__device__ __forceinline__ int signed_byte(u32 word, int index) { return int(word << (24 - 8 * index)) >> 24; }
__device__ __forceinline__ int unsigned_byte(u32 word, int index) { return int(__byte_perm(word, 0, 0x4440 | index)); }
__device__ __forceinline__ float low_half(u32 word) { return half_bits_to_float(u16(word)); }
__device__ __forceinline__ float high_half(u32 word) { return half_bits_to_float(u16(word >> 16)); }

// One instruction that needs `word` and leaves it as it is: gridDim.y is 1 wherever this is called, which the compiler does not know.
__device__ __forceinline__ void touch(u32& word) { asm volatile("mul.lo.u32 %0, %0, %1;" : "+r"(word) : "r"(gridDim.y)); }

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
        const uint4 v = weights16(at);
        w[4 * c] = v.x, w[4 * c + 1] = v.y, w[4 * c + 2] = v.z, w[4 * c + 3] = v.w;
      } else if constexpr (kChunk == 2) {
        const uint2 v = weights8(at);
        w[0] = v.x, w[1] = v.y;
      } else {
        w[0] = weights4(at);
      }
    }
  }

  // See Quant::arrive.
  __device__ __forceinline__ void arrive() {
#pragma unroll
    for (int c = 0; c < kWords; c += kChunk) touch(w[c]);
  }

  // Brings the next step's words to the place of the first's.
  __device__ __forceinline__ void rotate() {
#pragma unroll
    for (int i = 0; i + kBits < kWords; i++) w[i] = w[i + kBits];
  }

  // A quad of codes of up to 8 bits, a byte each, shifted left by `up`.
  __device__ __forceinline__ u32 quad(int step, int s, int m, int h, int up) const {
    const int number = (s * 2 + m) * 2 + h, per_word = 8 / kBits;
    return shifted(w[step * kBits + number / per_word], number % per_word * kBits - up) & ((((1u << kBits) - 1) * 0x01010101u) << up);
  }
};

// ---- floating point: a quad is two words ------------------------------------------------------------------------------------------

template <Kind kOne>
struct Float16 {
  static constexpr int kSpan = 64, kParts = 1;
  static constexpr Kind kKind = kOne;
  CodeWords<16, 1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) { q.load(p.at[0], span, lane); }
  __device__ __forceinline__ void arrive() { q.arrive(); }
  __device__ __forceinline__ void open() {}
  __device__ __forceinline__ u32 pairs(int s, int m, int h, int j, int) const { return q.w[((s * 2 + m) * 2 + h) * 2 + j]; }
  __device__ __forceinline__ float value(int, int s, int m, int h, int i) const {
    const u32 word = pairs(s, m, h, i >> 1, 0);
    if constexpr (kOne == Kind::kHalves) return i & 1 ? high_half(word) : low_half(word);
    return __uint_as_float(i & 1 ? word & 0xffff0000u : word << 16);
  }
};

template <> struct Quant<F16> : Float16<Kind::kHalves> {};
template <> struct Quant<BF16> : Float16<Kind::kBf16> {};

template <>
struct Quant<F32> {
  static constexpr int kSpan = 64, kParts = 3;
  static constexpr Kind kKind = Kind::kBf16;
  CodeWords<16, 1> high, low;  // the upper and the lower 16 bits
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    high.load(p.at[0], span, lane);
    low.load(p.at[1], span, lane);
  }
  __device__ __forceinline__ void arrive() { high.arrive(), low.arrive(); }
  __device__ __forceinline__ void open() {}
  __device__ __forceinline__ float value(int, int s, int m, int h, int i) const {
    const int word = ((s * 2 + m) * 2 + h) * 2 + (i >> 1);
    return __uint_as_float(__byte_perm(low.w[word], high.w[word], i & 1 ? 0x7632 : 0x5410));
  }
  __device__ __forceinline__ u32 pairs(int s, int m, int h, int j, int part) const {
    if (part == 0) return high.w[((s * 2 + m) * 2 + h) * 2 + j];
    const float a = bf16_rest(value(0, s, m, h, 2 * j)), b = bf16_rest(value(0, s, m, h, 2 * j + 1));
    return part == 1 ? bf16_pair(a, b) : bf16_pair(bf16_rest(a), bf16_rest(b));
  }
};

// ---- blocks of 32: one scale, at times one shift; the two blocks of a step lie side by side ---------------------------------------

struct BlockScale {  // d
  static constexpr bool kHasShift = false;
  uint2 d;  // rows g and g + 8: halves are s = 0 and 1
  __device__ __forceinline__ void load(const u8* plane, i64 span, int lane) { d = weights8(plane + span * 64 + (lane >> 2) * 8); }
  __device__ __forceinline__ void arrive() { touch(d.x); }
  __device__ __forceinline__ float scale(int h, int s) const {
    const u32 word = h ? d.y : d.x;
    return s ? high_half(word) : low_half(word);
  }
};

struct BlockScaleShift {  // d, m
  static constexpr bool kHasShift = true;
  uint4 dm;  // (row g, s = 0), (g, 1), (g + 8, 0), (g + 8, 1)
  __device__ __forceinline__ void load(const u8* plane, i64 span, int lane) { dm = weights16(plane + span * 128 + (lane >> 2) * 16); }
  __device__ __forceinline__ void arrive() { touch(dm.x); }
  __device__ __forceinline__ u32 word(int h, int s) const { return h ? (s ? dm.w : dm.z) : (s ? dm.y : dm.x); }
  __device__ __forceinline__ float scale(int h, int s) const { return low_half(word(h, s)); }
  __device__ __forceinline__ float shift(int h, int group) const { return high_half(word(h, group)); }
};

template <>
struct Quant<Q8_0> : BlockScale {
  static constexpr int kSpan = 64, kGroup = 32;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = false, kSigned = true;
  CodeWords<8, 1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
    BlockScale::load(p.at[1], span, lane);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive();
    BlockScale::arrive();
  }
  __device__ __forceinline__ void open() {}
  static __device__ __forceinline__ constexpr int up(int) { return 0; }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.quad(step, s, m, h, 0); }
};

// 4-bit codes, and 5-bit ones whose fifth bit has a plane of its own.
template <int kSteps, bool kFifthBit, bool kCentred>
struct Codes45 {
  CodeWords<4, kSteps> q;
  CodeWords<1, kSteps> fifth;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
    if constexpr (kFifthBit) fifth.load(p.at[1], span, lane);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive();
    if constexpr (kFifthBit) fifth.arrive();
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    if constexpr (kFifthBit) fifth.rotate();
  }
  static __device__ __forceinline__ constexpr int up(int h) { return kCentred ? (kFifthBit ? 3 : 4) : (kFifthBit ? 0 : 4 * h); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    u32 codes = q.quad(step, s, m, h, up(h));
    if constexpr (kFifthBit) codes |= fifth.quad(step, s, m, h, up(h) + 4);
    return kCentred ? codes ^ 0x80808080u : codes;
  }
};

template <bool kCentred, bool kFifthBit, typename Scales>
struct Block45 : Scales {
  using Codes = Codes45<1, kFifthBit, kCentred>;
  static constexpr int kSpan = 64, kGroup = 32;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = false, kSigned = kCentred;
  Codes codes;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    codes.load(p, span, lane);
    Scales::load(p.at[kFifthBit ? 2 : 1], span, lane);
  }
  __device__ __forceinline__ void arrive() {
    codes.arrive();
    Scales::arrive();
  }
  __device__ __forceinline__ void open() {}
  static __device__ __forceinline__ constexpr int up(int h) { return Codes::up(h); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return codes.bytes(step, s, m, h); }
};

template <> struct Quant<Q4_0> : Block45<true, false, BlockScale> {};
template <> struct Quant<Q4_1> : Block45<false, false, BlockScaleShift> {};
template <> struct Quant<Q5_0> : Block45<true, true, BlockScale> {};
template <> struct Quant<Q5_1> : Block45<false, true, BlockScaleShift> {};

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
  static __device__ __forceinline__ constexpr int up(int) { return 0; }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    const u32 word = this->w[step * 4 + s * 2 + m];
    return __byte_perm(table_levels(word & 0xffff), table_levels(word >> 16), h ? 0x7531 : 0x6420);
  }
};

template <>
struct Quant<IQ4_NL> : BlockScale {
  static constexpr int kSpan = 64, kGroup = 32;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = false, kSigned = true;
  TableCodes<1> q;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
    BlockScale::load(p.at[1], span, lane);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive();
    BlockScale::arrive();
  }
  __device__ __forceinline__ void open() {}
  static __device__ __forceinline__ constexpr int up(int h) { return TableCodes<1>::up(h); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.bytes(step, s, m, h); }
};

// ---- super-blocks of 256: a half for all of them, and a few bits a group, which become bytes once a span --------------------------

// The scales of 8 groups of 32, or 16 of 16, a byte each.
template <int kGroupColumns>
struct GroupBytes {
  static constexpr int kWords = 64 / kGroupColumns;  // 2 or 4
  u32 w[kWords];
  static __device__ __forceinline__ constexpr int number(int step, int s, int m) { return kGroupColumns == 32 ? step * 2 + s : step * 4 + s * 2 + m; }
  __device__ __forceinline__ u32 word(int step, int s, int m) const { return w[number(step, s, m) / 4]; }
  static __device__ __forceinline__ constexpr int byte(int step, int s, int m) { return number(step, s, m) % 4; }
  __device__ __forceinline__ void rotate() {
    if constexpr (kGroupColumns == 32) {
      w[0] = __funnelshift_r(w[0], w[1], 16), w[1] >>= 16;
    } else {
      w[0] = w[1], w[1] = w[2], w[2] = w[3];
    }
  }
};

template <>
struct Quant<IQ4_XS> {
  static constexpr int kSpan = 256, kGroup = 32;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = true, kSigned = true, kHasShift = false;
  TableCodes<4> q;
  uint4 meta;  // of a row: d and the high bits of the scales, their low nibbles
  GroupBytes<32> scales[2];
  u32 dd[2];
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
    meta = weights16(p.at[1] + span * 128 + (lane >> 2) * 16);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive();
    touch(meta.x);
  }
  __device__ __forceinline__ void open() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      dd[h] = h ? meta.z : meta.x;
      const u32 low = h ? meta.w : meta.y, high = dd[h] >> 16;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 word = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) {
          const int group = 4 * i + b;
          word |= ((low >> (4 * group) & 15) | (high >> (2 * group) & 3) << 4) << (8 * b);
        }
        scales[h].w[i] = ((word | 0x80808080u) - 0x20202020u) ^ 0x80808080u;  // less 32, no byte borrows from its neighbour
      }
    }
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    scales[0].rotate(), scales[1].rotate();
  }
  static __device__ __forceinline__ constexpr int up(int h) { return TableCodes<4>::up(h); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.bytes(step, s, m, h); }
  __device__ __forceinline__ float d(int h) const { return low_half(dd[h]); }
  __device__ __forceinline__ int group_scale(int step, int s, int m, int h) const {
    return signed_byte(scales[h].word(step, s, m), scales[h].byte(step, s, m));
  }
};

// Q4_K and Q5_K: two halves (scale and shift of the scales and shifts) and 8 + 8 six-bit numbers in 12 bytes.
template <bool kFifthBit>
struct SuperBlock45 {
  using Codes = Codes45<4, kFifthBit, false>;
  static constexpr int kSpan = 256, kGroup = 32;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = true, kSigned = false, kHasShift = true;
  Codes codes;
  uint4 packed[2];
  GroupBytes<32> scales[2], shifts[2];
  u32 dm[2];
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    codes.load(p, span, lane);
    const u8* at = p.at[kFifthBit ? 2 : 1] + span * 256 + (lane >> 2) * 32;
    packed[0] = weights16(at), packed[1] = weights16(at + 16);
  }
  __device__ __forceinline__ void arrive() {
    codes.arrive();
    touch(packed[0].x), touch(packed[1].x);
  }
  __device__ __forceinline__ void open() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 r = packed[h];
      dm[h] = r.x;
      scales[h].w[0] = r.y & 0x3f3f3f3fu, scales[h].w[1] = (r.w & 0x0f0f0f0fu) | (r.y >> 2 & 0x30303030u);
      shifts[h].w[0] = r.z & 0x3f3f3f3fu, shifts[h].w[1] = (r.w >> 4 & 0x0f0f0f0fu) | (r.z >> 2 & 0x30303030u);
    }
  }
  __device__ __forceinline__ void rotate() {
    codes.rotate();
    scales[0].rotate(), scales[1].rotate();
  }
  static __device__ __forceinline__ constexpr int up(int h) { return Codes::up(h); }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return codes.bytes(step, s, m, h); }
  __device__ __forceinline__ float d(int h) const { return low_half(dm[h]); }
  __device__ __forceinline__ int group_scale(int step, int s, int m, int h) const {
    return unsigned_byte(scales[h].word(step, s, m), scales[h].byte(step, s, m));
  }
  __device__ __forceinline__ float shift(int h, int group) const {
    return -__fmul_rn(high_half(dm[h]), byte_value(group < 4 ? shifts[h].w[0] : shifts[h].w[1], group & 3));
  }
};

template <> struct Quant<Q4_K> : SuperBlock45<false> {};
template <> struct Quant<Q5_K> : SuperBlock45<true> {};

template <>
struct Quant<Q2_K> {
  static constexpr int kSpan = 256, kGroup = 16;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = true, kSigned = false, kHasShift = true;
  CodeWords<2, 4> q;
  uint4 packed[2];
  GroupBytes<16> scales[2], shifts[2];  // nibbles of one byte in the file: scale low, shift high
  uint2 dm;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) packed[h] = weights16(p.at[1] + span * 256 + (lane >> 2) * 32 + 16 * h);
    dm = weights8(p.at[2] + span * 64 + (lane >> 2) * 8);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive();
    touch(packed[0].x), touch(packed[1].x), touch(dm.x);
  }
  __device__ __forceinline__ void open() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 r = packed[h];
      const u32 both[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int i = 0; i < 4; i++) scales[h].w[i] = both[i] & 0x0f0f0f0fu, shifts[h].w[i] = both[i] >> 4 & 0x0f0f0f0fu;
    }
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    scales[0].rotate(), scales[1].rotate();
  }
  static __device__ __forceinline__ constexpr int up(int) { return 0; }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const { return q.quad(step, s, m, h, 0); }
  __device__ __forceinline__ float d(int h) const { return low_half(h ? dm.y : dm.x); }
  __device__ __forceinline__ int group_scale(int step, int s, int m, int h) const {
    return unsigned_byte(scales[h].word(step, s, m), scales[h].byte(step, s, m));
  }
  __device__ __forceinline__ float shift(int h, int group) const {
    const u32 word = group < 8 ? (group < 4 ? shifts[h].w[0] : shifts[h].w[1]) : (group < 12 ? shifts[h].w[2] : shifts[h].w[3]);
    return -__fmul_rn(high_half(h ? dm.y : dm.x), byte_value(word, group & 3));
  }
};

template <>
struct Quant<Q3_K> {
  static constexpr int kSpan = 256, kGroup = 16;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = true, kSigned = true, kHasShift = false;
  CodeWords<2, 4> q;
  CodeWords<1, 4> third;
  u32 packed[6];  // 12 bytes of row g, then of row g + 8
  GroupBytes<16> scales[2];
  u32 dd;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
    third.load(p.at[1], span, lane);
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const uint2 two = weights8(p.at[2] + span * 192 + (lane >> 2) * 24 + i * 8);
      packed[2 * i] = two.x, packed[2 * i + 1] = two.y;
    }
    dd = weights4(p.at[3] + span * 32 + (lane >> 2) * 4);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive(), third.arrive();
    touch(packed[0]), touch(packed[2]), touch(packed[4]), touch(dd);
  }
  __device__ __forceinline__ void open() {
    // Six-bit scale i: low nibbles in 8 bytes (i mod 8, upper nibble from 8 on), upper pairs of bits in 4 bytes (i mod 4).
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 low = packed[3 * h + (i & 1)] >> (i & 2 ? 4 : 0) & 0x0f0f0f0fu;
        const u32 word = low | (shifted(packed[3 * h + 2], 2 * i - 4) & 0x30303030u);
        scales[h].w[i] = ((word | 0x80808080u) - 0x20202020u) ^ 0x80808080u;  // less 32, no byte borrows from its neighbour
      }
    }
  }
  __device__ __forceinline__ void rotate() {
    q.rotate();
    third.rotate();
    scales[0].rotate(), scales[1].rotate();
  }
  static __device__ __forceinline__ constexpr int up(int) { return 5; }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    return (q.quad(step, s, m, h, 5) | third.quad(step, s, m, h, 7)) ^ 0x80808080u;
  }
  __device__ __forceinline__ float d(int h) const { return h ? high_half(dd) : low_half(dd); }
  __device__ __forceinline__ int group_scale(int step, int s, int m, int h) const {
    return signed_byte(scales[h].word(step, s, m), scales[h].byte(step, s, m));
  }
};

template <>
struct Quant<Q6_K> {
  static constexpr int kSpan = 256, kGroup = 16;
  static constexpr Kind kKind = Kind::kBytes;
  static constexpr bool kInteger = true, kSigned = true, kHasShift = false;
  CodeWords<4, 4> q;
  CodeWords<2, 4> upper;
  GroupBytes<16> scales[2];
  u32 dd;
  __device__ __forceinline__ void load(const Planes& p, i64 span, int lane) {
    q.load(p.at[0], span, lane);
    upper.load(p.at[1], span, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 r = weights16(p.at[2] + span * 256 + (lane >> 2) * 32 + 16 * h);
      scales[h].w[0] = r.x, scales[h].w[1] = r.y, scales[h].w[2] = r.z, scales[h].w[3] = r.w;
    }
    dd = weights4(p.at[3] + span * 32 + (lane >> 2) * 4);
  }
  __device__ __forceinline__ void arrive() {
    q.arrive(), upper.arrive();
    touch(scales[0].w[0]), touch(scales[1].w[0]), touch(dd);
  }
  __device__ __forceinline__ void open() {}
  __device__ __forceinline__ void rotate() {
    q.rotate();
    upper.rotate();
    scales[0].rotate(), scales[1].rotate();
  }
  static __device__ __forceinline__ constexpr int up(int) { return 2; }
  __device__ __forceinline__ u32 bytes(int step, int s, int m, int h) const {
    return (q.quad(step, s, m, h, 2) | upper.quad(step, s, m, h, 6)) ^ 0x80808080u;
  }
  __device__ __forceinline__ float d(int h) const { return h ? high_half(dd) : low_half(dd); }
  __device__ __forceinline__ int group_scale(int step, int s, int m, int h) const {
    return signed_byte(scales[h].word(step, s, m), scales[h].byte(step, s, m));
  }
};

// Weight i of a quad, with the bits of the oracle (rollkv.quants.dequantise).
template <typename Q>
__device__ __forceinline__ float weight_value(const Q& q, int step, int s, int m, int h, int i) {
  if constexpr (Q::kKind != Kind::kBytes) {
    return q.value(step, s, m, h, i);
  } else {
    const u32 bytes = q.bytes(step, s, m, h);
    const float level = float((Q::kSigned ? signed_byte(bytes, i) : unsigned_byte(bytes, i)) >> Q::up(h));
    float scale;
    if constexpr (Q::kInteger) {
      scale = __fmul_rn(q.d(h), float(q.group_scale(step, s, m, h)));
    } else {
      scale = q.scale(h, s);
    }
    const float product = __fmul_rn(scale, level);
    if constexpr (Q::kHasShift) return __fadd_rn(product, q.shift(h, (step * kStepColumns + s * 32 + m * 16) / Q::kGroup));
    return product;
  }
}
