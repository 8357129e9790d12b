// Loop of independent fp32 multiply-adds in registers, which ceiling.py compiles and times.
#include <ctime>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
constexpr int kBytes = 64, kChains = 24;
#else
constexpr int kBytes = 32, kChains = 12;
#endif
typedef float Vec __attribute__((vector_size(kBytes)));

static double now() {  // CPU time of this thread, which other programs do not change
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void work(long rounds, float seed, float* sum, double* seconds) {
  const double start = now();
  Vec x[kChains];  // the loops are unrolled, so that each element stays in a register
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) x[i] = Vec{} + seed * (i + 1);
  const Vec a = Vec{} + 0.999f, b = Vec{} + seed;
  for (long r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) x[i] = x[i] * a + b;
  }
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) x[0] += x[i];
  *sum = x[0][0];
  *seconds = now() - start;
}

extern "C" double rate(int threads, long rounds) {  // flop/s
  std::vector<std::thread> pool;
  std::vector<float> sums(threads);
  std::vector<double> seconds(threads);
  for (int t = 0; t < threads; ++t)
    pool.emplace_back(work, rounds, 0.001f * (t + 1), &sums[t], &seconds[t]);
  for (auto& thread : pool) thread.join();
  double total = 0;
  for (double s : seconds) total += 2.0 * rounds * kChains * (kBytes / sizeof(float)) / s;
  return total;
}
