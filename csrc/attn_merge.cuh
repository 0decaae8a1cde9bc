// Merges the partial attention states of a step's pages while the last of them are still being made.
//
// Formula   out[h] = sum_i w_i part_out[i][h] / sum_i w_i with w_i = exp(part_lse[i][h] - max_i part_lse[i][h]), over parts in index order;
//           an empty part (0, -inf) is the identity.
// Order     Parts 0 .. num_parts - 1 are merged in sets of `set_parts` neighbours, then the sets' states, which follow the parts in memory: the bits depend
//           on these two numbers alone, not on who merges or on how the pages are divided into launches. One set alone is the result.
// Who       A block that has written its part counts up its set's counter; the last of a set merges it, and the last of those the sets. Only blocks of
//           one launch count: launches follow each other in the order of the pages, so a set belongs to the launch that holds its last page, and the
//           whole to the launch that holds the last part. Counters are 0 before and after every launch.
// Bound     latency: a counter and a read of the states, about 2 us at the end of a launch for each of the two levels; all other sets are merged while
//           pages are read. One merge of all parts behind the pages, in a kernel of its own, took 2.6 to 8 us.
#pragma once

#include "online_softmax.cuh"

// True in every thread of the block that is the last of `count` blocks to come here, behind a barrier; it then sees what the others wrote before.
__device__ __forceinline__ bool arrives_last(u32* counter, int count) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, count - 1) == count - 1;  // which takes it back to 0
    __threadfence();
  }
  __syncthreads();
  return last;
}

// States of a layer's pages, and of their sets behind them.
struct PartStates {
  float* out;  // [num_parts + sets][H][Dv]
  float* lse;  // [num_parts + sets][H]
  int num_parts;
  int set_parts;
  int num_heads;

  __device__ __forceinline__ int sets() const { return (num_parts + set_parts - 1) / set_parts; }
  __device__ __forceinline__ i64 row(int state, int head) const { return i64(state) * num_heads + head; }
};

// Merges states first .. first + count - 1 of heads head .. head + heads - 1 into out [heads][Dv] and, unless null, lse [heads].
template <int kThreads, int kValueDim>
__device__ __forceinline__ void merge_states(const PartStates& states, int first, int count, int head, int heads, float* out, float* lse) {
  constexpr int kBatch = 8;  // states whose loads a thread has under way
  for (int item = threadIdx.x; item < heads * (kValueDim / 4); item += kThreads) {
    const int h = item / (kValueDim / 4), column = item % (kValueDim / 4) * 4;
    const float* const logs = states.lse + states.row(first, head + h);
    const float* const outs = states.out + states.row(first, head + h) * kValueDim + column;
    float4 x[kBatch];
    float l[kBatch];
    auto load = [&](int begin) {
      const float* log = logs + i64(begin) * states.num_heads;
      const float* part = outs + i64(begin) * states.num_heads * kValueDim;
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const bool there = begin + i < count;
        l[i] = there ? fresh(log) : -infinity();
        x[i] = there ? fresh(reinterpret_cast<const float4*>(part)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        log += states.num_heads, part += states.num_heads * kValueDim;
      }
    };
    load(0);
    float m = l[0];
#pragma unroll
    for (int i = 1; i < kBatch; i++) m = fmaxf(m, l[i]);
#pragma unroll 8
    for (int i = kBatch; i < count; i++) m = fmaxf(m, fresh(logs + i64(i) * states.num_heads));
    const float base = softmax_base(m);

    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float weight = 0.0f;
    for (int begin = 0;;) {
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const float w = expf(l[i] - base);
        weight += w;
        total.x = __fmaf_rn(w, x[i].x, total.x);
        total.y = __fmaf_rn(w, x[i].y, total.y);
        total.z = __fmaf_rn(w, x[i].z, total.z);
        total.w = __fmaf_rn(w, x[i].w, total.w);
      }
      begin += kBatch;
      if (begin >= count) break;
      load(begin);
    }
    const float norm = softmax_norm(weight);
    *reinterpret_cast<float4*>(out + item * 4) = make_float4(total.x * norm, total.y * norm, total.z * norm, total.w * norm);
    if (lse != nullptr && column == 0) lse[h] = softmax_lse(m, weight);
  }
}

// Called for every part of a launch over parts first_part .. first_part + launch_parts - 1 by the block that has just written heads head .. head + heads - 1
// of its state; begins with a barrier. arrivals: the counters of these heads, one a set and one for the sets. out: the result [H][Dv].
template <int kThreads, int kValueDim>
__device__ __forceinline__ void merge_when_last(
    const PartStates& states, u32* arrivals, int part, int first_part, int launch_parts, int head, int heads, float* out) {
  __syncthreads();
  const int sets = states.sets(), set = part / states.set_parts, end_part = first_part + launch_parts;
  int first = set * states.set_parts, count = min(states.set_parts, states.num_parts - first);
  if (first + count > end_part) return;  // the rest of the set comes with a later launch
  int counter = set, arriving = first + count - max(first, first_part);
  bool whole = sets == 1;
  while (arrives_last(arrivals + counter, arriving)) {
    const i64 merged = states.row(states.num_parts + set, head);
    float* const target = whole ? out + i64(head) * kValueDim : states.out + merged * kValueDim;
    merge_states<kThreads, kValueDim>(states, first, count, head, heads, target, whole ? nullptr : states.lse + merged);
    if (whole || end_part < states.num_parts) return;
    __syncthreads();
    first = states.num_parts, count = counter = sets, arriving = sets - first_part / states.set_parts, whole = true;
  }
}
