// Writes new cells into their pages, rounded to the cache's types (to nearest, ties to even).
//
// Operands  k f32 [T][Hkv*Dk], v f32 [T][Hkv*Dv]; pool bytes [slot][K then V][Hkv][P][D]; position i32 [1] = cell of row 0.
// Mapping   block (t, part of the row); a thread moves 8 neighbouring elements: two 16-byte loads, one 16-byte store (two for float).
//           A launch serves one run of pages; rows whose cell lies outside the run are left to the launch of another run.
// Bound     memory: T * Hkv * (Dk + Dv) * (4 + 2) bytes with 16-bit caches. At T = 1 it is a launch and nothing else.
#include "kv_page.cuh"

template <typename T>
__device__ __forceinline__ void store8(T* target, const float* __restrict__ source) {
  const float4 low = reinterpret_cast<const float4*>(source)[0], high = reinterpret_cast<const float4*>(source)[1];
  if constexpr (sizeof(T) == 4) {
    reinterpret_cast<float4*>(target)[0] = low;
    reinterpret_cast<float4*>(target)[1] = high;
  } else {
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = u32(from_float<T>(x[2 * i]).bits) | u32(from_float<T>(x[2 * i + 1]).bits) << 16;
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(128) kv_append(
    const float* __restrict__ k,       // [T][Hkv*Dk]
    const float* __restrict__ v,       // [T][Hkv*Dv]
    const int* __restrict__ position,  // [1]
    u8* __restrict__ pool,             // [num_slots][page_bytes]
    int num_slots, int first_slot, int first_page, int num_pages, int num_kv_heads, int page_cells) {
  const int t = blockIdx.x;
  const int cell = position[0] + t;
  const int page = cell / page_cells - first_page;
  if (cell < 0 || page < 0 || page >= num_pages) return;
  const int vectors_k = num_kv_heads * (kKeyDim / 8), vectors_v = num_kv_heads * (kValueDim / 8);
  int e = blockIdx.y * 128 + threadIdx.x;
  if (e >= vectors_k + vectors_v) return;
  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  const i64 row = cell % page_cells;
  if (e < vectors_k) {
    const int head = e / (kKeyDim / 8), d = e % (kKeyDim / 8) * 8;
    store8(const_cast<KeyType*>(pages.keys(page, head)) + row * kKeyDim + d, k + i64(t) * num_kv_heads * kKeyDim + i64(e) * 8);
  } else {
    e -= vectors_k;
    const int head = e / (kValueDim / 8), d = e % (kValueDim / 8) * 8;
    store8(const_cast<ValueType*>(pages.values(page, head)) + row * kValueDim + d, v + i64(t) * num_kv_heads * kValueDim + i64(e) * 8);
  }
}
