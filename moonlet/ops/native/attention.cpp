// Causal softmax attention over packed documents, forward and backward; the definition is in ops/mla.py.
//
// A query's sums run over blocks of 64 keys that lie at fixed places of its document, and inside a block in the order of the
// keys. Keys that it does not see add zeros. So a row's bits depend on its own query and the keys up to it alone: the same
// for whole documents, for pieces of a prefill, and for one token at the end.
#include "product.h"

namespace {

constexpr int KEYS = 64, QUERIES = 48;

struct Heads {  // q [Nq][H][D], k [Nk][H][D], v [Nk][H][V], out [Nq][H][V], top and denominator [Nq][H]
  int64_t count;
  int D, V;
  float scale;
};

struct Span {  // one head of one document: its queries and the keys given, with their places in the document
  int64_t head, first_query, queries, first_key, keys, query_place, key_place;
};

INLINE int padded(int64_t rows) { return rows <= 8 ? 8 : (int)((rows + 3) / 4 * 4); }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `count` rows of `width` numbers times `factor`, then zero rows up to `padded_count`.
INLINE void pack_rows(const float* from, int64_t step, float* to, int width, int64_t count, int64_t padded_count, float factor) {
  for (int64_t i = 0; i < count; i++)
    for (int d = 0; d < width; d += LANES) store(to + i * width + d, load(from + i * step + d) * factor);
  memset(to + count * width, 0, (padded_count - count) * width * sizeof(float));
}

// Blocks of 64 rows as columns: [blocks][width][64], zeros behind the last row.
void pack_columns(const float* from, int64_t step, float* to, int width, int64_t count, float* rows) {
  for (int64_t start = 0; start < count; start += KEYS, to += (int64_t)width * KEYS) {
    pack_rows(from + start * step, step, rows, width, least(KEYS, count - start), KEYS, 1.f);
    transpose_matrix(rows, width, to, KEYS, KEYS, width);
  }
}

// How many keys of the block that starts at `key_place` the query at `query_place` sees.
INLINE int visible(int64_t query_place, int64_t key_place, int count) {
  int64_t seen = query_place + 1 - key_place;
  return seen <= 0 ? 0 : (int)least(seen, count);
}

// Scores of one row become weights beside a new maximum; returns what earlier sums are multiplied by.
INLINE float soften(float* score, int seen, float& top, float& denominator) {
  for (int i = seen; i < KEYS; i++) score[i] = -INFINITY;
  Vec largest = load(score);
  for (int i = LANES; i < KEYS; i += LANES) largest = larger(largest, load(score + i));
  float next = top;
  for (int i = 0; i < LANES; i++) next = largest[i] > next ? largest[i] : next;
  if (next == -INFINITY) {
    memset(score, 0, KEYS * sizeof(float));
    return 1.f;
  }
  float kept = std::exp(top - next);
  Vec added{};
  for (int i = 0; i < KEYS; i += LANES) {
    Vec weight = exponential(load(score + i) - next);
    store(score + i, weight);
    added += weight;
  }
  denominator = denominator * kept + sum(added);
  top = next;
  return kept;
}

struct ForwardSpace {
  float *memory, *q, *score, *sums, *kept, *rows;
  explicit ForwardSpace(const Heads& h) {
    memory = aligned_floats((int64_t)QUERIES * (h.D + h.V + KEYS + 1) + (int64_t)KEYS * h.D);
    q = memory, sums = q + QUERIES * h.D, score = sums + QUERIES * h.V, rows = score + QUERIES * KEYS, kept = rows + KEYS * h.D;
  }
  ~ForwardSpace() { free(memory); }
  ForwardSpace(const ForwardSpace&) = delete;
};

// Continues the sums of a block of queries over the keys given. `k_columns` holds the keys as columns.
void forward_block(const Heads& h, const Span& s, int64_t start, const float* q, const float* k_columns, const float* v, float* out,
                   float* top, float* denominator, ForwardSpace& w) {
  const int64_t count = least(QUERIES, s.queries - start), first = (s.first_query + start) * h.count + s.head;
  const int rows = padded(count);
  pack_rows(q + first * h.D, h.count * h.D, w.q, h.D, count, rows, h.scale);
  pack_rows(out + first * h.V, h.count * h.V, w.sums, h.V, count, rows, 1.f);
  memset(w.kept, 0, rows * sizeof(float));
  const int64_t last_place = s.query_place + start + count - 1;
  for (int64_t block = 0; block * KEYS < s.keys && s.key_place + block * KEYS <= last_place; block++) {
    const int64_t place = s.key_place + block * KEYS;
    const int given = (int)least(KEYS, s.keys - block * KEYS);
    product<ZERO>({w.score, KEYS}, {w.q, h.D, 1}, k_columns + block * h.D * KEYS, KEYS, rows, KEYS, h.D);
    for (int64_t i = 0; i < count; i++) {
      const int seen = visible(s.query_place + start + i, place, given);
      w.kept[i] = soften(w.score + i * KEYS, seen, top[first + i * h.count], denominator[first + i * h.count]);
    }
    const float* v_rows = v + ((s.first_key + block * KEYS) * h.count + s.head) * h.V;
    product<SCALE_ROWS>({w.sums, h.V}, {w.score, KEYS, 1}, v_rows, h.count * h.V, rows, h.V, given, w.kept);
  }
  for (int64_t i = 0; i < count; i++) memcpy(out + (first + i * h.count) * h.V, w.sums + i * h.V, h.V * sizeof(float));
}

void forward_span(const Heads& h, const Span& s, const float* q, const float* k, const float* v, float* out, float* top,
                  float* denominator, ForwardSpace& w) {
  float* k_columns = aligned_floats((s.keys + KEYS) * h.D);
  pack_columns(k + (s.first_key * h.count + s.head) * h.D, h.count * h.D, k_columns, h.D, s.keys, w.rows);
  for (int64_t start = 0; start < s.queries; start += QUERIES)
    forward_block(h, s, start, q, k_columns, v, out, top, denominator, w);
  free(k_columns);
}

// Everything of one head of one document that the backward pass reads, packed.
struct BackwardSpace {
  float *memory, *q, *d_o, *d_q, *columns, *weight, *d_weight, *d_k, *d_v, *delta, *k, *v, *rows;
  BackwardSpace(const Heads& h, int64_t most_queries) {
    const int64_t N = most_queries + QUERIES;
    memory = aligned_floats(N * (2 * h.D + h.V + 1) + (int64_t)KEYS * 4 * (h.D + h.V) + 2 * QUERIES * KEYS);
    float* p = memory;
    auto take = [&](float*& part, int64_t count) { part = p, p += count; };
    take(q, N * h.D), take(d_q, N * h.D), take(d_o, N * h.V), take(delta, N);
    take(columns, KEYS * (h.D + h.V)), take(k, KEYS * h.D), take(v, KEYS * h.V), take(d_k, KEYS * h.D), take(d_v, KEYS * h.V);
    take(rows, KEYS * (h.D + h.V)), take(weight, QUERIES * KEYS), take(d_weight, QUERIES * KEYS);
  }
  ~BackwardSpace() { free(memory); }
  BackwardSpace(const BackwardSpace&) = delete;
};

// weight = P and d_weight = dS of a block of queries against a block of keys.
void backward_weights(const Heads& h, const Span& s, int64_t start, int64_t block, int64_t count, int rows, int given,
                      const float* lse, BackwardSpace& w) {
  product<ZERO>({w.weight, KEYS}, {w.q + start * h.D, h.D, 1}, w.columns, KEYS, rows, KEYS, h.D);
  product<ZERO>({w.d_weight, KEYS}, {w.d_o + start * h.V, h.V, 1}, w.columns + KEYS * h.D, KEYS, rows, KEYS, h.V);
  for (int64_t i = 0; i < rows; i++) {
    float *p = w.weight + i * KEYS, *d = w.d_weight + i * KEYS;
    const int seen = i < count ? visible(s.query_place + start + i, s.key_place + block * KEYS, given) : 0;
    const float top = i < count ? lse[(s.first_query + start + i) * h.count + s.head] : 0.f, delta = w.delta[start + i];
    for (int j = seen; j < KEYS; j++) p[j] = -INFINITY;
    for (int j = 0; j < KEYS; j += LANES) {
      Vec weight = exponential(load(p + j) - top);
      store(p + j, weight);
      store(d + j, weight * (load(d + j) - delta));
    }
  }
}

void backward_keys(const Heads& h, const Span& s, int64_t block, const float* k, const float* v, const float* lse, float* d_k,
                   float* d_v, BackwardSpace& w) {
  const int given = (int)least(KEYS, s.keys - block * KEYS);
  const int64_t first = (s.first_key + block * KEYS) * h.count + s.head;
  pack_rows(k + first * h.D, h.count * h.D, w.k, h.D, given, KEYS, 1.f);
  pack_rows(v + first * h.V, h.count * h.V, w.v, h.V, given, KEYS, 1.f);
  transpose_matrix(w.k, h.D, w.columns, KEYS, KEYS, h.D);
  transpose_matrix(w.v, h.V, w.columns + KEYS * h.D, KEYS, KEYS, h.V);
  memset(w.d_k, 0, KEYS * h.D * sizeof(float));
  memset(w.d_v, 0, KEYS * h.V * sizeof(float));
  const int64_t first_seeing = s.key_place + block * KEYS - s.query_place;
  for (int64_t start = first_seeing <= 0 ? 0 : first_seeing / QUERIES * QUERIES; start < s.queries; start += QUERIES) {
    const int64_t count = least(QUERIES, s.queries - start);
    const int rows = padded(count);
    backward_weights(h, s, start, block, count, rows, given, lse, w);
    product<ADD>({w.d_v, h.V}, {w.weight, 1, KEYS}, w.d_o + start * h.V, h.V, KEYS, h.V, rows);
    product<ADD>({w.d_k, h.D}, {w.d_weight, 1, KEYS}, w.q + start * h.D, h.D, KEYS, h.D, rows);
    product<ADD>({w.d_q + start * h.D, h.D}, {w.d_weight, KEYS, 1}, w.k, h.D, rows, h.D, KEYS);
  }
  for (int i = 0; i < given; i++) {
    memcpy(d_k + (first + i * h.count) * h.D, w.d_k + i * h.D, h.D * sizeof(float));
    memcpy(d_v + (first + i * h.count) * h.V, w.d_v + i * h.V, h.V * sizeof(float));
  }
}

void backward_span(const Heads& h, const Span& s, const float* q, const float* k, const float* v, const float* out,
                   const float* d_out, const float* lse, float* d_q, float* d_k, float* d_v, BackwardSpace& w) {
  const int64_t first = s.first_query * h.count + s.head, padded_queries = s.queries + QUERIES;
  pack_rows(q + first * h.D, h.count * h.D, w.q, h.D, s.queries, padded_queries, h.scale);
  pack_rows(d_out + first * h.V, h.count * h.V, w.d_o, h.V, s.queries, padded_queries, 1.f);
  memset(w.d_q, 0, padded_queries * h.D * sizeof(float));
  memset(w.delta, 0, padded_queries * sizeof(float));
  for (int64_t i = 0; i < s.queries; i++) {
    Vec total{};
    for (int d = 0; d < h.V; d += LANES) total += load(w.d_o + i * h.V + d) * load(out + (first + i * h.count) * h.V + d);
    w.delta[i] = sum(total);
  }
  for (int64_t block = 0; block * KEYS < s.keys; block++) backward_keys(h, s, block, k, v, lse, d_k, d_v, w);
  pack_rows(w.d_q, h.D, w.q, h.D, s.queries, s.queries, h.scale);
  for (int64_t i = 0; i < s.queries; i++) memcpy(d_q + (first + i * h.count) * h.D, w.q + i * h.D, h.D * sizeof(float));
}

// `starts` [2][documents + 1]: first query, first key of each document; `places` [2][documents]: of its first query and key.
INLINE Span span_of(int64_t index, const int64_t* starts, const int64_t* places, int64_t documents, int64_t heads) {
  const int64_t document = index / heads;
  const int64_t *queries = starts + document, *keys = starts + documents + 1 + document;
  return {index % heads, queries[0], queries[1] - queries[0], keys[0], keys[1] - keys[0], places[document], places[documents + document]};
}

}  // namespace

