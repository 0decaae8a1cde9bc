// Where the cells of one layer lie, and which of them a query may see.
//
// A pool is [slot][K then V][Hkv] of a head's cells, P rows (HeadCells); page i of a run lies in slot (first_slot + i) mod num_slots. Every offset that a
// slot multiplies is 64 bits wide. A head's cells begin on a 16-byte boundary, and so does a row of D elements (D a multiple of 16) of a plain type.
#pragma once

#include "kv_types.cuh"

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
struct KvPages {
  const u8* pool;  // [num_slots][page_bytes]
  int num_slots;
  int first_slot;
  int num_kv_heads;
  int page_cells;

  __device__ __forceinline__ i64 key_bytes() const { return i64(num_kv_heads) * page_cells * RowFormat<KeyType, kKeyDim>::kRowBytes; }
  __device__ __forceinline__ i64 page_bytes() const {
    return key_bytes() + i64(num_kv_heads) * page_cells * RowFormat<ValueType, kValueDim>::kRowBytes;
  }
  __device__ __forceinline__ const u8* page(int index) const { return pool + i64((first_slot + index) % num_slots) * page_bytes(); }
  // The cells of one head in page `index` of the run.
  __device__ __forceinline__ HeadCells<KeyType, kKeyDim> key_cells(int index, int kv_head) const {
    return {page(index) + i64(kv_head) * page_cells * RowFormat<KeyType, kKeyDim>::kRowBytes, page_cells};
  }
  __device__ __forceinline__ HeadCells<ValueType, kValueDim> value_cells(int index, int kv_head) const {
    return {page(index) + key_bytes() + i64(kv_head) * page_cells * RowFormat<ValueType, kValueDim>::kRowBytes, page_cells};
  }
  // The first of them, where they are of a plain type: [P][D].
  __device__ __forceinline__ const KeyType* keys(int index, int kv_head) const {
    return reinterpret_cast<const KeyType*>(key_cells(index, kv_head).first);
  }
  __device__ __forceinline__ const ValueType* values(int index, int kv_head) const {
    return reinterpret_cast<const ValueType*>(value_cells(index, kv_head).first);
  }
};

// Cells [first_cell(p), p + 1) are visible to the query at position p; sliding_window 0 means that there is none.
__device__ __forceinline__ int first_cell(int position, int sliding_window) {
  return sliding_window > 0 && position >= sliding_window ? position - sliding_window + 1 : 0;
}

// Eight neighbouring elements of a row as they lie in memory: one 16-byte load, or two for float.
template <typename T>
struct Eight {
  static constexpr int kLoads = int(sizeof(T)) / 2;
  uint4 raw[kLoads];

  // Zeros instead of what lies there, if not `visible`: a cell that must not be seen may hold NaN.
  __device__ __forceinline__ void load(const T* row, int index, bool visible) {
#pragma unroll
    for (int i = 0; i < kLoads; i++) raw[i] = visible ? fresh16(reinterpret_cast<const uint4*>(row + index * 8) + i) : make_uint4(0, 0, 0, 0);
  }
  // The same of a row in shared memory.
  __device__ __forceinline__ void take(const T* row, int index) {
#pragma unroll
    for (int i = 0; i < kLoads; i++) raw[i] = reinterpret_cast<const uint4*>(row + index * 8)[i];
  }
  __device__ __forceinline__ void unpack(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if constexpr (kLoads == 2) {
          x[4 * i + j] = __uint_as_float(words[j]);
        } else {
          x[2 * j] = to_float(T{u16(words[j] & 0xffffu)});
          x[2 * j + 1] = to_float(T{u16(words[j] >> 16)});
        }
      }
    }
  }
};
