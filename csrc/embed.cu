// out[t] = scale * row(sequence[position[0] + t]) of a table of any type in its device form.
//
// A token outside the table, or a cell outside the sequence, gives a row of NaN (and reads nothing), so that the run's check for non-finite values reports it.
// Operands  sequence i32 [n]; position i32 [1]; planes of TYPE [vocab, columns]; out f32 [T][columns].
// Mapping   a thread takes a quarter of a span (16 columns of 64) of one row: what lane (row mod 8) * 4 + t holds. It also loads, and leaves, the
//           other row of that lane, which costs nothing beside the launch.
// Bound     the launch at T = 1; memory at many tokens (T * columns * (4 + 2 * bytes of a weight)).
// Oracle    scale * quants.dequantise, bit for bit
#include "quants.cuh"

template <int TYPE>
__global__ void __launch_bounds__(128) embed(
    const int* sequence,                                                                                         // [n]
    const int* position,                                                                                         // [1]
    const u8* __restrict__ p0, const u8* __restrict__ p1, const u8* __restrict__ p2, const u8* __restrict__ p3,  // planes
    float* out,                                                                                                  // [T][columns]
    float scale, int n, int vocab, int columns, int spans) {
  using Q = Quant<TYPE>;
  let_next_begin();
  wait_for_previous();
  const int i = blockIdx.y * 128 + threadIdx.x, span = i >> 2, t = i & 3;
  if (span >= spans) return;
  const i64 cell = i64(fresh(position)) + blockIdx.x;
  const int token = cell >= 0 && cell < n ? fresh(sequence + cell) : -1;
  const bool known = token >= 0 && token < vocab;
  const int row = known ? token : 0;
  Q q;
  q.load(Planes{{p0, p1, p2, p3}}, i64(row / kTileRows) * spans + span, (row & 7) * 4 + t);
  q.open();
#pragma unroll
  for (int step = 0; step < Q::kSpan / kStepColumns; step++) {
#pragma unroll
    for (int run = 0; run < 4; run++) {  // (s, m)
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int s = run >> 1, m = run & 1;
        const float value = row & 8 ? weight_value(q, step, s, m, 1, i) : weight_value(q, step, s, m, 0, i);
        v[i] = known ? __fmul_rn(scale, value) : __uint_as_float(0x7fc00000u);
      }
      const int column = span * Q::kSpan + step * kStepColumns + run * 16 + t * 4;
      float* target = out + i64(blockIdx.x) * columns + column;
      if (columns % 4 == 0) {
        if (column < columns) *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (column + i < columns) target[i] = v[i];
      }
    }
  }
}