extern "C" {

// Continues sums that begin as out = 0, top = -infinity, denominator = 0. With `is_last` they are divided, and `top` becomes
// the logarithm of the sum of exponentials. Places of keys are multiples of 64.
void moonlet_attention_forward(const float* q, const float* k, const float* v, const int64_t* starts, const int64_t* places,
                               float* out, float* top, float* denominator, int64_t documents, int64_t heads, int64_t D, int64_t V,
                               float scale, int64_t is_last, int64_t threads) {
  const Heads h{heads, (int)D, (int)V, scale};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    ForwardSpace space(h);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < documents * heads; index++) {
      const Span s = span_of(index, starts, places, documents, heads);
      forward_span(h, s, q, k, v, out, top, denominator, space);
      for (int64_t i = 0; i < s.queries && is_last; i++) {
        const int64_t row = (s.first_query + i) * heads + s.head;
        for (int64_t d = 0; d < V; d += LANES) store(out + row * V + d, load(out + row * V + d) / denominator[row]);
        top[row] += std::log(denominator[row]);
      }
    }
  }
}

void moonlet_attention_backward(const float* q, const float* k, const float* v, const int64_t* starts, const int64_t* places,
                                const float* out, const float* d_out, const float* lse, float* d_q, float* d_k, float* d_v,
                                int64_t documents, int64_t heads, int64_t D, int64_t V, float scale, int64_t most_queries,
                                int64_t threads) {
  const Heads h{heads, (int)D, (int)V, scale};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    BackwardSpace space(h, most_queries);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < documents * heads; index++)
      backward_span(h, span_of(index, starts, places, documents, heads), q, k, v, out, d_out, lse, d_q, d_k, d_v, space);
  }
}
}
