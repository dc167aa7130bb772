// Vectors of float32 for one source and any register width: AVX-512 (16 lanes), AVX2 (8), SSE and NEON (4).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

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
INLINE Vec splat(float x) { return Vec{} + x; }
INLINE Vec choose(IntVec mask, Vec yes, Vec no) { return (Vec)(((IntVec)yes & mask) | ((IntVec)no & ~mask)); }
INLINE Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }
INLINE Vec absolute(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }

INLINE float sum(Vec x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

// exp(x) to about 1 ulp; 0 below -87.3, finite up to 88. NaN stays NaN.
INLINE Vec exponential(Vec x) {
  const Vec low = splat(-87.33f), high = splat(88.f);
  IntVec vanishes = x < low;
  Vec bounded = choose(x > high, high, choose(vanishes, low, x));
  // 1.5 * 2^23: adding it rounds to an integer that then stands in the low mantissa bits.
  Vec shifted = bounded * 1.44269504f + 12582912.f;
  Vec whole = shifted - 12582912.f;
  // ln 2 in two parts, so that the remainder is exact.
  Vec r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = splat(1.f / 5040);
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.f;
  IntVec exponent = ((IntVec)shifted) << 23;
  return choose(vanishes, Vec{}, (Vec)((IntVec)p + exponent));
}

INLINE Vec sigmoid(Vec x) { return 1.f / (1.f + exponential(-x)); }

// tanh(x) to about 2 ulp: an odd polynomial near zero, where 1 - exp(-2x) would cancel.
INLINE Vec hyperbolic_tangent(Vec x) {
  Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  Vec near = x + x * z * p;
  Vec e = exponential(absolute(x) * -2.f);
  Vec far = (1.f - e) / (1.f + e);
  far = choose(x < Vec{}, -far, far);
  return choose(absolute(x) < splat(0.625f), near, far);
}

INLINE float* aligned_floats(size_t count) {
  size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
  return (float*)aligned_alloc(64, bytes ? bytes : 64);
}
