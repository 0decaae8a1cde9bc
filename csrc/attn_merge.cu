// Merges more partial attention states than the attention kernels merge themselves (attn_merge.cuh).
//
// Operands  part_out f32 [parts][H][Dv], part_lse f32 [parts][H], out f32 [H*Dv].
// Order     part i belongs to sum i % 32, which adds its parts in index order; then the sums of a warp are added in pairs of pairs, and those of the warps in order.
// Mapping   block = (head, 32 columns), 8 lanes a sum, each 4 columns. Parts are taken kTurn at a time: a thread finds the weight of one; the values of eight a
//           sum are asked for a turn ahead, the first before any weight is known.
// Bound     memory: parts * H * (Dv + 1) * 4 bytes out of L2. Instructions count as well, and those run once more than those in loops: a fetch of code that is
//           not in a cache takes as long as one of data.
#include "attn_merge.cuh"

constexpr int kThreads = 256, kSums = 32, kAhead = 8, kTurn = kSums * kAhead;
static_assert(kTurn == kThreads, "a thread has the weight of one part");

template <int kValueDim>
__global__ void __launch_bounds__(kThreads) attn_merge(
    const float* part_out,  // [parts][H][Dv]
    const float* part_lse,  // [parts][H]
    float* out,             // [H*Dv]
    int num_parts) {
  __shared__ float maxima[kThreads / 32], weights[kTurn], norms[kThreads / 32];
  __shared__ float4 sums[kThreads / 32][8];
  const int num_heads = gridDim.x, h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = threadIdx.x / 8;
  const int column = min(blockIdx.y * 32 + lane % 8 * 4, kValueDim - 4);  // a lane beyond the last columns repeats them
  const float* const lse = part_lse + h;
  const float* const value = part_out + i64(h) * kValueDim + column;
  const i64 stride = i64(num_heads) * kValueDim;
  auto load = [&](float4& x, int part) {
    if (part < num_parts) x = fresh(reinterpret_cast<const float4*>(value + part * stride));
  };

  let_next_begin();
  wait_for_previous();
  float m = -infinity();
#pragma unroll 1
  for (int i = threadIdx.x; i < num_parts; i += kThreads) m = fmaxf(m, fresh(lse + i64(i) * num_heads));
  float4 ahead[kAhead] = {};
#pragma unroll
  for (int k = 0; k < kAhead; k++) load(ahead[k], k * kSums + sum);
  m = warp_max(m);
  if (lane == 0) maxima[warp] = m;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; i++) m = fmaxf(m, maxima[i]);
  const float base = softmax_base(m);

  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float norm = 0.0f;
#pragma unroll 1
  for (int begin = 0; begin < num_parts; begin += kTurn) {
    const int mine = begin + threadIdx.x;
    const float of_mine = mine < num_parts ? fresh(lse + i64(mine) * num_heads) : -infinity();
    weights[threadIdx.x] = of_mine == -infinity() ? -1.0f : expf(of_mine - base);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kAhead; k++) {
      const float e = weights[k * kSums + sum];
      if (e >= 0.0f || e != e) {  // else the part is empty, and its values mean nothing; a NaN must reach the result
        norm += e;
        total.x = __fmaf_rn(e, ahead[k].x, total.x), total.y = __fmaf_rn(e, ahead[k].y, total.y);
        total.z = __fmaf_rn(e, ahead[k].z, total.z), total.w = __fmaf_rn(e, ahead[k].w, total.w);
      }
      load(ahead[k], begin + kTurn + k * kSums + sum);
    }
    __syncthreads();
  }
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    total.x += __shfl_xor_sync(kAllLanes, total.x, lanes), total.y += __shfl_xor_sync(kAllLanes, total.y, lanes);
    total.z += __shfl_xor_sync(kAllLanes, total.z, lanes), total.w += __shfl_xor_sync(kAllLanes, total.w, lanes);
    norm += __shfl_xor_sync(kAllLanes, norm, lanes);
  }
  if (lane < 8) sums[warp][lane] = total;
  if (lane == 0) norms[warp] = norm;
  __syncthreads();
  if (threadIdx.x < 8) {
    total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), norm = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++) {
      const float4 x = sums[i][lane];
      total.x = __fadd_rn(total.x, x.x), total.y = __fadd_rn(total.y, x.y), total.z = __fadd_rn(total.z, x.z), total.w = __fadd_rn(total.w, x.w);
      norm += norms[i];
    }
    norm = softmax_norm(norm);
    const float4 result = make_float4(total.x * norm, total.y * norm, total.z * norm, total.w * norm);
    *reinterpret_cast<float4*>(out + i64(h) * kValueDim + column) = result;
  }
}
