// SiTU-GLU of rows [N, I]: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta), and its gradients.
// gate and up are rows with a stride of their own, so that the halves of one product [N, 2I] need no copy.
#include "vector.h"

namespace {
struct Parts {
  Vec tanh_gate, sigmoid_gate, tanh_up;
};
INLINE Parts parts(Vec gate, Vec up, float inverse_beta, float inverse_linear) {
  return {hyperbolic_tangent(gate * inverse_beta), sigmoid(gate), hyperbolic_tangent(up * inverse_linear)};
}
}  // namespace

extern "C" {

int64_t moonlet_lanes() { return LANES; }

void moonlet_situ_forward(const float* gate, const float* up, float* out, int64_t rows, int64_t width, int64_t gate_stride,
                          int64_t up_stride, float beta, float linear_beta, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    const float *g = gate + n * gate_stride, *u = up + n * up_stride;
    for (int64_t i = 0; i < width; i += LANES) {
      Parts t = parts(load(g + i), load(u + i), 1.f / beta, 1.f / linear_beta);
      store(out + n * width + i, t.tanh_gate * t.sigmoid_gate * t.tanh_up * (beta * linear_beta));
    }
  }
}

void moonlet_situ_backward(const float* gate, const float* up, const float* d_out, float* d_gate, float* d_up, int64_t rows,
                           int64_t width, int64_t gate_stride, int64_t up_stride, int64_t d_stride, float beta,
                           float linear_beta, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    const float *g = gate + n * gate_stride, *u = up + n * up_stride;
    for (int64_t i = 0; i < width; i += LANES) {
      Parts t = parts(load(g + i), load(u + i), 1.f / beta, 1.f / linear_beta);
      Vec d = load(d_out + n * width + i);
      Vec slope = t.sigmoid_gate * (1.f - t.tanh_gate * t.tanh_gate + beta * t.tanh_gate * (1.f - t.sigmoid_gate));
      store(d_gate + n * d_stride + i, d * t.tanh_up * linear_beta * slope);
      store(d_up + n * d_stride + i, d * t.tanh_gate * t.sigmoid_gate * beta * (1.f - t.tanh_up * t.tanh_up));
    }
  }
}
}
