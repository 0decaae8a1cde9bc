// A decode step's attention to coded pages, on the tensor cores: half, q8_0, q4_0 or turbo cells, keys and values each of their own type and head size.
//
// Formula   out[h] = softmax(scale q[h] K) V over the visible cells of a page, and the logarithm of the sum of exponentials; attn_merge.cuh. The query, finished by
//           prepare_step.cu, and the softmax weights are rounded to half; so are q8_0 and q4_0 values. Everything else is exact or float32: scales of keys
//           multiply the scores of their group, a turbo type's scales of values the weights, before these are rounded.
// Operands  q f32 [R][H*Dk] by the page's band; pool bytes as in kv_page.cuh, the new cell in its page; states as in attn_decode.cu.
// Mapping   block (chunk of up to 8 query heads, KV head, z) = kTeams teams of kWarps warps; a team takes page after page. A warp has a share of a page's cells for
//           itself: S^T = K q^T (16 cells are the rows, 8 heads the columns), its maximum, weights, O^T = V^T P^T with P^T transposed in registers; then
//           the shares of a team are merged in their order, a warp some columns. kv_fragments.cuh has the operands.
// Pipeline  kRing loads of 16 bytes a lane run ahead in the order in which they are decoded, into the next page of the team; scales come a page ahead into shared
//           memory. Only the newest page waits for the kernel before.
// Bound     device memory in q8_0; below, issue slots, and in turbo4 what shared memory can move (docs/performance.md).
#include "attn_merge.cuh"
#include "barriers.cuh"
#include "kv_fragments.cuh"
#include "kv_page.cuh"

constexpr int kHeads = 8, kUnitCells = 32;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr u32 kOnes = 0x3c003c00u;

// What a block has in shared memory, in bytes: rollkv/cuda/kernels/attn_decode_coded.py computes the sum too. The queries stand last.
template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim, int kPartTiles, int kCells, int kWarps, int kTeams, bool kTabled>
struct Layout {
  static constexpr int kTable = kTabled ? kTableBytes : 0;
  static constexpr int kSums = kPartTiles * 512, kStats = 2 * (kHeads * 8 + 16);  // of a warp
  static constexpr int kKeyScales = kCells * RowFormat<KeyType, kKeyDim>::kScales * 2, kValueScales = kCells * RowFormat<ValueType, kValueDim>::kScales * 2;
  static constexpr int kScales = 2 * (kKeyScales + kValueScales);
  static constexpr int kTeam = kWarps * (kSums + kStats + kScales);
  static constexpr int kQueries = kTable + kTeams * kTeam;
  static constexpr int kBand = (kKeyDim + 31) / 32 * 512;  // of a band's queries
};

template <int kThreads>
__device__ __forceinline__ void team_barrier(int team) {
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    named_wait(team + 1, kThreads);
  }
}

// x, of which the compiler then knows nothing: what depends on it is found where it is needed, and takes no register before.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 1 / l for a row that saw a cell, 0 for one that saw none; relative error below 2^-22.
__device__ __forceinline__ float reciprocal(float l) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(l));
  return l == 0.0f ? 0.0f : y;
}

// Four scales of neighbouring cells.
__device__ __forceinline__ void to_floats(float (&x)[4], uint2 halves) {
  x[0] = half_bits_to_float(u16(halves.x)), x[1] = half_bits_to_float(u16(halves.x >> 16));
  x[2] = half_bits_to_float(u16(halves.y)), x[3] = half_bits_to_float(u16(halves.y >> 16));
}

// The fewest parts that a lane's slots can be divided into so that each has 8 tiles of 16 columns at most: 32 registers of sums.
constexpr int parts_of(int slots, int tiles) {
  int parts = 1;
  while (slots % parts != 0 || tiles / parts > 8) parts++;
  return parts;
}

// kBlocks: that a multiprocessor must have room for. kFew: the form for few pages, one a block, which merges up to kMergedWithin of them. kTable: turbo4 looks its
// levels up in shared memory.
template <typename KeyType, typename ValueType, int kKeyDim, int kValueDim, int kPageCells, int kWarps, int kTeams, int kRing, int kBlocks, bool kFew,
          bool kTable>
