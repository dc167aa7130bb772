// KDA over packed documents in chunks of 16 tokens, forward and backward. One task is one head of one document, so the
// result does not depend on the number of threads, nor a document on its neighbours.
#include "kda_chunk.h"

namespace {

// Sizes and tensors of a call: q, k, g [N][H][K], v [N][H][V], beta [N][H], states [documents][H][K][V].
struct Problem {
  const float *q, *k, *v, *g, *beta;
  const int64_t *starts, *checkpoint_starts;  // [documents + 1]: first token, first checkpoint of each document
  int64_t documents, heads, interval;         // `interval` chunks between checkpoints of the state
  int K, V;
  float scale;

  Strides strides() const { return {heads * K, heads * V, heads}; }
  int64_t state_size() const { return (int64_t)K * V; }
};

struct Task {  // one head of one document
  int64_t document, head, first_token, tokens, chunks;
  float* checkpoints;

  Task(const Problem& p, int64_t index, float* all) {
    document = index / p.heads, head = index % p.heads;
    first_token = p.starts[document], tokens = p.starts[document + 1] - first_token;
    chunks = (tokens + CHUNK - 1) / CHUNK;
    int64_t count = p.checkpoint_starts[document + 1] - p.checkpoint_starts[document];
    checkpoints = all + (p.checkpoint_starts[document] * p.heads + head * count) * p.state_size();
  }
  int64_t token(int64_t chunk) const { return first_token + chunk * CHUNK; }
  int count(int64_t chunk) const { return (int)(tokens - chunk * CHUNK < CHUNK ? tokens - chunk * CHUNK : CHUNK); }
};

INLINE Tokens tokens_of(const Problem& p, const Task& task, int64_t chunk) {
  int64_t row = task.token(chunk) * p.heads + task.head;
  return {p.q + row * p.K, p.k + row * p.K, p.v + row * p.V, p.g + row * p.K, p.beta + row, task.count(chunk)};
}

// u_i = beta_i (v_i - read_i - sum_{j<i} P_ij u_j) for WIDTH vectors of columns; rows of u are V apart.
template <int WIDTH>
INLINE void substitute(const Chunk& c, const float* v, int64_t v_step, int count, const float* read, float* u) {
  for (int i = 0; i < CHUNK; i++) {
    Vec x[WIDTH];
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; w++) {
      Vec value = i < count ? load(v + i * v_step + w * LANES) : Vec{};
      x[w] = value - load(read + i * c.V + w * LANES);
    }
    for (int j = 0; j < i; j++) {
      float factor = c.P()[i * CHUNK + j];
#pragma GCC unroll 8
      for (int w = 0; w < WIDTH; w++) x[w] -= load(u + j * c.V + w * LANES) * factor;
    }
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; w++) store(u + i * c.V + w * LANES, x[w] * c.beta[i]);
  }
}

// d_r_i = d_u_i - sum_{j>i} P_ji beta_j d_r_j, and minus_d_v = -beta d_r, for WIDTH vectors of columns.
template <int WIDTH>
INLINE void substitute_back(const Chunk& c, const float* d_u, float* d_r, float* minus_d_v) {
  for (int i = CHUNK - 1; i >= 0; i--) {
    Vec x[WIDTH];
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; w++) x[w] = load(d_u + i * c.V + w * LANES);
    for (int j = i + 1; j < CHUNK; j++) {
      float factor = c.P()[j * CHUNK + i];
#pragma GCC unroll 8
      for (int w = 0; w < WIDTH; w++) x[w] += load(minus_d_v + j * c.V + w * LANES) * factor;
    }
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; w++) {
      store(d_r + i * c.V + w * LANES, x[w]);
      store(minus_d_v + i * c.V + w * LANES, x[w] * -c.beta[i]);
    }
  }
}

// Calls f(column, width tag) over V in blocks of 8, 4, 2 and 1 vectors.
template <class F>
INLINE void in_blocks(int V, F f) {
  int n = 0;
  for (; n + 8 * LANES <= V; n += 8 * LANES) f(n, std::integral_constant<int, 8>{});
  for (; n + 4 * LANES <= V; n += 4 * LANES) f(n, std::integral_constant<int, 4>{});
  for (; n + LANES <= V; n += LANES) f(n, std::integral_constant<int, 1>{});
}

INLINE void advance_state(const Chunk& c, const float* u, float* S) {
  product<SCALE_ROWS>({S, c.V}, {c.k_after, CHUNK, 1}, u, c.V, c.K, c.V, CHUNK, c.decay);
}

