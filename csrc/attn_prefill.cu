// Causal attention of T query rows over one run of pages, with a running state that launches hand on exactly. Any cache types, any head
// sizes, float32 arithmetic.
//
// Formula   out[t][h] = softmax(scale q[t][h] . K) V over the cells visible from position[0] + t; KV head h / G.
// Operands  q f32 [T][H*Dk]; pool bytes [slot][K then V][Hkv][P][D]; out f32 [T][H*Dv];
//           state f32 [T][H][Dv + 8]: O (not normalised), m, l, six unused. Launches walk runs of pages from old to new: a tile's first visible
//           cell begins its state, its last makes it out's. Cells that no row of a tile sees may hold NaN: never loaded.
// Bits      A row's cells come in blocks of min(32, P) cells aligned to absolute positions, and a block without a cell visible to the row
//           leaves its m, l and O as they are. So neither the division of pages into launches nor that of queries into calls matters.
// Mapping   block = one head and a tile of 64 query rows (32 where a head has more than 128 elements), 256 threads as 16 x 16. Thread
//           (ty, tx) owns rows ty + 16 i: scores of cells tx and tx + 16, and every sixteenth vector of the output columns. K and then V
//           of a block go through one shared buffer as float32, and through registers first: the next load is in flight meanwhile.
//           Grid order: KV heads outermost, long tiles first, the G heads of a KV head side by side, which share K and V in L2.
// Bound     float32 multiply-adds and the shared-memory reads that feed them. The tensor-core kernel is attn_prefill_mma.cu.
#include "kv_page.cuh"
#include "online_softmax.cuh"

constexpr int kThreads = 256;
constexpr int kCells = 32;  // of a block of work
constexpr int kStateExtra = 8;

template <int kCount>
struct alignas(4 * kCount) Floats {
  float x[kCount];
};

// This thread's share of kCells rows of D elements, on its way from the pool to shared memory.
template <typename T, int kDim>
struct TileShare {
  static constexpr int kVectors = kDim / 8, kShare = (kCells * kVectors + kThreads - 1) / kThreads;
  Eight<T> part[kShare];

