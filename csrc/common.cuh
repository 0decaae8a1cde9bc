// Types, conversions, reductions and loads shared by all kernels. Includes nothing: NVRTC alone must be able to compile every source.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// ---- 16-bit floating point --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float half_bits_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Round to nearest, ties to even; beyond the largest half: infinity.
__device__ __forceinline__ u16 float_to_half_bits(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float bf16_bits_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Round to nearest, ties to even. The paired form exists from sm_80 on, the single one only from sm_90 on.
__device__ __forceinline__ u16 float_to_bf16_bits(float value) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
  return u16(pair);
}

// Two halves in one word, `low` in the low 16 bits.
__device__ __forceinline__ u32 pack_half2(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two halves each; results are rounded to nearest, ties to even.
__device__ __forceinline__ u32 subtract_half2(u32 a, u32 b) {
  u32 difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
__device__ __forceinline__ u32 multiply_half2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// Element tags: the storage types that templates are instantiated with (Half, Bf16, float).
struct Half {
  u16 bits;
};
struct Bf16 {
  u16 bits;
};

__device__ __forceinline__ float to_float(Half x) { return half_bits_to_float(x.bits); }
__device__ __forceinline__ float to_float(Bf16 x) { return bf16_bits_to_float(x.bits); }
__device__ __forceinline__ float to_float(float x) { return x; }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
  return Half{float_to_half_bits(value)};
}
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float value) {
  return Bf16{float_to_bf16_bits(value)};
}
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

// A constant as an argument: a generic lambda is compiled once for each.
template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// ---- launches that overlap ---------------------------------------------------------------------------------------------------------

// A kernel marked `early` (KernelSpec) may begin, on sm_90 and newer, as soon as every block of the kernel before it has begun. What kernels
// before it write or still read it touches behind wait_for_previous() alone, which returns when all of them have ended and which every block
// must call; before that it may load weights, and what earlier steps wrote, for a step's first kernel (rope_table) is not early. Elsewhere
// kernels follow each other and both calls are nothing.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A place in shared memory as instructions for it alone name it.
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// What a kernel before an early one wrote: out of L2, for L1 may hold an older copy, and the path of constant data (ld.nc) is not ordered
// behind the wait. Pointers to such data are therefore never `const __restrict__` in early kernels.
__device__ __forceinline__ float fresh(const float* address) { return __ldcg(address); }
__device__ __forceinline__ float2 fresh(const float2* address) { return __ldcg(address); }
__device__ __forceinline__ float4 fresh(const float4* address) { return __ldcg(address); }
__device__ __forceinline__ int fresh(const int* address) { return __ldcg(address); }
__device__ __forceinline__ u32 fresh(const u32* address) { return __ldcg(address); }
__device__ __forceinline__ u64 fresh(const u64* address) { return __ldcg(address); }
__device__ __forceinline__ u16 fresh(const u16* address) { return __ldcg(address); }
__device__ __forceinline__ Half fresh(const Half* address) { return Half{fresh(&address->bits)}; }
__device__ __forceinline__ Bf16 fresh(const Bf16* address) { return Bf16{fresh(&address->bits)}; }
__device__ __forceinline__ uint2 fresh(const uint2* address) { return __ldcg(address); }
__device__ __forceinline__ uint4 fresh(const uint4* address) { return __ldcg(address); }

// 16 aligned bytes of the KV cache: read once, by nobody else nearby, but written by the kernel before.
__device__ __forceinline__ uint4 fresh16(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Asks L2 for the line of 128 bytes at `address`.
__device__ __forceinline__ void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Asks L2 for num_bytes from `address` on.
template <int kThreads>
__device__ __forceinline__ void prefetch(const void* address, int num_bytes) {
  for (int line = threadIdx.x * 128; line < num_bytes; line += kThreads * 128) prefetch_line(static_cast<const u8*>(address) + line);
}

// ---- lanes ------------------------------------------------------------------------------------------------------------------------

// `value`, which all lanes share without the compiler's knowing: what follows from it may be computed once a warp.
__device__ __forceinline__ int same_in_all_lanes(int value) { return __shfl_sync(kAllLanes, value, 0); }

// `value`, of which the compiler no longer knows what it computed from it before: that is computed again, not kept in registers.
__device__ __forceinline__ int forgotten(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ const int* forgotten(const int* value) {
  asm volatile("" : "+l"(value));
  return value;
}

// ---- reductions in a fixed order: the result depends on the values and the block size alone, and every thread receives it ---------

// Butterflies: at each step both partners add the same two numbers, so all lanes end with equal bits. Over kLanes neighbouring lanes:
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

template <int kLanes>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Warp sums, then these in the order of the warps. All kThreads threads must call; the leading barrier makes repeated calls safe.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
  if constexpr (kThreads == 32) return warp_sum(value);
  __shared__ float partial[kThreads / 32];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float total = partial[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; warp++) total += partial[warp];
  return total;
}

template <int kThreads>
__device__ __forceinline__ float block_max(float value) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
  if constexpr (kThreads == 32) return warp_max(value);
  __shared__ float partial[kThreads / 32];
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float most = partial[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; warp++) most = fmaxf(most, partial[warp]);
  return most;
}
