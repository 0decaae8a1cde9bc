// Chooses the next token from one row of logits, to the bit as rollkv/sampling.py, which is the definition.
//
// Formula   greedy: the largest penalised logit, the lowest id among equals. Sampled: of the tokens that top-k, top-p and min-p leave, in order of
//           their ids, the first at which the sum of weights exceeds (a random word * the whole sum) / 2^64.
// Operands  logits f32 [vocab], any number of them; sequence i32 [n]: the ids so far; position i32 [1]; outcome i32 [2].
// Mapping   a block takes 1024 tokens, so 149 blocks a vocabulary of 151,936. One kernel after the other:
//             choose_rank    penalty; a logit's image as u32 (its key); the best key of every block
//             choose_best    greedy: the best of those. The end
//             choose_narrow  up to five times: a histogram of one digit (11, 11 and 10 bits from the top) of the keys that agree with what is known of
//                            the cut, counts for top-k and weights for top-p. What is known every block works out by itself, from the histogram of
//                            the step before. Digits for top-k first, then, from the weight that it leaves, those for top-p; the first histogram
//                            serves both
//             choose_sum     weights at the temperature of what is left, block by block
//             choose_draw    one block: finds the block that was drawn, and in it the token. The end
//           Sums are of integers, so that neither blocks nor atomics decide their bits. The last kernel alone moves the position.
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
constexpr double kExp2[] = {1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
                            0.0001540353039338161, 1.5252733804059841e-05, 1.321548679014431e-06, 1.01780860092397e-07, 7.054911620801123e-09};

struct alignas(16) Histogram {
  u64 weight[kBins];
  u32 count[kBins];
};

// What is known of the cut: keys that begin with `prefix` are at it, above lies what is left for sure. In the end every token with a key above
// `prefix` is left, and the first `wanted` of those at it.
struct Cut {
  u64 wanted;  // tokens, or weight, still to find among the keys at it
  u64 above;   // weight of the keys above it
  u32 prefix;
};

constexpr int kSteps = 5;  // three digits for top-k and two more for top-p
struct Search {            // choose_rank clears it
  Histogram histograms[kSteps];
  Cut cuts[kSteps + 1];  // known before each step, and in the end
};
static_assert(sizeof(Search) == 123024, "workspace.CHOICE_SEARCH_BYTES");

__device__ __forceinline__ int shift_of(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
__device__ __forceinline__ int bits_of(int digit) { return digit == 2 ? 10 : 11; }

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
__device__ float best_logit(const u64* best, int num_blocks) {
  u64 largest = 0;
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) largest = max(largest, fresh(best + i));
  return value_of(u32(block_largest(largest) >> 32));
}

// A thread's bins: kBinsEach neighbours, the highest first, as the threads are.
struct Bins {
  u64 weights[kBinsEach];
  u32 counts[kBinsEach];

  __device__ __forceinline__ explicit Bins(const Histogram& histogram) {
    const int lowest = kBins - (threadIdx.x + 1) * kBinsEach;
    const uint4* weight = reinterpret_cast<const uint4*>(histogram.weight + lowest);
    const uint4* count = reinterpret_cast<const uint4*>(histogram.count + lowest);
#pragma unroll
    for (int i = 0; i < kBinsEach / 2; i++) {
      const uint4 pair = fresh(weight + kBinsEach / 2 - 1 - i);
      weights[2 * i] = u64(pair.w) << 32 | pair.z;
      weights[2 * i + 1] = u64(pair.y) << 32 | pair.x;
    }
#pragma unroll
    for (int i = 0; i < kBinsEach / 4; i++) {
      const uint4 quad = fresh(count + kBinsEach / 4 - 1 - i);
      counts[4 * i] = quad.w;
      counts[4 * i + 1] = quad.z;
      counts[4 * i + 2] = quad.y;
      counts[4 * i + 3] = quad.x;
    }
  }
};

struct Found {
  u32 bin;
  u64 wanted;  // of what the bin holds
  u64 above;   // weight of the bins above it
};

// From the highest bin down, the one where the count, or the weight, reaches `wanted`, or top_p of all weight where `wanted` is 0.
__device__ Found find_bin(const Bins& bins, bool by_weight, u64 wanted, double top_p) {
  __shared__ Found found;
  u64 weight = 0, amount = 0, total;
#pragma unroll
  for (int i = 0; i < kBinsEach; i++) {
    weight += bins.weights[i];
    amount += by_weight ? bins.weights[i] : bins.counts[i];
  }
  u64 above = block_before(weight, total);
  if (wanted == 0) wanted = mass_to_reach(total, top_p);
  u64 before = by_weight ? above : block_before(amount, total);
  if (before < wanted && wanted <= before + amount) {
    int i = 0;
#pragma unroll
    for (int bin = 0; bin < kBinsEach - 1; bin++) {
      const u64 here = by_weight ? bins.weights[bin] : bins.counts[bin];
      if (i == bin && before + here < wanted) {
        before += here;
        above += bins.weights[bin];
        i++;
      }
    }
    found = Found{kBins - 1 - threadIdx.x * kBinsEach - i, wanted - before, above};
  }
  __syncthreads();
  return found;
}

