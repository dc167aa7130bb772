// Causal depthwise convolution, SiLU and (for queries and keys) L2 norm of each head, in one pass over packed documents.
// x, y [N][C] with C = heads * D; weight [W][C]; eps < 0 leaves the norm out.
#include "blocks.h"

namespace {

constexpr int MAX_WIDTH = 16;

struct Conv {
  const float *x, *weight;
  const int64_t* starts;  // [documents + 1]
  int64_t documents, heads, x_step;
  int D, width;
  float eps;

  int64_t channels() const { return heads * D; }
  int64_t tokens() const { return starts[documents]; }
  int64_t document_of(int64_t token) const {
    int64_t low = 0, high = documents;
    while (high - low > 1) {
      int64_t middle = (low + high) / 2;
      (starts[middle] <= token ? low : high) = middle;
    }
    return low;
  }
};

// Calls f with the number of taps as a constant where it is 4, the released width, so that its loops unroll.
template <class F>
INLINE void with_taps(int taps, F f) {
  if (taps == 4)
    f(std::integral_constant<int, 4>{});
  else
    f(taps);
}

// Inputs that a token sees in its document, itself included; also: gradients that reach its input.
INLINE int taps_of(const Conv& c, int64_t places) { return (int)(places < c.width ? places : c.width); }

// The convolution at channels i.. of the token at x, which sees `taps` inputs.
template <class Taps>
INLINE Vec convolve(const Conv& c, const float* x, int64_t i, Taps taps) {
  const int64_t C = c.channels();
  const float* weight = c.weight + (c.width - 1) * C + i;
  Vec y = load(x + i) * load(weight);
  for (int j = 1; j < taps; j++) y += load(x - j * c.x_step + i) * load(weight - j * C);
  return y;
}

template <class Taps>
INLINE void forward_token(const Conv& c, int64_t token, Taps taps, float* out) {
  const float* x = c.x + token * c.x_step;
  for (int64_t h = 0; h < c.heads; h++) {
    Vec squares{};
    for (int64_t i = h * c.D; i < (h + 1) * c.D; i += LANES) {
      Vec y = convolve(c, x, i, taps), a = y * sigmoid(y);
      squares += a * a;
      store(out + i, a);
    }
    if (c.eps < 0) continue;
    float scale = 1.f / std::sqrt(sum(squares) + c.eps);
    for (int64_t i = h * c.D; i < (h + 1) * c.D; i += LANES) store(out + i, load(out + i) * scale);
  }
}

// A token with fewer inputs before it than the convolution is wide. Zeros stand for those that are missing, and the sum is the
// same as everywhere: where a document's first tokens are computed apart, their bits do not change.
void forward_early_token(Conv c, int64_t token, int taps, float* out, float* rows) {
  const int64_t C = c.channels();
  memset(rows, 0, (c.width - taps) * C * sizeof(float));
  for (int j = 0; j < taps; j++)
    memcpy(rows + (c.width - 1 - j) * C, c.x + (token - j) * c.x_step, C * sizeof(float));
  c.x = rows, c.x_step = C;
  with_taps(c.width, [&](auto n) { forward_token(c, c.width - 1, n, out); });
}

// Gradient of the convolution's output for one token, from that of the normalised activation.
template <class Taps>
INLINE void backward_token(const Conv& c, int64_t token, Taps taps, const float* d_out, float* d_y, float* slopes) {
  const float* x = c.x + token * c.x_step;
  for (int64_t h = 0; h < c.heads; h++) {
    Vec squares{}, along{};
    const int64_t first = h * c.D;
    for (int64_t i = first; i < first + c.D; i += LANES) {
      Vec y = convolve(c, x, i, taps), s = sigmoid(y), a = y * s;
      squares += a * a, along += a * load(d_out + i);
      store(d_y + i, a), store(slopes + i - first, s + a * (1.f - s));
    }
    float scale = 1.f, pull = 0.f;
    if (c.eps >= 0) {
      scale = 1.f / std::sqrt(sum(squares) + c.eps);
      pull = sum(along) * scale * scale * scale;
    }
    for (int64_t i = first; i < first + c.D; i += LANES)
      store(d_y + i, (load(d_out + i) * scale - load(d_y + i) * pull) * load(slopes + i - first));
  }
}

// d_x of a token from d_y of itself and of the `later` - 1 tokens after it, rows of a ring.
template <class Later>
INLINE void input_grad(const Conv& c, float* const* d_y, Later later, float* d_x) {
  const int64_t C = c.channels();
  for (int64_t i = 0; i < C; i += LANES) {
    const float* weight = c.weight + (c.width - 1) * C + i;
    Vec total = load(d_y[0] + i) * load(weight);
    for (int j = 1; j < later; j++) total += load(d_y[j] + i) * load(weight - j * C);
    store(d_x + i, total);
  }
}

template <class Taps>
INLINE void weight_grad(const Conv& c, const float* x, Taps taps, const float* d_y, float* d_weight) {
  const int64_t C = c.channels();
  for (int64_t i = 0; i < C; i += LANES) {
    Vec here = load(d_y + i);
    for (int j = 0; j < taps; j++) add_to(d_weight + (c.width - 1 - j) * C + i, here * load(x - j * c.x_step + i));
  }
}

// Tokens of a block from last to first. d_x needs d_y of the W-1 tokens after it: those behind the block's end are
// computed again, their part of d_weight belongs to the next block.
void backward_block(const Conv& c, int64_t first, int64_t last, const float* d_out, float* d_x, float* d_weight, float* space) {
  const int64_t C = c.channels();
  float* d_y[MAX_WIDTH];  // of this token, the next one, ...
  for (int j = 0; j < c.width; j++) d_y[j] = space + c.D + j * C;
  int64_t document = c.document_of(last - 1), end = c.starts[document + 1];
  int64_t token = last - 1 + c.width - 1 < end ? last - 1 + c.width - 1 : end - 1;
  for (; token >= first; token--) {
    if (token < c.starts[document]) end = c.starts[document], document = c.document_of(token);
    float* reused = d_y[c.width - 1];
    for (int j = c.width - 1; j > 0; j--) d_y[j] = d_y[j - 1];
    d_y[0] = reused;
    const int taps = taps_of(c, token - c.starts[document] + 1);
    with_taps(taps, [&](auto n) { backward_token(c, token, n, d_out + token * C, d_y[0], space); });
    if (token >= last) continue;
    with_taps(taps_of(c, end - token), [&](auto n) { input_grad(c, d_y, n, d_x + token * C); });
    with_taps(taps, [&](auto n) { weight_grad(c, c.x + token * c.x_step, n, d_y[0], d_weight); });
  }
}

}  // namespace

