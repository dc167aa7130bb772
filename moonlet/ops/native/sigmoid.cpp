// Element by element, also the last few: torch computes those by another function, so that a number's bits there depend on
// how many others it is with.
#include "vector.h"

extern "C" {

void moonlet_sigmoid(const float* x, float* out, int64_t count, int64_t threads) {
  const int64_t whole = count / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < whole; i += LANES) store(out + i, sigmoid(load(x + i)));
  if (whole == count) return;
  float rest[LANES] = {};
  memcpy(rest, x + whole, (count - whole) * sizeof(float));
  store(rest, sigmoid(load(rest)));
  memcpy(out + whole, rest, (count - whole) * sizeof(float));
}
}
