// Chooses the next token from one row of logits, to the bit as rollkv/sampling.py, which is the definition.
//
// Formula   greedy: the largest penalised logit, the lowest id among equals. Sampled: of the tokens that top-k, top-p and min-p leave, in order of
//           their ids, the first at which the sum of weights exceeds (a random word * the whole sum) / 2^64.
// Operands  logits f32 [vocab], any number of them; sequence i32 [n]: the ids so far; position i32 [1]; outcome i32 [2].
// Mapping   a block takes 1024 tokens, so 149 blocks a vocabulary of 151,936. One kernel after the other:
//             choose_rank    penalty; a logit's image as u32 (its key); the best key of every block
//             choose_best    greedy: the best of those. The end
//             choose_narrow  up to five times: a histogram of one digit (11, 11 and 10 bits from the top) of the keys that agree with what is known of
//                            the cut, counts for top-k and weights for top-p. The last block to arrive finds the digit of the cut. Digits for top-k
//                            first, then, from the weight that it leaves, those for top-p; the first histogram serves both
//             choose_draw    weights at the temperature, block by block; the last one to arrive finds the block and then the token
//           Sums are of integers, so that neither blocks nor atomics decide their bits. A step's last kernel alone moves the position.
// Bound     latency: 600 KB out of L2 a kernel. Weights take 26 operations of float64 a token: 4 M, 6 us where a card makes 0.6 T of them a second.
// Oracle    sampling.choose, the same id always
#include "split_mix.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokens = 1024, kEach = kTokens / kThreads;  // of a block, of a thread
constexpr int kBins = 2048, kBinsEach = kBins / kThreads;
constexpr int kWeightBits = 40, kLowBits = 20;
constexpr u32 kLowMask = (1u << kLowBits) - 1;
constexpr float kLargest = 3.402823466e38f;
// As in sampling.py: ln(2)^k / k!.
constexpr double kExp2[] = {1.0,
                            0.6931471805599453,
                            0.24022650695910072,
                            0.05550410866482158,
                            0.009618129107628477,
                            0.0013333558146428443,
                            0.0001540353039338161,
                            1.5252733804059841e-05,
                            1.321548679014431e-06,
                            1.01780860092397e-07,
                            7.054911620801123e-09};

struct Histogram {
  u64 weight[kBins];
  u32 count[kBins];
};

// What is known of the cut; choose_rank clears it. In the end every token with a key above `prefix` is left, and the first `wanted` at it.
struct Search {
  Histogram first, deeper;  // by the first digit; by the one at hand, empty between kernels
  u64 wanted;               // tokens or weight still to find among the keys that begin with `prefix`
  u64 above;                // weight of the keys above those
  u32 prefix;
  u32 arrived;  // blocks of the kernel at hand
};
static_assert(sizeof(Search) == 49176, "workspace.CHOICE_SEARCH_BYTES");

// ---- keys and weights --------------------------------------------------------------------------------------------------------------

// Finite floats in order, above 0, which stands for no token. Both zeros are one.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// 2^((x - best) * sharpness) in units of 2^-kWeightBits.
__device__ __forceinline__ u64 weight_of(u32 key, float best, double sharpness) {
  const double power = fmax(__dmul_rn(__dsub_rn(double(value_of(key)), double(best)), sharpness), -64.0);
  const double whole = rint(power), rest = __dsub_rn(power, whole);
  double value = kExp2[10];
#pragma unroll
  for (int k = 9; k >= 0; k--) value = __dadd_rn(__dmul_rn(value, rest), kExp2[k]);
  return __double2ull_rn(__dmul_rn(value, __longlong_as_double(i64(__double2int_rn(whole) + 1023 + kWeightBits) << 52)));
}

// The least sum of weights that makes up the share top_p of the total.
__device__ __forceinline__ u64 mass_to_reach(u64 total, double top_p) {
  return min(max(__double2ull_ru(__dmul_rn(top_p, __ull2double_rn(total))), u64(1)), total);
}

// ---- all threads of a block --------------------------------------------------------------------------------------------------------

__device__ u64 block_largest(u64 value) {
  __shared__ u64 warps[kWarps];
  const u32 high = __reduce_max_sync(kAllLanes, u32(value >> 32));
  const u32 low = __reduce_max_sync(kAllLanes, u32(value >> 32) == high ? u32(value) : 0u);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = u64(high) << 32 | low;
  __syncthreads();
  u64 largest = warps[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; warp++) largest = max(largest, warps[warp]);
  return largest;
}

