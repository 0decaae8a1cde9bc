// What the tensor-core kernels of prefill attention share: the running state of 16 query rows as a warp's accumulators hold them.
//
// With g = lane / 4 and t = lane % 4 a lane owns rows g and g + 8: element 4 n + 2 r + e of its accumulators is row g + 8 r, column
// 8 n + 2 t + e, both in mma m16n8k16 and in wgmma m64 (there warp w of the group has rows 16 w on).
// State in memory f32 [H][T / 8, rounded up][8][D + 8], 8 rows together: O (not normalised) as [D/8][8 rows][8], so that a warp moves whole lines, where
// rows one by one took four times as many; then m, l of lanes 0 to 3 and three unused of each row. l stays four numbers a row until the end: added
// up before, they would depend on the division into launches. m moves only when a row's maximum grew by more than a factor 2^8 (so weights reach
// 2^8, far from the 2^16 where half ends), decided row by row.
#pragma once

#include "mma.cuh"
#include "online_softmax.cuh"

constexpr int kStateExtra = 8;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kRaise = 8.0f;  // binary orders of magnitude

struct RowPair {
  float m[2], l[2];
};

// One block's online softmax over S[4 i + 2 r + e] = score of row r and cell 8 i + e, counted from this lane's first; scores become
// weights. scale includes kLog2E. Row r sees the `reach` cells before end + 8 r. Returns whether a row of this lane moved its m; keep
// is exactly 1 for rows that did not.
template <int kCells, bool kMasked>
__device__ __forceinline__ bool softmax_block(float (&S)[kCells / 2], RowPair& row, float (&keep)[2], float scale, int end, int reach) {
  const float raise = kRaise / scale;
  bool moved = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = -infinity();
#pragma unroll
    for (int i = 0; i < kCells / 8; i++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& s = S[4 * i + 2 * r + e];
        if (kMasked) s = u32(8 * i + e - (end + 8 * r - reach)) < u32(reach) ? s : -infinity();
        most = fmaxf(most, s);
      }
    }
    most = lanes_max<4>(most);
    keep[r] = 1.0f;
    if (most > row.m[r] + raise) {
      keep[r] = exp2_approx(__fmul_rn(__fsub_rn(row.m[r], most), scale));
      row.m[r] = most;
      moved = true;
    }
    const float base = __fmul_rn(softmax_base(row.m[r]), scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCells / 8; i++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& s = S[4 * i + 2 * r + e];
        s = exp2_approx(fmaf(s, scale, -base));
        sum = __fadd_rn(sum, s);
      }
    }
    row.l[r] = fmaf(row.l[r], keep[r], sum);
  }
  return moved;
}

template <int kDim>
__device__ __forceinline__ void rescale_rows(float (&O)[kDim / 2], const float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < kDim / 2; i++) O[i] *= keep[i / 2 % 2];
}

// Softmax weights to halves, as the left factor of O += P V.
template <int kCells>
__device__ __forceinline__ void pack_weights(u32 (&P)[kCells / 4], const float (&S)[kCells / 2]) {
#pragma unroll
  for (int i = 0; i < kCells / 4; i++) P[i] = pack_half2(S[2 * i], S[2 * i + 1]);
}

// Rows from `token` on of one head; row: in arrays [T][H][...], as q and out are.
struct RowPlace {
  int token, num_tokens, num_heads, head;

  __device__ __forceinline__ i64 row(int at_token) const { return i64(at_token) * num_heads + head; }
};

// The first kColumns columns of 16 query rows as the left factor of S = Q K^T, rounded to half; zeros past the last row.
template <int kDim, int kColumns>
__device__ __forceinline__ void load_queries(u32 (&Q)[kColumns / 4], const float* q, RowPlace place, int lane) {
#pragma unroll
  for (int i = 0; i < kColumns / 4; i++) {
    const int token = place.token + lane / 4 + i % 2 * 8;
    float2 x = make_float2(0.0f, 0.0f);
    if (token < place.num_tokens) x = *reinterpret_cast<const float2*>(q + place.row(token) * kDim + i / 2 * 8 + lane % 4 * 2);
    Q[i] = pack_half2(x.x, x.y);
  }
}

