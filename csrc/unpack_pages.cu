// Coded pages to f16 pages, which the attention kernels of prefill walk: unpacked once here, not in each of the hundreds of blocks that read a page.
//
// Formula   level * scale (kv_codes.cuh), rounded to half (to nearest, ties to even); the frame stays as it is, and halves stay as they are.
// Operands  pool bytes as in kv_page.cuh; out f16 [num_pages][K then V][Hkv][P][D], the run's pages in their order.
// Mapping   block (page, head of K or V, kThreads * kUnits eights of its cells): a thread makes kUnits times 8 neighbouring elements, whose codes are all asked
//           for before the first is needed.
// Bound     memory: the codes and scales read, 2 bytes an element written; turbo2 reads an eighth of what it writes.
// Oracle    rollkv/kv_codes.py, bit for bit
#include "kv_codes.cuh"
#include "kv_page.cuh"

constexpr int kThreads = 256, kUnits = 4;

// Some cells of one head. target: [P][D].
template <typename T, int kDim>
__device__ __forceinline__ void unpack_cells(const HeadCells<T, kDim>& cells, Half* target) {
  using Format = RowFormat<T, kDim>;
  const u32 first = blockIdx.z * kThreads * kUnits + threadIdx.x, end = cells.page_cells * (kDim / 8);
  auto cell_of = [](u32 eight) { return eight / (4 * (kDim / 8)) * 4 + eight % 4; };  // four cells by turns, as their words lie
  EightCodes<T, kDim> eights[kUnits];
  u32 scales[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    const u32 eight = first + i * kThreads, cell = cell_of(eight), index = eight / 4 % (kDim / 8);
    if (eight >= end) break;
    eights[i].load(cells, cell, index);
    if constexpr (kCoded<T>) scales[i] = fresh(cells.scale(cell, index * 8 / Format::kGroup));
  }
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    const u32 eight = first + i * kThreads;
    if (eight >= end) break;
    uint4 x = eights[i].levels();
    if constexpr (kCoded<T>) {
      const u32 scale = scales[i] | scales[i] << 16;
      x = make_uint4(multiply_half2(x.x, scale), multiply_half2(x.y, scale), multiply_half2(x.z, scale), multiply_half2(x.w, scale));
    }
    reinterpret_cast<uint4*>(target)[cell_of(eight) * (kDim / 8) + eight / 4 % (kDim / 8)] = x;
  }
}

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kThreads) unpack_pages(
    const u8* pool,  // [num_slots][page_bytes]
    Half* out,       // [num_pages][Hkv*P*(Dk + Dv)]
    int num_slots, int first_slot, int num_kv_heads, int page_cells) {
  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  const KvPages<Half, Half, kKeyDim, kValueDim> targets{reinterpret_cast<u8*>(out), int(gridDim.x), 0, num_kv_heads, page_cells};
  const int page = blockIdx.x, head = blockIdx.y;
  let_next_begin();
  wait_for_previous();
  if (head < num_kv_heads) {
    unpack_cells(pages.key_cells(page, head), const_cast<Half*>(targets.keys(page, head)));
  } else {
    unpack_cells(pages.value_cells(page, head - num_kv_heads), const_cast<Half*>(targets.values(page, head - num_kv_heads)));
  }
}
