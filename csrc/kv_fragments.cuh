// How a head's coded cells become operands of mma m16n8k16 (mma.cuh).
//
// Of keys a lane needs neighbouring elements of one cell, two a register; of values the same element of two cells, "partners", for there the product adds over
// cells. Both come out of whole words of codes (kv_codes.cuh): words of two cells are paired before anything is decoded, which costs one permute or two for all of
// their elements. Levels are exact.
//   q8_0, q4_0  codes become mantissa bits: 0x6400 + code is the half 1024 + code, from which a constant is subtracted.
//   turbo2      the same with a mantissa near 1: a half 1 + code / 4 (even pairs of a word) or 1 + code / 16 (odd), one logic operation for two elements. What is
//               to be subtracted, 1.375 or 1.09375, is left to the sums (kOffset, kFactor): level = kFactor (x - kOffset).
//   turbo3      byte permutes look its levels up in two registers (levels_of_codes), behind a join of its planes to 4 bits an element.
//   turbo4      the same; or, with kTable, a byte of two codes looks up its two halves in shared memory. There is a copy of the table for each lane, so that no two lanes ever meet in a bank, and
//               one byte permute makes the address: code in its second byte, lane in its first. That fills the way to shared memory, so every second slot of keys is
//               looked up by permutes as well, which take twice the instructions, of a pipe that is half as wide. 131,072 cells of 128 elements: 45.2 us, where all by
//               shared memory take 46.8, all keys by permutes 47.6, everything by permutes 52.2.
#pragma once

#include "kv_codes.cuh"
#include "mma.cuh"

// Types whose codes are made 4 bits an element.
template <typename T>
constexpr bool kCodes4 = kSame<T, Turbo4> || kSame<T, Turbo3>;
// Bytes of the table: [256 pairs of codes][32 lanes] halves of two elements, in rows of 256 bytes.
constexpr int kTableBytes = 256 * 256;

// The magnitude that a code of turbo4 names by its lower bits.
template <int kFirst = 0>
__device__ __forceinline__ float magnitude(int index) {
  constexpr float x = Book<Turbo4>::upper(kFirst);
  if constexpr (kFirst + 1 == Book<Turbo4>::kUpper) {
    return x;
  } else {
    return index == kFirst ? x : magnitude<kFirst + 1>(index);
  }
}

// Writes turbo4's table; in use behind a barrier. Every warp of the block must call.
template <int kThreads>
__device__ __forceinline__ void make_table(u8* table) {
  const int lane = threadIdx.x % 32;
  auto level_of = [](int code) { return (code & 8 ? -1.0f : 1.0f) * magnitude(code % 8); };
  for (int first = threadIdx.x / 32 * 32; first < 256; first += kThreads) {
    const u32 mine = pack_half2(level_of((first + lane) & 15), level_of((first + lane) >> 4));
#pragma unroll 4
    for (int i = 0; i < 32; i += 4) {  // four entries at a time, 8 lanes each
      const u32 x = __shfl_sync(kAllLanes, mine, i + lane / 8);
      *reinterpret_cast<uint4*>(table + (first + i + lane / 8) * 256 + lane % 8 * 16) = make_uint4(x, x, x, x);
    }
  }
}

// A lane's share of a row when kLanes lanes divide it: slot kLanes j + lane for every j. A slot is a word, or where that leaves lanes without any, a part of one.
// Half: of eight elements, the 16 bytes of a load.
template <typename T, int kDim, int kLanes>
struct Slots {
  static constexpr int kWord = kSame<T, Q8_0> ? 4 : kSame<T, Turbo3> || kSame<T, Turbo2> ? 16 : 8;  // elements
  static constexpr int elements() {
    int size = kWord;
    while (kDim % (kLanes * size) != 0) size /= 2;
    return size;
  }
  static constexpr int kElements = elements(), kParts = kWord / kElements, kCount = kDim / (kLanes * kElements);
  static constexpr int kStep = kLanes / kParts;  // words from one slot of a lane to its next; no word is divided between two of a lane's slots
  int lane;

  __device__ __forceinline__ int first_word() const { return lane / kParts; }
  __device__ __forceinline__ int part() const { return lane % kParts; }
};

// u32 number i, a constant, of 16 bytes.
__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// A constant that stays in a register of each lane. The assembler makes one anew for every use, an instruction each, where another operand is a constant too, and
// copies one that it knows to be alike in all lanes.
__device__ __forceinline__ u32 kept(u32 constant) {
  u32 x;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(x) : "r"(constant + threadIdx.y), "r"(threadIdx.x % 32));
  return x;
}