// What is known before `step`; the first block writes it down for the next one. Steps 0 .. 2 look for top_k's digits, if it is not 0, and all others for
// those of top_p. `top` receives the best logit.
__device__ Cut narrow(Search* search, int step, int top_k, double top_p, double sharpness, const u64* best, float& top) {
  const int num_blocks = gridDim.x;
  if (step == 0) {
    top = best_logit(best, num_blocks);
    return Cut{0, 0, 0};
  }
  const int last = step - 1, counted = top_k ? 3 : 0, digit = last < 3 ? last : last - 2;
  const bool by_weight = last >= counted;
  const Cut* known = search->cuts + last;
  Cut cut{fresh(&known->wanted), fresh(&known->above), fresh(&known->prefix)};
  const Bins bins(search->histograms[last]);  // under way while the best is found
  top = best_logit(best, num_blocks);
  const Found found = find_bin(bins, by_weight, digit ? cut.wanted : top_k, top_p);
  cut = Cut{found.wanted, cut.above + found.above, cut.prefix << bits_of(digit) | found.bin};
  if (digit == 2) {
    const u64 weight = weight_of(cut.prefix, top, sharpness);
    if (by_weight) {
      cut.wanted = (cut.wanted + weight - 1) / weight;
    } else if (top_p < 1.0) {
      const u64 mass = mass_to_reach(cut.above + cut.wanted * weight, top_p);
      const Found again = find_bin(Bins(search->histograms[0]), true, mass, top_p);
      cut = Cut{again.wanted, again.above, again.bin};
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) search->cuts[step] = cut;
  return cut;
}

// The end of a step, by one thread. n: cells of the sequence.
__device__ void finish(int id, u64 unsound, int* sequence, int* position, int* outcome, int n) {
  const int cell = fresh(position), chosen = unsound ? 0 : id;
  if (cell + 1 < n) sequence[cell + 1] = chosen;
  outcome[0] = chosen;
  outcome[1] = int(unsound);
  *position = cell + 1;
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
  u64 largest = 0, wrong = 0;
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) {
    largest = max(largest, fresh(best + i));
    wrong += fresh(unsound + i);
  }
  largest = block_largest(largest);
  wrong = block_total(wrong);
  if (threadIdx.x == 0) finish(int(~u32(largest)), wrong, sequence, position, outcome, n);
}

// Counts and weighs one digit of the keys at what is known of the cut.
extern "C" __global__ void __launch_bounds__(kThreads, 2) choose_narrow(
    const u32* keys,  // [blocks][kTokens]
    const u64* best,  // [blocks]
    Search* search,   // [1]
    int step, int top_k, double top_p, double sharpness) {
  __shared__ u32 counts[kBins], lows[kBins], highs[kBins];  // weights in two parts: additions of 32 bits are the ones that shared memory has
  let_next_begin();
#pragma unroll
  for (int i = threadIdx.x; i < kBins; i += kThreads) counts[i] = lows[i] = highs[i] = 0;
  wait_for_previous();
  u32 mine[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) mine[i] = fresh(keys + blockIdx.x * kTokens + i * kThreads + threadIdx.x);
  float top;
  const Cut cut = narrow(search, step, top_k, top_p, sharpness, best, top);  // and a barrier
  const int digit = step < 3 ? step : step - 2, shift = shift_of(digit), bits = bits_of(digit);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    if (mine[i] == 0 || u64(mine[i]) >> (shift + bits) != cut.prefix) continue;
    const u32 bin = mine[i] >> shift & ((1u << bits) - 1);
    atomicAdd(counts + bin, 1);
    if (top_p < 1.0) {
      const u64 weight = weight_of(mine[i], top, sharpness);
      atomicAdd(lows + bin, u32(weight) & kLowMask);
      atomicAdd(highs + bin, u32(weight >> kLowBits));
    }
  }
  __syncthreads();
  Histogram& histogram = search->histograms[step];
#pragma unroll
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (counts[i] == 0) continue;
    atomicAdd(histogram.count + i, counts[i]);
    if (top_p < 1.0) atomicAdd(histogram.weight + i, (u64(highs[i]) << kLowBits) + lows[i]);
  }
}

