// How the partial attention states of a step's pages become its result.
//
// Formula   out[h] = sum_i w_i part_out[i][h] / sum_i w_i with w_i = exp(part_lse[i][h] - max_i part_lse[i][h]); an empty part (0, -inf) is the identity.
// Order     It depends on the number of parts alone, not on how the pages were divided into launches. Up to kMergedWithin parts are merged by the block that ends
//           last of those that attend (merge_when_last), in index order; more by attn_merge.cu, in its order.
#pragma once

#include "online_softmax.cuh"

constexpr int kMergedWithin = 16;

// Called by every block of the launch that holds the last part, when its threads have written heads head .. head + heads - 1 of one of launch_parts parts: the
// last block to come merges all num_parts <= kMergedWithin parts of these heads. arrivals: their counter, 0 before and after. part_out [parts][H][Dv],
// part_lse [parts][H], out [H][Dv].
template <int kThreads, int kValueDim>
__device__ __forceinline__ void merge_when_last(
    const float* part_out, const float* part_lse, u32* arrivals, float* out, int num_parts, int launch_parts, int num_heads, int head, int heads) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {  // what the others of the block wrote before the barrier is released together with what this thread wrote
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals), "r"(launch_parts - 1) : "memory");  // the last makes it 0
    last = before == launch_parts - 1;
  }
  __syncthreads();
  if (!last) return;
  for (int item = threadIdx.x; item < heads * (kValueDim / 4); item += kThreads) {
    const int h = item / (kValueDim / 4), column = item % (kValueDim / 4) * 4;
    const float* lse = part_lse + head + h;
    const float* part = part_out + i64(head + h) * kValueDim + column;
    float4 x[kMergedWithin];
    float weight[kMergedWithin], m = -infinity();
#pragma unroll
    for (int i = 0; i < kMergedWithin; i++) {
      weight[i] = i < num_parts ? fresh(lse + i * num_heads) : -infinity();
      x[i] = i < num_parts ? fresh(reinterpret_cast<const float4*>(part + i * num_heads * kValueDim)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kMergedWithin; i++) m = fmaxf(m, weight[i]);
    const float base = softmax_base(m);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float norm = 0.0f;
#pragma unroll
    for (int i = 0; i < kMergedWithin; i++) {
      const float w = weight[i] == -infinity() ? 0.0f : expf(weight[i] - base);
      norm += w;
      total.x = __fadd_rn(total.x, __fmul_rn(w, x[i].x));
      total.y = __fadd_rn(total.y, __fmul_rn(w, x[i].y));
      total.z = __fadd_rn(total.z, __fmul_rn(w, x[i].z));
      total.w = __fadd_rn(total.w, __fmul_rn(w, x[i].w));
    }
    norm = softmax_norm(norm);
    *reinterpret_cast<float4*>(out + i64(head + h) * kValueDim + column) = make_float4(total.x * norm, total.y * norm, total.z * norm, total.w * norm);
  }
}
