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
      eight.load(cells.codes(cell), lane);
      const float scale = half_bits_to_float(fresh(cells.scales(cell) + lane * 8 / RowFormat<T, kDim>::kGroup));
      const uint4 levels = eight.levels();
      const u32 words[4] = {levels.x, levels.y, levels.z, levels.w};
#pragma unroll
      for (int e = 0; e < 8; e++) scratch[lane * 8 + e] = __fmul_rn(half_bits_to_float(u16(words[e / 2] >> 16 * (e % 2))), scale);
    }
    __syncwarp();
    row.take(scratch);
  } else {
    const T* source = reinterpret_cast<const T*>(cells.codes(cell));
#pragma unroll
    for (int i = 0; i < row.kCount; i++) row.x[i] = row.element(i) < kDim ? to_float(fresh(source + row.element(i))) : 0.0f;
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void copy_row(const HeadCells<T, kDim>& source, const HeadCells<T, kDim>& target, int cell) {
  using Format = RowFormat<T, kDim>;
  const int lane = threadIdx.x % 32;
  const u32* words = reinterpret_cast<const u32*>(source.codes(cell));
  u32* const to_words = reinterpret_cast<u32*>(const_cast<u8*>(target.codes(cell)));
  for (int w = lane; w < Format::kCodeBytes / 4; w += 32) to_words[w] = fresh(words + w);
  if (lane < Format::kScales) const_cast<u16*>(target.scales(cell))[lane] = fresh(source.scales(cell) + lane);
}

template <typename Source, typename Target, int kDim>
__device__ __forceinline__ void reencode_cells(const HeadCells<Source, kDim>& source, const HeadCells<Target, kDim>& target, float* scratch) {
  for (int cell = blockIdx.z * kCells + threadIdx.x / 32; cell < int(blockIdx.z + 1) * kCells; cell += kWarps) {
    if constexpr (kSame<Source, Target>) {
      copy_row(source, target, cell);
    } else {
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
