// The codes of the KV cache: a head's row written by a warp (head_rows.cuh), and read eight elements at a time.
//
// Formula   An element is level * scale: a level that its code names, exact in half, and its group's scale, a half; the product is exact in float32.
//   q8_0    levels -127 .. 127; scale = max |x| / 127; code = x / scale, rounded half away from zero.
//   q4_0    levels -8 .. 7; scale = m / -8 with m the first element of largest magnitude; code = x / scale rounded to nearest, at most 7. Both as GGUF's
//           reference does for weights.
//   turbo*  x rotated (rotate.cuh); code = the level nearest to x sqrt(n) / (|x| s), the upper of two; scale = <x, levels> / <levels, levels>, which makes
//           the squared error least (after Zandieh et al., arXiv 2504.19874, and EDEN, Vargaftik et al. 2022).
// A group with a NaN or an infinity gets the scale NaN.
// Order     rollkv/kv_codes.py does the same operations in float32 in the same order, each rounded on its own; a sum is taken over pairs of neighbours, then
//           over pairs of pairs, ...: between lanes, then between a lane's registers. So host and device write equal bits.
// Words     32 bits, element e of a word, numbered from the row's beginning:
//   q8_0    4 codes, level + 128.
//   q4_0    8 codes, level + 8, element 2 i + k at bit 4 i + 16 k: neighbours lie in the two halves of (w >> 4 i) & 0x000f000f.
//   turbo4  8 codes of 4 bits, element e at bit 4 e: a magnitude, 0 the smallest, and above it the sign, set where negative.
//   turbo2  16 codes of 2 bits, level + 3 / 2, element 2 i + k at bit 2 i + 16 k.
//   turbo3  16 magnitudes of 2 bits, element e at bit 4 (e % 8) + 2 (e / 8); behind all of a row's magnitudes its signs in words of 32, element e at bit
//           4 (e % 8) + e / 8: one shift brings eight of them beside their magnitudes. The last of these is half empty where D is an odd multiple of 16.
// The attention kernel wants them so (kv_fragments.cuh).
#pragma once

#include "head_rows.cuh"
#include "kv_types.cuh"

// ---- levels -----------------------------------------------------------------------------------------------------------------------

// Of turbo types, those above zero; the others are their negatives. kDeviation: of the normal distribution that they suit best. A level of turbo3 is one byte,
// the high byte of a half; those of turbo2 are uniform, code - 3 / 2, and so need no table.
template <typename T>
struct Book;
template <>
struct Book<Turbo4> {
  static constexpr int kUpper = 8;
  static constexpr double kDeviation = 1.0;
  static constexpr float upper(int i) {
    constexpr float levels[8] = {0.12841796875f, 0.387939453125f, 0.65673828125f, 0.9423828125f, 1.255859375f, 1.6181640625f, 2.068359375f, 2.732421875f};
    return levels[i];
  }
};
template <>
struct Book<Turbo3> {
  static constexpr int kUpper = 4;
  static constexpr double kDeviation = 1.0682;
  static constexpr float upper(int i) {
    constexpr float levels[4] = {0.25f, 0.75f, 1.25f, 2.0f};
    return levels[i];
  }
};
template <>
struct Book<Turbo2> {
  static constexpr int kUpper = 2;
  static constexpr double kDeviation = 0.99;
  static constexpr float upper(int i) { return i == 0 ? 0.5f : 1.5f; }
};

// Of all, ascending.
template <typename T>
constexpr float level(int code) {
  constexpr int kUpper = Book<T>::kUpper;
  return code < kUpper ? -Book<T>::upper(kUpper - 1 - code) : Book<T>::upper(code - kUpper);
}

// ---- writing ----------------------------------------------------------------------------------------------------------------------

// One lane's elements as they are stored: a code each, with a turbo type's sign at bit 7, and the scale of the group that each belongs to.
template <int kDim>
struct CodedRow {
  static constexpr int kCount = HeadRow<kDim>::kCount;
  u32 code[kCount];
  u16 scale[kCount];
};

