// Barriers of parts of a block, and copies that complete on them: bulk copies and barriers that count their bytes exist from compute capability 9.0 on.
#pragma once

#include "common.cuh"

// Barriers in shared memory, 8 bytes each, by address. A phase ends when `arrivals` came and every byte announced has landed.
constexpr u32 kBarrierBytes = 8;
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of a phase: parity 0 for the first, then in turns. A barrier that has completed nothing has the parity 1 behind it.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// barrier_init and publish_barriers, by the threads for which `mine` holds. Around a single barrier_init the compiler makes no branch and moves the mark for
// compute-sanitizer ahead of the condition: racecheck takes all threads to write. A loop of them stays a branch.
__device__ __forceinline__ void barrier_publish_if(bool mine, u32 barrier, u32 arrivals) {
  asm volatile(
      "{\n.reg .pred mine;\nsetp.ne.u32 mine, %2, 0;\n@mine mbarrier.init.shared::cta.b64 [%0], %1;\n"
      "@mine fence.mbarrier_init.release.cluster;\n}" ::"r"(barrier),
      "r"(arrivals), "r"(u32(mine))
      : "memory");
}

// Copies `bytes`, a multiple of 16, to shared memory; both begin on a multiple of 16.
__device__ __forceinline__ void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// Hardware barriers of some of the block's warps: wait for, or merely count towards, `threads` arrivals.
__device__ __forceinline__ void named_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