extern "C" {

void moonlet_conv_norm_forward(const float* x, const float* weight, const int64_t* starts, float* out, int64_t documents,
                               int64_t heads, int64_t dim, int64_t width, int64_t x_step, float eps, int64_t threads) {
  Conv c{x, weight, starts, documents, heads, x_step, (int)dim, (int)width, eps};
  const int64_t tokens = c.tokens(), blocks = blocks_of(tokens);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* rows = aligned_floats(width * c.channels());
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
      int64_t token = block * BLOCK, document = c.document_of(token);
      for (; token < block_end(block, tokens); token++) {
        if (token == c.starts[document + 1]) document++;
        const int taps = taps_of(c, token - c.starts[document] + 1);
        float* to = out + token * c.channels();
        if (taps < c.width)
          forward_early_token(c, token, taps, to, rows);
        else
          with_taps(taps, [&](auto n) { forward_token(c, token, n, to); });
      }
    }
    free(rows);
  }
}

void moonlet_conv_norm_backward(const float* x, const float* weight, const int64_t* starts, const float* d_out, float* d_x,
                                float* d_weight, int64_t documents, int64_t heads, int64_t dim, int64_t width,
                                int64_t x_step, float eps, int64_t threads) {
  Conv c{x, weight, starts, documents, heads, x_step, (int)dim, (int)width, eps};
  const int64_t tokens = c.tokens(), C = c.channels();
  PartialSums weights(tokens, width * C);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* space = aligned_floats(dim + width * C);  // slopes of one head, then d_y of W tokens
#pragma omp for schedule(static)
    for (int64_t block = 0; block < weights.blocks; block++)
      backward_block(c, block * BLOCK, block_end(block, tokens), d_out, d_x, weights.of(block), space);
    free(space);
  }
  weights.total(d_weight);
}
}
