// Weights of any type, from their device form, as f16 [rows][columns] for products with many rows.
//
// Values are the oracle's float32, rounded to the nearest f16; finite ones beyond +-65504 become +-65504. What that costs: relative errors
// of at most 2^-11 in weights of 6.1e-5 to 65504 (none for F16 and BF16 there), absolute ones of at most 3e-8 in smaller weights.
// A quantised weight's own step is at least 2^-8 of the largest weight of its block.
// Operands  planes of TYPE; out f16 [num_rows][columns], rows first_tile * 16 onwards.
// Mapping   a warp takes one span of one tile; a lane stores 4 neighbouring columns (8 bytes) of each of its two rows at a time, the four
//           lanes of a quad fill 32-byte sectors.
// Bound     memory: the weight's bytes in, 2 bytes a weight out.
// Oracle    quants.dequantise rounded by NumPy, bit for bit
#include "quants.cuh"

__device__ __forceinline__ u16 saturated_half(float x) {
  if (fabsf(x) < infinity()) x = fminf(fmaxf(x, -65504.0f), 65504.0f);  // infinities and NaN stay what they are
  return float_to_half_bits(x);
}

template <int TYPE>
__global__ void __launch_bounds__(256) dequantise(
    const u8* __restrict__ p0, const u8* __restrict__ p1, const u8* __restrict__ p2, const u8* __restrict__ p3,  // planes
    u16* __restrict__ out,  // [num_rows][columns]
    int first_tile, int num_rows, int columns, int spans) {
  using Q = Quant<TYPE>;
  const int lane = threadIdx.x & 31, span = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (span >= spans) return;
  const i64 tile = i64(first_tile) + blockIdx.y;
  Q q;
  q.load(Planes{{p0, p1, p2, p3}}, tile * spans + span, lane);
  q.open();
  const int first_row = blockIdx.y * kTileRows + (lane >> 2);
#pragma unroll
  for (int step = 0; step < Q::kSpan / kStepColumns; step++) {
#pragma unroll
    for (int quad = 0; quad < 8; quad++) {
      const int sub = quad >> 2, m = quad >> 1 & 1, h = quad & 1;
      const int row = first_row + h * 8, column = span * Q::kSpan + step * kStepColumns + sub * 32 + m * 16 + (lane & 3) * 4;
      u16 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = saturated_half(weight_value(q, step, sub, m, h, i));
      if (row >= num_rows) continue;
      u16* target = out + i64(row) * columns + column;
      if (columns % 4 == 0) {
        if (column < columns) *reinterpret_cast<uint2*>(target) = make_uint2(v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (column + i < columns) target[i] = v[i];
      }
    }
  }
}
