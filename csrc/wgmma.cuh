// Products of a warpgroup (4 warps) and bulk tensor copies (the barriers they complete on: barriers.cuh): compute capability 9.0 alone (sm_90a).
//
// wgmma m64nNk16: C[64][N] += A[64][16] B[16][N], half operands, float32 sums. Warp w of the group holds rows 16 w on, laid out as in mma.cuh.
// B, and A if not in registers, lie in shared memory in rows of 128 bytes whose 16-byte chunks are swizzled: chunk c of row i at c ^ i % 8.
// A tile of more than 64 columns is a sequence of such planes of 64 columns. All of it begins on a multiple of 1,024 bytes.
#pragma once

#include "barriers.cuh"
#include "mma.cuh"

// ---- copies -----------------------------------------------------------------------------------------------------------------------

// A description of memory for bulk copies, made by the driver (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// What this thread wrote to shared memory becomes visible to products and bulk copies, once a barrier has passed on that it did.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One box of a map of three dimensions to shared memory.
__device__ __forceinline__ void copy_box(u32 target, const TensorMap& map, u32 barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
               "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// Registers of a thread of the calling warpgroup from here on. They are moved between the warpgroups of a block.
template <int kRegisters>
__device__ __forceinline__ void give_registers_up() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- products ---------------------------------------------------------------------------------------------------------------------

// A swizzled matrix in shared memory. stride: bytes from 8 rows to the next 8; plane: bytes between planes of 64 columns, read where columns
// are what the product does not sum over.
__device__ __forceinline__ u64 describe_matrix(u32 address, u32 plane, u32 stride = 1024) {
  return u64((address & 0x3ffff) >> 4) | u64(plane >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}
// The matrix that begins 16 n bytes behind another. Nothing carries into the upper word, which the compiler must be told: with it every product took
// three instructions more.
__device__ __forceinline__ u64 matrix_behind(u64 matrix, u32 n) { return (matrix & ~0xffffffffull) | u32(u32(matrix) + n); }

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are under way. Their registers may be touched only then; `pin` tells the compiler so.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(u32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+r"(registers[i])::"memory");
}

// C[64][kN] += A B, or = A B without kAdd. from_registers: A as in mma.cuh; kTransposed: B is stored [k][column], else [column][k].
template <int kN>
struct Wgmma;

#define FLOATS_8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define FLOATS_32(c, i) FLOATS_8(c, i), FLOATS_8(c, i + 8), FLOATS_8(c, i + 16), FLOATS_8(c, i + 24)
#define FLOATS_64(c) FLOATS_32(c, 0), FLOATS_32(c, 32)
#define FLOATS_96(c) FLOATS_64(c), FLOATS_32(c, 64)
#define FLOATS_128(c) FLOATS_96(c), FLOATS_32(c, 96)
#define NAMES_32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 \
  NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_96 \
  NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_128                                                                                                                        \
  NAMES_96                                                                                                                               \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122," \
  "%123,%124,%125,%126,%127"

// The operands behind the accumulators are numbered on from there: i0 to i5.
#define DEFINE_WGMMA(kN, NAMES, FLOATS, i0, i1, i2, i3, i4, i5, i6)                                                                  \
  template <>                                                                                                                        \
  struct Wgmma<kN> {                                                                                                                 \
    template <bool kAdd>                                                                                                             \
    static __device__ __forceinline__ void from_shared(float (&c)[kN / 2], u64 a, u64 b) {                                           \
      asm volatile("{.reg .pred add; setp.ne.b32 add, %" #i2 ", 0; wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32.f16.f16 {" NAMES  \
                   "}, %" #i0 ", %" #i1 ", add, 1, 1, 0, 0;}"                                                                        \
                   : FLOATS                                                                                                          \
                   : "l"(a), "l"(b), "n"(int(kAdd)));                                                                                \
    }                                                                                                                                \
    template <bool kAdd, bool kTransposed>                                                                                           \
    static __device__ __forceinline__ void from_registers(float (&c)[kN / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {               \
      asm volatile("{.reg .pred add; setp.ne.b32 add, %" #i5 ", 0; wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32.f16.f16 {" NAMES  \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", add, 1, 1, %" #i6 ";}"                                    \
                   : FLOATS                                                                                                          \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(int(kAdd)), "n"(int(kTransposed)));                             \
    }                                                                                                                                \
  };
DEFINE_WGMMA(64, NAMES_32, FLOATS_32(c, 0), 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA(128, NAMES_64, FLOATS_64(c), 64, 65, 66, 67, 68, 69, 70)
DEFINE_WGMMA(192, NAMES_96, FLOATS_96(c), 96, 97, 98, 99, 100, 101, 102)
DEFINE_WGMMA(256, NAMES_128, FLOATS_128(c), 128, 129, 130, 131, 132, 133, 134)
#undef DEFINE_WGMMA
#undef NAMES_32
#undef NAMES_64
#undef NAMES_96
#undef NAMES_128
#undef FLOATS_8
#undef FLOATS_32
#undef FLOATS_64
#undef FLOATS_96
#undef FLOATS_128