__global__ void __launch_bounds__(kWarps * kTeams * 32, kBlocks) attn_decode_coded(
    const float* q,       // [R][H*Dk]
    const int* position,  // [1]
    const u8* pool,       // [num_slots][page_bytes]
    const u8* next_pool,  // [next_slots][page_bytes]
    float* part_out,      // [num_parts][H][Dv]
    float* part_lse,      // [num_parts][H]
    u32* arrivals,        // [H], of which the first Hkv*chunks are used
    float* out,           // [H*Dv]
    int num_slots, int first_slot, int run_pages, int next_slots, int next_first_slot, int num_pages, int first_page, int first_part, int num_parts, int previous_page,
    int own_page, int num_bands, int group, int heads_a_block, int sliding_window, float scale) {
  constexpr int kThreads = kWarps * kTeams * 32;
  constexpr int kShareCells = (kPageCells < kUnitCells ? kUnitCells : kPageCells) / kWarps, kUnits = kShareCells / kUnitCells;  // of a warp
  constexpr int kPresent = kPageCells < kShareCells ? kPageCells : kShareCells;  // of these, in the page
  static_assert(kUnits >= 1 && kShareCells % kUnitCells == 0, "a warp takes whole units");
  using Keys = KeyReader<KeyType, kKeyDim, kPageCells, kTable>;
  using Values = ValueReader<ValueType, kValueDim, kPageCells, kTable>;
  using KeyFormat = RowFormat<KeyType, kKeyDim>;
  using ValueFormat = RowFormat<ValueType, kValueDim>;
  constexpr int kKeyElements = Keys::Place::kElements, kKeySlots = Keys::Place::kCount, kFragments = kKeyDim / 16;
  constexpr int kKeyGroup = KeyFormat::kGroup / (4 * kKeyElements);  // slots that share a scale
  constexpr int kValueElements = Values::Place::kElements, kValueSlots = Values::Place::kCount, kTiles = kValueDim / 16;
  constexpr bool kWeighted = kTurbo<ValueType>;  // the scales of values are part of the weights, in as many sets as there are groups
  constexpr int kSets = kWeighted ? ValueFormat::kScales : 1, kSetSlots = kValueSlots / kSets;
  constexpr int kParts = parts_of(kValueSlots, kTiles), kPartSlots = kValueSlots / kParts, kPartTiles = kTiles / kParts;  // columns that have sums at a time
  constexpr bool kTight = kUnits > 2 && kCodes4<ValueType>;  // for registers
  constexpr int kOwned = (kPartTiles + kWarps - 1) / kWarps;  // tiles of a part that a warp merges
  // The loads of a page in their order: keys, then values, aligned to what is loaded together, then nothing up to whole rounds of the ring.
  constexpr int kKeyLoads = kUnits * kKeySlots * Keys::kLoads, kValueBegin = (kKeyLoads + Values::kLoads - 1) / Values::kLoads * Values::kLoads;
  constexpr int kHalves = 2 / Values::kTiles, kValueLoads = kUnits * kValueSlots * kHalves * Values::kLoads;
  constexpr int kLoads = (kValueBegin + kValueLoads + kRing - 1) / kRing * kRing;
  using Memory = Layout<KeyType, ValueType, kKeyDim, kValueDim, kPartTiles, kPresent, kWarps, kTeams, kTable>;
  static_assert(kRing % 4 == 0, "what is loaded together lies together in the ring");

  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0), team = kTeams == 1 ? 0 : warp / kWarps, share = kTeams == 1 ? warp : warp % kWarps;  // now the compiler knows that the warp agrees
  const int chunk = blockIdx.x, kv_head = blockIdx.y, num_kv_heads = gridDim.y, num_heads = num_kv_heads * group;
  const int head = kv_head * group + chunk * heads_a_block, heads = min(heads_a_block, group - chunk * heads_a_block);
  u8* const of_team = shared + Memory::kTable + team * Memory::kTeam;
  float4* const sums = reinterpret_cast<float4*>(of_team);                                        // [kWarps][kPartTiles][32]
  u8* const stats = of_team + kWarps * Memory::kSums;  // [2][kWarps], pages by turns: maxima and sums of 8 heads, and what undoes the raising of weights
  u8* const scales = of_team + kWarps * (Memory::kSums + Memory::kStats) + share * Memory::kScales;  // [2][of keys, of values]
  u8* const queries = shared + Memory::kQueries;                                                  // [R][kBand]
  const Constants<KeyType> key_constants;
  auto value_constants = [&] {
    if constexpr (kSame<KeyType, ValueType>) {
      return key_constants;
    } else {
      return Constants<ValueType>();
    }
  };
  const Keys keys{{t, shared, key_constants}};
  const Values values{{g, shared, value_constants()}};
  let_next_begin();

  // A page's first byte, and how far from it lies what this lane reads.
  const u32 page_bytes = num_kv_heads * (kPageCells * (KeyFormat::kRowBytes + ValueFormat::kRowBytes));
  const u32 key_head = kv_head * (kPageCells * KeyFormat::kRowBytes);
  const u32 value_head = num_kv_heads * (kPageCells * KeyFormat::kRowBytes) + kv_head * (kPageCells * ValueFormat::kRowBytes);
  const u32 key_offset = key_head + share * kShareCells * KeyFormat::kCodeBytes + keys.offset();
  const u32 value_offset = value_head + share * kShareCells * ValueFormat::kCodeBytes + values.offset();
  auto page_of = [&](int index) {
    const bool next = index >= run_pages;
    const int slot = (next ? next_first_slot : first_slot) + (next ? index - run_pages : index), slots = next ? next_slots : num_slots;
    return (next ? next_pool : pool) + u64(u32(slot < slots ? slot : slot - slots)) * page_bytes;
  };
  auto stage_scales = [&](int buffer, const u8* page) {
    const u32 target = shared_address(scales + buffer * (Memory::kKeyScales + Memory::kValueScales)) + lane * 16;
    const u8* const of_keys = page + (key_head + kPageCells * KeyFormat::kCodeBytes + share * Memory::kKeyScales + lane * 16);
    const u8* const of_values = page + (value_head + kPageCells * ValueFormat::kCodeBytes + share * Memory::kValueScales + lane * 16);
#pragma unroll
    for (int i = 0; i < Memory::kKeyScales; i += 512) {
      if (i + lane * 16 < Memory::kKeyScales) copy16_async(target + i, of_keys + i, true);
    }
#pragma unroll
    for (int i = 0; i < Memory::kValueScales; i += 512) {
      if (i + lane * 16 < Memory::kValueScales) copy16_async(target + Memory::kKeyScales + i, of_values + i, true);
    }
    commit_copies();
  };
  uint4 ring[kRing];
  const u8 *key_cells = nullptr, *value_cells = nullptr;  // this lane's, of the page that is being loaded
  // What ends with load `at` of the page, if anything does.
  auto load = [&](int at, bool wanted) {
    if (at < kKeyLoads) {
      const int slot = at / Keys::kLoads;
      if (at % Keys::kLoads == Keys::kLoads - 1) keys.load(ring + slot * Keys::kLoads % kRing, key_cells, slot / kKeySlots, slot % kKeySlots, wanted);
    } else if (at >= kValueBegin && at < kValueBegin + kValueLoads) {
      const int slot = (at - kValueBegin) / Values::kLoads, part = slot / (kUnits * kPartSlots * kHalves), unit = slot / (kPartSlots * kHalves) % kUnits;
      if ((at - kValueBegin) % Values::kLoads == Values::kLoads - 1) {
        const int j = part * kPartSlots + slot / kHalves % kPartSlots;
        values.load(ring + (kValueBegin + slot * Values::kLoads) % kRing, value_cells, unit, j, slot % kHalves, wanted);
      }
    }
  };
  auto begin_page = [&](int index) {
    const u8* const page = page_of(index);
    key_cells = page + key_offset, value_cells = page + value_offset;
    stage_scales(0, page);
#pragma unroll
    for (int at = 0; at < kRing; at++) load(at, true);
  };
  const int step = gridDim.z * kTeams;
  int index = blockIdx.z * kTeams + team;
  const bool newest_first = first_part + index == num_parts - 1;
  if (index < num_pages && !newest_first) begin_page(index);
  if constexpr (kTable) make_table<kThreads>(shared);
  const int newest = fresh(position), oldest = first_cell(newest, sliding_window);
  const int newest_page = newest / kPageCells, oldest_page = oldest / kPageCells;
  wait_for_previous();
  if (index < num_pages && newest_first) begin_page(index);

  // The queries as fragments, element d of head h in the word of lane (h, slot % 4). Where operands are smaller by a factor than their levels the queries make up
  // for what differs between pairs, the scale of the scores for the rest.
  constexpr bool kShiftedKeys = decltype(keys.decoder)::kShifted, kShiftedValues = decltype(values.decoder)::kShifted;
  constexpr float kFactor = kShiftedKeys ? 8.0f : 1.0f, kEven = decltype(keys.decoder)::factor(0) / kFactor, kOdd = decltype(keys.decoder)::factor(1) / kFactor;
  const float scale2 = scale * kLog2E * kFactor;
  for (int item = threadIdx.x; item < num_bands * kHeads * (kKeyDim / 4); item += kThreads) {
    const int d = item % (kKeyDim / 4) * 4, h = item / (kKeyDim / 4) % kHeads, band = item / (kKeyDim / 4) / kHeads;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (h < heads) x = fresh(reinterpret_cast<const float4*>(q + (i64(band) * num_heads + head + h) * kKeyDim + d));
    const int slot = d / kKeyElements, fragment = slot / 4 * (kKeyElements / 4) + d % kKeyElements / 4;
    u32* const target = reinterpret_cast<u32*>(queries + band * Memory::kBand) + (fragment / 2 * 32 + 4 * h + slot % 4) * 4 + fragment % 2 * 2;
    *reinterpret_cast<uint2*>(target) = make_uint2(pack_half2(x.x * kEven, x.y * kEven), pack_half2(x.z * kOdd, x.w * kOdd));
  }
  __syncthreads();

  const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float offsets[kShiftedKeys ? KeyFormat::kScales : 1][4];
  int offsets_band = -1, buffer = 0;
