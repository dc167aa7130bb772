// One decoded token of KDA for each of `streams` = sequences x heads: q, k, g [streams][K], v, o [streams][V],
// beta [streams], states [streams][K][V]. Two walks over the state: decay and read, then correct and read.
#include "vector.h"

namespace {

// `columns` = WIDTH vectors of the value side of one stream.
template <int WIDTH>
INLINE void step_columns(const float* q, const float* k, const float* decay, const float* v, float beta, const float* S,
                         float* S_new, float* o, int64_t K, int64_t V, float scale) {
  Vec surprise[WIDTH], out[WIDTH] = {};
  for (int w = 0; w < WIDTH; w++) surprise[w] = load(v + w * LANES);
  for (int64_t d = 0; d < K; d++)
    for (int w = 0; w < WIDTH; w++) {
      Vec decayed = load(S + d * V + w * LANES) * decay[d];
      surprise[w] -= decayed * k[d];
      store(S_new + d * V + w * LANES, decayed);
    }
  for (int64_t d = 0; d < K; d++)
    for (int w = 0; w < WIDTH; w++) {
      Vec corrected = load(S_new + d * V + w * LANES) + surprise[w] * (beta * k[d]);
      store(S_new + d * V + w * LANES, corrected);
      out[w] += corrected * (scale * q[d]);
    }
  for (int w = 0; w < WIDTH; w++) store(o + w * LANES, out[w]);
}

}  // namespace

extern "C" {

void moonlet_kda_step(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* S,
                      float* S_new, float* o, int64_t streams, int64_t K, int64_t V, float scale, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* decay = aligned_floats(K);
#pragma omp for schedule(static)
    for (int64_t s = 0; s < streams; s++) {
      for (int64_t d = 0; d < K; d += LANES) store(decay + d, exponential(load(g + s * K + d)));
      const float *qs = q + s * K, *ks = k + s * K;
      int64_t n = 0;
      for (; n + 4 * LANES <= V; n += 4 * LANES)
        step_columns<4>(qs, ks, decay, v + s * V + n, beta[s], S + s * K * V + n, S_new + s * K * V + n, o + s * V + n, K, V, scale);
      for (; n < V; n += LANES)
        step_columns<1>(qs, ks, decay, v + s * V + n, beta[s], S + s * K * V + n, S_new + s * K * V + n, o + s * V + n, K, V, scale);
    }
    free(decay);
  }
}
}