// The sum over the threads before this one; `total`: over all.
__device__ u64 block_before(u64 value, u64& total) {
  __shared__ u64 warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u64 before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; i++) {
    before += i < warp ? warps[i] : 0;
    total += warps[i];
  }
  return before + sum - value;
}

__device__ u64 block_total(u64 value) {
  u64 total;
  block_before(value, total);
  return total;
}

// The best logit, from choose_rank's blocks.
__device__ float best_logit(const u64* best) {
  u64 largest = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += kThreads) largest = max(largest, fresh(best + i));
  return value_of(u32(block_largest(largest) >> 32));
}

// Whether all other blocks have arrived; what they wrote before can then be read out of L2.
__device__ bool last_to_arrive(u32* arrived) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == gridDim.x - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

struct Bin {
  u32 number;
  u64 before, weight_before;  // of the bins above it: of what was wanted, and weight
};

// From the highest bin down, the one where the count, or the weight, reaches `wanted`; there is one.
__device__ Bin find_bin(const Histogram& histogram, bool by_weight, u64 wanted) {
  __shared__ Bin found;
  const int highest = kBins - 1 - threadIdx.x * kBinsEach;
  u64 weights[kBinsEach], amounts[kBinsEach], weight = 0, amount = 0, total;
#pragma unroll
  for (int i = 0; i < kBinsEach; i++) {
    weights[i] = fresh(histogram.weight + highest - i);
    amounts[i] = by_weight ? weights[i] : fresh(histogram.count + highest - i);
    weight += weights[i];
    amount += amounts[i];
  }
  u64 before = block_before(amount, total), weight_before = block_before(weight, total);
  if (before < wanted && wanted <= before + amount) {
    int i = 0;
#pragma unroll
    for (int bin = 0; bin < kBinsEach - 1; bin++) {
      if (i == bin && before + amounts[bin] < wanted) {
        before += amounts[bin];
        weight_before += weights[bin];
        i++;
      }
    }
    found = Bin{u32(highest - i), before, weight_before};
  }
  __syncthreads();
  return found;
}

__device__ u64 whole_weight(const Histogram& histogram) {
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsEach; i++) sum += fresh(histogram.weight + i * kThreads + threadIdx.x);
  return block_total(sum);
}

// The end of a step, by one thread. n: cells of the sequence.
__device__ void finish(int id, u64 unsound, int* sequence, int* position, int* outcome, int n) {
  const int cell = fresh(position), chosen = unsound ? 0 : id;
  if (cell + 1 < n) sequence[cell + 1] = chosen;
  outcome[0] = chosen;
  outcome[1] = int(unsound);
  *position = cell + 1;
}

__device__ u64 all_unsound(const u32* unsound, int num_blocks) {
  u64 sum = 0;
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) sum += fresh(unsound + i);
  return block_total(sum);
}

// ---- kernels -----------------------------------------------------------------------------------------------------------------------

// keys and search: nullptr where greedy. repeat_last: up to n; 0: no penalty.
extern "C" __global__ void __launch_bounds__(kThreads) choose_rank(
    const float* logits,   // [vocab]
    const int* sequence,   // [n]
    const int* position,   // [1]
    u32* keys,             // [blocks][kTokens]
    u64* best,             // [blocks]: key, and the complement of the id
    u32* unsound,          // [blocks]: logits that are not finite
    Search* search,        // [1]
    int vocab, int n, float penalty, int repeat_last) {
  __shared__ u32 repeated[kTokens / 32];
  let_next_begin();
  if (threadIdx.x < kTokens / 32) repeated[threadIdx.x] = 0;
  wait_for_previous();
  const int first = blockIdx.x * kTokens;
  float values[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int token = first + i * kThreads + threadIdx.x;
    values[i] = token < vocab ? fresh(logits + token) : 0.0f;
  }
  if (repeat_last) {
    const int end = min(fresh(position) + 1, n);
    __syncthreads();
#pragma unroll 8
    for (int i = max(end - repeat_last, 0) + threadIdx.x; i < end; i += kThreads) {
      const u32 local = u32(fresh(sequence + i) - first);
      if (local < kTokens) atomicOr(repeated + local / 32, 1u << local % 32);
    }
    __syncthreads();
  }
  if (search) {
    u32* words = reinterpret_cast<u32*>(search);
    for (int i = first / kEach + threadIdx.x; i < int(sizeof(Search) / 4); i += gridDim.x * kThreads) words[i] = 0;
  }
  u64 largest = 0, wrong = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int local = i * kThreads + threadIdx.x, token = first + local;
    u32 key = 0;
    if (token < vocab) {
      float x = values[i];
      if (!(fabsf(x) <= kLargest)) {
        wrong++;
        x = -kLargest;
      }
      if (repeat_last && repeated[local / 32] >> local % 32 & 1) {
        x = x > 0.0f ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty);
        x = fminf(fmaxf(x, -kLargest), kLargest);
      }
      key = key_of(x);
      largest = max(largest, u64(key) << 32 | u32(~token));
    }
    if (keys) keys[token] = key;
  }
  largest = block_largest(largest);
  wrong = block_total(wrong);
  if (threadIdx.x == 0) {
    best[blockIdx.x] = largest;
    unsound[blockIdx.x] = u32(wrong);
  }
}