void forward_task(const Problem& p, const Task& task, Chunk& c, float* rows, float* S, float* out, float* u_all) {
  const int V = p.V;
  const Strides strides = p.strides();
  float *read = rows, *u = rows + PAIR * V;
  for (int64_t chunk = 0; chunk < task.chunks; chunk++) {
    if (task.checkpoints && chunk % p.interval == 0)
      memcpy(task.checkpoints + chunk / p.interval * p.state_size(), S, p.state_size() * sizeof(float));
    Tokens t = tokens_of(p, task, chunk);
    prepare<false>(c, t, strides, p.scale);
    product<ZERO>({read, V}, {c.qk_before, 1, PAIR}, S, V, PAIR, V, p.K);
    in_blocks(V, [&](int n, auto width) {
      substitute<width.value>(c, t.v + n, strides.value, t.count, read + CHUNK * V + n, u + n);
    });
    product<ADD>({read, V}, {c.A(), CHUNK, 1}, u, V, CHUNK, V, CHUNK);
    advance_state(c, u, S);
    int64_t row = (task.token(chunk) * p.heads + task.head) * V;
    for (int i = 0; i < t.count; i++) {
      memcpy(out + row + i * strides.value, read + i * V, V * sizeof(float));
      if (u_all) memcpy(u_all + row + i * strides.value, u + i * V, V * sizeof(float));
    }
  }
}

struct Grads {  // of the inputs, in their layouts
  float *q, *k, *v, *g, *beta;
};

struct BackwardSpace {
  float *memory, *dr, *d_o, *minus_dv, *d_u, *u, *u_T, *dr_do_T, *d_tiles, *d_tiles_T, *from_S, *ahead, *d_rise, *d_fall;
  float *d_q, *d_k, *d_G;

  BackwardSpace(int K, int V) {
    int64_t KC = (int64_t)K * CHUNK, VC = (int64_t)V * CHUNK;
    memory = aligned_floats(VC * 8 + KC * 9 + 4 * CHUNK * CHUNK);
    float* p = memory;
    auto take = [&](float*& part, int64_t count) { part = p, p += count; };
    take(dr, VC), take(d_o, VC), take(minus_dv, VC);  // adjacent: [dr; do] and [do; -dv] are both read as 32 rows
    take(d_u, VC), take(u, VC), take(u_T, VC), take(dr_do_T, 2 * VC);
    take(d_tiles, 2 * CHUNK * CHUNK), take(d_tiles_T, 2 * CHUNK * CHUNK);
    take(from_S, 2 * KC), take(ahead, KC), take(d_rise, 2 * KC), take(d_fall, KC), take(d_q, KC), take(d_k, KC), take(d_G, KC);
  }
  ~BackwardSpace() { free(memory); }
  BackwardSpace(const BackwardSpace&) = delete;
};

// Turns [dr u^T; do u^T] into [dA; dP] below the diagonal; takes out A's diagonal and beta's part through P.
INLINE void split_tile_grads(const Chunk& c, float* raw, float* diagonal, float* d_beta) {
  float d_P[CHUNK * CHUNK];
  memcpy(d_P, raw, sizeof(d_P));
  memcpy(raw, raw + CHUNK * CHUNK, sizeof(d_P));
  for (int i = 0; i < CHUNK; i++) {
    float through_P = 0;
    diagonal[i] = raw[i * CHUNK + i];
    for (int j = 0; j < i; j++) through_P += d_P[i * CHUNK + j] * c.P()[i * CHUNK + j];
    d_beta[i] -= through_P;
    for (int j = 0; j < CHUNK; j++) {
      if (j >= i) raw[i * CHUNK + j] = 0;
      raw[(CHUNK + i) * CHUNK + j] = j < i ? -c.beta[i] * d_P[i * CHUNK + j] : 0.f;
    }
  }
}

