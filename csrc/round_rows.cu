// Around a large product in f16: activations to f16 with a power of two a row, and the way back.
//
// round_rows   k = 0, or the least k with max |row| <= 32768 * 2^k where the row exceeds 32768; out = x * 2^-k, row_scale = 2^k. Powers of two
//              are exact, so a scale costs no precision: entries below 2^-24 * 2^k (relative to the row's largest: 2^-39) vanish.
// scale_bias   out = out * row_scale + bias, in place, rounded twice; a row with scale 1 and no bias is left alone.
// Operands  x f32 [T][columns]; x16 f16 [T][columns]; row_scale f32 [T]; out f32 [T][N]; bias f32 [N] or null.
// Mapping   round_rows: a block a row, two passes, the second out of L2. scale_bias: a block takes 1024 columns of a row.
// Bound     memory: 6 bytes an element; 8 bytes an element where there is something to do.
// Oracle    NumPy's float16, bit for bit
#include "common.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) round_rows(
    const float* __restrict__ x,      // [T][columns]
    u16* __restrict__ x16,            // [T][columns]
    float* __restrict__ row_scale,    // [T]
    int columns) {
  const float* row = x + i64(blockIdx.x) * columns;
  u16* out = x16 + i64(blockIdx.x) * columns;
  const bool vectors = columns % 4 == 0;
  float most = 0.0f;
  if (vectors) {
    for (int i = threadIdx.x; i < columns / 4; i += kThreads) {
      const float4 v = reinterpret_cast<const float4*>(row)[i];
      most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
    }
  } else {
    for (int i = threadIdx.x; i < columns; i += kThreads) most = fmaxf(most, fabsf(row[i]));
  }
  most = block_max<kThreads>(most);
  // Exponent of the power of two at or above most / 2^15. Non-finite rows keep scale 1 and stay non-finite.
  int k = 0;
  if (most > 32768.0f && most < infinity()) {
    const u32 bits = __float_as_uint(most);
    k = int(bits >> 23) - 127 - 15 + ((bits & 0x7fffffu) != 0);
  }
  const float down = __int_as_float((127 - k) << 23);
  if (threadIdx.x == 0) row_scale[blockIdx.x] = __int_as_float((127 + k) << 23);
  if (vectors) {
    for (int i = threadIdx.x; i < columns / 4; i += kThreads) {
      const float4 v = reinterpret_cast<const float4*>(row)[i];
      reinterpret_cast<uint2*>(out)[i] = make_uint2(pack_half2(v.x * down, v.y * down), pack_half2(v.z * down, v.w * down));
    }
  } else {
    for (int i = threadIdx.x; i < columns; i += kThreads) out[i] = float_to_half_bits(row[i] * down);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) scale_bias(
    float* __restrict__ out,              // [T][N]
    const float* __restrict__ row_scale,  // [T]
    const float* __restrict__ bias,       // [N] or null
    int num_columns) {
  const float scale = row_scale[blockIdx.x];
  if (scale == 1.0f && bias == nullptr) return;
  float* row = out + i64(blockIdx.x) * num_columns;
  const int end = min(num_columns, int(blockIdx.y + 1) * 1024);
  for (int i = blockIdx.y * 1024 + threadIdx.x; i < end; i += kThreads) {
    const float scaled = __fmul_rn(row[i], scale);
    row[i] = bias == nullptr ? scaled : __fadd_rn(scaled, bias[i]);
  }
}