// A group's sum of one number an element, to all its lanes: kRegisters registers of kLanes neighbouring lanes. As long as there are several registers, the two
// lanes of a pair share them out, so that one exchange serves two.
template <int kLanes, int kRegisters>
__device__ __forceinline__ float group_sum(const float* x) {
  float sums[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; i++) sums[i] = x[i];
#pragma unroll
  for (int stride = 1; stride < kLanes; stride *= 2) {
    if (stride < kRegisters) {  // 2 i of even lanes, 2 i + 1 of odd ones
      const bool odd = threadIdx.x & stride;
#pragma unroll
      for (int i = 0; i < kRegisters / stride / 2; i++) {
        const float keep = sums[odd ? 2 * i + 1 : 2 * i], give = sums[odd ? 2 * i : 2 * i + 1];
        sums[i] = __fadd_rn(keep, __shfl_xor_sync(kAllLanes, give, stride));
      }
    } else {
      sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], stride));
    }
  }
#pragma unroll
  for (int stride = 1; stride < kRegisters; stride *= 2) sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], stride));
  return sums[0];
}

// A scale to half; NaN where an element of the group is not finite.
__device__ __forceinline__ u16 scale_bits(float scale, bool sound) { return sound ? float_to_half_bits(scale) : u16(0x7e00); }

__device__ __forceinline__ float inverse(float step) { return step == 0.0f ? 0.0f : __fdiv_rn(1.0f, step); }

// The row, rotated if the cache is, as T stores it. The whole warp must call.
template <typename T, int kDim>
__device__ __forceinline__ CodedRow<kDim> encode(const HeadRow<kDim>& row) {
  CodedRow<kDim> coded;
  if constexpr (kTurbo<T>) {
    constexpr int kGroup = rotation_group(kDim), kLanes = kGroup < 32 ? kGroup : 32, kRegisters = kGroup / kLanes, kUpper = Book<T>::kUpper;
    constexpr double kRoot = kGroup == 128 ? 11.313708498984761 : kGroup == 64 ? 8.0 : kGroup == 32 ? 5.656854249492381 : 4.0;
#pragma unroll
    for (int g = 0; g < row.kCount; g += kRegisters) {
      const float* x = row.x + g;
      float products[kRegisters], squares[kRegisters];
#pragma unroll
      for (int i = 0; i < kRegisters; i++) squares[i] = __fmul_rn(x[i], x[i]);
      const float norm = __fsqrt_rn(group_sum<kLanes, kRegisters>(squares));
      const float unit = norm == 0.0f ? 0.0f : __fdiv_rn(float(kRoot / Book<T>::kDeviation), norm);
#pragma unroll
      for (int i = 0; i < kRegisters; i++) {
        const float place = __fmul_rn(x[i], unit);
        u32 code = 0;
        float chosen = level<T>(0);
#pragma unroll
        for (int k = 1; k < 2 * kUpper; k++) {
          if (place >= (level<T>(k - 1) + level<T>(k)) / 2) {
            code = k;
            chosen = level<T>(k);
          }
        }
        products[i] = __fmul_rn(x[i], chosen);
        squares[i] = __fmul_rn(chosen, chosen);
        coded.code[g + i] = kSame<T, Turbo2> ? code : code < kUpper ? kUpper - 1 - code | 0x80 : code - kUpper;
      }
      const float product = group_sum<kLanes, kRegisters>(products), square = group_sum<kLanes, kRegisters>(squares);
      bool sound = true;
#pragma unroll
      for (int i = 0; i < kRegisters; i++) sound = sound && fabsf(x[i]) < infinity();
      const u32 mine = kAllLanes >> (32 - kLanes) << threadIdx.x % 32 / kLanes * kLanes;
      sound = (~__ballot_sync(kAllLanes, sound) & mine) == 0;
      const u16 bits = scale_bits(norm == 0.0f ? 0.0f : __fdiv_rn(product, square), sound);
#pragma unroll
      for (int i = 0; i < kRegisters; i++) coded.scale[g + i] = bits;
    }
  } else {
#pragma unroll
    for (int i = 0; i < row.kCount; i++) {  // a register is a group
      const float x = row.x[i];
      const u32 most = __reduce_max_sync(kAllLanes, __float_as_uint(fabsf(x)));  // as numbers are ordered so are their bits, NaN above all
      float step;
      int code;
      if constexpr (kSame<T, Q8_0>) {
        step = __fdiv_rn(__uint_as_float(most), 127.0f);
        code = 128 + min(max(__float2int_rz(roundf(__fmul_rn(x, inverse(step)))), -127), 127);
      } else {
        const int first = __ffs(__ballot_sync(kAllLanes, __float_as_uint(fabsf(x)) == most)) - 1;
        step = __fdiv_rn(__shfl_sync(kAllLanes, x, first), -8.0f);
        code = min(max(__float2int_rz(__fadd_rn(__fmul_rn(x, inverse(step)), 8.5f)), 0), 15);
      }
      coded.code[i] = u32(code);
      coded.scale[i] = scale_bits(step, most < __float_as_uint(infinity()));
    }
  }
  return coded;
}

