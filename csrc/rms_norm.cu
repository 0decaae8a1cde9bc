// out = x / sqrt(mean(x^2) + eps) * weight, over runs of n columns.
//
// Operands  x, out f32 [runs][n] (T rows of m runs each, runs = T * m); weight f32 [n]. out may be x.
// Mapping   short runs (query and key norm): one warp a run, 8 runs a block. Long runs (a whole row): one block a run, 16 bytes a thread
//           and step. A run's sum is added in an order that n alone decides: its bits do not depend on the number of rows.
// Bound     memory: 8 bytes an element (the second read of x comes from L1); at T = 1 the latency of one block, hence its many threads.
// Oracle    reference.rms_norm
#include "common.cuh"

// kThreads a run, kRuns runs a block; kWidth columns a load: 4, or 1 where n is no multiple of 4.
template <int kThreads, int kRuns, int kWidth>
__global__ void __launch_bounds__(kThreads * kRuns) rms_norm(
    const float* x,                   // [runs][n]
    const float* __restrict__ weight, // [n]
    float* out,                       // [runs][n]
    i64 runs, int n, float eps) {
  static_assert(kRuns == 1 || kThreads == 32, "several runs share a block only as whole warps");
  const i64 run = i64(blockIdx.x) * kRuns + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  if (run >= runs) return;  // whole warps leave, and only where no barrier follows (kRuns > 1)
  const float* row = x + run * n;
  float squares = 0.0f;
  for (int i = thread * kWidth; i < n; i += kThreads * kWidth) {
    if constexpr (kWidth == 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + i);
      squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    } else {
      squares += row[i] * row[i];
    }
  }
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(squares) / float(n) + eps);
  float* target = out + run * n;
  for (int i = thread * kWidth; i < n; i += kThreads * kWidth) {
    if constexpr (kWidth == 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + i), w = *reinterpret_cast<const float4*>(weight + i);
      *reinterpret_cast<float4*>(target + i) = make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
    } else {
      target[i] = row[i] * scale * weight[i];
    }
  }
}
