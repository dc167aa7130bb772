// Work over many rows in fixed blocks. Sums over rows (gradients of weights) have one partial sum for each block, added in
// the order of the blocks: the bits do not depend on the number of threads.
#pragma once
#include "vector.h"

constexpr int64_t BLOCK = 128;

INLINE int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }
INLINE int64_t block_end(int64_t block, int64_t rows) {
  return (block + 1) * BLOCK < rows ? (block + 1) * BLOCK : rows;
}

struct PartialSums {
  int64_t blocks, width;
  float* memory;

  PartialSums(int64_t rows, int64_t width)
      : blocks(blocks_of(rows)), width(width), memory((float*)calloc(blocks * width, sizeof(float))) {}
  ~PartialSums() { free(memory); }
  PartialSums(const PartialSums&) = delete;

  float* of(int64_t block) { return memory + block * width; }
  void total(float* out) const {
    memset(out, 0, width * sizeof(float));
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t i = 0; i < width; i++) out[i] += memory[b * width + i];
  }
};

INLINE void add_to(float* p, Vec x) { store(p, load(p) + x); }