// What a type's decoding takes from registers: masks of fields, or the bytes of levels.
template <typename T>
struct Constants {
  u32 x[2];

  __device__ __forceinline__ Constants() {
    if constexpr (kSame<T, Q4_0>) x[0] = kept(0x000f000fu), x[1] = kept(0x00f000f0u);
    if constexpr (kSame<T, Turbo2>) x[0] = kept(0x03000300u), x[1] = kept(0x00c000c0u);
    if constexpr (kCodes4<T>) x[0] = kept(level_bytes<T>(0)), x[1] = kept(level_bytes<T>(1));  // with the low bytes too it is two registers too many
  }
};

// a where the mask's bits are set, else b.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

// Decodes a lane's slots. x[i] of neighbours: elements 2 i and 2 i + 1; of partners: element i of cell a and of cell b. `signs`: of turbo3, the words of its second
// plane. j, a constant: which of the lane's slots.
template <typename T, int kDim, int kLanes, bool kTable>
struct Decoder {
  using Place = Slots<T, kDim, kLanes>;
  static constexpr int kElements = Place::kElements;
  static constexpr bool kShifted = kSame<T, Turbo2>;  // operands are x with level = factor(pair) (x - offset(pair))
  static constexpr float offset(int pair) { return !kShifted ? 0.0f : pair % 2 == 0 ? 1.375f : 1.09375f; }
  static constexpr float factor(int pair) { return !kShifted ? 1.0f : pair % 2 == 0 ? 4.0f : 16.0f; }

  Place place;
  const u8* table;  // of turbo4
  Constants<T> constants;

  __device__ __forceinline__ Decoder(int lane, const u8* table, const Constants<T>& constants) : place{lane}, table(table), constants(constants) {}

