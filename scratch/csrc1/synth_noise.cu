// Random weights of a synthetic model as raw GGUF blocks (rollkv/synth_noise.py is the definition):
//   word i of a matrix = SplitMix64's finaliser of seed + (i + 1) * gamma;  a block = the head, then its words, eight bytes of codes each.
// In F16, whose blocks have no head, a word is four halves: ((16 bits - 32767.5) * scale), rounded to float32, then to float16.
//
// Operands  raw bytes [blocks][block_bytes], block_bytes even; the head by value, its first byte lowest.
// Mapping   a thread makes one word; the one of a block's first word writes the head too.
// Bound     stores of 2 bytes (blocks of Q8_0 are aligned to no more): 735 GB/s on an H200 in Q8_0, 711 in Q4_K, 1,762 in F16, where they
//           follow each other. Runs once a tensor, beside the repacking of the piece before.
// Oracle    Noise.fill, bit for bit
#include "common.cuh"

constexpr int kThreads = 256;

__device__ __forceinline__ u64 split_mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

extern "C" __global__ void __launch_bounds__(kThreads) synth_noise(
    u8* __restrict__ raw,  // [num_blocks][block_bytes]
    u64 seed, i64 first_block, i64 num_blocks, int block_bytes, int head_bytes, u64 head_low, u64 head_high, float scale) {
  const int block_words = (block_bytes - head_bytes) / 8;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < num_blocks * block_words; i += i64(gridDim.x) * kThreads) {
    const i64 block = i / block_words;
    const int word = int(i % block_words);
    const u64 bits = split_mix(seed + u64(first_block * block_words + i + 1) * 0x9E3779B97F4A7C15ull);
    u16* at = reinterpret_cast<u16*>(raw + block * block_bytes);
    if (word == 0) {
      for (int b = 0; b < head_bytes; b += 2) at[b / 2] = u16((b < 8 ? head_low : head_high) >> (b % 8 * 8));
    }
    at += head_bytes / 2 + word * 4;
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const u16 code = u16(bits >> (16 * part));
      at[part] = head_bytes ? code : float_to_half_bits(__fmul_rn(__fsub_rn(float(code), 32767.5f), scale));
    }
  }
}
