// The residual stream: x += y, or x += y / sqrt(mean(y^2) + eps) * weight over rows.
//
// Operands  x, y f32 [count]; for add_norm x, y f32 [T][n], weight f32 [n].
// Mapping   add: a thread takes kWidth neighbouring elements, 4 (16-byte loads), or 1 where the count is no multiple of 4. add_norm: a block a
//           row, 16 bytes a thread and step; the order of a row's sum is decided by n alone.
// Bound     memory: 12 bytes an element; at one row the latency of one block, hence add_norm's many threads.
// Oracle    NumPy, bit for bit; reference.rms_norm
#include "common.cuh"

template <int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) add(
    float* x,        // [count]
    const float* y,  // [count]
    i64 count) {
  let_next_begin();
  wait_for_previous();
  const i64 i = (i64(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i >= count) return;
  if constexpr (kWidth == 4) {
    const float4 a = fresh(reinterpret_cast<const float4*>(x + i)), b = fresh(reinterpret_cast<const float4*>(y + i));
    *reinterpret_cast<float4*>(x + i) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  } else {
    x[i] = fresh(x + i) + fresh(y + i);
  }
}

// kWidth columns a load: 4, or 1 where n is no multiple of 4.
template <int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) add_norm(
    float* x,                          // [T][n]
    const float* y,                    // [T][n]
    const float* __restrict__ weight,  // [n]
    int n, float eps) {
  let_next_begin();
  wait_for_previous();
  const float* row = y + i64(blockIdx.x) * n;
  float* target = x + i64(blockIdx.x) * n;
  float squares = 0.0f;
  for (int i = threadIdx.x * kWidth; i < n; i += kThreads * kWidth) {
    if constexpr (kWidth == 4) {
      const float4 v = fresh(reinterpret_cast<const float4*>(row + i));
      squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    } else {
      const float v = fresh(row + i);
      squares += v * v;
    }
  }
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(squares) / float(n) + eps);
  for (int i = threadIdx.x * kWidth; i < n; i += kThreads * kWidth) {
    if constexpr (kWidth == 4) {
      const float4 v = fresh(reinterpret_cast<const float4*>(row + i)), w = *reinterpret_cast<const float4*>(weight + i);
      const float4 old = fresh(reinterpret_cast<const float4*>(target + i));
      *reinterpret_cast<float4*>(target + i) =
          make_float4(old.x + v.x * scale * w.x, old.y + v.y * scale * w.y, old.z + v.z * scale * w.z, old.w + v.w * scale * w.w);
    } else {
      target[i] = fresh(target + i) + fresh(row + i) * scale * weight[i];
    }
  }
}