#pragma unroll 1
  for (; index < num_pages; index += step) {
    const bool more = index + step < num_pages;
    wait_for_copies<0>();
    __syncwarp();  // scales of this page have come; those of the page before have been read
    const int next_index = more ? index + step : index;
    if (more) stage_scales(buffer ^ 1, page_of(next_index));
    const u8* const key_scales = scales + buffer * (Memory::kKeyScales + Memory::kValueScales);
    const u8* const value_scales = key_scales + Memory::kKeyScales;
    float4* const share_stats = reinterpret_cast<float4*>(stats + buffer * (kWarps * Memory::kStats / 2));  // [kWarps][5]
    buffer ^= 1;
    auto load_ahead = [&](int at, int count) {  // once loads `at`, ... of this page have been decoded
#pragma unroll
      for (int i = at; i < at + count; i++) {
        if (i + kRing == kLoads) {
          const u8* const next_page = page_of(kTight ? anew(next_index) : next_index);
          key_cells = next_page + key_offset, value_cells = next_page + value_offset;
        }
        load((i + kRing) % kLoads, i + kRing < kLoads || more);
      }
    };
    const int page = first_page + index;
    const bool all_visible = kPageCells >= kUnitCells && page < newest_page && (page > oldest_page || (page == oldest_page && oldest % kPageCells == 0));
    const int begin = page > oldest_page ? 0 : page == oldest_page ? oldest % kPageCells : kPageCells;  // visible rows of the page
    const int end = page < newest_page ? kPageCells : page == newest_page ? newest % kPageCells + 1 : 0;
    auto visible = [&](int row) { return row + share * kShareCells >= begin && row + share * kShareCells < end; };  // of the share
    const int band = num_bands == 1 ? 0 : (page < own_page) + (page < previous_page);
    const uint4* const query = reinterpret_cast<const uint4*>(queries + band * Memory::kBand) + lane;
    if constexpr (kShiftedKeys) {
      if (band != offsets_band) {
        offsets_band = band;
        constexpr u32 kEven = 0xbd80bd80u, kOdd = 0xbc60bc60u;  // -1.375, -1.09375
        uint4 two;
#pragma unroll
        for (int f = 0; f < kFragments; f++) {
          constexpr int kOfGroup = KeyFormat::kGroup / 16;
          float(&sum)[4] = offsets[f / kOfGroup];
          if (f % 2 == 0) two = query[f / 2 * 32];
          mma_f16(sum, kEven, kEven, kOdd, kOdd, f % 2 == 0 ? two.x : two.z, f % 2 == 0 ? two.y : two.w, f % kOfGroup == 0 ? zeros : sum);
        }
      }
    }

    // S[u][i][e]: head 2 t + e of the lane's cell 4 g + i of unit u.
    float S[kUnits][4][2];
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      float T[2][4];  // of two tiles, for one scale
      uint4 two;      // queries of two fragments
#pragma unroll
      for (int j = 0; j < kKeySlots; j++) {
        constexpr int kInSlot = kKeyElements / 4;
        const int at = (u * kKeySlots + j) * Keys::kLoads;
        u32 x[4][kKeyElements / 2];
#pragma unroll
        for (int i = 0; i < 4; i++) keys.neighbours(x[i], ring + at % kRing, i, j);
#pragma unroll
        for (int k = 0; k < kInSlot; k++) {
          const int f = j * kInSlot + k;
          if (f % 2 == 0) two = query[f / 2 * 32];
          const u32 b0 = f % 2 == 0 ? two.x : two.z, b1 = f % 2 == 0 ? two.y : two.w;
#pragma unroll
          for (int tile = 0; tile < 2; tile++) {
            const float* sum = T[tile];
            if (j % kKeyGroup == 0 && k == 0) sum = kShiftedKeys ? offsets[kShiftedKeys ? j / kKeyGroup : 0] : zeros;
            mma_f16(T[tile], x[2 * tile][2 * k], x[2 * tile + 1][2 * k], x[2 * tile][2 * k + 1], x[2 * tile + 1][2 * k + 1], b0, b1, sum);
          }
        }
        load_ahead(at, Keys::kLoads);
        __syncwarp();
        if (j % kKeyGroup == kKeyGroup - 1) {
          float factor[4] = {scale2, scale2, scale2, scale2};
          if constexpr (kCoded<KeyType>) {
            to_floats(factor, *reinterpret_cast<const uint2*>(key_scales + ((u * 8 + g) * KeyFormat::kScales + j / kKeyGroup) * 8));
#pragma unroll
            for (int i = 0; i < 4; i++) factor[i] *= scale2;
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const float sum = T[i / 2][i % 2 * 2 + e];
              S[u][i][e] = j < kKeyGroup ? sum * factor[i] : fmaf(sum, factor[i], S[u][i][e]);
            }
          }
        }
      }
    }

    if constexpr (kValueBegin > kKeyLoads) load_ahead(kKeyLoads, kValueBegin - kKeyLoads);

    // Maximum, weights and their sum of this share.
    if (!all_visible) {
      asm volatile("");
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (!visible(32 * u + 4 * g + i)) S[u][i][0] = S[u][i][1] = -infinity();
        }
      }
    }
    float m[2] = {-infinity(), -infinity()}, l[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int i = 0; i < 4 * kUnits; i++) m[e] = fmaxf(m[e], S[i / 4][i % 4][e]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) m[e] = fmaxf(m[e], __shfl_xor_sync(kAllLanes, m[e], lanes));
      const float base = softmax_base(m[e]);