  // Rows [begin, end) of the tile are loaded, the others are zero.
  __device__ __forceinline__ void load(const T* rows, int begin, int end) {
#pragma unroll
    for (int i = 0; i < kShare; i++) {
      const int e = threadIdx.x + i * kThreads, row = e / kVectors;
      part[i].load(rows + i64(row) * kDim, e % kVectors, row >= begin && row < end);
    }
  }
  __device__ __forceinline__ void store(float* tile) const {  // [kCells][kDim + 4]
#pragma unroll
    for (int i = 0; i < kShare; i++) {
      const int e = threadIdx.x + i * kThreads, row = e / kVectors;
      if (row >= kCells) continue;
      float x[8];
      part[i].unpack(x);
      float4* target = reinterpret_cast<float4*>(tile + row * (kDim + 4) + e % kVectors * 8);
      target[0] = make_float4(x[0], x[1], x[2], x[3]);
      target[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
};

// Blocks a multiprocessor, where their registers do without spills.
template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
__device__ constexpr int blocks() {
#if __CUDA_ARCH__ >= 1000
  return 1;
#else
  return sizeof(KeyType) + sizeof(ValueType) == 4 && kKeyDim % 64 == 0 && kValueDim % 64 == 0 ? 2 : 1;
#endif
}

template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kThreads, (blocks<KeyType, ValueType, kKeyDim, kValueDim>())) attn_prefill(
    const float* __restrict__ q,       // [T][H*Dk]
    const int* __restrict__ position,  // [1]
    const u8* __restrict__ pool,       // [num_slots][page_bytes]
    float* __restrict__ state,         // [T][H][Dv + 8]
    float* __restrict__ out,           // [T][H*Dv]
    int num_tokens, int num_heads, int num_kv_heads, int num_slots, int first_slot, int first_page, int num_pages, int page_cells,
    int sliding_window, float scale) {
  static_assert(kKeyDim % 16 == 0 && kValueDim % 16 == 0 && kKeyDim <= 256 && kValueDim <= 256, "unsupported shape");
  constexpr int kWide = kKeyDim > kValueDim ? kKeyDim : kValueDim;
  constexpr int kRows = kWide <= 128 ? 64 : 32, kOwn = kRows / 16;            // query rows of the tile; of a thread
  constexpr int kColumns = kValueDim / 16;                                     // output columns of a thread
  constexpr int kVec = kColumns % 4 == 0 ? 4 : kColumns % 2 == 0 ? 2 : 1;      // as vectors of this many
  constexpr int kQueryStride = kKeyDim + 4, kValueStride = kValueDim + 4, kWeightStride = kCells + 4;  // free of bank conflicts
  extern __shared__ float4 shared[];
  float* const queries = reinterpret_cast<float*>(shared);      // [kRows][Dk + 4]
  float* const tile = queries + kRows * kQueryStride;           // [kCells][Dk + 4], then [kCells][Dv + 4]
  float* const weights = tile + kCells * (kWide + 4);           // [kRows][kCells + 4]

  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int group = num_heads / num_kv_heads, num_tiles = (num_tokens + kRows - 1) / kRows;
  const int kv_head = blockIdx.x / (group * num_tiles), rest = blockIdx.x % (group * num_tiles);
  const int head = kv_head * group + rest % group, q0 = (num_tiles - 1 - rest / group) * kRows;

  // Cells of the run that some row of the tile sees, counted from the run's first: [seen_begin, seen_end), in blocks [j0, j1).
  const int position0 = position[0], run_cell = first_page * page_cells, cells = min(kCells, page_cells);
  const int seen_begin = max(first_cell(position0 + q0, sliding_window) - run_cell, 0);
  const int seen_end = min(position0 + min(q0 + kRows, num_tokens) - run_cell, num_pages * page_cells);
  if (seen_begin >= seen_end) return;  // nothing here for this tile: it has yet to begin, or has ended
  const int j0 = seen_begin / cells, j1 = (seen_end + cells - 1) / cells;
  // With its first cell a tile begins, with its last it ends: no state before, none behind.
  const bool begins = first_cell(position0 + q0, sliding_window) >= run_cell;

  float m[kOwn], l[kOwn], O[kOwn][kColumns];
#pragma unroll
  for (int i = 0; i < kOwn; i++) {
    m[i] = -infinity();
    l[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumns; n++) O[i][n] = 0.0f;
    const int t = q0 + ty + 16 * i;
    if (!begins && t < num_tokens) {
      const float* saved = state + (i64(t) * num_heads + head) * (kValueDim + kStateExtra);
      m[i] = saved[kValueDim];
      l[i] = saved[kValueDim + 1];
#pragma unroll
      for (int n = 0; n < kColumns; n += kVec) {
        const Floats<kVec> x = *reinterpret_cast<const Floats<kVec>*>(saved + n * 16 + tx * kVec);
#pragma unroll
        for (int e = 0; e < kVec; e++) O[i][n + e] = x.x[e];
      }
    }
  }
  for (int e = threadIdx.x; e < kRows * (kKeyDim / 4); e += kThreads) {
    const int row = e / (kKeyDim / 4), d = e % (kKeyDim / 4) * 4, t = q0 + row;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    *reinterpret_cast<float4*>(queries + row * kQueryStride + d) =
        t < num_tokens ? *reinterpret_cast<const float4*>(q + (i64(t) * num_heads + head) * kKeyDim + d) : zero;
  }

  const KvPages<KeyType, ValueType, kKeyDim, kValueDim> pages{pool, num_slots, first_slot, num_kv_heads, page_cells};
  TileShare<KeyType, kKeyDim> next_keys;
  TileShare<ValueType, kValueDim> next_values;
  auto load_keys = [&](int j) {
    const int cell = j * cells;
    const KeyType* rows = pages.keys(cell / page_cells, kv_head) + i64(cell % page_cells) * kKeyDim;
    next_keys.load(rows, seen_begin - cell, min(seen_end - cell, cells));
  };
  auto load_values = [&](int j) {
    const int cell = j * cells;
    const ValueType* rows = pages.values(cell / page_cells, kv_head) + i64(cell % page_cells) * kValueDim;
    next_values.load(rows, seen_begin - cell, min(seen_end - cell, cells));
  };
  // Cells that this thread's row i sees, counted like those of the run: [row_begin, row_end).
  int row_begin[kOwn], row_end[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; i++) {
    const int at = position0 + q0 + ty + 16 * i;
    row_begin[i] = first_cell(at, sliding_window) - run_cell;
    row_end[i] = at + 1 - run_cell;
  }
  // Blocks within [all_begin, all_end) are visible to every row of the tile.
  const int all_begin = first_cell(position0 + q0 + kRows - 1, sliding_window) - run_cell, all_end = position0 + q0 + 1 - run_cell;

  load_keys(j0);
  for (int j = j0; j < j1; j++) {
    __syncthreads();  // the last block's V has been read
    next_keys.store(tile);
    load_values(j);
    __syncthreads();

    float S[kOwn][2];
#pragma unroll
    for (int i = 0; i < kOwn; i++) S[i][0] = S[i][1] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < kKeyDim; d += 4) {
      const float4 k0 = *reinterpret_cast<const float4*>(tile + tx * kQueryStride + d);
      const float4 k1 = *reinterpret_cast<const float4*>(tile + (tx + 16) * kQueryStride + d);
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        const float4 x = *reinterpret_cast<const float4*>(queries + (ty + 16 * i) * kQueryStride + d);
        S[i][0] = fmaf(x.w, k0.w, fmaf(x.z, k0.z, fmaf(x.y, k0.y, fmaf(x.x, k0.x, S[i][0]))));
        S[i][1] = fmaf(x.w, k1.w, fmaf(x.z, k1.z, fmaf(x.y, k1.y, fmaf(x.x, k1.x, S[i][1]))));
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int local = tx + 16 * c, cell = j * cells + local;
        const bool visible = local < cells && cell >= row_begin[i] && cell < row_end[i];
        S[i][c] = visible ? __fmul_rn(S[i][c], scale) : -infinity();
      }
      const float m_new = fmaxf(m[i], lanes_max<16>(fmaxf(S[i][0], S[i][1])));
      const float keep = softmax_rescale(m[i], m_new), base = softmax_base(m_new);
      const float p0 = expf(__fsub_rn(S[i][0], base)), p1 = expf(__fsub_rn(S[i][1], base));
      l[i] = fmaf(l[i], keep, lanes_sum<16>(__fadd_rn(p0, p1)));
      m[i] = m_new;
#pragma unroll
      for (int n = 0; n < kColumns; n++) O[i][n] = __fmul_rn(O[i][n], keep);
      weights[(ty + 16 * i) * kWeightStride + tx] = p0;
      weights[(ty + 16 * i) * kWeightStride + tx + 16] = p1;
    }
    __syncthreads();  // K has been read, the weights are there
    next_values.store(tile);
    if (j + 1 < j1) load_keys(j + 1);
    __syncthreads();

    // Where some row does not see every cell, its multiply-adds are left out rather than done with weight 0: a value that only a
    // neighbour sees may be anything.
    const bool all = cells == kCells && j * cells >= all_begin && (j + 1) * cells <= all_end;
    auto add_values = [&](auto guarded) {
#pragma unroll 2
      for (int k = 0; k < kCells; k += 4) {
        float p[kOwn][4];
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
          const float4 x = *reinterpret_cast<const float4*>(weights + (ty + 16 * i) * kWeightStride + k);
          p[i][0] = x.x, p[i][1] = x.y, p[i][2] = x.z, p[i][3] = x.w;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int local = k + c, cell = j * cells + local;
#pragma unroll
          for (int n = 0; n < kColumns; n += kVec) {
            const Floats<kVec> v = *reinterpret_cast<const Floats<kVec>*>(tile + local * kValueStride + n * 16 + tx * kVec);
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
              const bool visible = !decltype(guarded)::value || (local < cells && cell >= row_begin[i] && cell < row_end[i]);
#pragma unroll
              for (int e = 0; e < kVec; e++) O[i][n + e] = visible ? fmaf(p[i][c], v.x[e], O[i][n + e]) : O[i][n + e];
            }
          }
        }
      }
    };
    if (all) {
      add_values(Constant<false>{});
    } else {
      add_values(Constant<true>{});
    }
  }

  bool goes_on = false;  // what it takes is there; kept from the beginning on, it would spill
#pragma unroll
  for (int i = 0; i < kOwn; i++) goes_on |= q0 + ty + 16 * i < num_tokens && row_end[i] > num_pages * page_cells;
  const bool ends = !__syncthreads_or(goes_on);
#pragma unroll
  for (int i = 0; i < kOwn; i++) {
    const int t = q0 + ty + 16 * i;
    if (t >= num_tokens) continue;
    const i64 row = i64(t) * num_heads + head;
    const float norm = ends ? softmax_norm(l[i]) : 1.0f;
    float* const target = ends ? out + row * kValueDim : state + row * (kValueDim + kStateExtra);
#pragma unroll
    for (int n = 0; n < kColumns; n += kVec) {
      Floats<kVec> x;
#pragma unroll
      for (int e = 0; e < kVec; e++) x.x[e] = ends ? O[i][n + e] * norm : O[i][n + e];
      *reinterpret_cast<Floats<kVec>*>(target + n * 16 + tx * kVec) = x;
    }
    if (!ends && tx == 0) {
      target[kValueDim] = m[i];
      target[kValueDim + 1] = l[i];
    }
  }
}
