// The bounded log-decay g = bound * sigmoid(rate_h (f + bias)) of KDA, rate = exp(A_log). f, g [N][H][K], bias [H][K].
#include "blocks.h"

extern "C" {

void moonlet_kda_gate_forward(const float* f, const float* rate, const float* bias, float* g, int64_t tokens,
                              int64_t heads, int64_t dim, float bound, int64_t threads) {
  const int64_t C = heads * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < tokens; n++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = h * dim; i < (h + 1) * dim; i += LANES)
        store(g + n * C + i, sigmoid((load(f + n * C + i) + load(bias + i)) * rate[h]) * bound);
}

// d_sums [2][H][K]: of the bias, and of A_log before its sum over a head's channels.
void moonlet_kda_gate_backward(const float* f, const float* rate, const float* bias, const float* d_g, float* d_f,
                               float* d_sums, int64_t tokens, int64_t heads, int64_t dim, float bound,
                               int64_t threads) {
  const int64_t C = heads * dim;
  PartialSums sums(tokens, 2 * C);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t block = 0; block < sums.blocks; block++) {
    float *d_bias = sums.of(block), *d_A = d_bias + C;
    for (int64_t n = block * BLOCK; n < block_end(block, tokens); n++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t i = h * dim; i < (h + 1) * dim; i += LANES) {
          Vec logit = load(f + n * C + i) + load(bias + i);
          // s (1 - s) from exp(-|x|): exact where the sigmoid is saturated and 1 - s would cancel.
          Vec e = exponential(-absolute(logit * rate[h])), slope = e / ((1.f + e) * (1.f + e));
          Vec d = load(d_g + n * C + i) * slope * (bound * rate[h]);
          store(d_f + n * C + i, d);
          add_to(d_bias + i, d), add_to(d_A + i, d * logit);
        }
  }
  sums.total(d_sums);
}
}