  // Eight codes of 4 bits of slot j, two levels a register.
  __device__ __forceinline__ void look_up(u32 (&x)[4], u32 codes, int j) const {
    if (kTable && kSame<T, Turbo4> && (kLanes == 8 || j % 2 == 1)) {
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = *reinterpret_cast<const u32*>(table + __byte_perm(codes, threadIdx.x % 32 * 4, 0x5504 | i << 4));
    } else {
      const u32 bytes[4] = {constants.x[0], constants.x[1], level_bytes<T>(2), level_bytes<T>(3)};
      levels_of_codes<T>(x, codes, bytes);
    }
  }
  // Codes of four elements each of two cells, 4 bits each, a word of eight elements each: even elements of both by turns, and odd ones.
  static __device__ __forceinline__ void interleave(u32 a, u32 b, u32& even, u32& odd) {
    even = select_bits(0x0f0f0f0fu, a, b << 4);
    odd = select_bits(0x0f0f0f0fu, a >> 4, b);
  }
  // turbo3's planes as 4 bits an element, the uppermost of which means nothing: of the slot's first eight elements, and of the others.
  __device__ __forceinline__ void join(u32 (&codes)[2], u32 word, u32 signs, int j) const {
    const int element = place.part() * kElements, in_pair = (j * Place::kStep + place.first_word()) % 2 * 16 + element;
    if constexpr (kElements < 16) word >>= 4 * (element % 8) + 2 * (element / 8);
    signs = __funnelshift_r(signs, signs, 4 * (in_pair % 8) + in_pair / 8 - 2 & 31);
    codes[0] = select_bits(0x33333333u, word, signs);
    codes[1] = kElements == 16 ? select_bits(0x33333333u, word >> 2, signs >> 1) : 0u;
  }
  // Codes in the two halves of a word (q4_0, turbo2) as operands: x[stride * i] is field i of both.
  template <int kCount, int kStride>
  __device__ __forceinline__ void fields(u32* x, u32 word) const {
    if constexpr (kSame<T, Q4_0>) {
      if constexpr (kCount < 4) word >>= 8 * place.part();
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const u32 two = word >> 4 * i;
        x[kStride * i] = subtract_half2(two & constants.x[0] | 0x64006400u, 0x64086408u);                                // 1024 + code, less 1032
        x[kStride * (i + 1)] = fma_half2(two & constants.x[1] | 0x64006400u, 0x2c002c00u, 0xd480d480u);                  // (1024 + 16 code) / 16 - 72
      }
    } else {
      auto even = [&](u32 w) { return w & constants.x[0] | 0x3c003c00u; };
      auto odd = [&](u32 w) { return w & constants.x[1] | 0x3c003c00u; };
      if constexpr (kCount == 8) {  // field i lies at bit 2 i
        const u32 turned = __byte_perm(word, 0, 0x2301);
        x[0] = even(turned), x[kStride] = odd(word << 4), x[kStride * 2] = even(word << 4), x[kStride * 3] = odd(word);
        x[kStride * 4] = even(word), x[kStride * 5] = odd(turned << 4), x[kStride * 6] = even(turned << 4), x[kStride * 7] = odd(turned);
      } else {  // the slot's field i at bit 2 i + 4
        word = __funnelshift_r(word, word, 2 * kCount * place.part() - 4 & 31);
        x[0] = even(word << 4);
        if constexpr (kCount > 1) x[kStride] = odd(word);
        if constexpr (kCount > 2) x[kStride * 2] = even(word), x[kStride * 3] = odd(word >> 4);
      }
    }
  }

  __device__ __forceinline__ void neighbours(u32 (&x)[kElements / 2], u32 word, u32 signs, int j) const {
    if constexpr (kSame<T, Q8_0>) {
      x[0] = subtract_half2(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u);  // 1024 + code, less 1152
      x[1] = subtract_half2(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u);
    } else if constexpr (kCodes4<T>) {
      u32 codes[2] = {word, 0};
      if constexpr (kSame<T, Turbo3>) {
        join(codes, word, signs, j);
      } else if constexpr (kElements < 8) {
        codes[0] >>= 4 * kElements * place.part();
      }
#pragma unroll
      for (int eight = 0; eight < (kElements + 7) / 8; eight++) {
        u32 levels[4];
        look_up(levels, codes[eight], j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (4 * eight + i < kElements / 2) x[4 * eight + i] = levels[i];
        }
      }
    } else {
      fields<kElements / 2, 1>(x, word);
    }
  }

  __device__ __forceinline__ void partners(u32 (&x)[kElements], u32 a, u32 b, u32 a_signs, u32 b_signs, int j) const {
    if constexpr (kCodes4<T>) {
      u32 a_codes[2] = {a, 0}, b_codes[2] = {b, 0};
      if constexpr (kSame<T, Turbo3>) {
        join(a_codes, a, a_signs, j);
        join(b_codes, b, b_signs, j);
      } else if constexpr (kElements < 8) {
        a_codes[0] >>= 4 * kElements * place.part();
        b_codes[0] >>= 4 * kElements * place.part();
      }
#pragma unroll
      for (int eight = 0; eight < (kElements + 7) / 8; eight++) {
        u32 even, odd;
        interleave(a_codes[eight], b_codes[eight], even, odd);
        u32 of_even[4], of_odd[4];
        look_up(of_even, even, j);
        look_up(of_odd, odd, j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (8 * eight + 2 * i < kElements) x[8 * eight + 2 * i] = of_even[i], x[8 * eight + 2 * i + 1] = of_odd[i];
        }
      }
    } else {
      const u32 low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
      if constexpr (kSame<T, Q8_0>) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          x[i] = subtract_half2(__byte_perm(low, 0x64646464u, i == 0 ? 0x4240 : 0x4341), 0x64806480u);
          x[2 + i] = subtract_half2(__byte_perm(high, 0x64646464u, i == 0 ? 0x4240 : 0x4341), 0x64806480u);
        }
      } else {
        fields<kElements / 2, 2>(x, low);
        fields<kElements / 2, 2>(x + 1, high);
      }
    }
  }
};

// ---- 32 cells of one head: two tiles of 16, of which a lane (g = lane / 4, t = lane % 4) holds a share ---------------------------------

// 16 bytes of a page to v, if `wanted`; zeros where the page has no such cells.
template <bool kGuarded>
__device__ __forceinline__ void load_cells(uint4& v, const u8* address, bool inside, bool wanted) {
  if (kGuarded && !inside) {
    v = make_uint4(0, 0, 0, 0);
  } else {
    load16_in_order(v, address, wanted);
  }
}

// Keys: the slots of t of cells 4 g .. 4 g + 3, which are rows g and g + 8 of the first tile and of the second.
template <typename T, int kDim, int kPageCells, bool kTable>
struct KeyReader {
  using Place = Slots<T, kDim, 4>;
  using Format = RowFormat<T, kDim>;
  static constexpr int kLoads = kSame<T, Half> ? 4 : kSame<T, Turbo3> ? 2 : 1;  // of 16 bytes, for one slot of 32 cells
  Decoder<T, kDim, 4, kTable> decoder;

