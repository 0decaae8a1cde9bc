// Pages in the types of the tail: every cell of one run of pages as other types store it, into another run.
//
// Formula   What the cell holds, level * scale in float32, rounded or encoded as a new cell is (kv_codes.cuh). Both runs are in one frame: nothing is rotated.
//           Codes whose type stays are copied.
// Operands  source, target: pools of bytes as in kv_page.cuh, of the same heads, cells and head sizes.
// Mapping   block (page, head of K or V, kCells cells), a warp a row.
// Bound     memory: both pages once; a page is re-encoded once in its life.
// Oracle    rollkv/kv_codes.py
#include "head_rows.cuh"
#include "kv_codes.cuh"
#include "kv_page.cuh"

constexpr int kWarps = 8, kCells = 16;  // the latter divides every page

// One cell's row. scratch: kDim floats of shared memory that belong to the warp, 16-byte aligned.
template <typename T, int kDim>
__device__ __forceinline__ void load_row(HeadRow<kDim>& row, const HeadCells<T, kDim>& cells, int cell, float* scratch) {
  const int lane = threadIdx.x % 32;
  if constexpr (kCoded<T>) {
    __syncwarp();  // scratch of the row before has been read
    if (lane < kDim / 8) {
      EightCodes<T, kDim> eight;
      eight.load(cells, cell, lane);
      const float scale = half_bits_to_float(fresh(cells.scale(cell, lane * 8 / RowFormat<T, kDim>::kGroup)));
      const uint4 levels = eight.levels();
      const u32 words[4] = {levels.x, levels.y, levels.z, levels.w};
#pragma unroll
      for (int e = 0; e < 8; e++) scratch[lane * 8 + e] = __fmul_rn(half_bits_to_float(u16(words[e / 2] >> 16 * (e % 2))), scale);
    }
    __syncwarp();
    row.take(scratch);
  } else {
    const T* source = cells.row(cell);
#pragma unroll
    for (int i = 0; i < row.kCount; i++) row.x[i] = row.element(i) < kDim ? to_float(fresh(source + row.element(i))) : 0.0f;
  }
}

// bytes: a multiple of 16.
__device__ __forceinline__ void copy_bytes(const u8* source, u8* target, int bytes) {
  for (int i = threadIdx.x * 16; i < bytes; i += kWarps * 32 * 16) {
    *reinterpret_cast<uint4*>(target + i) = fresh(reinterpret_cast<const uint4*>(source + i));
  }
}

template <typename Source, typename Target, int kDim>
__device__ __forceinline__ void reencode_cells(const HeadCells<Source, kDim>& source, const HeadCells<Target, kDim>& target, float* scratch) {
  const int first = blockIdx.z * kCells;
  if constexpr (kSame<Source, Target>) {
    using Format = RowFormat<Source, kDim>;
    const int codes = first * Format::kCodeBytes, scales = source.page_cells * Format::kCodeBytes + first * Format::kScales * 2;
    copy_bytes(source.first + codes, const_cast<u8*>(target.first) + codes, kCells * Format::kCodeBytes);
    copy_bytes(source.first + scales, const_cast<u8*>(target.first) + scales, kCells * Format::kScales * 2);
  } else {
    for (int cell = first + threadIdx.x / 32; cell < first + kCells; cell += kWarps) {
      HeadRow<kDim> row;
      load_row(row, source, cell, scratch);
      store_row(row, target, cell, scratch);
    }
  }
}

template <typename SourceKey, typename SourceValue, typename TargetKey, typename TargetValue, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kWarps * 32) reencode_pages(
    const u8* source,  // [source_slots][page bytes of the source]
    u8* target,        // [target_slots][page bytes of the target]
    int source_slots, int source_first, int target_slots, int target_first, int num_kv_heads, int page_cells) {
  __shared__ __align__(16) float scratch[kWarps][kKeyDim > kValueDim ? kKeyDim : kValueDim];
  const KvPages<SourceKey, SourceValue, kKeyDim, kValueDim> from{source, source_slots, source_first, num_kv_heads, page_cells};
  const KvPages<TargetKey, TargetValue, kKeyDim, kValueDim> to{target, target_slots, target_first, num_kv_heads, page_cells};
  const int page = blockIdx.x, head = blockIdx.y;
  let_next_begin();
  wait_for_previous();
  if (head < num_kv_heads) {
    reencode_cells(from.key_cells(page, head), to.key_cells(page, head), scratch[threadIdx.x / 32]);
  } else {
    reencode_cells(from.value_cells(page, head - num_kv_heads), to.value_cells(page, head - num_kv_heads), scratch[threadIdx.x / 32]);
  }
}
