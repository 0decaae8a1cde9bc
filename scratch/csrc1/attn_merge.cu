// Merges partial attention states into the attention of one query row.
//
// Formula   out[h] = sum_i w_i part_out[i][h] / sum_i w_i with w_i = exp(part_lse[i][h] - max_i part_lse[i][h]).
//           An empty part (lse = -inf) is the identity and its part_out is not looked at; all empty gives 0.
// Operands  part_out f32 [parts][H][Dv], part_lse f32 [parts][H], out f32 [H*Dv].
// Mapping   block = (head, 32 columns), 16 warps, a lane a column. Warp w adds parts w, w + 16, ... in index order, then the 16 sums are
//           added in order: the order depends on the number of parts alone.
// Bound     memory: parts * H * (Dv + 1) * 4 bytes, a few microseconds; mostly the launch itself.
#include "online_softmax.cuh"

constexpr int kWarps = 16;

template <int kValueDim>
__global__ void __launch_bounds__(kWarps * 32) attn_merge(
    const float* part_out,  // [parts][H][Dv]
    const float* part_lse,  // [parts][H]
    float* out,             // [H*Dv]
    int num_parts) {
  __shared__ float maxima[kWarps], weights[kWarps], sums[kWarps][33];
  const int num_heads = gridDim.x, h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.y * 32 + lane;
  const bool inside = column < kValueDim;

  let_next_begin();
  wait_for_previous();
  float m = -infinity();
  for (int i = threadIdx.x; i < num_parts; i += kWarps * 32) m = fmaxf(m, fresh(part_lse + i64(i) * num_heads + h));
  m = warp_max(m);
  if (lane == 0) maxima[warp] = m;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; i++) m = fmaxf(m, maxima[i]);
  const float base = softmax_base(m);

  float sum = 0.0f, weight = 0.0f;
#pragma unroll 4
  for (int i = warp; i < num_parts; i += kWarps) {
    const i64 part = i64(i) * num_heads + h;
    const float lse = fresh(part_lse + part);
    const bool empty = lse == -infinity();  // and not "weight > 0": a NaN must reach the result
    const float e = empty ? 0.0f : expf(lse - base);
    const float x = empty || !inside ? 0.0f : fresh(part_out + part * kValueDim + column);
    weight += e;
    sum = fmaf(e, x, sum);
  }
  sums[warp][lane] = sum;
  if (lane == 0) weights[warp] = weight;
  __syncthreads();
  if (warp == 0) {
    float total = 0.0f, norm = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; i++) {
      total += sums[i][lane];
      norm += weights[i];
    }
    if (inside) out[i64(h) * kValueDim + column] = total * softmax_norm(norm);
  }
}
