// The frame in which rotated cells are stored: H(sigma x) for every group of n = rotation_group(D) neighbouring elements of a head's row.
//
// H is the Walsh-Hadamard transform divided by sqrt(n), its own inverse; sigma are fixed signs, the first digits of pi. The rotation makes a row's elements
// nearly normal and equally large, whatever the model, so that few levels serve all (QuaRot, arXiv 2404.00456; TurboQuant, arXiv 2504.19874); it keeps
// scalar products, so a rotated query meets rotated keys as the query would meet the keys.
// Order     butterflies of strides 1, 2, 4, ..., n / 2, then the factor: the operations of rollkv/kv_codes.py, in float32 and in equal bits.
#pragma once

#include "head_rows.cuh"
#include "kv_types.cuh"

// x -> sigma x: the sign of element i of a group changes where bit i % 32 of word i / 32 of the hexadecimal fraction of pi is set.
template <int kDim>
__device__ __forceinline__ void flip_signs(HeadRow<kDim>& row) {
  constexpr int kGroup = rotation_group(kDim), kRegisters = kGroup > 32 ? kGroup / 32 : 1;
  constexpr u32 kSigma[4] = {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u};
#pragma unroll
  for (int i = 0; i < row.kCount; i++) {
    const u32 word = kSigma[i % kRegisters];
    row.x[i] = __uint_as_float(__float_as_uint(row.x[i]) ^ (word >> (threadIdx.x % 32) % kGroup << 31));
  }
}

// x -> H x. The whole warp must call.
template <int kDim>
__device__ __forceinline__ void transform(HeadRow<kDim>& row) {
  constexpr int kGroup = rotation_group(kDim);
  constexpr float kFactor = kGroup == 128 ? 0.08838834764831845f : kGroup == 64 ? 0.125f : kGroup == 32 ? 0.17677669529663687f : 0.25f;  // 1 / sqrt(n)
#pragma unroll
  for (int stride = 1; stride < kGroup; stride *= 2) {
    if (stride < 32) {  // between lanes
#pragma unroll
      for (int i = 0; i < row.kCount; i++) {
        const float other = __shfl_xor_sync(kAllLanes, row.x[i], stride);
        row.x[i] = __fadd_rn(other, threadIdx.x & stride ? -row.x[i] : row.x[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < row.kCount; i++) {
        if (i & stride / 32) continue;
        const int j = i + stride / 32;
        const float a = row.x[i], b = row.x[j];
        row.x[i] = __fadd_rn(a, b);
        row.x[j] = __fsub_rn(a, b);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < row.kCount; i++) row.x[i] = __fmul_rn(row.x[i], kFactor);
}

template <int kDim>
__device__ __forceinline__ void rotate(HeadRow<kDim>& row) {
  flip_signs(row);
  transform(row);
}

template <int kDim>
__device__ __forceinline__ void rotate_back(HeadRow<kDim>& row) {
  transform(row);
  flip_signs(row);
}
