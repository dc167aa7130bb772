// Small matrix products C = start + A B held in registers. B and C are rows of whole vectors; A is read number by number
// with any two steps, so a transposed A costs nothing.
#pragma once
#include "vector.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TALL = 12;  // 32 vector registers: 12 x 2 sums
#else
constexpr int TALL = 6;  // 16 vector registers: 6 x 2 sums, 2 of B, 1 of A
#endif

enum Start { ZERO, ADD, SCALE_ROWS };  // from nothing, from C, from C with row r times row_scale[r]

struct Left {  // A(r, k) at p[r * row_step + k * depth_step]
  const float* p;
  int64_t row_step, depth_step;
};
struct Rows {
  float* p;
  int64_t step;
};

template <Start start, int HEIGHT, int WIDTH>
INLINE void product_tile(Rows c, Left a, const float* b, int64_t b_step, int depth, const float* row_scale) {
  Vec total[HEIGHT][WIDTH];
#pragma GCC unroll 16
  for (int r = 0; r < HEIGHT; r++)
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w++) {
      if (start == ZERO) total[r][w] = Vec{};
      if (start != ZERO) total[r][w] = load(c.p + r * c.step + w * LANES);
      if (start == SCALE_ROWS) total[r][w] *= row_scale[r];
    }
  for (int k = 0; k < depth; k++) {
    Vec right[WIDTH];
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w++) right[w] = load(b + k * b_step + w * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < HEIGHT; r++) {
      Vec left = splat(a.p[r * a.row_step + k * a.depth_step]);
#pragma GCC unroll 4
      for (int w = 0; w < WIDTH; w++) total[r][w] += left * right[w];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < HEIGHT; r++)
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w++) store(c.p + r * c.step + w * LANES, total[r][w]);
}

template <Start start, int WIDTH>
INLINE void product_panel(Rows c, Left a, const float* b, int64_t b_step, int rows, int depth, const float* row_scale) {
  int r = 0;
  auto next = [&](Rows& part, Left& left) {
    part = {c.p + r * c.step, c.step};
    left = {a.p + r * a.row_step, a.row_step, a.depth_step};
  };
  Rows part;
  Left left;
  for (; rows - r >= TALL && rows - r != 8; r += TALL) {
    next(part, left);
    product_tile<start, TALL, WIDTH>(part, left, b, b_step, depth, row_scale + r);
  }
  for (; r < rows; r += 4) {
    next(part, left);
    product_tile<start, 4, WIDTH>(part, left, b, b_step, depth, row_scale + r);
  }
}

// rows: a multiple of 4 and at least 8; columns: a multiple of LANES.
template <Start start>
INLINE void product(Rows c, Left a, const float* b, int64_t b_step, int rows, int columns, int depth,
                    const float* row_scale = nullptr) {
  int n = 0;
  for (; n + 2 * LANES <= columns; n += 2 * LANES)
    product_panel<start, 2>({c.p + n, c.step}, a, b + n, b_step, rows, depth, row_scale);
  if (n < columns) product_panel<start, 1>({c.p + n, c.step}, a, b + n, b_step, rows, depth, row_scale);
}