// Gradients of q, k and of the summed log-decay G, token-minor, from all of their sources.
INLINE void key_side(const Chunk& c, const BackwardSpace& w, const float* S, const float* dS, const float* diagonal,
                     float* d_beta, int count, float scale) {
  constexpr int VECTORS = CHUNK / LANES;
  Vec beta_grad[VECTORS] = {};
  IntVec is_inner[VECTORS] = {};  // the last token has no decay between itself and the chunk's end
  for (int i = 0; i < CHUNK; i++) is_inner[i / LANES][i % LANES] = i == count - 1 ? 0 : -1;
  for (int d = 0; d < c.K; d++) {
    Vec end{};
    for (int n = 0; n < c.V; n += LANES) end += load(dS + (int64_t)d * c.V + n) * load(S + (int64_t)d * c.V + n);
    end *= c.decay[d];
#pragma GCC unroll 4
    for (int x = 0; x < VECTORS; x++) {
      int one = d * CHUNK + x * LANES, two = d * PAIR + x * LANES;
      Vec q = load(c.qk + two), k = load(c.qk + two + CHUNK), rise = load(c.rise + one), before = load(c.before + one);
      Vec dr_S = load(w.from_S + two), diag = load(diagonal + x * LANES);
      Vec d_q = rise * load(w.d_rise + two) + before * load(w.from_S + two + CHUNK);
      Vec late = rise * load(w.d_rise + two + CHUNK) - before * dr_S * load(c.beta + x * LANES);
      Vec early = load(c.fall + one) * load(w.d_fall + one), ahead = load(c.after + one) * load(w.ahead + one);
      Vec through_end = choose(is_inner[x], k * ahead, Vec{});
      beta_grad[x] -= k * before * dr_S;
      end += through_end;
      store(w.d_G + one, q * d_q + k * (late - early) - through_end);
      store(w.d_q + one, (d_q + diag * k) * scale);
      store(w.d_k + one, late + early + ahead + diag * q);
    }
    w.d_G[d * CHUNK + count - 1] += sum(end);
  }
  for (int i = 0; i < CHUNK; i++) d_beta[i] += beta_grad[i / LANES][i % LANES];
}

// Token-minor [K][16] to the first `count` token rows, optionally summed from the last token backwards.
template <bool reverse_sum>
INLINE void store_rows(const float* from, float* to, int64_t step, int K, int count) {
  for (int d = 0; d < K; d += LANES) {
    Vec x[CHUNK];
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i += LANES) {
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; lane++) x[i + lane] = load(from + (d + lane) * CHUNK + i);
      transpose(x + i);
    }
    if (reverse_sum)
#pragma GCC unroll 16
      for (int i = CHUNK - 2; i >= 0; i--) x[i] += x[i + 1];
    for (int i = 0; i < count; i++) store(to + i * step + d, x[i]);
  }
}

// One chunk: from the gradient of its outputs and of the state after it (dS, replaced by the one before it).
INLINE void backward_chunk(const Problem& p, const Task& task, int64_t chunk, Chunk& c, BackwardSpace& w, const float* S,
                           float* dS, const float* d_out, const float* u_all, Grads grads) {
  const int K = p.K, V = p.V;
  const Strides strides = p.strides();
  Tokens t = tokens_of(p, task, chunk);
  int64_t row = task.token(chunk) * p.heads + task.head;
  float diagonal[CHUNK], d_beta[CHUNK];
  prepare<true>(c, t, strides, p.scale);
  copy_rows(d_out + row * V, strides.value, w.d_o, V, t.count);
  copy_rows(u_all + row * V, strides.value, w.u, V, t.count);
  product<ZERO>({w.d_u, V}, {c.A(), 1, CHUNK}, w.d_o, V, CHUNK, V, CHUNK);
  product<ADD>({w.d_u, V}, {c.k_after, 1, CHUNK}, dS, V, CHUNK, V, K);
  in_blocks(V, [&](int n, auto width) { substitute_back<width.value>(c, w.d_u + n, w.dr + n, w.minus_dv + n); });
  for (int i = 0; i < CHUNK; i++) {
    Vec through_r{};
    for (int n = 0; n < V && i < t.count; n += LANES) through_r += load(w.dr + i * V + n) * load(t.v + i * strides.value + n);
    d_beta[i] = sum(through_r);
  }
  transpose_matrix(w.dr, V, w.dr_do_T, PAIR, PAIR, V);
  transpose_matrix(w.u, V, w.u_T, CHUNK, CHUNK, V);
  product<ZERO>({w.d_tiles, CHUNK}, {w.dr, V, 1}, w.u_T, CHUNK, PAIR, CHUNK, V);
  split_tile_grads(c, w.d_tiles, diagonal, d_beta);
  product<ZERO>({w.from_S, PAIR}, {S, V, 1}, w.dr_do_T, PAIR, K, PAIR, V);
  product<ZERO>({w.ahead, CHUNK}, {dS, V, 1}, w.u_T, CHUNK, K, CHUNK, V);
  if (c.is_pairwise) {
    pairwise_tile_grads(c, w.d_tiles, p.scale, w.d_rise, w.d_fall);
  } else {
    transpose_matrix(w.d_tiles, CHUNK, w.d_tiles_T, PAIR, PAIR, CHUNK);
    product<ZERO>({w.d_rise, PAIR}, {c.k_fall, CHUNK, 1}, w.d_tiles_T, PAIR, K, PAIR, CHUNK);
    product<ZERO>({w.d_fall, CHUNK}, {c.qk_rise, PAIR, 1}, w.d_tiles, CHUNK, K, CHUNK, PAIR);
  }
  key_side(c, w, S, dS, diagonal, d_beta, t.count, p.scale);
  product<SCALE_ROWS>({dS, V}, {c.qk_before, PAIR, 1}, w.d_o, V, K, V, PAIR, c.decay);
  store_rows<false>(w.d_q, grads.q + row * K, strides.key, K, t.count);
  store_rows<false>(w.d_k, grads.k + row * K, strides.key, K, t.count);
  store_rows<true>(w.d_G, grads.g + row * K, strides.key, K, t.count);
  for (int i = 0; i < t.count; i++) {
    for (int n = 0; n < V; n += LANES) store(grads.v + row * V + i * strides.value + n, -load(w.minus_dv + i * V + n));
    grads.beta[row + i * p.heads] = d_beta[i];
  }
}