  // What a lane adds to the address of its cells.
  __device__ __forceinline__ int offset() const {
    const int g = threadIdx.x % 32 / 4;
    return 4 * g * Format::kCodeBytes + 16 * decoder.place.first_word();
  }
  // Slot j of cells 32 unit, ...
  __device__ __forceinline__ void load(uint4* r, const u8* cells, int unit, int j, bool wanted) const {
    const bool inside = threadIdx.x % 32 / 4 < kPageCells / 4;
    const int word = Place::kStep * j, first = decoder.place.first_word();
    cells += 32 * unit * Format::kCodeBytes;
    if constexpr (kSame<T, Half>) {
#pragma unroll
      for (int i = 0; i < 4; i++) load_cells<kPageCells < 32>(r[i], cells + i * Format::kCodeBytes + 16 * word, inside, wanted);
    } else {
      load_cells<kPageCells < 32>(r[0], cells + 16 * word, inside, wanted);
      if constexpr (kLoads == 2) load_cells<kPageCells < 32>(r[1], cells + 16 * (word / 2 + kDim / 16 + first / 2 - first), inside, wanted);
    }
  }
  // Of the lane's cell i: elements 2 e and 2 e + 1 of slot j to x[e].
  __device__ __forceinline__ void neighbours(u32 (&x)[Place::kElements / 2], const uint4* r, int i, int j) const {
    if constexpr (kSame<T, Half>) {
#pragma unroll
      for (int e = 0; e < Place::kElements / 2; e++) {
        x[e] = word_of(r[i], e);
        if (Place::kParts == 2 && decoder.place.part() == 1) x[e] = word_of(r[i], e + 2);
      }
    } else {
      decoder.neighbours(x, word_of(r[0], i), kLoads == 2 ? word_of(r[kLoads - 1], i) : 0u, j);
    }
  }
};

// Values: the slots of g of cells 8 t .. 8 t + 7. Partners are cells 8 t + i and 8 t + 4 + i, for i = 0 and 1 in the first tile, 2 and 3 in the second.
template <typename T, int kDim, int kPageCells, bool kTable>
struct ValueReader {
  using Place = Slots<T, kDim, 8>;
  using Format = RowFormat<T, kDim>;
  static constexpr int kTiles = kSame<T, Half> ? 1 : 2;  // that a load serves
  static constexpr int kLoads = kSame<T, Half> || kSame<T, Turbo3> ? 4 : 2;
  Decoder<T, kDim, 8, kTable> decoder;

  __device__ __forceinline__ int offset() const {
    const int t = threadIdx.x % 4;
    return 8 * t * Format::kCodeBytes + 16 * decoder.place.first_word();
  }
  // Slot j of cells 32 unit, ... of the tiles from `tile` on.
  __device__ __forceinline__ void load(uint4* r, const u8* cells, int unit, int j, int tile, bool wanted) const {
    const bool inside = threadIdx.x % 4 < kPageCells / 8;
    const int word = Place::kStep * j, first = decoder.place.first_word();
    cells += 32 * unit * Format::kCodeBytes;
    if constexpr (kSame<T, Half>) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        load_cells<kPageCells < 32>(r[k], cells + (2 * tile + k / 2 + k % 2 * 4) * Format::kCodeBytes + 16 * word, inside, wanted);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        load_cells<kPageCells < 32>(r[k], cells + 4 * k * Format::kCodeBytes + 16 * word, inside, wanted);
        if constexpr (kLoads == 4) {
          load_cells<kPageCells < 32>(r[2 + k], cells + 4 * k * Format::kCodeBytes + 16 * (word / 2 + kDim / 16 + first / 2 - first), inside, wanted);
        }
      }
    }
  }
  // Of cells 8 t + i and 8 t + 4 + i: element e of slot j to x[e].
  __device__ __forceinline__ void partners(u32 (&x)[Place::kElements], const uint4* r, int i, int j) const {
    if constexpr (kSame<T, Half>) {
      const uint4 a = r[i % 2 * 2], b = r[i % 2 * 2 + 1];
#pragma unroll
      for (int e = 0; e < Place::kElements; e += 2) {
        u32 both[2] = {word_of(a, e / 2), word_of(b, e / 2)};
#pragma unroll
        for (int part = 1; part < Place::kParts; part++) {
          if (decoder.place.part() != part) continue;
          both[0] = word_of(a, (part * Place::kElements + e) / 2), both[1] = word_of(b, (part * Place::kElements + e) / 2);
        }
        x[e] = __byte_perm(both[0], both[1], 0x5410);
        x[e + 1] = __byte_perm(both[0], both[1], 0x7632);
      }
    } else {
      const bool planes = kLoads == 4;
      decoder.partners(x, word_of(r[0], i), word_of(r[1], i), planes ? word_of(r[2 % kLoads], i) : 0u, planes ? word_of(r[3 % kLoads], i) : 0u, j);
    }
  }
};