#pragma unroll
      for (int i = 0; i < 4 * kUnits; i++) {
        S[i / 4][i % 4][e] = exp2_approx(S[i / 4][i % 4][e] - base);
        l[e] += S[i / 4][i % 4][e];
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) l[e] += __shfl_xor_sync(kAllLanes, l[e], lanes);
    }

    // P^T as fragments: of partners i of unit u. With scales in them the largest is brought near 2^15, so that small ones keep their bits.
    u32 P[kSets][kUnits][4];
    float undone = 1.0f;
    if constexpr (kWeighted) {
      float of_cell[kSets][kUnits][4], most = 0.0f;
#pragma unroll
      for (int i = 0; i < kSets * kUnits; i++) {
        const int set = i / kUnits, u = i % kUnits;
        to_floats(of_cell[set][u], *reinterpret_cast<const uint2*>(value_scales + ((u * 8 + g) * kSets + set) * 8));
      }
      if (!all_visible) {
        asm volatile("");
#pragma unroll
        for (int i = 0; i < kSets * kUnits * 4; i++) {  // what is not visible may be no number, which no weight makes 0
          if (!visible(32 * (i / 4 % kUnits) + 4 * g + i % 4)) of_cell[i / 4 / kUnits][i / 4 % kUnits][i % 4] = 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kSets * kUnits * 4; i++) most = fmaxf(most, fabsf(of_cell[i / 4 / kUnits][i / 4 % kUnits][i % 4]));
      const u32 exponent = min(max(__reduce_max_sync(kAllLanes, __float_as_uint(most)) >> 23, 103u), 142u);  // of a half that is not 0
      const float raised = __uint_as_float((127 + 127 + 14 - exponent) << 23);
      undone = __uint_as_float((exponent - 14) << 23);
#pragma unroll
      for (int i = 0; i < kSets * kUnits * 4; i++) {
        const int set = i / 4 / kUnits, u = i / 4 % kUnits, k = i % 4;
        const float factor = of_cell[set][u][k] * raised;
        P[set][u][k] = transpose_matrix(pack_half2(S[u][k][0] * factor, S[u][k][1] * factor));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnits * 4; i++) P[0][i / 4][i % 4] = transpose_matrix(pack_half2(S[i / 4][i % 4][0], S[i / 4][i % 4][1]));
    }

    if (g == 0) share_stats[share * 5 + t] = make_float4(m[0], l[0], m[1], l[1]);
    if (lane == 0) share_stats[share * 5 + 4].x = undone;

    // O[tile]: elements 2 i (sums 0, 1) and 2 i + 1 (2, 3) of a slot of heads 2 t and 2 t + 1.
    float O[kPartTiles][4], start[kShiftedValues ? kSets : 1][2][4];
    if constexpr (kShiftedValues) {
#pragma unroll
      for (int set = 0; set < kSets; set++) {
        float sum[4];  // of the weights
#pragma unroll
        for (int i = 0; i < 2 * kUnits; i++) {
          mma_f16(sum, kOnes, kOnes, kOnes, kOnes, P[set][i / 2][i % 2 * 2], P[set][i / 2][i % 2 * 2 + 1], i == 0 ? zeros : sum);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) start[set][k / 4][k % 4] = sum[k % 4] * -values.decoder.offset(k / 4);
      }
    }
    const i64 state = i64(first_part + index) * num_heads + head;
    float* const target = num_parts == 1 ? out + i64(head) * kValueDim : part_out + state * kValueDim;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
#pragma unroll
        for (int j = part * kPartSlots; j < (part + 1) * kPartSlots; j++) {
          u32 factor[4];  // scales of partners
          if constexpr (kCoded<ValueType> && !kWeighted) {
            const int of_group = (8 * j * kValueElements + g * kValueElements) / ValueFormat::kGroup;
            const u8* const first = value_scales + ((u * 8 + 2 * t) * ValueFormat::kScales + of_group) * 8;
            const uint2 a = *reinterpret_cast<const uint2*>(first), b = *reinterpret_cast<const uint2*>(first + ValueFormat::kScales * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              factor[i] = __byte_perm(i < 2 ? a.x : a.y, i < 2 ? b.x : b.y, i % 2 == 0 ? 0x5410 : 0x7632);
            }
            if (!all_visible) {
              asm volatile("");
#pragma unroll
              for (int i = 0; i < 4; i++) {
                const int row = 32 * u + 8 * t + i;
                factor[i] &= (visible(row) ? 0xffffu : 0u) | (visible(row + 4) ? 0xffff0000u : 0u);
              }
            }
          }
#pragma unroll
          for (int tile = 0; tile < 2; tile++) {
            const int slot = (part * kUnits + u) * kPartSlots + j % kPartSlots, set = j / kSetSlots;
            const int at = kValueBegin + (slot * 2 + tile) / Values::kTiles * Values::kLoads;
            if (kSame<ValueType, Half> && !all_visible) {
              asm volatile("");
#pragma unroll
              for (int i = 0; i < 4; i++) {  // as ValueReader loads them
                if (!visible(32 * u + 8 * t + 2 * tile + i / 2 + i % 2 * 4)) ring[(at + i) % kRing] = make_uint4(0, 0, 0, 0);
              }
            }
            u32 x[2][kValueElements];  // of two pairs of partners
#pragma unroll
            for (int i = 0; i < 2; i++) {
              values.partners(x[i], ring + at % kRing, 2 * tile + i, j);
              if constexpr (kCoded<ValueType> && !kWeighted) {
#pragma unroll
                for (int e = 0; e < kValueElements; e++) x[i][e] = multiply_half2(x[i][e], factor[2 * tile + i]);
              }
            }
#pragma unroll
            for (int k = 0; k < kValueElements / 2; k++) {
              float(&sum)[4] = O[j % kPartSlots * (kValueElements / 2) + k];
              const float* const before = u + tile > 0 ? sum : kShiftedValues ? start[kShiftedValues ? set : 0][k % 2] : zeros;
              mma_f16(sum, x[0][2 * k], x[0][2 * k + 1], x[1][2 * k], x[1][2 * k + 1], P[set][u][2 * tile], P[set][u][2 * tile + 1], before);
            }
            if (tile == 1 || Values::kTiles == 1) {
              load_ahead(at, Values::kLoads);
              __syncwarp();
            }
          }
        }
      }
      // The team's shares become the page's state.
      const int late = kTight ? anew(lane) : lane, g = late / 4, t = late % 4;
      const int heads = min(heads_a_block, group - (kTight ? anew(chunk) : chunk) * heads_a_block);
      team_barrier<kWarps * 32>(team);  // what was there before has been read, and statistics are there