// Eight neighbouring elements of a query row, rounded to half; zeros past the last row.
template <int kDim>
__device__ __forceinline__ uint4 load_query_chunk(const float* q, RowPlace place, int row, int chunk) {
  if (place.token + row >= place.num_tokens) return make_uint4(0, 0, 0, 0);
  const float4* source = reinterpret_cast<const float4*>(q + place.row(place.token + row) * kDim + chunk * 8);
  const float4 low = source[0], high = source[1];
  return make_uint4(pack_half2(low.x, low.y), pack_half2(low.z, low.w), pack_half2(high.x, high.y), pack_half2(high.z, high.w));
}

// A group of 8 rows in the state, and in it this lane's share.
template <int kDim>
struct SavedRows {
  static constexpr int kRows = 8, kStride = kRows * 8;  // from eight columns to the next
  float* sums;                                          // two of every eight columns
  float* rest;                                          // m and l of its row

  __device__ __forceinline__ SavedRows(float* state, RowPlace place, int first_token, int lane) {
    const int row = place.head * ((place.num_tokens + kRows - 1) & ~(kRows - 1)) + first_token;
    float* const group = state + i64(row) * (kDim + kStateExtra);
    sums = group + lane * 2;
    rest = group + kRows * kDim + lane / 4 * kStateExtra;
  }
};

// The state that an earlier launch left, or the empty one where there is none.
template <int kDim>
__device__ __forceinline__ void load_rows(RowPair& row, float (&O)[kDim / 2], float* state, RowPlace place, int lane, bool empty) {
#pragma unroll
  for (int i = 0; i < kDim / 2; i++) O[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row.m[r] = -infinity();
    row.l[r] = 0.0f;
    if (empty || place.token + lane / 4 + 8 * r >= place.num_tokens) continue;
    const SavedRows<kDim> saved(state, place, place.token + 8 * r, lane);
    row.m[r] = saved.rest[0];
    row.l[r] = saved.rest[1 + lane % 4];
#pragma unroll
    for (int n = 0; n < kDim / 8; n++) {
      const float2 x = *reinterpret_cast<const float2*>(saved.sums + n * saved.kStride);
      O[4 * n + 2 * r] = x.x;
      O[4 * n + 2 * r + 1] = x.y;
    }
  }
}

// The state for the next launch.
template <int kDim>
__device__ __forceinline__ void save_rows(const RowPair& row, const float (&O)[kDim / 2], float* state, RowPlace place, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (place.token + lane / 4 + 8 * r >= place.num_tokens) continue;
    const SavedRows<kDim> saved(state, place, place.token + 8 * r, lane);
    if (lane % 4 == 0) saved.rest[0] = row.m[r];
    saved.rest[1 + lane % 4] = row.l[r];
#pragma unroll
    for (int n = 0; n < kDim / 8; n++)
      *reinterpret_cast<float2*>(saved.sums + n * saved.kStride) = make_float2(O[4 * n + 2 * r], O[4 * n + 2 * r + 1]);
  }
}

// The normalised result. The whole warp must call.
template <int kDim>
__device__ __forceinline__ void write_rows(const RowPair& row, const float (&O)[kDim / 2], float* out, RowPlace place, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int token = place.token + lane / 4 + 8 * r;
    const float norm = softmax_norm(lanes_sum<4>(row.l[r]));
    if (token >= place.num_tokens) continue;
    float* const target = out + place.row(token) * kDim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; n++)
      *reinterpret_cast<float2*>(target + 8 * n) = make_float2(O[4 * n + 2 * r] * norm, O[4 * n + 2 * r + 1] * norm);
  }
}
