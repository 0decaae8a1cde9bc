// The (cos, sin) table of one step's rotary position embedding: out[t][i] = magnitude * (cos, sin)(pi * (position[0] + t) * frequency[i]).
//
// Frequencies are in half turns a position, double. The angle is formed and reduced in double (sincospi reduces exactly), so that cell
// 1,000,000 is as precise as cell 0; only the result is rounded to float.
// Operands  position i32 [1]; frequency f64 [pairs]; out f32 [T][pairs][2].
// Mapping   one thread an entry. Bound: double arithmetic, once a step.
// Oracle    reference.rope_table
#include "common.cuh"

template <int kThreads>
__global__ void __launch_bounds__(kThreads) rope_table(
    const int* position,                   // [1]
    const double* __restrict__ frequency,  // [pairs]
    float2* out,                           // [T][pairs]
    i64 entries, int pairs, double magnitude) {
  let_next_begin();
  wait_for_previous();
  const i64 entry = i64(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= entries) return;
  const double cell = double(fresh(position)) + double(entry / pairs);
  double sine, cosine;
  sincospi(cell * frequency[entry % pairs], &sine, &cosine);
  out[entry] = make_float2(float(cosine * magnitude), float(sine * magnitude));
}
