// SplitMix64 by counter (rollkv/split_mix.py is the definition).
#pragma once

#include "common.cuh"

// Output `index`, from 0 on, of the generator started at `seed`.
__device__ __forceinline__ u64 split_mix(u64 seed, u64 index) {
  u64 z = seed + (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
