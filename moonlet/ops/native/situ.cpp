// SiTU-GLU of rows [N, I]: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta), and its gradients.
// gate and up are rows with a stride of their own, so that the halves of one product [N, 2I] need no copy.
#include "vector.h"

namespace {

// With a = exp(-2 g / beta), s = exp(-g), b = exp(-2 u / linear_beta):
// tanh(g / beta) = (1 - a) / (1 + a), sigmoid(g) = 1 / (1 + s), tanh(u / linear_beta) = (1 - b) / (1 + b).
struct Parts {
  Vec a, minus_a, s, b, minus_b;  // minus_a = 1 - a
  Vec to_a, to_s, to_b;           // 1 / (1 + a), ...: one division for the three
};

// K3's beta is 4: s is then the square of a, and one exponential less is needed.
template <bool beta_is_4>
INLINE Parts parts(Vec gate, Vec up, float beta, float linear_beta) {
  Parts p;
  // Beyond these limits every factor has reached its end value, and the product below still has room.
  Vec g = clamp(gate, beta_is_4 ? 40.f : 28.f);
  Vec gate_part = exponential_minus_one(clamp(g * (-2.f / beta), 20.f));
  Vec up_part = exponential_minus_one(clamp(up * (-2.f / linear_beta), 20.f));
  p.a = 1.f + gate_part, p.minus_a = -gate_part;
  p.b = 1.f + up_part, p.minus_b = -up_part;
  p.s = beta_is_4 ? p.a * p.a : exponential_of_moderate(-g);
  Vec one_a = 1.f + p.a, one_s = 1.f + p.s, one_b = 1.f + p.b, all = 1.f / (one_a * one_s * one_b);
  p.to_a = one_s * one_b * all, p.to_s = one_a * one_b * all, p.to_b = one_a * one_s * all;
  return p;
}

template <bool beta_is_4>
INLINE Vec value(Vec gate, Vec up, float beta, float linear_beta) {
  Parts p = parts<beta_is_4>(gate, up, beta, linear_beta);
  return p.minus_a * p.to_a * p.to_s * (p.minus_b * p.to_b) * (beta * linear_beta);
}

template <bool beta_is_4>
INLINE void grads(Vec gate, Vec up, Vec d, float beta, float linear_beta, float* d_gate, float* d_up) {
  Parts p = parts<beta_is_4>(gate, up, beta, linear_beta);
  Vec tanh_gate = p.minus_a * p.to_a, tanh_up = p.minus_b * p.to_b;
  // 1 - tanh^2 = 4 a / (1 + a)^2 and 1 - sigmoid = s / (1 + s), without cancellation
  Vec slope = 4.f * p.a * p.to_a * p.to_a + beta * tanh_gate * (p.s * p.to_s);
  store(d_gate, d * (linear_beta * tanh_up) * (p.to_s * slope));
  store(d_up, d * (beta * tanh_gate * p.to_s) * (4.f * p.b * p.to_b * p.to_b));
}

struct Rows {  // of gate, up and the results; strides from row to row
  int64_t rows, width, gate_step, up_step;
  float beta, linear_beta;
};

template <bool beta_is_4>
void forward(const float* gate, const float* up, float* out, Rows r, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < r.rows; n++)
    for (int64_t i = 0; i < r.width; i += LANES)
      store(out + n * r.width + i, value<beta_is_4>(load(gate + n * r.gate_step + i), load(up + n * r.up_step + i), r.beta,
                                                    r.linear_beta));
}

template <bool beta_is_4>
void backward(const float* gate, const float* up, const float* d_out, float* d_gate, float* d_up, Rows r, int64_t d_step,
              int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < r.rows; n++)
    for (int64_t i = 0; i < r.width; i += LANES)
      grads<beta_is_4>(load(gate + n * r.gate_step + i), load(up + n * r.up_step + i), load(d_out + n * r.width + i), r.beta,
                       r.linear_beta, d_gate + n * d_step + i, d_up + n * d_step + i);
}

}  // namespace

extern "C" {

int64_t moonlet_lanes() { return LANES; }

void moonlet_situ_forward(const float* gate, const float* up, float* out, int64_t rows, int64_t width, int64_t gate_step,
                          int64_t up_step, float beta, float linear_beta, int64_t threads) {
  auto form = beta == 4.f ? forward<true> : forward<false>;
  form(gate, up, out, {rows, width, gate_step, up_step, beta, linear_beta}, threads);
}

void moonlet_situ_backward(const float* gate, const float* up, const float* d_out, float* d_gate, float* d_up, int64_t rows,
                           int64_t width, int64_t gate_step, int64_t up_step, int64_t d_step, float beta,
                           float linear_beta, int64_t threads) {
  auto form = beta == 4.f ? backward<true> : backward<false>;
  form(gate, up, d_out, d_gate, d_up, {rows, width, gate_step, up_step, beta, linear_beta}, d_step, threads);
}
}
