// What KDA knows about 16 tokens of one head before it sees the state; the mathematics is in ops/kda_chunk.py.
//
// Key-side numbers are kept token-minor, [K][16] (or [K][32]: q beside k), so that tokens lie along the vector lanes;
// value-side numbers are kept as rows of tokens, [16][V].
#pragma once
#include "product.h"

constexpr int CHUNK = 16, PAIR = 32;
constexpr float SAFE_EXPONENT = 84.f;  // beyond it exp(G_i) and its inverse are no normal numbers

struct Strides {  // of one token to the next, in numbers
  int64_t key, value, head;
};

// Rows of the tokens of a chunk; `count` of the 16 exist.
struct Tokens {
  const float *q, *k, *v, *g, *beta;
  int count;
};

struct Chunk {
  int K, V;
  float *memory, *qk, *rise, *fall, *before, *after, *qk_rise, *k_fall, *qk_before, *k_after, *decay, *tiles, *beta;
  float *row_q, *row_k, *row_g;  // rows [16][K] for tails and pairs
  bool is_pairwise;

  Chunk(int K, int V) : K(K), V(V) {
    int64_t KC = (int64_t)K * CHUNK;
    memory = aligned_floats(KC * 17 + K + PAIR * CHUNK + CHUNK);
    float* p = memory;
    auto take = [&](float*& part, int64_t count) { part = p, p += count; };
    take(qk, 2 * KC), take(qk_rise, 2 * KC), take(qk_before, 2 * KC);
    take(rise, KC), take(fall, KC), take(before, KC), take(after, KC), take(k_fall, KC), take(k_after, KC);
    take(row_q, KC), take(row_k, KC), take(row_g, KC);
    take(tiles, PAIR * CHUNK), take(beta, CHUNK), take(decay, K);
  }
  ~Chunk() { free(memory); }
  Chunk(const Chunk&) = delete;

  float* A() const { return tiles; }                  // [16][16], scaled, with its diagonal
  float* P() const { return tiles + CHUNK * CHUNK; }  // [16][16], strictly lower
};

// The first `count` rows of `width` numbers, then zeros.
INLINE void copy_rows(const float* from, int64_t step, float* to, int width, int count) {
  for (int i = 0; i < count; i++) memcpy(to + i * width, from + i * step, width * sizeof(float));
  memset(to + count * width, 0, (CHUNK - count) * width * sizeof(float));
}

// Exponents G_i summed from the chunk's start, into `rise`; says whether the dense tiles are safe. Measured from the start
// and not from the middle, which would halve them: so no bit of a token depends on the tokens behind it.
INLINE bool exponents(Chunk& c, const float* g, int64_t step) {
  Vec worst{};
  for (int d = 0; d < c.K; d += LANES) {
    Vec x[CHUNK], total{};
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++) x[i] = total += load(g + i * step + d);
    store(c.decay + d, total);
    worst = larger(worst, absolute(total));
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i += LANES) {
      transpose(x + i);
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; lane++) store(c.rise + (d + lane) * CHUNK + i, x[i + lane]);
    }
  }
  float limit = 0;
  for (int i = 0; i < LANES; i++) limit = worst[i] > limit ? worst[i] : limit;
  return !(limit > SAFE_EXPONENT);
}

// What the backward pass reads besides the products of decays with q and k.
template <bool for_backward>
INLINE void store_decays(Chunk& c, int at, Vec rise, Vec fall, Vec before, Vec after) {
  if (!for_backward) return;
  store(c.rise + at, rise), store(c.fall + at, fall), store(c.before + at, before), store(c.after + at, after);
}

INLINE void store_products(Chunk& c, int d, int i, float scale, Vec rise, Vec fall, Vec before, Vec after) {
  float* q_at = c.qk + d * PAIR + i;
  Vec q = load(q_at) * scale, k = load(q_at + CHUNK);
  store(q_at, q);
  store(c.qk_rise + d * PAIR + i, q * rise), store(c.qk_rise + d * PAIR + CHUNK + i, k * rise);
  store(c.qk_before + d * PAIR + i, q * before), store(c.qk_before + d * PAIR + CHUNK + i, k * before);
  store(c.k_fall + d * CHUNK + i, k * fall), store(c.k_after + d * CHUNK + i, k * after);
}

// A safe chunk: one exp and one reciprocal for each key channel of each token.
template <bool for_backward>
INLINE void dense_decays(Chunk& c, float scale) {
  for (int d = 0; d < c.K; d += LANES) store(c.decay + d, exponential_of_moderate(load(c.decay + d)));
  for (int d = 0; d < c.K; d++)
    for (int i = 0; i < CHUNK; i += LANES) {
      Vec rise = exponential_of_moderate(load(c.rise + d * CHUNK + i)), fall = 1.f / rise, after = fall * c.decay[d];
      store_decays<for_backward>(c, d * CHUNK + i, rise, fall, rise, after);
      store_products(c, d, i, scale, rise, fall, rise, after);
    }
}

