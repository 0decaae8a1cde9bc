// Random cells for measurements: out[i] = (bits - 32767.5) * scale, rounded once, with the 16 bits number first + i of a seed, four in a word of
// SplitMix64. Uniform, mean 0, deviation 1 with the scale that the wrapper gives. A number depends on seed and index alone.
//
// Operands  out f32 [count].
// Mapping   a thread makes one word, four numbers, and stores 16 bytes where all four lie in out and at a multiple of 16 bytes.
// Bound     stores: 4 bytes a number, once a layer and ubatch of `ladder --fill random`.
// Oracle    reference.noise, bit for bit
#include "split_mix.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) noise(
    float* __restrict__ out,  // [count]
    u64 seed, i64 first, i64 count, float scale) {
  const i64 word = first / 4 + i64(blockIdx.x) * kThreads + threadIdx.x;
  const i64 begin = word * 4 - first;  // of its numbers in out; may lie before it
  if (begin >= count) return;
  const u64 bits = split_mix(seed, u64(word));
  float values[4];
#pragma unroll
  for (int part = 0; part < 4; part++) {
    values[part] = __fmul_rn(__fsub_rn(float(u16(bits >> (16 * part))), 32767.5f), scale);
  }
  if (begin % 4 == 0 && begin >= 0 && begin + 4 <= count) {
    *reinterpret_cast<float4*>(out + begin) = make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
#pragma unroll
  for (int part = 0; part < 4; part++) {
    if (begin + part >= 0 && begin + part < count) out[begin + part] = values[part];
  }
}
