// Activations of gated feed-forward blocks: out = activation(gate) * up.
//
// silu         g / (1 + e^-g)
// gelu_tanh    g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
// expf and tanhf are the accurate ones: at HBM rate they hide behind the loads. Intrinsics, so that no instance contracts anything.
#pragma once
#include "common.cuh"

// The numbers that rollkv/cuda/kernels/activation.py gives them.
enum Activation : int { kNoActivation = 0, kSilu = 1, kGeluTanh = 2 };

__device__ __forceinline__ float activate(int activation, float g) {
  if (activation == kSilu) return __fdiv_rn(g, __fadd_rn(1.0f, expf(-g)));
  const float cube = __fmul_rn(__fmul_rn(__fmul_rn(0.044715f, g), g), g);
  const float inner = __fmul_rn(0.7978845608028654f, __fadd_rn(g, cube));
  return __fmul_rn(__fmul_rn(0.5f, g), __fadd_rn(1.0f, tanhf(inner)));
}
