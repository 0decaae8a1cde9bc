// Warp-wide matrix instructions and asynchronous copies to shared memory (compute capability 8.0 and newer).
//
// mma m16n8k16: C[16][8] += A[16][16] B[16][8], half operands, float32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//   A: a0 = (row g, k 2t and 2t+1), a1 = (row g+8, same k), a2 = (row g, k + 8), a3 = (row g+8, k + 8);
//   B: b0 = (k 2t and 2t+1, column g), b1 = (k + 8, column g);   C: c0, c1 = (row g, columns 2t and 2t+1), c2, c3 = row g+8.
#pragma once

#include "common.cuh"

__device__ __forceinline__ void mma_f16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D = A B + C.
__device__ __forceinline__ void mma_f16(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ uint4 load_shared(u32 source) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(source) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 target, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Four 8 x 8 matrices of halves; lane i gives the address of row i % 8 of matrix i / 8 and receives (row lane / 4, columns 2t and 2t+1).
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// An 8 x 8 matrix of halves spread over the warp as (row lane / 4, columns 2t and 2t+1), transposed.
__device__ __forceinline__ u32 transpose_matrix(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// 16 bytes that are read once. Volatile: the compiler must leave it in its place.
__device__ __forceinline__ uint4 load16_in_order(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

// The same into v, if `wanted`. Without a branch, across which the assembler would move it.
__device__ __forceinline__ void load16_in_order(uint4& v, const void* address, bool wanted) {
  asm volatile(
      "{.reg .pred wanted; setp.ne.s32 wanted, %5, 0; @wanted ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(int(wanted)));
}

// 16 bytes from device to shared memory; zeros, and nothing read, if not `visible`.
__device__ __forceinline__ void copy16_async(u32 target, const void* source, bool visible) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(visible ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups of copies are under way. Other threads' copies need a barrier after it.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 2^x, relative error below 2^-22; 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A tile of rows of kDim halves in shared memory, laid out so that the same 16-byte chunk of 8 neighbouring rows lies in different banks:
// exclusive-or within groups of 8 chunks, or one chunk of padding where a row is no multiple of 8 chunks.
template <int kDim>
struct SwizzledTile {
  static constexpr int kChunks = kDim / 8;
  static constexpr bool kPadded = kChunks % 8 != 0;
  static constexpr int kRowBytes = (kChunks + (kPadded ? 1 : 0)) * 16;
  static_assert(!kPadded || kRowBytes / 16 % 2 == 1, "an odd number of chunks a row spreads over the banks");

  // Byte offset, within its row, of a chunk; of the chunk 2 * pairs further on, from that of chunk 0 or 1. Rows 8 n apart are alike.
  static __device__ __forceinline__ u32 row_chunk(int row, int chunk) { return u32(kPadded ? chunk : chunk ^ (row & 7)) * 16; }
  static __device__ __forceinline__ u32 forward(u32 offset, int pairs) { return kPadded ? offset + 32 * pairs : offset ^ (32 * pairs); }
  // Byte offset of a chunk within the tile.
  static __device__ __forceinline__ u32 at(int row, int chunk) { return row * kRowBytes + row_chunk(row, chunk); }
};
