// One site of Block AttnRes: softmax over S sources of (source / rms) . query, and the weighted sum of the sources.
// sources: S pointers to [N][D]; query [D]; weights, scores, inverse [N][S].
#include "blocks.h"

extern "C" {

void moonlet_mix_forward(const float* const* sources, const float* query, float* out, float* weights, float* scores,
                         float* inverse, int64_t rows, int64_t S, int64_t D, float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    float *weight = weights + n * S, *score = scores + n * S, largest = -INFINITY, total = 0;
    for (int64_t s = 0; s < S; s++) {
      const float* x = sources[s] + n * D;
      Vec along{}, squares{};
      for (int64_t i = 0; i < D; i += LANES) along += load(x + i) * load(query + i), squares += load(x + i) * load(x + i);
      inverse[n * S + s] = 1.f / std::sqrt(sum(squares) / (float)D + eps);
      score[s] = sum(along) * inverse[n * S + s];
      largest = score[s] > largest ? score[s] : largest;
    }
    for (int64_t s = 0; s < S; s++) total += weight[s] = std::exp(score[s] - largest);
    for (int64_t s = 0; s < S; s++) weight[s] /= total;
    for (int64_t i = 0; i < D; i += LANES) {
      Vec mixed{};
      for (int64_t s = 0; s < S; s++) mixed += load(sources[s] + n * D + i) * weight[s];
      store(out + n * D + i, mixed);
    }
  }
}

void moonlet_mix_backward(const float* const* sources, const float* query, const float* weights, const float* scores,
                          const float* inverse, const float* d_out, float* const* d_sources, float* d_query, int64_t rows,
                          int64_t S, int64_t D, int64_t threads) {
  PartialSums queries(rows, D);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* d_weight = aligned_floats(S);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < queries.blocks; block++)
      for (int64_t n = block * BLOCK; n < block_end(block, rows); n++) {
        const float* weight = weights + n * S;
        float mean = 0;
        for (int64_t s = 0; s < S; s++) {
          Vec along{};
          for (int64_t i = 0; i < D; i += LANES) along += load(d_out + n * D + i) * load(sources[s] + n * D + i);
          d_weight[s] = sum(along);
          mean += weight[s] * d_weight[s];
        }
        for (int64_t s = 0; s < S; s++) {
          const float* x = sources[s] + n * D;
          float r = inverse[n * S + s], d_score = weight[s] * (d_weight[s] - mean), to_query = d_score * r;
          // score = (x . query) r with r = (mean x^2 + eps)^-1/2, so dr/dx = -x r^3 / D
          float through_rms = d_score * scores[n * S + s] * r * r / (float)D;
          for (int64_t i = 0; i < D; i += LANES) {
            Vec here = load(x + i);
            store(d_sources[s] + n * D + i, load(d_out + n * D + i) * weight[s] + load(query + i) * to_query - here * through_rms);
            add_to(queries.of(block) + i, here * to_query);
          }
        }
      }
    free(d_weight);
  }
  queries.total(d_query);
}
}
