// The types of the KV cache: element tags beside Half, Bf16 and float (common.cuh), and how a head's cells of each lie in a page.
//
// A plain type stores a row of D elements as they are, a page [P][D] of each head. A coded one stores codes, 32-bit words whose bits kv_codes.cuh tells, and a
// scale, a half, for every group of n elements: a page holds, for each head, words u32 [P/4][words][4 cells] and behind them scales f16 [P/4][D / n][4 cells].
// So 16 bytes are the same word of four neighbouring cells, a lane's load in attention, where cells as such would be too narrow: a row of turbo2 has
// 32 bytes for 8 lanes. rollkv/kv_types.py and kv_page.py have the same facts.
#pragma once

#include "common.cuh"

struct Q8_0 {};    // 8 bits an element, uniform levels, groups of 32
struct Q4_0 {};    // 4 bits
struct Turbo4 {};  // 4 bits, the levels that suit a normal distribution; groups of rotation_group(D), always rotated (rotate.cuh)
struct Turbo3 {};  // 3 bits
struct Turbo2 {};  // 2 bits

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename T>
constexpr bool kTurbo = kSame<T, Turbo4> || kSame<T, Turbo3> || kSame<T, Turbo2>;
template <typename T>
constexpr bool kCoded = kSame<T, Q8_0> || kSame<T, Q4_0> || kTurbo<T>;

// Elements that are rotated together: the largest power of two up to 128 that divides the head size.
constexpr int rotation_group(int dim) {
  int size = 128;
  while (dim % size != 0) size /= 2;
  return size;
}

// The rows of a head: bytes of elements or codes, elements of a group (all, where there are no scales), scales.
template <typename T, int kDim>
struct RowFormat {
  static_assert(kDim % 16 == 0, "head sizes are multiples of 16");
  static_assert(kTurbo<T> || !kCoded<T> || kDim % 32 == 0, "groups of 32");

  static constexpr int code_bytes() {
    if constexpr (kSame<T, Q8_0>) return kDim;
    if constexpr (kSame<T, Q4_0> || kSame<T, Turbo4>) return kDim / 2;
    if constexpr (kSame<T, Turbo3>) return (kDim / 16 + (kDim + 31) / 32) * 4;
    if constexpr (kSame<T, Turbo2>) return kDim / 4;
    return kDim * int(sizeof(T));
  }
  static constexpr int kCodeBytes = code_bytes(), kWords = kCodeBytes / 4;
  static constexpr int kGroup = kTurbo<T> ? rotation_group(kDim) : kCoded<T> ? 32 : kDim;
  static constexpr int kScales = kCoded<T> ? kDim / kGroup : 0;
  static constexpr int kRowBytes = kCodeBytes + 2 * kScales;
};

// The cells of one head in one page.
template <typename T, int kDim>
struct HeadCells {
  using Format = RowFormat<T, kDim>;
  const u8* first;
  int page_cells;

  // A plain cell's row.
  __device__ __forceinline__ const T* row(int cell) const { return reinterpret_cast<const T*>(first + cell * Format::kCodeBytes); }
  // One word of a coded cell's row, and the scale of one of its groups.
  __device__ __forceinline__ const u32* word(int cell, int index) const {
    return reinterpret_cast<const u32*>(first) + (cell / 4 * Format::kWords + index) * 4 + cell % 4;
  }
  __device__ __forceinline__ const u16* scale(int cell, int group) const {
    return reinterpret_cast<const u16*>(first + page_cells * Format::kCodeBytes) + (cell / 4 * Format::kScales + group) * 4 + cell % 4;
  }
};