// Whether a token at this key is among those that min_p leaves.
__device__ __forceinline__ bool likely(u32 key, float top, double log_min_p) {
  return __dsub_rn(double(value_of(key)), double(top)) >= log_min_p;
}

extern "C" __global__ void __launch_bounds__(kThreads) choose_sum(
    const u32* keys,  // [blocks][kTokens]
    const u64* best,  // [blocks]
    Search* search,   // [1]
    u64* sums,        // [blocks]: weight of the tokens above the cut
    u32* ties,        // [blocks]: tokens at the cut
    int steps, int top_k, double top_p, double sharpness, double draw_sharpness, double log_min_p) {
  let_next_begin();
  wait_for_previous();
  u32 mine[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) mine[i] = fresh(keys + blockIdx.x * kTokens + i * kThreads + threadIdx.x);
  float top;
  const u32 cut = narrow(search, steps, top_k, top_p, sharpness, best, top).prefix;
  u64 sum = 0, tied = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    tied += cut != 0 && mine[i] == cut;
    if (mine[i] > cut && likely(mine[i], top, log_min_p)) sum += weight_of(mine[i], top, draw_sharpness);
  }
  sum = block_total(sum);
  tied = block_total(tied);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    ties[blockIdx.x] = u32(tied);
  }
}

// One block.
extern "C" __global__ void __launch_bounds__(kThreads) choose_draw(
    const u32* keys,       // [blocks][kTokens]
    const u64* best,       // [blocks]
    const u32* unsound,    // [blocks]
    const Search* search,  // [1]
    const u64* sums,       // [blocks]
    const u32* ties,       // [blocks]
    int* sequence,         // [n]
    int* position,         // [1]
    int* outcome,          // [2]
    int num_blocks, int n, int steps, double draw_sharpness, double log_min_p, u64 seed) {
  __shared__ struct {
    int block;
    u64 left, ties_before;
  } place;
  let_next_begin();
  wait_for_previous();
  // Blocks in order, a run of them a thread.
  const int run = (num_blocks + kThreads - 1) / kThreads, begin = min(int(threadIdx.x) * run, num_blocks), end = min(begin + run, num_blocks);
  const u32 cut = fresh(&search->cuts[steps].prefix);
  const u64 random = split_mix(seed, u64(fresh(position)));
  u64 kept = fresh(&search->cuts[steps].wanted), tied = 0, above = 0, wrong = 0, total;
  for (int i = begin; i < end; i++) {
    tied += fresh(ties + i);
    above += fresh(sums + i);
    wrong += fresh(unsound + i);
  }
  const float top = best_logit(best, num_blocks);
  if (cut == 0 || !likely(cut, top, log_min_p)) kept = 0;  // of the tokens at the cut
  const u64 tie_weight = kept ? weight_of(cut, top, draw_sharpness) : 0;
  const auto kept_of = [&](u64 before, u64 count) { return before >= kept ? 0 : min(kept - before, count); };
  u64 ties_before = block_before(tied, total);
  const u64 amount = above + kept_of(ties_before, tied) * tie_weight;
  u64 before = block_before(amount, total);
  const u64 drawn = __umul64hi(random, total);
  if (before <= drawn && drawn < before + amount) {
    int block = begin;
    for (;; block++) {
      const u64 here = fresh(ties + block), weight = fresh(sums + block) + kept_of(ties_before, here) * tie_weight;
      if (drawn < before + weight) break;
      before += weight;
      ties_before += here;
    }
    place.block = block;
    place.left = drawn - before;
    place.ties_before = ties_before;
  }
  wrong = block_total(wrong);  // and a barrier

  // Its tokens in order, kEach neighbours a thread.
  const int first = place.block * kTokens + threadIdx.x * kEach;
  u32 mine[kEach];
  tied = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    mine[i] = fresh(keys + first + i);
    tied += cut != 0 && mine[i] == cut;
  }
  ties_before = place.ties_before + block_before(tied, total);
  u64 weights[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const bool tie = cut != 0 && mine[i] == cut;
    weights[i] = tie                                                   ? kept_of(ties_before, 1) * tie_weight
                 : mine[i] > cut && likely(mine[i], top, log_min_p) ? weight_of(mine[i], top, draw_sharpness)
                                                                       : 0;
    ties_before += tie;
    sum += weights[i];
  }
  before = block_before(sum, total);
  if (before <= place.left && place.left < before + sum) {
    int i = 0;
#pragma unroll
    for (int token = 0; token < kEach - 1; token++) {
      if (i == token && before + weights[token] <= place.left) {
        before += weights[token];
        i++;
      }
    }
    finish(first + i, wrong, sequence, position, outcome, n);
  }
}