// A chunk with any decay: only exponentials that cannot overflow. Its tiles come from pairs.
static void pairwise_decays(Chunk& c, float scale) {
  const int K = c.K;
  for (int d = 0; d < K; d++) {
    float total = 0;
    for (int i = 0; i < CHUNK; i++) c.before[d * CHUNK + i] = total += c.row_g[i * K + d];
    c.decay[d] = total;
    total = 0;
    for (int i = CHUNK - 1; i >= 0; total += c.row_g[i * K + d], i--) c.after[d * CHUNK + i] = total;
  }
  for (int d = 0; d < K; d += LANES) store(c.decay + d, exponential(load(c.decay + d)));
  for (int d = 0; d < K; d++)
    for (int i = 0; i < CHUNK; i += LANES) {
      const int at = d * CHUNK + i;
      Vec before = exponential(load(c.before + at)), after = exponential(load(c.after + at));
      store_decays<true>(c, at, splat(1.f), splat(1.f), before, after);
      store_products(c, d, i, scale, splat(1.f), splat(1.f), before, after);
    }
}

static void pairwise_tiles(Chunk& c, float scale) {
  const int K = c.K;
  for (int i = 0; i < CHUNK; i++) {
    Vec to_A[CHUNK], to_P[CHUNK];
    for (int j = 0; j <= i; j++) to_A[j] = to_P[j] = Vec{};
    for (int d = 0; d < K; d += LANES) {
      Vec window{}, q = load(c.row_q + i * K + d), k = load(c.row_k + i * K + d);
      for (int j = i; j >= 0; j--) {
        Vec weighted = load(c.row_k + j * K + d) * exponential(window);
        to_A[j] += q * weighted, to_P[j] += k * weighted;
        window += load(c.row_g + j * K + d);
      }
    }
    for (int j = 0; j <= i; j++) c.A()[i * CHUNK + j] = scale * sum(to_A[j]), c.P()[i * CHUNK + j] = sum(to_P[j]);
  }
}

// Gradients through the strictly lower tiles, from pairs: [K][32] of q (scaled) and of k as the later token, [K][16] of k
// as the earlier one.
static void pairwise_tile_grads(const Chunk& c, const float* d_tiles, float scale, float* d_rise, float* d_fall) {
  const int K = c.K;
  const float *d_A = d_tiles, *d_P = d_tiles + CHUNK * CHUNK;
  memset(d_fall, 0, K * CHUNK * sizeof(float));
  for (int d = 0; d < K; d += LANES)
    for (int i = 0; i < CHUNK; i++) {
      Vec window{}, q = load(c.row_q + i * K + d) * scale, k = load(c.row_k + i * K + d), d_q{}, d_late{};
      for (int j = i - 1; j >= 0; j--) {
        window += load(c.row_g + (j + 1) * K + d);
        Vec decay = exponential(window), weighted = load(c.row_k + j * K + d) * decay;
        float to_A = d_A[i * CHUNK + j], to_P = d_P[i * CHUNK + j];
        d_q += weighted * to_A, d_late += weighted * to_P;
        Vec d_early = (q * to_A + k * to_P) * decay;
        for (int lane = 0; lane < LANES; lane++) d_fall[(d + lane) * CHUNK + j] += d_early[lane];
      }
      for (int lane = 0; lane < LANES; lane++) {
        d_rise[(d + lane) * PAIR + i] = d_q[lane];
        d_rise[(d + lane) * PAIR + CHUNK + i] = d_late[lane];
      }
    }
}

INLINE void keep_lower(float* tile, bool with_diagonal) {
  for (int i = 0; i < CHUNK; i++)
    for (int j = i + with_diagonal; j < CHUNK; j++) tile[i * CHUNK + j] = 0;
}

INLINE void copy_token_rows(Chunk& c, Tokens& t, int64_t& step) {
  copy_rows(t.q, step, c.row_q, c.K, t.count), copy_rows(t.k, step, c.row_k, c.K, t.count);
  copy_rows(t.g, step, c.row_g, c.K, t.count);
  t.q = c.row_q, t.k = c.row_k, t.g = c.row_g, step = c.K;
}

// Everything that a chunk knows without the state; the tiles may be left out where only the state is walked.
template <bool for_backward>
INLINE void prepare(Chunk& c, Tokens t, Strides strides, float scale, bool with_tiles = true) {
  int64_t step = strides.key;
  for (int i = 0; i < CHUNK; i++) c.beta[i] = i < t.count ? t.beta[i * strides.head] : 0.f;
  if (t.count < CHUNK) copy_token_rows(c, t, step);
  transpose_matrix(t.q, step, c.qk, PAIR, CHUNK, c.K);
  transpose_matrix(t.k, step, c.qk + CHUNK, PAIR, CHUNK, c.K);
  c.is_pairwise = !exponents(c, t.g, step);
  if (c.is_pairwise) {
    if (t.count == CHUNK) copy_token_rows(c, t, step);
    pairwise_decays(c, scale);
    pairwise_tiles(c, scale);
  } else {
    dense_decays<for_backward>(c, scale);
    if (with_tiles) product<ZERO>({c.tiles, CHUNK}, {c.qk_rise, 1, PAIR}, c.k_fall, CHUNK, PAIR, CHUNK, c.K);
  }
  keep_lower(c.A(), true), keep_lower(c.P(), false);
}
