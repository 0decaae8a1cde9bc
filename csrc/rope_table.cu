// The (cos, sin) tables of one step's rotary position embedding: out[r][t][i] = magnitude * (cos, sin)(pi * place(r, t) * frequency[i]).
//
// Without dual chunk attention (stride 0) there is one table and the place is the cell, position[0] + t. With it there are four: of the query for pages
// of its own chunk, of the chunk before and of older ones, then of the key. The query's come times the square of 1 + 0.1 ln(L / original_context) where
// that is above 1; L is the length of the whole prompt, or the present one if that is larger.
// Frequencies are in half turns a position, double. The angle is formed and reduced in double (sincospi reduces exactly), so that cell
// 1,000,000 is as precise as cell 0; only the result is rounded to float.
// Operands  position, prompt_cells i32 [1]; frequency f64 [pairs]; out f32 [tables][T][pairs][2].
// Mapping   one thread an entry, blockIdx.y = table. Bound: double arithmetic, once a step. It is a step's first kernel and not early: it begins when all kernels of
//           the step before have ended, and so does whatever comes behind it in this step.
// Oracle    reference.rope_table
#include "common.cuh"

template <int kThreads>
__global__ void __launch_bounds__(kThreads) rope_table(
    const int* position,                   // [1]
    const int* prompt_cells,               // [1]
    const double* __restrict__ frequency,  // [pairs]
    float2* out,                           // [tables][T][pairs]
    i64 entries, int pairs, double magnitude, int stride, int chunk, int original_context) {
  constexpr int kBefore = 1, kOlder = 2, kKey = 3;
  const i64 entry = i64(blockIdx.x) * kThreads + threadIdx.x;
  const int table = blockIdx.y;
  if (entry >= entries) return;
  const int cell = fresh(position) + int(entry / pairs);
  int place = cell;
  if (stride > 0) {
    place = cell % stride;
    if (table == kBefore) place = min(place + stride, chunk);
    if (table == kOlder) place = min(2 * stride - 1, chunk);
    const int length = max(cell + 1, fresh(prompt_cells));
    if (table != kKey && length > original_context) {
      const double raised = 1.0 + 0.1 * log(double(length) / original_context);
      magnitude *= raised * raised;
    }
  }
  double sine, cosine;
  sincospi(place * frequency[entry % pairs], &sine, &cosine);
  out[table * entries + entry] = make_float2(float(cosine * magnitude), float(sine * magnitude));
}
