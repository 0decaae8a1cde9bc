// A step's queries once more, turned as another band of pages asks for: what qkv_append.cu does to them and nothing else, in equal bits.
//
// Formula   head_rows.cuh; then rotate.cuh, where the keys are rotated.
// Operands  qkv f32 [T][columns], of which the first H*Dk are the queries; q_norm f32 [Dk] or null; table f32 [T][pairs][2], pairs <= Dk / 2; q f32 [T][H*Dk].
// Mapping   block (t, 8 heads), a warp a head, its row in shared memory.
// Bound     memory: 8 T H Dk bytes.
// Oracle    reference.rms_norm, reference.rope
#include "head_rows.cuh"
#include "rotate.cuh"

constexpr int kWarps = 8;

template <int kKeyDim>
__global__ void __launch_bounds__(kWarps * 32) queries(
    const float* qkv,                  // [T][columns]
    const float* __restrict__ q_norm,  // [Dk] or null
    const float* table,                // [T][pairs][2]
    float* q,                          // [T][H*Dk]
    int columns, int num_heads, int pairs, int interleaved, int key_rotated, float eps) {
  __shared__ float scratch[kWarps][kKeyDim];
  __shared__ float2 angles[kKeyDim / 2];
  const int t = blockIdx.x, warp = threadIdx.x / 32, head = blockIdx.y * kWarps + warp;
  let_next_begin();
  wait_for_previous();

  load_angles<kWarps * 32>(angles, table + i64(t) * pairs * 2, nullptr, pairs);
  __syncthreads();
  if (head >= num_heads) return;
  HeadRow<kKeyDim> x;
  x.load(qkv + i64(t) * columns + head * kKeyDim);
  norm_and_turn(x, q_norm, eps, Rotation{angles, pairs, interleaved != 0}, scratch[warp]);
  if (key_rotated) rotate(x);
  x.store(q + (i64(t) * num_heads + head) * kKeyDim);
}
