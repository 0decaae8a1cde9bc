// Merges more partial attention states than the attention kernels merge themselves (attn_merge.cuh).
//
// Operands  part_out f32 [parts][H][Dv], part_lse f32 [parts][H], out f32 [H*Dv].
// Mapping   block = (head, 32 columns), a warp a sum, a lane a column. A warp's lanes hold the weights of its first 32 parts, one each; the first values are
//           asked for before the weights are known, so up to 128 parts cost two reads in a row and a barrier or two.
// Bound     memory: parts * H * (Dv + 1) * 4 bytes, a few microseconds; mostly the launch itself.
#include "attn_merge.cuh"

constexpr int kWarps = kMergeSums, kAhead = 8;

template <int kValueDim>
__global__ void __launch_bounds__(kWarps * 32) attn_merge(
    const float* part_out,  // [parts][H][Dv]
    const float* part_lse,  // [parts][H]
    float* out,             // [H*Dv]
    int num_parts) {
  __shared__ float maxima[kWarps], weights[kWarps], sums[kWarps][33];
  const int num_heads = gridDim.x, h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.y * 32 + lane, count = (num_parts - warp + kWarps - 1) / kWarps;  // parts warp, warp + kWarps, ... of this sum
  const bool inside = column < kValueDim;
  auto log = [&](int k) { return k < count ? fresh(part_lse + i64(warp + k * kWarps) * num_heads + h) : -infinity(); };
  auto value = [&](int k) {
    return k < count && inside ? fresh(part_out + (i64(warp + k * kWarps) * num_heads + h) * kValueDim + column) : 0.0f;
  };

  let_next_begin();
  wait_for_previous();
  float ahead[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; k++) ahead[k] = value(k);
  const float first = log(lane);
  float m = first;
  for (int k = lane + 32; k < count; k += 32) m = fmaxf(m, log(k));
  m = warp_max(m);
  if (lane == 0) maxima[warp] = m;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; i++) m = fmaxf(m, maxima[i]);
  const float base = softmax_base(m);

  float sum = 0.0f, weight = 0.0f;
  auto add = [&](float e, float x) {  // e: below 0 for an empty part, whose x is not looked at
    const bool empty = e < 0.0f;      // and not "e == 0": a NaN must reach the result
    weight += empty ? 0.0f : e;
    sum = __fmaf_rn(empty ? 0.0f : e, empty ? 0.0f : x, sum);
  };
  auto exponential = [&](float lse) { return lse == -infinity() ? -1.0f : expf(lse - base); };
  float e = exponential(first);
  for (int begin = 0; begin < count; begin += 32) {  // the parts whose weights the lanes hold
    if (begin > 0) e = exponential(log(begin + lane));
#pragma unroll
    for (int k = 0; k < 32; k += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        if (begin + k > 0) ahead[i] = value(begin + k + i);
      }
#pragma unroll
      for (int i = 0; i < kAhead; i++) add(__shfl_sync(kAllLanes, e, k + i), ahead[i]);
      if (begin + k + kAhead >= count) break;
    }
  }
  sums[warp][lane] = sum;
  if (lane == 0) weights[warp] = weight;
  __syncthreads();
  if (warp == 0) {
    float total = 0.0f, norm = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; i++) {
      total = __fadd_rn(total, sums[i][lane]);
      norm += weights[i];
    }
    if (inside) out[i64(h) * kValueDim + column] = total * softmax_norm(norm);
  }
}
