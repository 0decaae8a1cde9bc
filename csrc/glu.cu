// out = activation(gate) * up, elementwise.
//
// silu         g / (1 + e^-g)
// gelu_tanh    g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
// Operands  gate, up, out f32 [count]; out may be gate.
// Mapping   a thread takes kWidth neighbouring elements: 4 (16-byte loads), or 1 where the count is no multiple of 4.
// Bound     memory: 12 bytes an element. expf and tanhf are the accurate ones; at HBM rate they hide behind the loads.
// Oracle    reference.glu
#include "common.cuh"

struct Silu {
  static __device__ __forceinline__ float apply(float g) { return g / (1.0f + expf(-g)); }
};

struct GeluTanh {
  static __device__ __forceinline__ float apply(float g) {
    const float inner = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return 0.5f * g * (1.0f + tanhf(inner));
  }
};

template <typename Activation, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) glu(
    const float* gate,             // [count]
    const float* __restrict__ up,  // [count]
    float* out,                    // [count]
    i64 count) {
  const i64 i = (i64(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i >= count) return;
  if constexpr (kWidth == 4) {
    const float4 g = *reinterpret_cast<const float4*>(gate + i), u = *reinterpret_cast<const float4*>(up + i);
    *reinterpret_cast<float4*>(out + i) = make_float4(Activation::apply(g.x) * u.x, Activation::apply(g.y) * u.y,
                                                      Activation::apply(g.z) * u.z, Activation::apply(g.w) * u.w);
  } else {
    out[i] = Activation::apply(gate[i]) * up[i];
  }
}
