// One decoded token of absorbed MLA for each sequence, over latent rows in pages. Queries [B][H][L] are in latent space;
// rows are L = R + P numbers (latent, shared key); out [B][H][R] is the softmax-weighted sum of the latents.
// Rows are read once for all heads; softmax is merged online over blocks of rows, in the order of the tokens.
#include "vector.h"

namespace {

constexpr int BLOCK = 16;  // rows whose weights are made at a time; a multiple of every register width

struct Cache {
  const float* pool;     // [pages][page_rows][L]
  const int64_t* table;  // pages of this sequence, in order
  int64_t page_rows, L;

  const float* row(int64_t s) const { return pool + (table[s / page_rows] * page_rows + s % page_rows) * L; }
};

INLINE float dot(const float* a, const float* b, int64_t width) {
  Vec total{};
  for (int64_t i = 0; i < width; i += LANES) total += load(a + i) * load(b + i);
  return sum(total);
}

// Turns scores of `count` rows into weights beside a running maximum; returns what earlier sums are multiplied by.
INLINE float to_weights(float* score, int count, float& top, float& denominator) {
  float block_top = top;
  for (int i = 0; i < count; i++) block_top = score[i] > block_top ? score[i] : block_top;
  for (int i = count; i < BLOCK; i++) score[i] = -INFINITY;
  float kept = top == -INFINITY ? 0.f : std::exp(top - block_top);
  Vec added{};
  for (int i = 0; i < BLOCK; i += LANES) {
    Vec weight = exponential(load(score + i) - splat(block_top));
    weight = choose(load(score + i) > splat(-INFINITY), weight, Vec{});
    store(score + i, weight);
    added += weight;
  }
  denominator = denominator * kept + sum(added);
  top = block_top;
  return kept;
}

void attend(const float* q, const Cache& cache, int64_t length, float* out, int64_t heads, int64_t R, float scale) {
  float* state = aligned_floats(heads * (2 + BLOCK));
  float *top = state, *denominator = state + heads, *score = state + 2 * heads;
  for (int64_t h = 0; h < heads; h++) top[h] = -INFINITY, denominator[h] = 0;
  memset(out, 0, heads * R * sizeof(float));
  for (int64_t start = 0; start < length; start += BLOCK) {
    const int count = length - start < BLOCK ? (int)(length - start) : BLOCK;
    const float* rows[BLOCK];
    for (int i = 0; i < count; i++) {
      rows[i] = cache.row(start + i);
      for (int64_t h = 0; h < heads; h++) score[h * BLOCK + i] = scale * dot(q + h * cache.L, rows[i], cache.L);
    }
    for (int64_t h = 0; h < heads; h++) {
      float *weight = score + h * BLOCK, *sums = out + h * R;
      const float kept = to_weights(weight, count, top[h], denominator[h]);
      for (int64_t d = 0; d < R; d += LANES) {
        Vec total = load(sums + d) * kept;
        for (int i = 0; i < count; i++) total += load(rows[i] + d) * weight[i];
        store(sums + d, total);
      }
    }
  }
  for (int64_t h = 0; h < heads; h++)
    for (int64_t d = 0; d < R; d += LANES) store(out + h * R + d, load(out + h * R + d) / denominator[h]);
  free(state);
}

}  // namespace

extern "C" {

// `tables` [B][max_pages], `lengths` [B]: at least 1. R and L are whole registers.
void moonlet_mla_decode(const float* q, const float* pool, const int64_t* tables, const int64_t* lengths, float* out,
                        int64_t batch, int64_t heads, int64_t R, int64_t L, int64_t page_rows, int64_t max_pages, float scale,
                        int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t b = 0; b < batch; b++)
    attend(q + b * heads * L, {pool, tables + b * max_pages, page_rows, L}, lengths[b], out + b * heads * R, heads, R, scale);
}
}
