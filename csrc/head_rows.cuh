// How a head's row of a layer's product becomes a query or a key.
//
// Formula   head = x / sqrt(mean(x^2) + eps) * norm, where there is a norm; then pairs (a, b) -> (a cos - b sin, a sin + b cos): interleaved (2i, 2i+1),
//           or halves (i, i + pairs).
// A warp takes a row, lane l its elements l, l + 32, ... Every operation is written out, roundings and all, so that prefill and decode make equal bits.
// Oracle    reference.rms_norm, reference.rope
#pragma once

#include "common.cuh"

// One lane's elements.
template <int kDim>
struct HeadRow {
  static constexpr int kCount = (kDim + 31) / 32;
  float x[kCount];

  __device__ __forceinline__ void load(const float* source) {  // [kDim], written by the kernel before
#pragma unroll
    for (int i = 0; i < kCount; i++) x[i] = element(i) < kDim ? fresh(source + element(i)) : 0.0f;
  }
  __device__ __forceinline__ void take(const float* row) {  // [kDim], in shared memory
#pragma unroll
    for (int i = 0; i < kCount; i++) x[i] = element(i) < kDim ? row[element(i)] : 0.0f;
  }
  __device__ __forceinline__ void store(float* target) const {  // [kDim]
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (element(i) < kDim) target[element(i)] = x[i];
    }
  }
  static __device__ __forceinline__ int element(int i) { return threadIdx.x % 32 + 32 * i; }
};

// How far heads turn with their position: all of a token's queries that a block has alike, and so its keys.
struct Rotation {
  const float2* angles;  // [pairs] (cos, sin), in shared memory
  int pairs;
  bool interleaved;

  __device__ __forceinline__ bool turns(int d) const { return d < 2 * pairs; }
  __device__ __forceinline__ bool second(int d) const { return interleaved ? d & 1 : d >= pairs; }  // of its pair
  __device__ __forceinline__ int partner(int d) const { return interleaved ? d ^ 1 : second(d) ? d - pairs : d + pairs; }
  __device__ __forceinline__ float2 angle(int d) const { return angles[interleaved ? d / 2 : second(d) ? d - pairs : d]; }
};

// A block's copy of the angles [pairs][2] of a token's queries, and behind them those of its keys if it has any (else null); in use behind a barrier.
template <int kThreads>
__device__ __forceinline__ void load_angles(float2* angles, const float* of_queries, const float* of_keys, int pairs) {
  for (int i = threadIdx.x; i < (of_keys == nullptr ? 1 : 2) * pairs; i += kThreads) {
    angles[i] = fresh(reinterpret_cast<const float2*>(i < pairs ? of_queries : of_keys) + (i < pairs ? i : i - pairs));
  }
}

// Norms (norm: [kDim] or null) and turns a row. `scratch`: kDim floats of shared memory that belong to the warp.
template <int kDim>
__device__ __forceinline__ void norm_and_turn(HeadRow<kDim>& row, const float* norm, float eps, const Rotation& rotation, float* scratch) {
  constexpr int kCount = HeadRow<kDim>::kCount;
  if (norm != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i++) squares = __fmaf_rn(row.x[i], row.x[i], squares);
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(squares), float(kDim)), eps)));
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int d = HeadRow<kDim>::element(i);
      if (d < kDim) row.x[i] = __fmul_rn(__fmul_rn(row.x[i], scale), norm[d]);
    }
  }
  __syncwarp();  // scratch of the row before has been read
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const int d = HeadRow<kDim>::element(i);
    if (d < kDim) scratch[d] = row.x[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const int d = HeadRow<kDim>::element(i);
    if (!rotation.turns(d)) continue;
    const float2 angle = rotation.angle(d);
    const float across = __fmul_rn(scratch[rotation.partner(d)], angle.y);
    row.x[i] = __fmaf_rn(row.x[i], angle.x, rotation.second(d) ? across : -across);
  }
}
