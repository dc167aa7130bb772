// Vectors of float32 for one source and any register width: AVX-512 (16 lanes), AVX2 (8), SSE and NEON (4).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#ifdef MOONLET_LANES
constexpr int LANES = MOONLET_LANES;
#elif defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float VecAnywhere __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

INLINE Vec load(const float* p) { return *(const VecAnywhere*)p; }
INLINE void store(float* p, Vec x) { *(VecAnywhere*)p = x; }
INLINE Vec splat(float x) { return x - Vec{}; }
INLINE Vec choose(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }
INLINE Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }
INLINE Vec absolute(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }

// Lanes of a and b by a constant rule: `Rule::lane(i)` in [0, LANES) picks from a, in [LANES, 2 LANES) from b.
template <class Rule, size_t... I>
INLINE Vec pick(Vec a, Vec b, std::index_sequence<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, Rule::lane(I)...);
#else
  return __builtin_shuffle(a, b, IntVec{Rule::lane(I)...});
#endif
}
template <class Rule>
INLINE Vec pick(Vec a, Vec b) {
  return pick<Rule>(a, b, std::make_index_sequence<LANES>{});
}

template <int S>
struct Rotate {
  static constexpr int lane(int i) { return (i + S) % LANES; }
};
template <int S>
struct LowerHalves {  // of each group of 2S lanes: a's first S, then b's first S
  static constexpr int lane(int i) { return (i & S) ? LANES + i - S : i; }
};
template <int S>
struct UpperHalves {
  static constexpr int lane(int i) { return (i & S) ? LANES + i : i + S; }
};

template <int S = LANES / 2>
INLINE float sum(Vec x) {
  x += pick<Rotate<S>>(x, x);
  if constexpr (S > 1) return sum<S / 2>(x);
  return x[0];
}

// LANES vectors of LANES numbers, transposed in place by log2(LANES) exchanges.
template <int S = LANES / 2>
INLINE void transpose(Vec* x) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & S) continue;
    Vec a = x[i], b = x[i + S];
    x[i] = pick<LowerHalves<S>>(a, b);
    x[i + S] = pick<UpperHalves<S>>(a, b);
  }
  if constexpr (S > 1) transpose<S / 2>(x);
}

// Block of LANES x LANES numbers from rows `from_step` apart to rows `to_step` apart, transposed.
INLINE void transpose_block(const float* from, int64_t from_step, float* to, int64_t to_step) {
  Vec x[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) x[i] = load(from + i * from_step);
  transpose(x);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) store(to + i * to_step, x[i]);
}

// [rows][columns] -> [columns][rows]; both are multiples of LANES.
INLINE void transpose_matrix(const float* from, int64_t from_step, float* to, int64_t to_step, int rows, int columns) {
  for (int c = 0; c < columns; c += LANES)
    for (int r = 0; r < rows; r += LANES) transpose_block(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
}

// NaN stays NaN.
INLINE Vec clamp(Vec x, float limit) {
  return choose(x > splat(limit), splat(limit), choose(x < splat(-limit), splat(-limit), x));
}

// exp(x) = 2^whole (1 + rest), |x| <= 87: the power as its exponent's bits, and rest = exp(r) - 1 for |r| <= ln 2 / 2.
struct Exponential {
  IntVec power;
  Vec rest;
};
INLINE Exponential split_exponential(Vec x) {
  // 1.5 * 2^23: adding it rounds to an integer that then stands in the low mantissa bits.
  Vec shifted = x * 1.44269504f + 12582912.f;
  Vec whole = shifted - 12582912.f;
  // ln 2 in two parts, so that the remainder is exact.
  Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = splat(1.f / 5040);
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  return {((IntVec)shifted) << 23, p * r * r + r};
}

// exp(x) to about 1 ulp for |x| <= 87.
INLINE Vec exponential_of_moderate(Vec x) {
  Exponential e = split_exponential(x);
  return (Vec)((IntVec)(e.rest + 1.f) + e.power);
}

// exp(x) - 1 without cancellation near zero, |x| <= 87.
INLINE Vec exponential_minus_one(Vec x) {
  Exponential e = split_exponential(x);
  Vec power = (Vec)((IntVec)splat(1.f) + e.power);
  return power * e.rest + (power - 1.f);
}

// exp(x) for any x: 0 below -87.3, finite up to the largest float, NaN stays NaN.
INLINE Vec exponential(Vec x) {
  const Vec low = splat(-87.33f), high = splat(88.f);
  Vec bounded = choose(x < low, low, choose(x > high, high, x));
  return choose(x == x, choose(x < low, Vec{}, exponential_of_moderate(bounded)), x);
}

INLINE Vec sigmoid(Vec x) { return 1.f / (1.f + exponential_of_moderate(clamp(-x, 87.f))); }

INLINE float* aligned_floats(size_t count) {
  size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
  return (float*)aligned_alloc(64, bytes ? bytes : 64);
}
