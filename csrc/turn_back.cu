// What attention over rotated values gives, back in the model's frame: x = sigma H x over every group of a head's columns, in place.
//
// Formula   rotate.cuh
// Operands  x f32 [rows][D], a row a token and head.
// Mapping   a warp a row, lane l its columns l, l + 32, ...
// Bound     memory: 8 rows D bytes; at one token the latency of a load and a store.
// Oracle    rollkv/kv_codes.py, bit for bit
#include "rotate.cuh"

constexpr int kWarps = 4;

template <int kDim>
__global__ void __launch_bounds__(kWarps * 32) turn_back(
    float* x,  // [rows][D]
    int rows) {
  const i64 row = i64(blockIdx.x) * kWarps + threadIdx.x / 32;
  let_next_begin();
  wait_for_previous();
  if (row >= rows) return;
  HeadRow<kDim> columns;
  columns.load(x + row * kDim);
  rotate_back(columns);
  columns.store(x + row * kDim);
}