// Word `index` of a row whose stored codes lie in bytes, 16-byte aligned, those behind the row's end zeros.
template <typename T, int kDim>
__device__ __forceinline__ u32 pack_word(const u32* bytes, int index) {
  auto code = [&](int e) { return bytes[e / 4] >> 8 * (e % 4) & 0xffu; };
  u32 word = 0;
  if constexpr (kSame<T, Q8_0>) {
    word = bytes[index];
  } else if constexpr (kSame<T, Q4_0> || kSame<T, Turbo4>) {
    bytes += 2 * index;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if constexpr (kSame<T, Q4_0>) word |= code(e) << 4 * (e / 2) + 16 * (e % 2);
      if constexpr (kSame<T, Turbo4>) word |= (code(e) & 7 | code(e) >> 7 << 3) << 4 * e;
    }
  } else if (index < kDim / 16) {
    bytes += 4 * index;
#pragma unroll
    for (int e = 0; e < 16; e++) word |= (code(e) & 3) << (kSame<T, Turbo2> ? 2 * (e / 2) + 16 * (e % 2) : 4 * (e % 8) + 2 * (e / 8));
  } else {
    bytes += 8 * (index - kDim / 16);
#pragma unroll
    for (int e = 0; e < 32; e++) word |= code(e) >> 7 << 4 * (e % 8) + e / 8;
  }
  return word;
}

// A row into its cell: rounded to a plain type (to nearest, ties to even), or encoded. The whole warp must call. scratch: HeadRow<kDim>::kCount * 32 bytes of
// shared memory that belong to the warp, 16-byte aligned; unused by plain types.
template <typename T, int kDim>
__device__ __forceinline__ void store_row(const HeadRow<kDim>& row, const HeadCells<T, kDim>& cells, int cell, void* scratch) {
  using Format = RowFormat<T, kDim>;
  const int lane = threadIdx.x % 32;
  if constexpr (kCoded<T>) {
    const CodedRow<kDim> coded = encode<T>(row);
    __syncwarp();  // scratch of what was before has been read
#pragma unroll
    for (int i = 0; i < row.kCount; i++) static_cast<u8*>(scratch)[row.element(i)] = row.element(i) < kDim ? u8(coded.code[i]) : u8(0);
    __syncwarp();
#pragma unroll
    for (int w = lane; w < Format::kWords; w += 32) *const_cast<u32*>(cells.word(cell, w)) = pack_word<T, kDim>(static_cast<const u32*>(scratch), w);
#pragma unroll
    for (int i = 0; i < row.kCount; i++) {
      const int d = row.element(i);
      if (d % Format::kGroup == 0 && d < kDim) *const_cast<u16*>(cells.scale(cell, d / Format::kGroup)) = coded.scale[i];
    }
  } else {
    T* const target = const_cast<T*>(cells.row(cell));
#pragma unroll
    for (int i = 0; i < row.kCount; i++) {
      if (row.element(i) < kDim) target[row.element(i)] = from_float<T>(row.x[i]);
    }
  }
}

// ---- reading ----------------------------------------------------------------------------------------------------------------------

// The bits of a positive number that a half holds exactly.
constexpr u32 half_bits(float x) {
  u32 exponent = 15;
  while (x >= 2.0f) x /= 2, exponent++;
  while (x < 1.0f) x *= 2, exponent--;
  return exponent << 10 | u32((x - 1.0f) * 1024.0f);
}

// The bytes of eight levels, as halves: of turbo4's magnitudes, or of turbo3's levels, by magnitude and sign. Words 0 and 1 are the high bytes, 2 and 3 the low ones.
template <typename T>
constexpr u32 level_bytes(int word) {
  u32 bytes = 0;
  for (int k = 0; k < 4; k++) {
    const int entry = word % 2 * 4 + k;
    const u32 bits = half_bits(Book<T>::upper(entry % Book<T>::kUpper)) | (entry < Book<T>::kUpper ? 0u : 0x8000u);
    bytes |= (word < 2 ? bits >> 8 : bits & 0xffu) << 8 * k;
  }
  return bytes;
}