// States before each chunk of a segment, rebuilt from its checkpoint with the same operations as in the forward pass.
INLINE void rebuild_states(const Problem& p, const Task& task, int64_t first, int64_t last, Chunk& c, float* u, float* states,
                           const float* u_all) {
  const int64_t size = p.state_size();
  for (int64_t chunk = first; chunk + 1 < last; chunk++, states += size) {
    Tokens t = tokens_of(p, task, chunk);
    prepare<false>(c, t, p.strides(), p.scale, false);
    copy_rows(u_all + (task.token(chunk) * p.heads + task.head) * p.V, p.strides().value, u, p.V, t.count);
    memcpy(states + size, states, size * sizeof(float));
    advance_state(c, u, states + size);
  }
}

void backward_task(const Problem& p, const Task& task, Chunk& c, BackwardSpace& w, float* states, float* dS,
                   const float* d_out, const float* u_all, Grads grads) {
  const int64_t size = p.state_size();
  for (int64_t segment = (task.chunks - 1) / p.interval; segment >= 0; segment--) {
    int64_t first = segment * p.interval, last = first + p.interval < task.chunks ? first + p.interval : task.chunks;
    const float* before = task.checkpoints + segment * size;  // of every chunk, where nothing is left out
    if (p.interval > 1) {
      memcpy(states, before, size * sizeof(float));
      rebuild_states(p, task, first, last, c, w.u, states, u_all);
      before = states;
    }
    for (int64_t chunk = last - 1; chunk >= first; chunk--)
      backward_chunk(p, task, chunk, c, w, before + (chunk - first) * size, dS, d_out, u_all, grads);
  }
}

}  // namespace

extern "C" {

// `state`: initial states, replaced by the final ones. `checkpoints` and `u` may be null where no backward follows.
void moonlet_kda_forward(const float* q, const float* k, const float* v, const float* g, const float* beta,
                         const int64_t* starts, const int64_t* checkpoint_starts, float* state, float* out, float* u,
                         float* checkpoints, int64_t documents, int64_t heads, int64_t key_dim, int64_t value_dim,
                         int64_t interval, float scale, int64_t threads) {
  Problem p{q, k, v, g, beta, starts, checkpoint_starts, documents, heads, interval, (int)key_dim, (int)value_dim, scale};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Chunk chunk(p.K, p.V);
    float* rows = aligned_floats((PAIR + CHUNK) * value_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < documents * heads; index++) {
      Task task(p, index, checkpoints);
      if (!checkpoints) task.checkpoints = nullptr;
      forward_task(p, task, chunk, rows, state + index * p.state_size(), out, u);
    }
    free(rows);
  }
}

// `d_state`: gradients of the final states, replaced by those of the initial ones.
void moonlet_kda_backward(const float* q, const float* k, const float* v, const float* g, const float* beta,
                          const int64_t* starts, const int64_t* checkpoint_starts, const float* u, float* checkpoints,
                          const float* d_out, float* d_state, float* d_q, float* d_k, float* d_v, float* d_g,
                          float* d_beta, int64_t documents, int64_t heads, int64_t key_dim, int64_t value_dim,
                          int64_t interval, float scale, int64_t threads) {
  Problem p{q, k, v, g, beta, starts, checkpoint_starts, documents, heads, interval, (int)key_dim, (int)value_dim, scale};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Chunk chunk(p.K, p.V);
    BackwardSpace space(p.K, p.V);
    float* states = aligned_floats(interval * p.state_size());
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < documents * heads; index++) {
      Task task(p, index, checkpoints);
      backward_task(p, task, chunk, space, states, d_state + index * p.state_size(), d_out, u, {d_q, d_k, d_v, d_g, d_beta});
    }
    free(states);
  }
}
}