// One block.
extern "C" __global__ void __launch_bounds__(kThreads) choose_best(
    const u64* best,     // [blocks]
    const u32* unsound,  // [blocks]
    int* sequence,       // [n]
    int* position,       // [1]
    int* outcome,        // [2]
    int num_blocks, int n) {
  let_next_begin();
  wait_for_previous();
  u64 largest = 0;
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) largest = max(largest, fresh(best + i));
  const u64 wrong = all_unsound(unsound, num_blocks);
  largest = block_largest(largest);
  if (threadIdx.x == 0) finish(int(~u32(largest)), wrong, sequence, position, outcome, n);
}

// One digit of the cut: of top_k's, or of top_p's where top_k is 0. Behind the last of top_k's the search for top_p's begins, unless that is 1.
extern "C" __global__ void __launch_bounds__(kThreads) choose_narrow(
    const u32* keys,  // [blocks][kTokens]
    const u64* best,  // [blocks]
    Search* search,   // [1]
    int digit, int top_k, double top_p, double sharpness) {
  __shared__ u32 counts[kBins], lows[kBins], highs[kBins];  // weights in two parts: additions of 32 bits are the ones that shared memory has
  let_next_begin();
#pragma unroll
  for (int i = threadIdx.x; i < kBins; i += kThreads) counts[i] = lows[i] = highs[i] = 0;
  wait_for_previous();
  u32 mine[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) mine[i] = fresh(keys + blockIdx.x * kTokens + i * kThreads + threadIdx.x);
  const u32 prefix = fresh(&search->prefix);
  const float top = best_logit(best);  // and a barrier
  const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    if (mine[i] == 0 || u64(mine[i]) >> (shift + bits) != prefix) continue;
    const u32 bin = mine[i] >> shift & ((1u << bits) - 1);
    const u64 weight = weight_of(mine[i], top, sharpness);
    atomicAdd(counts + bin, 1);
    atomicAdd(lows + bin, u32(weight) & kLowMask);
    atomicAdd(highs + bin, u32(weight >> kLowBits));
  }
  __syncthreads();
  Histogram& histogram = digit == 0 ? search->first : search->deeper;
