// The running softmax of one row: m is the largest score so far, l the sum of exp(score - m), both float32, natural exponentials.
//
// Empty is (m, l) = (-inf, 0). A block of scores without a visible cell leaves m, l and everything scaled by them exactly as they were,
// so how cells are divided into blocks of work that a row does not see cannot change its bits. NaN scores reach l and never hide.
#pragma once

#include "common.cuh"

// The number to subtract from scores under the exponential: with nothing seen yet any finite number will do.
__device__ __forceinline__ float softmax_base(float m) { return m == -infinity() ? 0.0f : m; }

// What sums relative to the old maximum are multiplied by; exactly 1 where it did not move.
__device__ __forceinline__ float softmax_rescale(float m_old, float m_new) { return m_old == m_new ? 1.0f : expf(m_old - softmax_base(m_new)); }

// Logarithm of the sum of exponentials: -inf for an empty row.
__device__ __forceinline__ float softmax_lse(float m, float l) { return l == 0.0f ? -infinity() : m + logf(l); }

// 1 / l for a row that saw a cell, 0 (not NaN) for one that saw none.
__device__ __forceinline__ float softmax_norm(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }
