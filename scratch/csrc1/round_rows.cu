// Around a large product in f16: activations to f16 with a power of two a row, and the way back.
//
// round_rows      x * norm / sqrt(mean(x^2) + eps), or x where there is no norm, to f16
// round_glu       activation(gate) * up to f16
//   both          k = 0, or the least k with max |row| <= 32768 * 2^k where the row exceeds 32768; x16 = row * 2^-k, row_scale = 2^k. Powers of two are exact,
//                 so a scale costs no precision: entries below 2^-24 * 2^k (relative to the row's largest: 2^-39) vanish. Hardly any row needs
//                 one, so the row is written as if k were 0 and, where it was not, written again.
// finish_product  out = product * row_scale + bias, or out += that. A row with scale 1 and no bias is left alone where out is the product.
// Operands  x f32 [T][columns]; norm f32 [columns] or null; gate_up f32 [T][2 * columns], `run` columns of gate and of up by turns; x16 f16 [T][columns];
//           row_scale f32 [T]; product, out f32 [T][N]; bias f32 [N] or null.
// Mapping   round_*: a block a row, kWidth neighbouring columns a thread and step. finish_product: a block takes 1024 columns of a row.
// Bound     memory: 6 bytes an element (a norm reads the row twice, the second time out of the caches), 10 for round_glu, 8 or 12 for finish_product.
// Oracle    NumPy's float16, bit for bit without norm; reference.rms_norm, reference.glu
#include "activation.cuh"

constexpr int kThreads = 256;

template <int kWidth>
struct Columns {
  float v[kWidth];
  __device__ __forceinline__ void load(const float* address) {
    if constexpr (kWidth == 4) {
      const float4 f = *reinterpret_cast<const float4*>(address);
      v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
    } else {
      v[0] = *address;
    }
  }
  __device__ __forceinline__ void store16(u16* address, float scale) const {
    if constexpr (kWidth == 4) {
      *reinterpret_cast<uint2*>(address) = make_uint2(pack_half2(v[0] * scale, v[1] * scale), pack_half2(v[2] * scale, v[3] * scale));
    } else {
      *address = float_to_half_bits(v[0] * scale);
    }
  }
};

// Writes the row whose columns i .. i + kWidth - 1 `row(i)` gives.
template <int kWidth, typename Row>
__device__ __forceinline__ void round_row(const Row& row, u16* out, float* row_scale, int columns) {
  float most = 0.0f;
  for (int i = threadIdx.x * kWidth; i < columns; i += kThreads * kWidth) {
    const Columns<kWidth> c = row(i);
    c.store16(out + i, 1.0f);
#pragma unroll
    for (int e = 0; e < kWidth; e++) most = fmaxf(most, fabsf(c.v[e]));
  }
  most = block_max<kThreads>(most);
  // Exponent of the power of two at or above most / 2^15. Non-finite rows keep scale 1 and stay non-finite.
  int k = 0;
  if (most > 32768.0f && most < infinity()) {
    const u32 bits = __float_as_uint(most);
    k = int(bits >> 23) - 127 - 15 + ((bits & 0x7fffffu) != 0);
  }
  if (threadIdx.x == 0) *row_scale = __int_as_float((127 + k) << 23);
  if (k == 0) return;
  const float down = __int_as_float((127 - k) << 23);
  for (int i = threadIdx.x * kWidth; i < columns; i += kThreads * kWidth) row(i).store16(out + i, down);
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) round_rows(
    const float* __restrict__ x,     // [T][columns]
    const float* __restrict__ norm,  // [columns] or null
    u16* __restrict__ x16,           // [T][columns]
    float* __restrict__ row_scale,   // [T]
    int columns, float eps) {
  const float* source = x + i64(blockIdx.x) * columns;
  float scale = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int i = threadIdx.x * kWidth; i < columns; i += kThreads * kWidth) {
      Columns<kWidth> c;
      c.load(source + i);
#pragma unroll
      for (int e = 0; e < kWidth; e++) squares += c.v[e] * c.v[e];
    }
    scale = 1.0f / sqrtf(block_sum<kThreads>(squares) / float(columns) + eps);
  }
  auto row = [&](int i) {
    Columns<kWidth> c;
    c.load(source + i);
    if (norm != nullptr) {
      Columns<kWidth> w;
      w.load(norm + i);
#pragma unroll
      for (int e = 0; e < kWidth; e++) c.v[e] = c.v[e] * scale * w.v[e];
    }
    return c;
  };
  round_row<kWidth>(row, x16 + i64(blockIdx.x) * columns, row_scale + blockIdx.x, columns);
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) round_glu(
    const float* __restrict__ gate_up,  // [T][2 * columns]
    u16* __restrict__ x16,              // [T][columns]
    float* __restrict__ row_scale,      // [T]
    int columns, int run, int activation) {
  const float* source = gate_up + i64(blockIdx.x) * 2 * columns;
  auto row = [&](int i) {
    const int at = i / run * 2 * run + i % run;
    Columns<kWidth> gate, up;
    gate.load(source + at);
    up.load(source + at + run);
#pragma unroll
    for (int e = 0; e < kWidth; e++) gate.v[e] = activate(activation, gate.v[e]) * up.v[e];
    return gate;
  };
  round_row<kWidth>(row, x16 + i64(blockIdx.x) * columns, row_scale + blockIdx.x, columns);
}

extern "C" __global__ void __launch_bounds__(kThreads) finish_product(
    const float* product,                 // [T][N]
    const float* __restrict__ row_scale,  // [T]
    const float* __restrict__ bias,       // [N] or null
    float* out,                           // [T][N]
    int num_columns, int add) {
  const float scale = row_scale[blockIdx.x];
  if (scale == 1.0f && bias == nullptr && out == product) return;
  const i64 row = i64(blockIdx.x) * num_columns;
  const int end = min(num_columns, int(blockIdx.y + 1) * 1024);
  for (int i = blockIdx.y * 1024 + threadIdx.x; i < end; i += kThreads) {
    float value = __fmul_rn(product[row + i], scale);
    if (bias != nullptr) value = __fadd_rn(value, bias[i]);
    out[row + i] = add ? __fadd_rn(out[row + i], value) : value;
  }
}
