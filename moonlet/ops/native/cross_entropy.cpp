// Softmax cross-entropy of rows of logits [N][V]: the loss of each row, and the logits replaced by its gradient.
// A row whose label is `ignored` has loss 0 and gradient 0.
#include "vector.h"

extern "C" {

void moonlet_cross_entropy(float* logits, const int64_t* labels, float* losses, int64_t rows, int64_t V, int64_t ignored,
                           int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    float* x = logits + n * V;
    losses[n] = 0;
    if (labels[n] == ignored) {
      memset(x, 0, V * sizeof(float));
      continue;
    }
    Vec top = load(x), total{};
    for (int64_t i = LANES; i < V; i += LANES) top = larger(load(x + i), top);
    float largest = top[0], chosen = x[labels[n]];
    for (int i = 1; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    for (int64_t i = 0; i < V; i += LANES) {
      Vec e = exponential(load(x + i) - largest);
      total += e;
      store(x + i, e);
    }
    float denominator = sum(total);
    losses[n] = std::log(denominator) + (largest - chosen);
    for (int64_t i = 0; i < V; i += LANES) store(x + i, load(x + i) * (1.f / denominator));
    x[labels[n]] -= 1.f;
  }
}
}
