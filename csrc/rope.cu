// Rotary position embedding: a table of (cos, sin) of one step, and the rotation of heads by it, in place.
//
// rope_table   out[t][i] = magnitude * (cos, sin)(pi * (position[0] + t) * frequency[i]); frequencies in half turns a position, double.
//              The angle is formed and reduced in double (sincospi reduces exactly), so that cell 1,000,000 is as precise as cell 0;
//              only the result is rounded to float. One thread an entry. Bound: double arithmetic, once a step.
// rope         interleaved: pairs (2i, 2i+1); halves: pairs (i, i + pairs). (a, b) -> (a cos - b sin, a sin + b cos).
//              A thread turns kPairs neighbouring pairs of one head. Bound: memory, 8 bytes an element of the rotated part.
// Operands     position i32 [1]; frequency f64 [pairs]; table f32 [T][pairs][2]; x f32 [T][H][D], pairs <= D / 2.
// Oracle       reference.rope_table, reference.rope
#include "common.cuh"

template <int kThreads>
__global__ void __launch_bounds__(kThreads) rope_table(
    const int* __restrict__ position,      // [1]
    const double* __restrict__ frequency,  // [pairs]
    float2* __restrict__ out,              // [T][pairs]
    i64 entries, int pairs, double magnitude) {
  const i64 entry = i64(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= entries) return;
  const double cell = double(position[0]) + double(entry / pairs);
  double sine, cosine;
  sincospi(cell * frequency[entry % pairs], &sine, &cosine);
  out[entry] = make_float2(float(cosine * magnitude), float(sine * magnitude));
}

// Where the two elements of a pair lie: side by side, or `pairs` apart.
struct Interleaved {
  static constexpr bool kAdjacent = true;
};
struct Halves {
  static constexpr bool kAdjacent = false;
};

__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float first = a * cosine - b * sine;
  b = a * sine + b * cosine;
  a = first;
}

// kPairs 2 where pairs and head_dim allow aligned vectors, else 1. Block: part of one row; 32-bit division suffices inside a row.
template <typename Style, int kPairs, int kThreads>
__global__ void __launch_bounds__(kThreads) rope(
    float* __restrict__ x,            // [T][H][D]
    const float* __restrict__ table,  // [T][pairs][2]
    int num_heads, int head_dim, int pairs) {
  static_assert(kPairs == 1 || kPairs == 2, "one pair, or two that load together");
  const int groups = pairs / kPairs;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  if (item >= num_heads * groups) return;
  const i64 row = blockIdx.x;
  const int pair = item % groups * kPairs;
  const float* angle = table + (row * pairs + pair) * 2;
  float* base = x + (row * num_heads + item / groups) * head_dim;
  if constexpr (kPairs == 1) {
    float& a = base[Style::kAdjacent ? 2 * pair : pair];
    float& b = base[Style::kAdjacent ? 2 * pair + 1 : pair + pairs];
    turn(a, b, angle[0], angle[1]);
  } else {
    const float4 c = *reinterpret_cast<const float4*>(angle);
    if constexpr (Style::kAdjacent) {
      float4 v = *reinterpret_cast<float4*>(base + 2 * pair);
      turn(v.x, v.y, c.x, c.y);
      turn(v.z, v.w, c.z, c.w);
      *reinterpret_cast<float4*>(base + 2 * pair) = v;
    } else {
      float2 a = *reinterpret_cast<float2*>(base + pair), b = *reinterpret_cast<float2*>(base + pair + pairs);
      turn(a.x, b.x, c.x, c.y);
      turn(a.y, b.y, c.z, c.w);
      *reinterpret_cast<float2*>(base + pair) = a;
      *reinterpret_cast<float2*>(base + pair + pairs) = b;
    }
  }
}