#pragma unroll
      for (int i = 0; i < kPartTiles; i++) sums[(share * kPartTiles + i) * 32 + late] = make_float4(O[i][0], O[i][1], O[i][2], O[i][3]);
      float4 of_share[kWarps];
      float most[2] = {-infinity(), -infinity()}, total[2] = {0.0f, 0.0f}, weight[kWarps][2];
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        of_share[w] = share_stats[w * 5 + t];
        most[0] = fmaxf(most[0], of_share[w].x);
        most[1] = fmaxf(most[1], of_share[w].z);
      }
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        weight[w][0] = exp2_approx(of_share[w].x - softmax_base(most[0]));
        weight[w][1] = exp2_approx(of_share[w].z - softmax_base(most[1]));
        total[0] = fmaf(weight[w][0], of_share[w].y, total[0]);
        total[1] = fmaf(weight[w][1], of_share[w].w, total[1]);
        if constexpr (kWeighted) weight[w][0] *= share_stats[w * 5 + 4].x, weight[w][1] *= share_stats[w * 5 + 4].x;
      }
      team_barrier<kWarps * 32>(team);
      const float norm[2] = {reciprocal(total[0]), reciprocal(total[1])};
      float result[2][2][2];  // head, tile, element
#pragma unroll
      for (int k = 0; k < kOwned; k++) {
        const int own = share * kOwned + k, tile = part * kPartTiles + own;
        constexpr bool kPaired = kOwned % 2 == 0 && kPartTiles % 2 == 0 && kValueElements > 2;
        if (kOwned * kWarps > kPartTiles && own >= kPartTiles) break;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          const float4 x = sums[(w * kPartTiles + own) * 32 + late];
          sum.x = fmaf(weight[w][0], x.x, sum.x), sum.y = fmaf(weight[w][1], x.y, sum.y);
          sum.z = fmaf(weight[w][0], x.z, sum.z), sum.w = fmaf(weight[w][1], x.w, sum.w);
        }
        const float factor = values.decoder.factor(kValueElements > 2 ? (kOwned % 2 == 0 ? k : own) : 0);
        result[0][k % 2][0] = sum.x * (norm[0] * factor), result[0][k % 2][1] = sum.z * (norm[0] * factor);
        result[1][k % 2][0] = sum.y * (norm[1] * factor), result[1][k % 2][1] = sum.w * (norm[1] * factor);
        const int in_slot = tile % (kValueElements / 2) * 2, d = (tile / (kValueElements / 2) * 8 + g) * kValueElements + in_slot;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (2 * t + e >= heads) continue;
          float* const row = target + (2 * t + e) * kValueDim;
          if constexpr (kPaired) {
            if (k % 2 == 1) *reinterpret_cast<float4*>(row + d - 2) = make_float4(result[e][0][0], result[e][0][1], result[e][1][0], result[e][1][1]);
          } else {
            *reinterpret_cast<float2*>(row + d) = make_float2(result[e][k % 2][0], result[e][k % 2][1]);
          }
        }
      }
      if (part == 0 && share == 0 && g == 0 && num_parts > 1) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (2 * t + e < heads) part_lse[state + 2 * t + e] = softmax_lse(most[e] * kLn2, total[e]);
        }
      }
    }
    if constexpr (kLoads > kValueBegin + kValueLoads) load_ahead(kValueBegin + kValueLoads, kLoads - kValueBegin - kValueLoads);
  }
  if constexpr (kFew) {
    if (num_parts > 1 && num_parts <= kMergedWithin && first_part + num_pages == num_parts) {
      merge_when_last<kThreads, kValueDim>(
          part_out, part_lse, arrivals + kv_head * gridDim.x + chunk, out, num_parts, gridDim.z, num_heads, head, heads);
    }
  }
}
