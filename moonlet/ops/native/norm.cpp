// RMSNorm of rows, optionally times sigmoid(gate): y = weight * x / rms(x) [* sigmoid(gate)]. x, gate, y [N][D].
#include "blocks.h"

namespace {
INLINE float inverse_rms(const float* x, int64_t D, float eps) {
  Vec squares{};
  for (int64_t i = 0; i < D; i += LANES) squares += load(x + i) * load(x + i);
  return 1.f / std::sqrt(sum(squares) / (float)D + eps);
}
}  // namespace

extern "C" {

void moonlet_norm_forward(const float* x, const float* gate, const float* weight, float* y, int64_t rows, int64_t D, float eps,
                          int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    const float* row = x + n * D;
    float scale = inverse_rms(row, D, eps);
    for (int64_t i = 0; i < D; i += LANES) {
      Vec value = load(weight + i) * (load(row + i) * scale);
      store(y + n * D + i, gate ? value * sigmoid(load(gate + n * D + i)) : value);
    }
  }
}

void moonlet_norm_backward(const float* x, const float* gate, const float* weight, const float* d_y, float* d_x,
                           float* d_gate, float* d_weight, int64_t rows, int64_t D, float eps, int64_t threads) {
  PartialSums weights(rows, D);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* d_hat = aligned_floats(D);  // of x / rms(x)
#pragma omp for schedule(static)
    for (int64_t block = 0; block < weights.blocks; block++)
      for (int64_t n = block * BLOCK; n < block_end(block, rows); n++) {
        const float *row = x + n * D, *d_row = d_y + n * D;
        float scale = inverse_rms(row, D, eps);
        Vec along{};
        for (int64_t i = 0; i < D; i += LANES) {
          Vec hat = load(row + i) * scale, d = load(d_row + i), w = load(weight + i);
          if (gate) {
            Vec s = sigmoid(load(gate + n * D + i));
            store(d_gate + n * D + i, d * w * hat * s * (1.f - s));
            d *= s;
          }
          add_to(weights.of(block) + i, d * hat);
          store(d_hat + i, d * w);
          along += d * w * hat;
        }
        float pull = sum(along) / (float)D;
        for (int64_t i = 0; i < D; i += LANES)
          store(d_x + n * D + i, (load(d_hat + i) - load(row + i) * (scale * pull)) * scale);
      }
    free(d_hat);
  }
  weights.total(d_weight);
}
}
