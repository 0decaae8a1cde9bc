// Raw GGUF blocks to the planes of the device form (rollkv/quants.py): one launch a field, described by numbers, so one pair of kernels
// serves all types.
//
// Operands  raw bytes [rows][row_blocks][block_bytes], the rows of the tiles first_tile, first_tile + tile_step, ...; plane bytes, see there.
//           Rows and blocks beyond the matrix are zero bytes.
// Mapping   repack_codes: a thread gathers one 32-bit word (32 / bits codes) byte by byte; repack_bytes: a thread moves one byte.
// Bound     byte gathers out of L1; runs once a tensor, behind the copy over the link (55 GB/s): 430 GB/s read and written on an
//           H200 in Q8_0, so a piece takes a quarter of its copy's time and hides behind the next one's.
// Oracle    quants.split_planes, bit for bit
#include "common.cuh"

constexpr int kThreads = 256;

// Index decoder: splits off the innermost axis of length n.
__device__ __forceinline__ int take(i64& index, int n) {
  const int digit = int(index % n);
  index /= n;
  return digit;
}

extern "C" __global__ void __launch_bounds__(kThreads) repack_codes(
    const u8* __restrict__ raw,  // [rows][row_blocks][block_bytes]
    u32* __restrict__ plane,     // [tile][span][chunk][lane][words of a chunk]
    i64 first_tile, i64 tile_step, i64 num_tiles, i64 rows, int row_blocks, int spans, int block_elements, int block_bytes, int steps,
    int offset, int bits, int run) {
  const int words = bits * steps, chunk = words < 4 ? words : 4, width = bits < 8 ? 8 : bits, across = 32 / width;
  const i64 count = num_tiles * spans * 32 * words;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < count; i += i64(gridDim.x) * kThreads) {
    i64 rest = i;
    int word = take(rest, chunk);
    const int lane = take(rest, 32);
    word += take(rest, words / chunk) * chunk;
    const int span = take(rest, spans);
    const i64 tile = rest;
    const int step = word / bits, first_code = word % bits * (32 / bits);  // of the step, quad after quad
    u32 packed = 0;
    for (int slot = 0; slot < width / bits; slot++) {
#pragma unroll 1  // four times unrolled it spills around the divisions
      for (int lying = 0; lying < across; lying++) {
        const int code_number = first_code + slot * across + lying, quad = code_number >> 2;
        const i64 row = tile * 16 + (lane >> 2) + (quad & 1) * 8;
        if (row >= rows) continue;
        const int column = (span * steps + step) * 64 + (quad >> 2) * 32 + (quad >> 1 & 1) * 16 + (lane & 3) * 4 + (code_number & 3);
        const int block = column / block_elements, element = column % block_elements;
        if (block >= row_blocks) continue;
        const u8* at = raw + (row * row_blocks + block) * i64(block_bytes) + offset;
        u32 code;
        if (bits == 16) {
          code = at[0] | u32(at[1]) << 8;
        } else if (bits == 8) {
          code = at[element];
        } else {
          const int field_span = run * 8 / bits;
          code = at[element / field_span * run + element % run] >> (element % field_span / run * bits) & ((1 << bits) - 1);
        }
        packed |= code << (slot * bits + lying * width);
      }
    }
    plane[(first_tile + tile * (tile_step - 1)) * spans * 32 * words + i] = packed;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) repack_bytes(
    const u8* __restrict__ raw,  // [rows][row_blocks][block_bytes]
    u8* __restrict__ plane,      // [tile][span][g][h][block of the span][length]
    i64 first_tile, i64 tile_step, i64 num_tiles, i64 rows, int row_blocks, int spans, int block_bytes, int span_blocks, int offset, int length) {
  const i64 tile_bytes = i64(spans) * 16 * span_blocks * length;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < num_tiles * tile_bytes; i += i64(gridDim.x) * kThreads) {
    i64 rest = i;
    const int byte = take(rest, length), block_of_span = take(rest, span_blocks), h = take(rest, 2), g = take(rest, 8), span = take(rest, spans);
    const i64 row = rest * 16 + h * 8 + g;
    const int block = span * span_blocks + block_of_span;
    const bool known = row < rows && block < row_blocks;
    plane[(first_tile + rest * (tile_step - 1)) * tile_bytes + i] = known ? raw[(row * row_blocks + block) * i64(block_bytes) + offset + byte] : u8(0);
  }
}