#pragma unroll
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (counts[i] == 0) continue;
    atomicAdd(histogram.count + i, counts[i]);
    atomicAdd(histogram.weight + i, (u64(highs[i]) << kLowBits) + lows[i]);
  }
  if (!last_to_arrive(&search->arrived)) return;

  u64 wanted = digit ? fresh(&search->wanted) : top_k ? u64(top_k) : mass_to_reach(whole_weight(histogram), top_p);
  const Bin found = find_bin(histogram, top_k == 0, wanted);
  u32 cut = prefix << bits | found.number;
  wanted -= found.before;
  const u64 above = fresh(&search->above) + found.weight_before;
  if (digit) {
#pragma unroll
    for (int i = threadIdx.x; i < kBins; i += kThreads) histogram.weight[i] = histogram.count[i] = 0;
  }
  if (digit == 2) {
    const u64 weight = weight_of(cut, top, sharpness);
    if (top_k == 0) {
      wanted = (wanted + weight - 1) / weight;
    } else if (top_p < 1.0) {
      const u64 mass = mass_to_reach(above + wanted * weight, top_p);
      const Bin again = find_bin(search->first, true, mass);
      cut = again.number;
      wanted = mass - again.before;
    }
  }
  if (threadIdx.x == 0) {
    search->wanted = wanted;
    search->above = above;
    search->prefix = cut;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) choose_draw(
    const u32* keys,     // [blocks][kTokens]
    const u64* best,     // [blocks]
    const u32* unsound,  // [blocks]
    Search* search,      // [1]
    u64* sums,           // [blocks]: weight of the tokens above the cut
    u32* ties,           // [blocks]: tokens at the cut
    int* sequence,       // [n]
    int* position,       // [1]
    int* outcome,        // [2]
    int n, double sharpness, double log_min_p, u64 seed) {
  __shared__ struct {
    int block;
    u64 left, ties_before;
  } place;
  let_next_begin();
  wait_for_previous();
  u32 mine[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) mine[i] = fresh(keys + blockIdx.x * kTokens + i * kThreads + threadIdx.x);
  const u32 cut = fresh(&search->prefix);
  const float top = best_logit(best);
  const auto likely = [&](u32 key) { return __dsub_rn(double(value_of(key)), double(top)) >= log_min_p; };
  u64 sum = 0, tied = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    tied += cut != 0 && mine[i] == cut;
    if (mine[i] > cut && likely(mine[i])) sum += weight_of(mine[i], top, sharpness);
  }
  sum = block_total(sum);
  tied = block_total(tied);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    ties[blockIdx.x] = u32(tied);
  }
  if (!last_to_arrive(&search->arrived)) return;

  // Blocks in order, a run of them a thread.
  const int num_blocks = gridDim.x, run = (num_blocks + kThreads - 1) / kThreads;
  const int begin = min(int(threadIdx.x) * run, num_blocks), end = min(begin + run, num_blocks);
  const u64 kept = cut != 0 && likely(cut) ? fresh(&search->wanted) : 0;  // of the tokens at the cut
  const u64 tie_weight = kept ? weight_of(cut, top, sharpness) : 0;
  const auto kept_of = [&](u64 before, u64 count) { return before >= kept ? 0 : min(kept - before, count); };
  u64 total;
  tied = 0;
  for (int i = begin; i < end; i++) tied += fresh(ties + i);
  u64 ties_before = block_before(tied, total);
  sum = kept_of(ties_before, tied) * tie_weight;
  for (int i = begin; i < end; i++) sum += fresh(sums + i);
  u64 before = block_before(sum, total);
  const u64 drawn = __umul64hi(split_mix(seed, u64(fresh(position))), total);
  if (before <= drawn && drawn < before + sum) {
    int block = begin;
    for (;; block++) {
      const u64 here = fresh(ties + block), amount = fresh(sums + block) + kept_of(ties_before, here) * tie_weight;
      if (drawn < before + amount) break;
      before += amount;
      ties_before += here;
    }
    place.block = block;
    place.left = drawn - before;
    place.ties_before = ties_before;
  }
  const u64 wrong = all_unsound(unsound, num_blocks);  // and a barrier

  // Its tokens in order, kEach neighbours a thread.
  static_assert(kEach == 4, "one load");
  const int first = place.block * kTokens + threadIdx.x * kEach;
  const uint4 quad = fresh(reinterpret_cast<const uint4*>(keys + first));
  const u32 neighbours[kEach] = {quad.x, quad.y, quad.z, quad.w};
  tied = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) tied += cut != 0 && neighbours[i] == cut;
  ties_before = place.ties_before + block_before(tied, total);
  u64 amounts[kEach];
  sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const u32 key = neighbours[i];
    const bool tie = cut != 0 && key == cut;
    amounts[i] = tie ? kept_of(ties_before, 1) * tie_weight : key > cut && likely(key) ? weight_of(key, top, sharpness) : 0;
    ties_before += tie;
    sum += amounts[i];
  }
  before = block_before(sum, total);
  if (before <= place.left && place.left < before + sum) {
    int i = 0;
#pragma unroll
    for (int token = 0; token < kEach - 1; token++) {
      if (i == token && before + amounts[token] <= place.left) {
        before += amounts[token];
        i++;
      }
    }
    finish(first + i, wrong, sequence, position, outcome, n);
  }
}
