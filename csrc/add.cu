// x += y, elementwise: the residual connection.
//
// Operands  x, y f32 [count].
// Mapping   a thread takes kWidth neighbouring elements: 4 (16-byte loads), or 1 where the count is no multiple of 4.
// Bound     memory: 12 bytes an element.
#include "common.cuh"

template <int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) add(
    float* __restrict__ x,        // [count]
    const float* __restrict__ y,  // [count]
    i64 count) {
  const i64 i = (i64(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i >= count) return;
  if constexpr (kWidth == 4) {
    float4 a = *reinterpret_cast<const float4*>(x + i);
    const float4 b = *reinterpret_cast<const float4*>(y + i);
    a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
    *reinterpret_cast<float4*>(x + i) = a;
  } else {
    x[i] += y[i];
  }
}