// The levels of eight codes of 4 bits, two a register: of turbo4, or of turbo3, a magnitude and above it the sign, and a bit that means nothing. A byte permute
// looks four magnitudes up. bytes: level_bytes.
template <typename T>
__device__ __forceinline__ void levels_of_codes(u32 (&x)[4], u32 codes, const u32* bytes) {
  const u32 which = codes & 0x77777777u;
  u32 high[2], low[2] = {};  // bytes of the levels of four
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (kSame<T, Turbo4>) {
      const u32 signs = __byte_perm(codes << 4, codes, i == 0 ? 0xd9c8 : 0xfbea);  // bytes all of whose bits are a code's sign
      low[i] = __byte_perm(bytes[2], bytes[3], which >> 16 * i);
      high[i] = __byte_perm(bytes[0], bytes[1], which >> 16 * i) ^ (signs & 0x80808080u);
    } else {
      high[i] = __byte_perm(bytes[0], bytes[1], which >> 16 * i);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = __byte_perm(low[i / 2], high[i / 2], i % 2 ? 0x7362 : 0x5140);
}

// The codes of eight neighbouring elements, number `index` of a row.
template <typename T, int kDim>
struct EightCodes {
  static constexpr int kLoads = kSame<T, Half> ? 4 : kSame<T, Q8_0> || kSame<T, Turbo3> ? 2 : 1;
  u32 raw[kLoads], index;

  __device__ __forceinline__ void load(const HeadCells<T, kDim>& cells, u32 cell, u32 eight) {
    index = eight;
    if constexpr (kSame<T, Half>) {
      const uint4 x = fresh16(cells.row(cell) + 8 * index);
      raw[0] = x.x, raw[1] = x.y, raw[2] = x.z, raw[3] = x.w;
    } else if constexpr (kSame<T, Q8_0>) {
      raw[0] = fresh(cells.word(cell, 2 * index)), raw[1] = fresh(cells.word(cell, 2 * index + 1));
    } else if constexpr (kSame<T, Q4_0> || kSame<T, Turbo4>) {
      raw[0] = fresh(cells.word(cell, index));
    } else {
      raw[0] = fresh(cells.word(cell, index / 2));
      if constexpr (kSame<T, Turbo3>) raw[1] = fresh(cells.word(cell, kDim / 16 + index / 4));
    }
  }
  // Their levels, two neighbours a word.
  __device__ __forceinline__ uint4 levels() const {
    if constexpr (kSame<T, Half>) {
      return make_uint4(raw[0], raw[1], raw[2], raw[3]);
    } else if constexpr (kSame<T, Q8_0>) {  // 0x6400 + code = 1024 + code
      auto pair = [&](u32 x, u32 which) { return subtract_half2(__byte_perm(x, 0x64646464u, which), 0x64806480u); };
      return make_uint4(pair(raw[0], 0x4140), pair(raw[0], 0x4342), pair(raw[1], 0x4140), pair(raw[1], 0x4342));
    } else if constexpr (kSame<T, Q4_0>) {
      auto pair = [&](int i) { return subtract_half2(raw[0] >> 4 * i & 0x000f000fu | 0x64006400u, 0x64086408u); };
      return make_uint4(pair(0), pair(1), pair(2), pair(3));
    } else if constexpr (kSame<T, Turbo2>) {  // 1 + code / 4, and then 4 x - 11 / 2
      auto pair = [&](int i) {
        return fma_half2(raw[0] >> 8 * (index % 2) + 2 * i << 8 & 0x03000300u | 0x3c003c00u, 0x44004400u, 0xc580c580u);
      };
      return make_uint4(pair(0), pair(1), pair(2), pair(3));
    } else {
      constexpr u32 bytes[4] = {level_bytes<T>(0), level_bytes<T>(1), level_bytes<T>(2), level_bytes<T>(3)};
      u32 codes = raw[0], x[4];
      if constexpr (kSame<T, Turbo3>) codes = raw[0] >> 2 * (index % 2) & 0x33333333u | (raw[1] >> index % 4 & 0x11111111u) << 2;
      levels_of_codes<T>(x, codes, bytes);
      return make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
};
