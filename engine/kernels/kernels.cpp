// The kernels of `engine/kernels/compiled_kernels.py`, for CPUs, in float32.
//
// Every number of a result is computed by one thread, in an order that depends on the sizes of the
// model alone: not on the number of rows, on where a sequence is cut into chunks, on the number of
// threads or on the width of the CPU's vectors. That is what makes a token's logits bitwise the same
// in any batch.
//
// Vectors are 16 floats wide everywhere (GCC's and Clang's vector extension); with narrower
// registers the compiler takes several. Sums are contracted to fused multiply-adds.

#include <torch/extension.h>

#include <ATen/Parallel.h>
#include <unistd.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

namespace {

constexpr int64_t LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef float VecMem __attribute__((vector_size(64), aligned(4), may_alias));  // anywhere in memory
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef float Quad __attribute__((vector_size(16)));
typedef float QuadMem __attribute__((vector_size(16), aligned(4), may_alias));

INLINE Vec load(const float* from) { return *reinterpret_cast<const VecMem*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<VecMem*>(to) = value; }
INLINE Vec broadcast(float value) { return value - Vec{}; }

INLINE Vec load_some(const float* from, int64_t count) {
  Vec value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

// The sums of the lanes of four vectors.
INLINE Quad fold(Vec x) {
  auto low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  auto high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  auto sum = low + high;
  return __builtin_shufflevector(sum, sum, 0, 1, 2, 3) +
         __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
}

INLINE Quad sums(Vec a, Vec b, Vec c, Vec d) {
  Quad p = fold(a), q = fold(b), r = fold(c), s = fold(d);
  Quad pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  Quad rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

INLINE float sum(Vec x) {
  Quad q = fold(x);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

INLINE float largest(Vec x) {
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  return std::max(std::max(x[0], x[1]), std::max(x[2], x[3]));
}

// exp, to about one unit in the last place: 2^n * e^r with |r| <= ln(2) / 2, and e^r as the
// polynomial of Cephes (expf.c). Below -87.3 it is 0; above 88.3 it stays at e^88.3; NaN is NaN.
INLINE Vec exp(Vec x) {
  const Vec limited = larger(x < 88.3f ? x : broadcast(88.3f), broadcast(-87.3f));
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = limited * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const IntVec exponent = (IntVec)shifted << 23;  // the low bits of `shifted` are n
  const Vec result = (Vec)((IntVec)p + exponent);
  return x == x ? (x < -87.3f ? Vec{} : result) : x;
}

INLINE Vec swiglu(Vec gate, Vec up) { return gate / (1.0f + exp(-gate)) * up; }

// Rows of 16 numbers become columns: squares of `D` change places, for D = 8, 4, 2, 1.
template <int D>
INLINE void swap_squares(Vec rows[LANES]) {
#define LOW(lane) (((lane) & D) ? (lane) - D + 16 : (lane))
#define HIGH(lane) (((lane) & D) ? (lane) + 16 : (lane) + D)
#define ALL(of)                                                                                 \
  of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), \
      of(13), of(14), of(15)
  for (int i = 0; i < LANES; i++) {
    if (i & D) continue;
    const Vec a = rows[i], b = rows[i + D];
    rows[i] = __builtin_shufflevector(a, b, ALL(LOW));
    rows[i + D] = __builtin_shufflevector(a, b, ALL(HIGH));
  }
#undef LOW
#undef HIGH
#undef ALL
}

INLINE void transpose(Vec rows[LANES]) {
  swap_squares<8>(rows);
  swap_squares<4>(rows);
  swap_squares<2>(rows);
  swap_squares<1>(rows);
}

// Run `work()` by as many threads as torch has, or `most`.
template <typename Work>
void on_threads(int64_t most, const Work& work) {
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), most);
  if (num_threads <= 1) return work();
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) { work(); });
}

// Run `work(task, next)` for each task. Who is free takes the next one, because other processes may
// hold a core up; which one that is, is known one task before (or is `num_tasks`), so that its memory
// can be brought nearer.
template <typename Work>
void parallel_ahead(int64_t num_tasks, const Work& work) {
  std::atomic<int64_t> counter{0};
  const auto take = [&] {
    return std::min(num_tasks, counter.fetch_add(1, std::memory_order_relaxed));
  };
  on_threads(num_tasks, [&] {
    for (int64_t task = take(), next; task < num_tasks; task = next) {
      next = take();
      work(task, next);
    }
  });
}

// The same, for tasks that do not care: nothing is taken before there is time for it.
template <typename Work>
void parallel(int64_t num_tasks, const Work& work) {
  std::atomic<int64_t> next{0};
  on_threads(num_tasks, [&] {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) work(task);
  });
}

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Thread-local memory that only grows.
float* scratch(int which, int64_t count) {
  static thread_local std::vector<float> buffers[4];
  auto& buffer = buffers[which];
  if (static_cast<int64_t>(buffer.size()) < count + LANES) buffer.resize(count + LANES);
  return buffer.data();
}

char* aligned(char* memory) { return memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64; }

// ------------------------------------------------------------------------------------ linear
//
// out[m][n] = sum over k of x[m][k] * w[n][k]: both are read along k. A tile of up to 6 rows of x and
// 4 of w has 24 sums of 16 lanes, which is what registers hold; the lanes are added up at its end.
//
//         k ─►  |   chunk 0   |   chunk 1   |      chunks of at most 768 numbers, so that a tile's
//   w  4 rows   |═════════════|═════════════|      rows stay in the L1 cache; which they are depends
//   x  6 rows   |═════════════|═════════════|      on the length of k alone
//
// While a tile is computed, memory that is needed later comes nearer by prefetching: with few rows of
// x all time is reading w, and the reading must go on while there is arithmetic to do.

constexpr int64_t TILE_M = 6, TILE_N = 4, MAX_CHUNK = 768;
constexpr int64_t LINE = 64;  // bytes of a cache line

// Memory to bring nearer, line by line.
struct Ahead {
  const char *next, *end;
  int64_t lines_per_step;  // 0, 1, 2 or 4; a step is 16 numbers of k
};

// Where a tile's rows of w come from: float32, or 8 bits with a scale for each group of a row.
struct FloatRows {
  static constexpr int64_t PER_LINE = LINE / 4;
  static constexpr bool SIDE_BY_SIDE = false;
  const float* values;
  int64_t stride;

  static FloatRows from(const FloatRows& rows, int64_t k) { return {rows.values + k, rows.stride}; }
  INLINE const void* address(const FloatRows& rows, int64_t n, int64_t i) {
    return rows.values + n * rows.stride + i;
  }

  INLINE Vec at(const FloatRows& rows, int64_t n, int64_t i, int64_t count = LANES) {
    const float* from = rows.values + n * rows.stride + i;
    return count == LANES ? load(from) : load_some(from, count);
  }
};

constexpr int64_t INT8_GROUP = 64;  // as in kernels.py

struct Int8Rows {
  static constexpr int64_t PER_LINE = LINE;
  static constexpr bool SIDE_BY_SIDE = false;
  const int8_t* bytes;
  const float* scales;
  int64_t stride, scale_stride, offset;  // of the first number from the start of its row

  static Int8Rows from(const Int8Rows& rows, int64_t k) {
    return {rows.bytes, rows.scales, rows.stride, rows.scale_stride, rows.offset + k};
  }
  INLINE const void* address(const Int8Rows& rows, int64_t n, int64_t i) {
    return rows.bytes + n * rows.stride + rows.offset + i;
  }

  INLINE Vec at(const Int8Rows& rows, int64_t n, int64_t i, int64_t count = LANES) {
    const int8_t* from = rows.bytes + n * rows.stride + rows.offset + i;
    const float scale = rows.scales[n * rows.scale_stride + (rows.offset + i) / INT8_GROUP];
    if (count < LANES) {
      Vec some{};
      for (int64_t j = 0; j < count; j++) some[j] = static_cast<float>(from[j]) * scale;
      return some;
    }
#ifdef __AVX512F__
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(packed)) * scale;
#else
    Vec floats;
    for (int64_t j = 0; j < LANES; j++) floats[j] = static_cast<float>(from[j]);
    return floats * scale;
#endif
  }
};

template <int M, int LINES, typename W>
INLINE void tile(const float* x, int64_t x_stride, const W& w, int64_t k, float* out,
                 int64_t out_stride, int64_t num_n, bool add, const char* ahead) {
  Vec acc[M][TILE_N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < TILE_N; n++) acc[m][n] = Vec{};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    Vec b[TILE_N];
    for (int n = 0; n < TILE_N; n++) b[n] = W::at(w, n, i);
    for (int p = 0; p < LINES; p++) __builtin_prefetch(ahead + p * LINE, 0, 2);
    ahead += LINES * LINE;
    for (int m = 0; m < M; m++) {
      const Vec a = load(x + m * x_stride + i);
      for (int n = 0; n < TILE_N; n++) acc[m][n] += a * b[n];
    }
  }
  if (i < k) {
    Vec b[TILE_N];
    for (int n = 0; n < TILE_N; n++) b[n] = W::at(w, n, i, k - i);
    for (int m = 0; m < M; m++) {
      const Vec a = load_some(x + m * x_stride + i, k - i);
      for (int n = 0; n < TILE_N; n++) acc[m][n] += a * b[n];
    }
  }
  for (int m = 0; m < M; m++) {
    float* to = out + m * out_stride;
    Quad result = sums(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
    if (num_n == TILE_N) {
      // No `auto`: it forgets that this is anywhere in memory.
      QuadMem* quad = reinterpret_cast<QuadMem*>(to);
      *quad = add ? *quad + result : result;
    } else {
      for (int64_t n = 0; n < num_n; n++) to[n] = add ? to[n] + result[n] : result[n];
    }
  }
}

template <int LINES, typename W>
void tile_of(int64_t num_m, const float* x, int64_t x_stride, const W& w, int64_t k, float* out,
             int64_t out_stride, int64_t num_n, bool add, const char* ahead) {
  switch (num_m) {
    case 6: return tile<6, LINES>(x, x_stride, w, k, out, out_stride, num_n, add, ahead);
    case 5: return tile<5, LINES>(x, x_stride, w, k, out, out_stride, num_n, add, ahead);
    case 4: return tile<4, LINES>(x, x_stride, w, k, out, out_stride, num_n, add, ahead);
    case 3: return tile<3, LINES>(x, x_stride, w, k, out, out_stride, num_n, add, ahead);
    case 2: return tile<2, LINES>(x, x_stride, w, k, out, out_stride, num_n, add, ahead);
    default: return tile<1, LINES>(x, x_stride, w, k, out, out_stride, num_n, add, ahead);
  }
}

template <typename W>
void any_tile(int64_t num_m, const float* x, int64_t x_stride, const W& w, int64_t k, float* out,
              int64_t out_stride, int64_t num_n, bool add, Ahead& ahead) {
  const int64_t lines = ahead.next < ahead.end ? ahead.lines_per_step : 0;
  const auto run = [&](auto tile) {
    tile(num_m, x, x_stride, w, k, out, out_stride, num_n, add, ahead.next);
  };
  switch (lines) {
    case 0: run(tile_of<0, W>); break;
    case 1: run(tile_of<1, W>); break;
    case 2: run(tile_of<2, W>); break;
    default: run(tile_of<4, W>); break;
  }
  ahead.next += lines * LINE * (k / LANES);
}

int64_t chunk_of(int64_t k) { return div_up(div_up(k, LANES), div_up(k, MAX_CHUNK)) * LANES; }

struct Weight {
  const float* values;  // null: 8 bits
  const int8_t* bytes;
  const float* scales;
  int64_t num_out, num_in;

  const char* row(int64_t n) const {
    return values != nullptr ? reinterpret_cast<const char*>(values + n * num_in)
                             : reinterpret_cast<const char*>(bytes + n * num_in);
  }

  FloatRows float_rows() const { return {values, num_in}; }
  Int8Rows int8_rows() const { return {bytes, scales, num_in, div_up(num_in, INT8_GROUP), 0}; }

  // Rows `from` to `to` as floats; if they have to be copied, with rows of zeros up to a multiple of
  // 4. There are no others to read behind the last ones.
  const float* rows(int64_t from, int64_t to) const {
    if (values != nullptr && (to - from) % TILE_N == 0) return values + from * num_in;
    const int64_t count = div_up(to - from, TILE_N) * TILE_N;
    float* buffer = scratch(0, count * num_in);
    for (int64_t n = from; n < to; n++) unpack(n, buffer + (n - from) * num_in);
    std::fill(buffer + (to - from) * num_in, buffer + count * num_in, 0.0f);
    return buffer;
  }

  void unpack(int64_t n, float* to) const {
    if (values != nullptr) {
      std::memcpy(to, values + n * num_in, num_in * sizeof(float));
      return;
    }
    const int8_t* __restrict from = bytes + n * num_in;
    const float* scale = scales + n * div_up(num_in, INT8_GROUP);
    for (int64_t start = 0; start < num_in; start += INT8_GROUP, scale++) {
      const int64_t end = std::min(num_in, start + INT8_GROUP);
      const float step = *scale;
      float* __restrict floats = to;
      for (int64_t i = start; i < end; i++) floats[i] = static_cast<float>(from[i]) * step;
    }
  }
};

// How the product is cut up: tasks are `rows` of x times `columns` (rows of w), which are worked on
// `block` columns at a time.
struct Cut {
  int64_t rows, columns, block;
};

constexpr int64_t FEW_ROWS = 8, SOME_ROWS = 96;

// Few rows: w is read once, tile by tile. Some: a little of w stays near while all rows see it.
// Many: as much of x and w as the L2 cache holds. There must be enough tasks for all threads, and
// each of them reads on through memory, so that the next block's place is known.
Cut cut_for(int64_t num_rows, int64_t num_out, int64_t num_in) {
  static const int64_t l2_bytes = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 18);
  const int64_t num_tasks = at::get_num_threads() == 1 ? 1 : at::get_num_threads() * 4;
  if (num_rows <= SOME_ROWS) {
    const int64_t columns = div_up(div_up(num_out, num_tasks), 16) * 16;
    return {num_rows, columns, num_rows <= FEW_ROWS ? TILE_N : 16};
  }
  const int64_t fits = l2_bytes * 2 / 5 / static_cast<int64_t>(num_in * sizeof(float));
  const int64_t most = std::clamp<int64_t>(fits, 48, 768);
  int64_t rows = div_up(num_rows, div_up(num_rows, most));
  const int64_t columns = div_up(num_out, div_up(num_out, most));
  while (rows > SOME_ROWS && div_up(num_rows, rows) * div_up(num_out, columns) < num_tasks) rows /= 2;
  const int64_t even_columns = div_up(columns, 16) * 16;
  return {div_up(rows, TILE_M) * TILE_M, even_columns, even_columns};
}

void linear_task(const float* x, int64_t num_rows, int64_t m0, int64_t m1, const Weight& weight,
                 int64_t n0, int64_t n1, int64_t block, float* out) {
  const int64_t k = weight.num_in, chunk = chunk_of(k), num_tiles = div_up(m1 - m0, TILE_M);
  const int64_t lines = num_tiles == 1 ? 4 : num_tiles <= 3 ? 2 : 1;
  const int64_t num_groups = div_up(k, INT8_GROUP);
  for (int64_t first = n0; first < n1; first += block) {
    const int64_t last = std::min(n1, first + block);
    // Bytes that few rows see are unpacked on the way to registers.
    const bool packed = weight.values == nullptr && num_tiles <= 2 && (last - first) % TILE_N == 0;
    const float* w = packed ? nullptr : weight.rows(first, last);
    Ahead ahead{weight.row(last), weight.row(std::min(n1, last + block)), lines};
    for (int64_t m = m0; m < m1; m += TILE_M) {
      if (m1 - m0 < num_rows) {  // w is here already; the next rows of x are not
        const auto row = [&](int64_t i) {
          return reinterpret_cast<const char*>(x + std::min(i, num_rows) * k);
        };
        ahead = {row(m + TILE_M), row(m + 2 * TILE_M), 1};
      }
      for (int64_t c = 0; c < k; c += chunk) {
        for (int64_t n = first; n < last; n += TILE_N) {
          const auto run = [&](const auto& rows) {
            any_tile(std::min(TILE_M, m1 - m), x + m * k + c, k, rows, std::min(chunk, k - c),
                     out + m * weight.num_out + n, weight.num_out, std::min(TILE_N, last - n), c > 0,
                     ahead);
          };
          if (packed) {
            run(Int8Rows{weight.bytes + n * k, weight.scales + n * num_groups, k, num_groups, c});
          } else {
            run(FloatRows{w + (n - first) * k + c, k});
          }
        }
      }
    }
  }
}

void add_to(float* out, int64_t num_out, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
            const float* bias, const float* residual) {
  for (int64_t m = m0; m < m1; m++) {
    float* to = out + m * num_out;
    if (bias != nullptr)
      for (int64_t n = n0; n < n1; n++) to[n] += bias[n];
    if (residual != nullptr)
      for (int64_t n = n0; n < n1; n++) to[n] += residual[m * num_out + n];
  }
}

void check_sizes(const at::Tensor& x, int64_t num_out, int64_t num_in,
                 const std::optional<at::Tensor>& bias,
                 const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(x.is_contiguous() && x.size(1) == num_in, "x must be [rows, ", num_in, "]");
  const int64_t num_rows = x.size(0);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == num_out),
              "the bias must be [", num_out, "]");
  TORCH_CHECK(!residual || (residual->is_contiguous() && residual->numel() == num_rows * num_out),
              "the residual must be [", num_rows, ", ", num_out, "]");
}

at::Tensor run_linear(const at::Tensor& x, const Weight& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual) {
  check_sizes(x, weight.num_out, weight.num_in, bias, residual);
  const int64_t num_rows = x.size(0), num_out = weight.num_out;
  at::Tensor out = at::empty({num_rows, num_out}, x.options());
  if (num_rows == 0) return out;
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const float* added = residual ? residual->const_data_ptr<float>() : nullptr;
  const float* offset = bias ? bias->const_data_ptr<float>() : nullptr;
  const Cut cut = cut_for(num_rows, num_out, weight.num_in);
  const int64_t num_m = div_up(num_rows, cut.rows), num_n = div_up(num_out, cut.columns);
  parallel(num_m * num_n, [&](int64_t task) {
    const int64_t m0 = task % num_m * cut.rows, n0 = task / num_m * cut.columns;
    const int64_t m1 = std::min(num_rows, m0 + cut.rows), n1 = std::min(num_out, n0 + cut.columns);
    linear_task(from, num_rows, m0, m1, weight, n0, n1, cut.block, to);
    if (offset != nullptr || added != nullptr) add_to(to, num_out, m0, m1, n0, n1, offset, added);
  });
  return out;
}

// Of float32 [out, in], or of int8 with a scale for each group of a row.
Weight weight_of(const at::Tensor& values, const std::optional<at::Tensor>& scales) {
  TORCH_CHECK(values.is_contiguous() && (!scales || scales->is_contiguous()),
              "the weight must be contiguous");
  const int64_t num_out = values.size(0), num_in = values.size(1);
  if (!scales) return {values.const_data_ptr<float>(), nullptr, nullptr, num_out, num_in};
  TORCH_CHECK(scales->sizes() == at::IntArrayRef({num_out, div_up(num_in, INT8_GROUP)}),
              "a scale for each ", INT8_GROUP, " numbers of a row");
  return {nullptr, values.const_data_ptr<int8_t>(), scales->const_data_ptr<float>(), num_out, num_in};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& values,
                  const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& residual) {
  return run_linear(x, weight_of(values, scales), bias, residual);
}

// ------------------------------------------------------------------------- linear, of 4 bits
//
// Numbers of 16 rows of w lie side by side, so that 16 sums, each of one row, need no adding up:
//
//   columns     16 rows of w: one block                 16 bytes:  row 0 | row 1 | ... | row 15
//   k ─►        group 0 (32 numbers) | group 1 | ...      low halves: numbers j, high: numbers 16 + j
//                                                         j = 0 ... 15; scales and offsets: 16 each
//
// Sums are in the order 0, 16, 1, 17, ... of each group, however many rows of x there are.

constexpr int64_t PACKED_GROUP = 32;  // as in kernels.py

struct PackedBlocks {
  static constexpr bool SIDE_BY_SIDE = true;
  const uint8_t* bytes;  // [blocks][groups][16][16]
  const float* scales;   // [blocks][groups][2][16]
  int64_t num_groups, num_out;

  // From number `k` on, a multiple of 32.
  static PackedBlocks from(const PackedBlocks& w, int64_t k) {
    return {w.group(0, k / PACKED_GROUP), w.scale(0, k / PACKED_GROUP), w.num_groups, w.num_out};
  }
  INLINE_MEMBER const uint8_t* group(int64_t block, int64_t group) const {
    return bytes + (block * num_groups + group) * PACKED_GROUP / 2 * LANES;
  }
  INLINE_MEMBER const float* scale(int64_t block, int64_t group) const {
    return scales + (block * num_groups + group) * 2 * LANES;
  }
};

struct Numbers {  // of 16 rows: two of each
  Vec low, high;
};

INLINE Numbers unpacked(const uint8_t* from, Vec scale, Vec offset) {
#ifdef __AVX512F__
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const IntVec both = (IntVec)_mm512_cvtepu8_epi32(bytes);
  const Vec low = (Vec)_mm512_cvtepi32_ps((__m512i)(both & 15));
  const Vec high = (Vec)_mm512_cvtepi32_ps(_mm512_srli_epi32((__m512i)both, 4));
#else
  Vec low, high;
  for (int i = 0; i < LANES; i++) low[i] = from[i] & 15, high[i] = from[i] >> 4;
#endif
  return {low * scale + offset, high * scale + offset};
}

// M rows of x by `B` blocks of w.
template <int M, int B>
INLINE void packed_tile(const float* x, int64_t num_in, const PackedBlocks& w, int64_t block,
                        Vec acc[M][B]) {
  for (int m = 0; m < M; m++)
    for (int b = 0; b < B; b++) acc[m][b] = Vec{};
  for (int64_t group = 0; group < w.num_groups; group++, x += PACKED_GROUP) {
    Vec scale[B], offset[B];
    for (int b = 0; b < B; b++) {
      scale[b] = load(w.scale(block + b, group));
      offset[b] = load(w.scale(block + b, group) + LANES);
    }
    for (int64_t j = 0; j < LANES; j++) {
      for (int b = 0; b < B; b++) {
        const Numbers numbers = unpacked(w.group(block + b, group) + j * LANES, scale[b], offset[b]);
        for (int m = 0; m < M; m++) acc[m][b] += numbers.low * x[m * num_in + j];
        for (int m = 0; m < M; m++) acc[m][b] += numbers.high * x[m * num_in + LANES + j];
      }
    }
  }
}

template <int M>
void packed_rows(const float* x, int64_t row, const PackedBlocks& w, int64_t begin, int64_t end,
                 float* out) {
  constexpr int B = M <= 4 ? 4 : M <= 8 ? 2 : 1;  // sums that do not wait for each other
  const int64_t num_in = w.num_groups * PACKED_GROUP;
  const auto put = [&](Vec* acc, int64_t stride, int64_t block, int64_t num_blocks) {
    for (int64_t m = 0; m < M; m++) {
      for (int64_t b = 0; b < num_blocks; b++) {
        float* to = out + (row + m) * w.num_out + (block + b) * LANES;
        const int64_t count = std::min(LANES, w.num_out - (block + b) * LANES);
        std::memcpy(to, &acc[m * stride + b], count * sizeof(float));
      }
    }
  };
  int64_t block = begin;
  for (; block + B <= end; block += B) {
    Vec acc[M][B];
    packed_tile<M, B>(x + row * num_in, num_in, w, block, acc);
    put(acc[0], B, block, B);
  }
  for (; block < end; block++) {
    Vec acc[M][1];
    packed_tile<M, 1>(x + row * num_in, num_in, w, block, acc);
    put(acc[0], 1, block, 1);
  }
}

// As evenly as can be: a tile of few rows takes nearly as long as one of many.
template <int M>
void packed_some_rows(int64_t num_rows, const float* x, int64_t row, const PackedBlocks& w,
                      int64_t begin, int64_t end, float* out) {
  if (num_rows == M) return packed_rows<M>(x, row, w, begin, end, out);
  if constexpr (M > 1) packed_some_rows<M - 1>(num_rows, x, row, w, begin, end, out);
}

PackedBlocks packed_blocks(const at::Tensor& values, const at::Tensor& scales, int64_t num_out) {
  const int64_t num_blocks = div_up(num_out, LANES), num_groups = values.size(1);
  TORCH_CHECK(values.is_contiguous() && scales.is_contiguous() &&
                  values.sizes() == at::IntArrayRef({num_blocks, num_groups, LANES, LANES}) &&
                  scales.sizes() == at::IntArrayRef({num_blocks, num_groups, 2, LANES}),
              "a scale and an offset for each ", PACKED_GROUP, " numbers of a row");
  return {values.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), num_groups, num_out};
}

at::Tensor linear_packed(const at::Tensor& x, const at::Tensor& values, const at::Tensor& scales,
                         int64_t num_out, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& residual) {
  const PackedBlocks w = packed_blocks(values, scales, num_out);
  check_sizes(x, num_out, w.num_groups * PACKED_GROUP, bias, residual);
  const int64_t num_rows = x.size(0), num_blocks = div_up(num_out, LANES);
  at::Tensor out = at::empty({num_rows, num_out}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const float* added = residual ? residual->const_data_ptr<float>() : nullptr;
  const float* offset = bias ? bias->const_data_ptr<float>() : nullptr;
  const int64_t num_tiles = div_up(num_rows, LANES), per_tile = div_up(num_rows, std::max<int64_t>(1, num_tiles));
  const int64_t num_tasks = at::get_num_threads() == 1 ? 1 : at::get_num_threads() * 4;
  const int64_t blocks = div_up(div_up(num_blocks, num_tasks), 4) * 4;
  parallel(num_rows == 0 ? 0 : div_up(num_blocks, blocks), [&](int64_t task) {
    const int64_t begin = task * blocks, end = std::min(num_blocks, begin + blocks);
    for (int64_t first = begin; first < end; first += 4) {
      const int64_t last = std::min(end, first + 4);
      for (int64_t row = 0; row < num_rows; row += per_tile)
        packed_some_rows<LANES>(std::min(per_tile, num_rows - row), from, row, w, first, last, to);
    }
    if (offset != nullptr || added != nullptr)
      add_to(to, num_out, 0, num_rows, begin * LANES, std::min(num_out, end * LANES), offset, added);
  });
  return out;
}

// ------------------------------------------------------------------- linear, for many rows, by AMX
//
// AMX multiplies tiles of bfloat16 (16 rows of 32 numbers) and adds up in float32. A float32 is the
// sum of three bfloat16, x = x1 + x2 + x3 with 8 bits each; of the nine products of two such sums six
// are computed, the others being smaller than what float32 can tell:
//
//   x1 w3 + x1 w2 + x2 w2 + x2 w1 + x1 w1 + x3 w1
//
// which is as exact as a float32 product and sum, at 2.7 times its peak rate. Weights that come from
// fewer bits (bfloat16 has 8, most of GGUF's types 16) have w3 = 0, or w2 = w3 = 0: what is zero is not
// multiplied. A tile of results has rows of w as its rows, so that w, which is large, need not be
// turned: x is, once.
//
//   w  32 rows ─► parts, tiles of 16 x 32             x  all rows ─► parts, tiles of 32 x 16, turned
//   results: 2 x 2 tiles at a time, of 16 rows of w by 16 rows of x each

#ifdef __AMX_BF16__

constexpr int64_t AMX_K = 32, AMX_N = 32, TILE_BYTES = 1024, PARTS = 3 * TILE_BYTES;

// Of the process, by the kernel: its threads' states grow by 8 KiB.
bool request_amx() {
  constexpr int64_t ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

class Tiles {  // the shape of this thread's tile registers, for as long as it lives
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

INLINE __m512 widened(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

// 32 floats as three rows of bfloat16, TILE_BYTES apart; adds to `seen` the bits of the second and the
// third.
INLINE void store_parts(Vec low, Vec high, char* to, __m512i seen[2]) {
  __m512 a = (__m512)low, b = (__m512)high;
  for (int part = 0; part < 3; part++) {
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    _mm512_store_si512(to + part * TILE_BYTES, rounded);
    if (part > 0) seen[part - 1] = _mm512_or_si512(seen[part - 1], rounded);
    if (part == 2) break;
    a -= widened(_mm512_castsi512_si256(rounded));
    b -= widened(_mm512_extracti64x4_epi64(rounded, 1));
  }
}

// The same of two vectors whose numbers belong together in pairs: no number has to move.
INLINE void store_pairs(Vec low, Vec high, char* to, __m512i seen[2]) {
  const IntVec upper = IntVec{} - 65536;
  for (int part = 0; part < 3; part++) {
    const IntVec first = (IntVec)low & upper, second = (IntVec)high & upper;
    const __m512i cut = _mm512_or_si512(_mm512_srli_epi32((__m512i)first, 16), (__m512i)second);
    _mm512_store_si512(to + part * TILE_BYTES, cut);
    if (part > 0) seen[part - 1] = _mm512_or_si512(seen[part - 1], cut);
    if (part == 2) break;
    low -= (Vec)first;
    high -= (Vec)second;
  }
}

// 32 numbers of row `n` from `i`, of which `count` are there, as parts.
template <typename W>
INLINE void store_parts(const W& rows, int64_t n, int64_t i, int64_t count, char* to,
                        __m512i seen[2]) {
  if (count >= AMX_K) {
    store_parts(W::at(rows, n, i), W::at(rows, n, i + LANES), to, seen);
  } else {
    const int64_t second = std::max<int64_t>(0, count - LANES);
    store_parts(W::at(rows, n, i, std::min(LANES, count)),
                 second > 0 ? W::at(rows, n, i + LANES, second) : Vec{}, to, seen);
  }
}

// 16 rows of x by 32 numbers, in pairs as those of w that lie side by side.
void pack_x_in_pairs(const float* x, int64_t num_rows, int64_t num_in, int64_t row, int64_t k,
                     char* to) {
  __m512i seen[2] = {};
  for (int64_t i = 0; i < LANES; i++) {
    const float* from = x + (row + i) * num_in + k;
    const bool is_there = row + i < num_rows;
    store_pairs(is_there ? load(from) : Vec{}, is_there ? load(from + LANES) : Vec{}, to + i * 64, seen);
  }
}

// 16 rows of x by 32 numbers, turned: row j of a tile has numbers 2j and 2j + 1 of each row of x.
void pack_x(const float* x, int64_t num_rows, int64_t num_in, int64_t row, int64_t k, char* to) {
  alignas(64) char straight[PARTS] = {};
  __m512i seen[2] = {};
  const FloatRows rows{x + row * num_in, num_in};
  for (int64_t i = 0; i < std::min(LANES, num_rows - row); i++)
    store_parts(rows, i, k, num_in - k, straight + i * 64, seen);
  for (int part = 0; part < 3; part++) {
    Vec lines[LANES];
    for (int i = 0; i < LANES; i++)
      lines[i] = load(reinterpret_cast<float*>(straight + part * TILE_BYTES) + i * LANES);
    transpose(lines);
    for (int j = 0; j < LANES; j++)
      store(reinterpret_cast<float*>(to + part * TILE_BYTES) + j * LANES, lines[j]);
  }
}

// 32 rows of w on their way to tiles, a piece (32 numbers of a row) at a time, while others are
// multiplied.
template <typename W>
class Packing {
 public:
  // `jump`: how many rows the second 16 are further away than the first; `ahead`: where the rows are
  // that will be packed after these.
  Packing(const W& rows, int64_t num_rows, int64_t length, int64_t jump, int64_t ahead)
      : rows_(rows), num_rows_(num_rows), length_(length), jump_(jump), ahead_(ahead) {}

  void start(int64_t first, char* to) {
    first_ = first, to_ = to, row_ = 0, at_ = 0;
    seen_[0] = seen_[1] = _mm512_setzero_si512();
  }

  void fetch() const {  // what was not fetched on the way: a thread's first rows
    for (int64_t row = 0; row < AMX_N; row++)
      for (int64_t at = 0; at < length_; at += AMX_K) fetch(number(row), at);
  }

  INLINE_MEMBER void some(int64_t pieces) {
    for (; pieces > 0 && at_ < length_; pieces--) {
      if constexpr (W::SIDE_BY_SIDE) {
        pack_pairs();
      } else {
        fetch(number(row_) + ahead_, at_);
        store_parts(rows_, std::min(number(row_), num_rows_ - 1), at_, length_ - at_, to_, seen_);
      }
      to_ += row_ % LANES == LANES - 1 ? PARTS - 15 * 64 : 64;
      if (++row_ == AMX_N) row_ = 0, at_ += AMX_K;
    }
  }

  int num_parts() const {  // that are not zero
    if (_mm512_test_epi32_mask(seen_[1], seen_[1]) != 0) return 3;
    return _mm512_test_epi32_mask(seen_[0], seen_[0]) != 0 ? 2 : 1;
  }

 private:
  INLINE_MEMBER int64_t number(int64_t row) const {
    return first_ + row + (row >= LANES ? jump_ : 0);
  }

  // Two numbers of each row of a block. They come from so few bytes that the CPU's own prefetching
  // suffices.
  INLINE_MEMBER void pack_pairs() {
    const int64_t block = std::min(number(row_), num_rows_ - 1) / LANES, group = at_ / AMX_K;
    const float* scale = rows_.scale(block, group);
    const Numbers numbers = unpacked(rows_.group(block, group) + row_ % LANES * LANES, load(scale),
                                     load(scale + LANES));
    store_pairs(numbers.low, numbers.high, to_, seen_);
  }

  INLINE_MEMBER void fetch(int64_t row, int64_t at) const {
    if (W::SIDE_BY_SIDE || row >= num_rows_) return;
    if constexpr (!W::SIDE_BY_SIDE)
      for (int64_t i = 0; i < AMX_K; i += W::PER_LINE)
        __builtin_prefetch(W::address(rows_, row, at + i), 0, 2);
  }

  const W rows_;
  const int64_t num_rows_, length_, jump_, ahead_;
  int64_t first_ = 0, row_ = 0, at_ = INT64_MAX;
  char* to_ = nullptr;
  __m512i seen_[2];
};

// Left are those whose rows are the rows of results.
#define LOAD_LEFT(from, i_bytes, part)                         \
  _tile_loadd(4, from + ((part)-1) * TILE_BYTES, 64);          \
  _tile_loadd(5, from + i_bytes + ((part)-1) * TILE_BYTES, 64)
#define LOAD_RIGHT(from, i_bytes, part)                        \
  _tile_loadd(6, from + ((part)-1) * TILE_BYTES, 64);          \
  _tile_loadd(7, from + i_bytes + ((part)-1) * TILE_BYTES, 64)
#define LOAD_W(part)                  \
  if constexpr (W::SIDE_BY_SIDE) {    \
    LOAD_RIGHT(w, PARTS, part);       \
  } else {                            \
    LOAD_LEFT(w, PARTS, part);        \
  }
#define LOAD_X(part)                  \
  if constexpr (W::SIDE_BY_SIDE) {    \
    LOAD_LEFT(x, x_stride, part);     \
  } else {                            \
    LOAD_RIGHT(x, x_stride, part);    \
  }
#define MULTIPLY                \
  _tile_dpbf16ps(0, 4, 6);      \
  _tile_dpbf16ps(1, 4, 7);      \
  _tile_dpbf16ps(2, 5, 6);      \
  _tile_dpbf16ps(3, 5, 7);      \
  packing.some(pieces)

constexpr int num_products(int w_parts) { return w_parts == 1 ? 3 : w_parts + 3; }

// 32 rows of w by 32 rows of x, over `steps` steps of 32 numbers; the four tiles of the result. After
// every four products, `pieces` are packed: the vector units have nothing else to do.
template <int W_PARTS, typename W>
void multiply(const char* w, const char* x, int64_t x_stride, int64_t steps, float* result,
              Packing<W>& packing, int64_t pieces) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; step++, w += 2 * PARTS, x += PARTS) {
    if constexpr (W_PARTS >= 2) {
      LOAD_X(1);
    }
    if constexpr (W_PARTS == 3) {
      LOAD_W(3);
      MULTIPLY;
    }
    if constexpr (W_PARTS >= 2) {
      LOAD_W(2);
      MULTIPLY;
    }
    LOAD_X(2);
    if constexpr (W_PARTS >= 2) {
      MULTIPLY;
    }
    LOAD_W(1);
    MULTIPLY;
    LOAD_X(1);
    MULTIPLY;
    LOAD_X(3);
    MULTIPLY;
  }
  _tile_stored(0, result, 64);
  _tile_stored(1, result + 256, 64);
  _tile_stored(2, result + 512, 64);
  _tile_stored(3, result + 768, 64);
}
#undef LOAD_LEFT
#undef LOAD_RIGHT
#undef LOAD_W
#undef LOAD_X
#undef MULTIPLY

// Where results go, and what is done to them before.
struct Out {
  float* values;
  const float *bias, *residual;  // or null
  int64_t num_rows, num_columns;
  bool is_turned;  // tiles have rows of w as their rows
  bool is_gated;   // w has gates, then ups: SwiGLU makes one of two
  bool is_first = true, is_last = true;  // chunk of k: later ones are added to what is there

  int64_t columns_at_once() const { return is_gated ? LANES : 2 * LANES; }

  // Tiles of 16 rows of w by 16 of x: two of them by two.
  void put(const float* tiles, int64_t row, int64_t column) const {
    for (int64_t j = 0; j < 2; j++, row += LANES) {
      if (row >= num_rows) return;
      Vec first[LANES], second[LANES];
      take(tiles + (is_turned ? j : 2 * j) * LANES * LANES, first);
      take(tiles + (is_turned ? 2 + j : 2 * j + 1) * LANES * LANES, second);
      if (is_gated) {
        for (int m = 0; m < LANES; m++) first[m] = swiglu(first[m], second[m]);
      } else if (column + LANES < num_columns) {
        put_lines(second, row, column + LANES);
      }
      put_lines(first, row, column);
    }
  }

 private:
  INLINE_MEMBER void take(const float* tile, Vec lines[LANES]) const {
    for (int i = 0; i < LANES; i++) lines[i] = load(tile + i * LANES);
    if (is_turned) transpose(lines);
  }

  INLINE_MEMBER void put_lines(const Vec lines[LANES], int64_t row, int64_t column) const {
    const int64_t count = std::min(LANES, num_columns - column);
    const auto get = [&](const float* from) {
      return count == LANES ? load(from) : load_some(from, count);
    };
    const Vec offset = is_last && bias != nullptr ? get(bias + column) : Vec{};
    for (int64_t m = 0; m < std::min(LANES, num_rows - row); m++) {
      const int64_t at = (row + m) * num_columns + column;
      Vec line = lines[m] + offset;
      if (!is_first) line += get(values + at);
      if (is_last && residual != nullptr) line += get(residual + at);
      if (count == LANES) {
        store(values + at, line);
      } else {
        std::memcpy(values + at, &line, count * sizeof(float));
      }
    }
  }
};

// One chunk of k: `x` is packed, 3 tiles for each step, `x_stride` bytes for 16 rows. A thread takes
// 32 rows of w (if they are gated 16 and 16) and `panel` rows of x at a time, and the next ones while
// it works on these.
template <typename W>
void amx_chunk(const char* x, int64_t x_stride, int64_t panel, const W& w, int64_t length,
               const Out& out) {
  const int64_t steps = div_up(length, AMX_K), columns = out.columns_at_once();
  const int64_t num_blocks = div_up(out.num_columns, columns);
  const int64_t num_tasks = div_up(out.num_rows, panel) * num_blocks;
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_tasks);
  std::atomic<int64_t> next_task{0};
  on_threads(num_tasks, [&] {
    const Tiles tiles;
    const int64_t w_bytes = steps * 2 * PARTS;
    char* memory = aligned(reinterpret_cast<char*>(scratch(3, (2 * w_bytes + 5 * TILE_BYTES) / 4)));
    float* result = reinterpret_cast<float*>(memory + 2 * w_bytes);
    Packing<W> packing(w, out.is_gated ? 2 * out.num_columns : out.num_columns, length,
                       out.is_gated ? out.num_columns - LANES : 0, columns * num_threads);
    const auto take = [&] { return next_task.fetch_add(1, std::memory_order_relaxed); };
    int64_t task = take();
    if (task >= num_tasks) return;
    packing.start(task % num_blocks * columns, memory);
    packing.fetch();
    packing.some(AMX_N * steps);
    for (int64_t turn = 0; task < num_tasks; turn++) {
      const int64_t next = take(), num_parts = packing.num_parts();
      const auto run = num_parts == 1 ? multiply<1, W> : num_parts == 2 ? multiply<2, W> : multiply<3, W>;
      if (next < num_tasks)
        packing.start(next % num_blocks * columns, memory + (turn + 1) % 2 * w_bytes);
      const int64_t begin = task / num_blocks * panel, end = std::min(out.num_rows, begin + panel);
      const int64_t turns = div_up(end - begin, 2 * LANES) * num_products(num_parts);
      for (int64_t row = begin; row < end; row += 2 * LANES) {
        run(memory + turn % 2 * w_bytes, x + row / LANES * x_stride, x_stride, steps, result, packing,
            div_up(AMX_N, turns));
        out.put(result, row, task % num_blocks * columns);
      }
      packing.some(AMX_N * steps);
      task = next;
    }
  });
}

template <typename W>
at::Tensor amx_linear(const at::Tensor& x, const W& w, int64_t num_out, bool is_gated,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual) {
  const int64_t num_rows = x.size(0), num_in = x.size(1);
  at::Tensor result = at::empty({num_rows, num_out}, x.options());
  const float* from = x.const_data_ptr<float>();
  Out out{result.mutable_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr,
          residual ? residual->const_data_ptr<float>() : nullptr, num_rows, num_out,
          !W::SIDE_BY_SIDE, is_gated};
  const int64_t chunk = div_up(div_up(num_in, div_up(num_in, MAX_CHUNK)), 2 * AMX_K) * 2 * AMX_K;
  const int64_t x_stride = div_up(chunk, AMX_K) * PARTS;
  const int64_t num_tiles = div_up(num_rows, 2 * LANES) * 2;
  at::Tensor packed = at::empty({num_tiles * x_stride + 64}, x.options().dtype(at::kByte));
  char* all = aligned(static_cast<char*>(packed.mutable_data_ptr()));
  static const int64_t l2_bytes = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 20);
  const int64_t most = std::max<int64_t>(2, l2_bytes * 2 / 5 / x_stride) * LANES;
  const int64_t panel = div_up(div_up(num_rows, div_up(num_rows, most)), 2 * LANES) * 2 * LANES;
  for (int64_t k = 0; k < num_in; k += chunk) {
    const int64_t length = std::min(chunk, num_in - k), steps = div_up(length, AMX_K);
    parallel(num_tiles, [&](int64_t tile) {
      const auto pack = W::SIDE_BY_SIDE ? pack_x_in_pairs : pack_x;
      for (int64_t step = 0; step < steps; step++)
        pack(from, num_rows, num_in, tile * LANES, k + step * AMX_K,
             all + tile * x_stride + step * PARTS);
    });
    out.is_first = k == 0, out.is_last = k + length == num_in;
    amx_chunk(all, x_stride, panel, W::from(w, k), length, out);
  }
  return result;
}

at::Tensor silu_and_mul(const at::Tensor& gate_up);

// A projection, or SwiGLU of one. If k is one chunk, gates and ups never see memory.
template <typename W>
at::Tensor amx_linear_of(const at::Tensor& x, const W& w, int64_t num_out, int64_t num_in,
                         bool is_gated, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& residual) {
  check_sizes(x, num_out, num_in, bias, residual);
  if (!is_gated) return amx_linear(x, w, num_out, false, bias, residual);
  TORCH_CHECK(num_out % 2 == 0, "as many gates as ups");
  if (bias || num_in > MAX_CHUNK || (W::SIDE_BY_SIDE && num_out / 2 % LANES != 0))
    return silu_and_mul(amx_linear(x, w, num_out, false, bias, residual));
  return amx_linear(x, w, num_out / 2, true, bias, residual);
}

at::Tensor linear_of_many_rows(const at::Tensor& x, const at::Tensor& values,
                               const std::optional<at::Tensor>& scales, bool is_gated,
                               const std::optional<at::Tensor>& bias,
                               const std::optional<at::Tensor>& residual) {
  const Weight w = weight_of(values, scales);
  if (w.values != nullptr)
    return amx_linear_of(x, w.float_rows(), w.num_out, w.num_in, is_gated, bias, residual);
  return amx_linear_of(x, w.int8_rows(), w.num_out, w.num_in, is_gated, bias, residual);
}

at::Tensor linear_packed_of_many_rows(const at::Tensor& x, const at::Tensor& values,
                                      const at::Tensor& scales, int64_t num_out, bool is_gated,
                                      const std::optional<at::Tensor>& bias,
                                      const std::optional<at::Tensor>& residual) {
  const PackedBlocks w = packed_blocks(values, scales, num_out);
  return amx_linear_of(x, w, num_out, w.num_groups * PACKED_GROUP, is_gated, bias, residual);
}

#endif  // __AMX_BF16__

// ------------------------------------------------------------------------- element-wise

constexpr int64_t SERIAL_NUMBERS = 16384;  // waking threads would take longer

template <typename Work>
void over_rows(int64_t num_rows, int64_t row_size, const Work& work) {
  if (num_rows * row_size <= SERIAL_NUMBERS) {
    for (int64_t row = 0; row < num_rows; row++) work(row);
    return;
  }
  const int64_t rows_per_task = std::max<int64_t>(1, SERIAL_NUMBERS / 2 / row_size);
  parallel(div_up(num_rows, rows_per_task), [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; row++) work(row);
  });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t size = x.size(-1), heads = x.dim() == 3 ? x.size(1) : 1;
  TORCH_CHECK(x.stride(-1) == 1 && (x.dim() == 2 || x.stride(1) == size));
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t stride = x.stride(0);
  const float* all = x.const_data_ptr<float>();
  const float* w = weight.const_data_ptr<float>();
  float* to_all = out.mutable_data_ptr<float>();
  over_rows(x.size(0) * heads, size, [&](int64_t row) {
    const float* from = all + row / heads * stride + row % heads * size;
    float* to = to_all + row * size;
    Vec squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const Vec v = load(from + i);
      squares += v * v;
    }
    if (i < size) {
      const Vec v = load_some(from + i, size - i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / size + static_cast<float>(eps));
    for (i = 0; i < size; i++) to[i] = from[i] * scale * w[i];
  });
  return out;
}

at::Tensor silu_and_mul(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.is_contiguous());
  const int64_t num_rows = gate_up.size(0), size = gate_up.size(1) / 2;
  at::Tensor out = at::empty({num_rows, size}, gate_up.options());
  const float* all = gate_up.const_data_ptr<float>();
  float* to_all = out.mutable_data_ptr<float>();
  over_rows(num_rows, size, [&](int64_t row) {
    const float *gate = all + row * size * 2, *up = gate + size;
    float* to = to_all + row * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, swiglu(load(gate + i), load(up + i)));
    if (i < size) {
      const Vec result = swiglu(load_some(gate + i, size - i), load_some(up + i, size - i));
      std::memcpy(to + i, &result, (size - i) * sizeof(float));
    }
  });
  return out;
}

void rotate(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t num_heads = heads.size(1), size = heads.size(2), half = size / 2;
  TORCH_CHECK(heads.stride(2) == 1 && heads.stride(1) == size);
  const int64_t stride = heads.stride(0);
  float* all = heads.mutable_data_ptr<float>();
  const float *all_cos = cos.const_data_ptr<float>(), *all_sin = sin.const_data_ptr<float>();
  over_rows(heads.size(0), num_heads * size, [&](int64_t token) {
    const float *c = all_cos + token * half, *s = all_sin + token * half;
    for (int64_t head = 0; head < num_heads; head++) {
      float *first = all + token * stride + head * size, *second = first + half;
      for (int64_t i = 0; i < half; i++) {
        const float a = first[i], b = second[i];
        first[i] = a * c[i] - b * s[i];
        second[i] = b * c[i] + a * s[i];
      }
    }
  });
}

// ------------------------------------------------------------------------------------ attention
//
// One call for the ragged batch of a step: keys and values are written into the paged cache, then
// each query sees its sequence in place. The query heads that share a KV head, and neighbouring
// tokens of a chunk, are the rows of one small matrix, which sees the context in steps of 64 tokens
// with the online softmax (https://arxiv.org/abs/1805.02867):
//
//   positions   0      64     128    ...                        512            ...
//   context     |tile 0|tile 1|tile 2| ...              |tile 7||tile 8| ...
//               |═══════════ segment 0 ════════════════════════||══ segment 1 ══ ...
//
// A segment is summed up by itself, and segments are merged in order, so that the segments of one
// long sequence can be shared among threads. Where tiles and segments begin depends on positions
// alone, and what a query must not see adds exact zeros: so a query gets the same bits in a chunk,
// alone, and in any batch.

constexpr int64_t KV_TILE = 64, SEGMENT = 512;
constexpr int64_t KEY_STRIDE = KV_TILE + LANES;  // so that lines of a column are in different sets of the cache
constexpr float NOTHING = -1e30f;  // the maximum of no scores: finite, so that differences are

struct Cache {
  char* base;  // of the layer's keys in block 0
  int64_t block_bytes, values_bytes;  // from block to block, from keys to values
  int64_t block_size, num_heads, head_dim;
  bool is_bf16;

  int64_t row_bytes() const { return head_dim * (is_bf16 ? 2 : 4); }

  char* slot(int64_t block, int64_t offset, int64_t head) const {
    const int64_t number = (offset * num_heads + head) * head_dim;
    return base + block * block_bytes + number * (is_bf16 ? 2 : 4);
  }
};

struct Step {
  Cache cache;
  const float *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;  // from token to token
  float* out;                                      // [num_tokens, num_heads, head_dim]
  const int32_t *query_starts, *context_lens, *tables;
  int64_t table_width, num_seqs, group;  // query heads of a KV head
  int64_t window;                        // tokens that are seen
  float scale;
};

INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void write_numbers(const float* from, char* to, int64_t count, bool is_bf16) {
  if (!is_bf16) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; i++) out[i] = to_bf16(from[i]);
}

void write_token(const Step& step, int64_t seq, int64_t token) {
  const Cache& cache = step.cache;
  const int64_t position = step.context_lens[seq] - step.query_starts[seq + 1] + token;
  const int64_t block = step.tables[seq * step.table_width + position / cache.block_size];
  char* keys = cache.slot(block, position % cache.block_size, 0);
  const int64_t count = cache.num_heads * cache.head_dim;
  write_numbers(step.key + token * step.key_stride, keys, count, cache.is_bf16);
  write_numbers(step.value + token * step.value_stride, keys + cache.values_bytes, count,
                cache.is_bf16);
}

// 16 numbers of a row of the cache, or the `count` that are there.
INLINE Vec load_numbers(const char* row, int64_t at, bool is_bf16, int64_t count = LANES) {
  if (!is_bf16) {
    const float* from = reinterpret_cast<const float*>(row) + at;
    return count == LANES ? load(from) : load_some(from, count);
  }
  HalfVec bits{};
  std::memcpy(&bits, row + at * 2, count * 2);
  return (Vec)(__builtin_convertvector(bits, IntVec) << 16);
}

// Where the keys of some tokens of a sequence are, for one KV head.
void find_keys(const Step& step, int64_t seq, int64_t head, int64_t start, int64_t end,
               const char** rows) {
  const Cache& cache = step.cache;
  const int32_t* table = step.tables + seq * step.table_width;
  const int64_t row_bytes = cache.row_bytes() * cache.num_heads;
  int64_t block = start / cache.block_size, offset = start % cache.block_size;
  for (int64_t t = start; t < end; block++, offset = 0) {
    const char* row = cache.slot(table[block], offset, head);
    const int64_t last = std::min(end, t + cache.block_size - offset);
    for (; t < last; t++, row += row_bytes) *rows++ = row;
  }
}

// Tokens whose keys and values will be needed soon: they are brought nearer one by one, while there is
// arithmetic to do.
struct Coming {
  const char* keys[KV_TILE];
  int64_t count = 0, done = 0;

  INLINE_MEMBER void fetch_one(const Cache& cache) {
    if (done >= count) return;
    const char* at = keys[done++];
    for (int64_t line = 0; line < cache.row_bytes(); line += LINE) {
      __builtin_prefetch(at + line, 0, 2);
      __builtin_prefetch(at + cache.values_bytes + line, 0, 2);
    }
  }
};

// The visible part of a tile of the context, for one KV head.
struct Tile {
  float* keys;  // [head_dim][KEY_STRIDE]: transposed, and zeros up to a whole vector
  const float* values[KV_TILE];
  int64_t num_tokens;
  Coming coming;

  void fill(const Step& step, int64_t seq, int64_t head, int64_t start, int64_t end,
            float* value_buffer) {
    const Cache& cache = step.cache;
    const int64_t padded = div_up(cache.head_dim, LANES) * LANES;
    const bool in_place = !cache.is_bf16 && padded == cache.head_dim;
    const char* rows[KV_TILE];
    num_tokens = end - start;
    find_keys(step, seq, head, start, end, rows);
    for (int64_t t = 0; t < num_tokens; t++) {
      const char* from = rows[t] + cache.values_bytes;
      values[t] = reinterpret_cast<const float*>(from);
      if (in_place) continue;
      float* to = value_buffer + t * padded;
      values[t] = to;
      for (int64_t d = 0; d < cache.head_dim; d += LANES)
        store(to + d, load_numbers(from, d, cache.is_bf16, std::min(LANES, cache.head_dim - d)));
    }
    for (int64_t t = 0; t < num_tokens; t += LANES) {
      for (int64_t d = 0; d < cache.head_dim; d += LANES) {
        coming.fetch_one(cache);
        float* to = keys + d * KEY_STRIDE + t;
        if (num_tokens - t >= LANES && cache.head_dim - d >= LANES) {
          if (cache.is_bf16) {
            turn(rows + t, d, true, to);
          } else {
            turn(rows + t, d, false, to);
          }
        } else {
          turn_some(rows + t, d, cache.is_bf16, std::min(LANES, num_tokens - t),
                    std::min(LANES, cache.head_dim - d), to);
        }
      }
    }
  }

  // 16 numbers of 16 rows, turned.
  INLINE void turn(const char* const* rows, int64_t d, bool is_bf16, float* to) {
    Vec block[LANES];
    for (int i = 0; i < LANES; i++) block[i] = load_numbers(rows[i], d, is_bf16);
    transpose(block);
    for (int i = 0; i < LANES; i++) store(to + i * KEY_STRIDE, block[i]);
  }

  static void turn_some(const char* const* rows, int64_t d, bool is_bf16, int64_t num_rows,
                        int64_t size, float* to) {
    Vec block[LANES] = {};
    for (int64_t i = 0; i < num_rows; i++) block[i] = load_numbers(rows[i], d, is_bf16, size);
    transpose(block);
    for (int64_t i = 0; i < size; i++) store(to + i * KEY_STRIDE, block[i]);
  }
};

// scores[m][16 * VECS] = query[m] times the keys of a tile.
template <int M, int VECS>
INLINE void score(const float* query, Tile& tile, const Cache& cache, float* scores) {
  Vec acc[M][VECS];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < VECS; j++) acc[m][j] = Vec{};
  for (int64_t d = 0; d < cache.head_dim; d++) {
    if (d % 4 == 0) tile.coming.fetch_one(cache);
    Vec b[VECS];
    for (int j = 0; j < VECS; j++) b[j] = load(tile.keys + d * KEY_STRIDE + j * LANES);
    for (int m = 0; m < M; m++) {
      const Vec a = broadcast(query[m * cache.head_dim + d]);
      for (int j = 0; j < VECS; j++) acc[m][j] += a * b[j];
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < VECS; j++) store(scores + m * KV_TILE + j * LANES, acc[m][j]);
}

// sums[m] += weights[m] times the values of a tile, for VECS * 16 numbers of them.
template <int M, int VECS>
INLINE void weigh(const float* weights, Tile& tile, int64_t num_tokens, const Cache& cache,
                  int64_t at, float* sums, int64_t stride) {
  Vec acc[M][VECS];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < VECS; j++) acc[m][j] = load(sums + m * stride + at + j * LANES);
  for (int64_t t = 0; t < num_tokens; t++) {
    if (t % 2 == 0) tile.coming.fetch_one(cache);
    Vec b[VECS];
    for (int j = 0; j < VECS; j++) b[j] = load(tile.values[t] + at + j * LANES);
    for (int m = 0; m < M; m++) {
      const Vec a = broadcast(weights[m * KV_TILE + t]);
      for (int j = 0; j < VECS; j++) acc[m][j] += a * b[j];
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < VECS; j++) store(sums + m * stride + at + j * LANES, acc[m][j]);
}

// What some rows have seen so far: the weighted sum of values, the sum of weights, and the largest
// score, to which weights are relative.
struct Partial {
  float* sums;     // [rows][padded]
  float* totals;   // [rows][16]: a lane for each token modulo 16
  float* maxima;   // [rows]
  int64_t padded;  // numbers of a head, in whole vectors

  static int64_t size(int64_t rows, int64_t padded) { return rows * (padded + LANES + 1); }

  static Partial in(float* memory, int64_t rows, int64_t padded) {
    return {memory, memory + rows * padded, memory + rows * (padded + LANES), padded};
  }

  void clear(int64_t rows) {
    std::fill(sums, sums + rows * (padded + LANES), 0.0f);
    std::fill(maxima, maxima + rows, NOTHING);
  }

  INLINE void scale_row(float* sums, float* totals, int64_t padded, Vec factor) {
    for (int64_t i = 0; i < padded; i += LANES) store(sums + i, load(sums + i) * factor);
    store(totals, load(totals) * factor);
  }

  void merge(const Partial& later, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
      const float maximum = std::max(maxima[row], later.maxima[row]);
      const Vec mine = exp(broadcast(maxima[row] - maximum));
      const Vec its = exp(broadcast(later.maxima[row] - maximum));
      scale_row(sums + row * padded, totals + row * LANES, padded, mine);
      for (int64_t i = 0; i < padded; i += LANES) {
        float* to = sums + row * padded + i;
        store(to, load(to) + load(later.sums + row * padded + i) * its);
      }
      float* to = totals + row * LANES;
      store(to, load(to) + load(later.totals + row * LANES) * its);
      maxima[row] = maximum;
    }
  }
};

// Some neighbouring tokens of one sequence, and the query heads of some KV heads.
struct Item {
  int64_t seq, first_head, num_heads;
  int64_t first, last;  // tokens of the packed batch, `last` not included

  int64_t rows_per_head(const Step& step) const { return (last - first) * step.group; }
  int64_t rows(const Step& step) const { return num_heads * rows_per_head(step); }
  int64_t position(const Step& step, int64_t token) const {
    return step.context_lens[seq] - step.query_starts[seq + 1] + token;
  }
  int64_t begin(const Step& step) const {  // the first position that any of them sees
    return std::max<int64_t>(0, position(step, first) - step.window + 1);
  }
  int64_t first_tile(const Step& step) const { return begin(step) / KV_TILE * KV_TILE; }
  int64_t end(const Step& step) const { return position(step, last - 1) + 1; }

  // Its tile at `start`, for the KV head that `head` of another item's is to it.
  void find_coming(const Step& step, int64_t start, int64_t head, Coming& coming) const {
    const int64_t stop = std::min(end(step), start + KV_TILE);
    find_keys(step, seq, first_head + std::min(head, num_heads - 1), start, stop, coming.keys);
    coming.count = stop - start, coming.done = 0;
  }
};

// M rows of an item see the first `num_tokens` of a tile's, at most 16 * VECS.
template <int M, int VECS>
void attend_rows(const Step& step, Tile& tile, int64_t num_tokens, int64_t start, const int64_t* positions,
                 const float* query, Partial& partial, int64_t row, float* scores) {
  const int64_t padded = partial.padded;
  score<M, VECS>(query + row * step.cache.head_dim, tile, step.cache, scores);
  float* sums = partial.sums + row * padded;
  const IntVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int m = 0; m < M; m++) {
    const int64_t last = positions[m] - start;  // of the tile's tokens that it sees
    const int64_t first = last - step.window + 1;
    Vec s[VECS];
    Vec largest_s = broadcast(NOTHING);
    for (int j = 0; j < VECS; j++) {
      s[j] = load(scores + m * KV_TILE + j * LANES);
      if (last < VECS * LANES - 1 || first > 0) {
        const IntVec t = lanes + static_cast<int32_t>(j * LANES);
        const IntVec seen = (t <= static_cast<int32_t>(std::min(last, KV_TILE))) &
                            (t >= static_cast<int32_t>(std::clamp<int64_t>(first, 0, KV_TILE)));
        s[j] = seen ? s[j] : broadcast(-INFINITY);
      }
      largest_s = larger(s[j], largest_s);
    }
    float* maximum = partial.maxima + row + m;
    const float new_maximum = std::max(*maximum, largest(largest_s));
    float* totals = partial.totals + (row + m) * LANES;
    if (new_maximum != *maximum) {
      const Vec factor = exp(broadcast(*maximum - new_maximum));
      Partial::scale_row(sums + m * padded, totals, padded, factor);
      *maximum = new_maximum;
    }
    Vec total = load(totals);
    for (int j = 0; j < VECS; j++) {
      const Vec weight = exp(s[j] - new_maximum);
      total += weight;
      store(scores + m * KV_TILE + j * LANES, weight);
    }
    store(totals, total);
  }
  int64_t at = 0;
  for (; at + 4 * LANES <= padded; at += 4 * LANES)
    weigh<M, 4>(scores, tile, num_tokens, step.cache, at, sums, padded);
  for (; at < padded; at += LANES)
    weigh<M, 1>(scores, tile, num_tokens, step.cache, at, sums, padded);
}

template <int M>
void attend_some_rows(const Step& step, Tile& tile, int64_t start, const int64_t* positions,
                      const float* query, Partial& partial, int64_t row, float* scores) {
  // Rows are in the order of tokens: the last one sees most. What none of them sees is left out.
  const int64_t num_tokens = std::min(tile.num_tokens, positions[M - 1] - start + 1);
  if (num_tokens <= 0) return;
  const auto attend = [&](auto vecs) {
    attend_rows<M, vecs()>(step, tile, num_tokens, start, positions, query, partial, row, scores);
  };
  switch (div_up(num_tokens, LANES)) {
    case 1: return attend(std::integral_constant<int, 1>{});
    case 2: return attend(std::integral_constant<int, 2>{});
    case 3: return attend(std::integral_constant<int, 3>{});
    default: return attend(std::integral_constant<int, 4>{});
  }
}

// One segment of the context, seen by all rows of an item; `following` (or null) is what this thread
// works on after that.
void attend_segment(const Step& step, const Item& item, int64_t segment, Partial& partial,
                    const Item* following) {
  const Cache& cache = step.cache;
  const int64_t rows = item.rows(step), per_head = item.rows_per_head(step), head_dim = cache.head_dim;
  float* query = scratch(1, rows * head_dim + head_dim * KEY_STRIDE + KV_TILE * partial.padded +
                                TILE_M * KV_TILE);
  Tile tile;
  tile.keys = query + rows * head_dim;
  float* value_buffer = tile.keys + head_dim * KEY_STRIDE;
  float* scores = value_buffer + KV_TILE * partial.padded;
  std::vector<int64_t> positions(per_head);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t token = item.first + row % per_head / step.group;
    const int64_t head = (item.first_head + row / per_head) * step.group + row % step.group;
    const float* from = step.query + token * step.query_stride + head * head_dim;
    for (int64_t d = 0; d < head_dim; d++) query[row * head_dim + d] = from[d] * step.scale;
    if (row < per_head) positions[row] = item.position(step, token);
  }
  partial.clear(rows);
  const int64_t end = std::min(item.end(step), (segment + 1) * SEGMENT);
  int64_t start = std::max(item.first_tile(step), segment * SEGMENT);
  for (; start < end; start += KV_TILE) {
    for (int64_t head = 0; head < item.num_heads; head++) {
      if (start + KV_TILE < item.end(step)) {
        item.find_coming(step, start + KV_TILE, head, tile.coming);
      } else if (following != nullptr) {
        following->find_coming(step, following->first_tile(step), head, tile.coming);
      }
      tile.fill(step, item.seq, item.first_head + head, start, std::min(end, start + KV_TILE),
                value_buffer);
      for (int64_t row = 0; row < per_head; row += TILE_M) {
        const auto attend = [&](auto count) {
          attend_some_rows<count()>(step, tile, start, positions.data() + row, query, partial,
                                    head * per_head + row, scores);
        };
        switch (std::min(TILE_M, per_head - row)) {
          case 6: attend(std::integral_constant<int, 6>{}); break;
          case 5: attend(std::integral_constant<int, 5>{}); break;
          case 4: attend(std::integral_constant<int, 4>{}); break;
          case 3: attend(std::integral_constant<int, 3>{}); break;
          case 2: attend(std::integral_constant<int, 2>{}); break;
          case 1: attend(std::integral_constant<int, 1>{}); break;
        }
      }
      while (tile.coming.done < tile.coming.count) tile.coming.fetch_one(cache);
    }
  }
}

void write_result(const Step& step, const Item& item, const Partial& seen) {
  const int64_t head_dim = step.cache.head_dim, num_heads = step.cache.num_heads * step.group;
  const int64_t per_head = item.rows_per_head(step);
  for (int64_t row = 0; row < item.rows(step); row++) {
    const int64_t token = item.first + row % per_head / step.group;
    const int64_t head = (item.first_head + row / per_head) * step.group + row % step.group;
    float* to = step.out + (token * num_heads + head) * head_dim;
    const float total = sum(load(seen.totals + row * LANES));
    for (int64_t d = 0; d < head_dim; d++) to[d] = seen.sums[row * seen.padded + d] / total;
  }
}

constexpr int64_t ROWS_PER_ITEM = 96;

// The tokens of a chunk are cut up, each KV head by itself. A single token sees all heads of its
// context together, because they lie together in memory, if there is enough other work for the
// threads.
std::vector<Item> items_of(const Step& step) {
  const int64_t tokens = std::max<int64_t>(1, ROWS_PER_ITEM / step.group);
  const int64_t num_heads = step.cache.num_heads;
  const bool together = step.num_seqs >= at::get_num_threads() * 2;
  std::vector<Item> items;
  for (int64_t seq = 0; seq < step.num_seqs; seq++) {
    // The last tokens of a chunk see most: they come first, so that no thread is late with them.
    const int64_t begin = step.query_starts[seq], end = step.query_starts[seq + 1];
    const int64_t heads = together && end - begin == 1 ? num_heads : 1;
    for (int64_t last = end; last > begin; last -= tokens)
      for (int64_t head = 0; head < num_heads; head += heads)
        items.push_back({seq, head, heads, std::max(begin, last - tokens), last});
  }
  return items;
}

// One segment of one item. What they have seen is put together when all are done.
struct Part {
  size_t item;
  int64_t segment, offset;  // offset: of its sums in memory
};

void attend(const Step& step, const std::vector<Item>& items) {
  const int64_t padded = div_up(step.cache.head_dim, LANES) * LANES;
  parallel_ahead(items.size(), [&](int64_t task, int64_t next) {
    const Item& item = items[task];
    const Item* following = next < static_cast<int64_t>(items.size()) ? &items[next] : nullptr;
    const int64_t rows = item.rows(step), size = Partial::size(rows, padded);
    float* memory = scratch(2, 2 * size);
    Partial seen = Partial::in(memory, rows, padded);
    Partial part = Partial::in(memory + size, rows, padded);
    seen.clear(rows);
    for (int64_t s = item.begin(step) / SEGMENT; s * SEGMENT < item.end(step); s++) {
      attend_segment(step, item, s, part, following);
      seen.merge(part, rows);
    }
    write_result(step, item, seen);
  });
}

// The same, if there are few items: the segments of one are shared among threads.
void attend_in_segments(const Step& step, const std::vector<Item>& items) {
  const int64_t padded = div_up(step.cache.head_dim, LANES) * LANES;
  std::vector<Part> parts;
  int64_t offset = 0;
  for (size_t i = 0; i < items.size(); i++) {
    for (int64_t s = items[i].begin(step) / SEGMENT; s * SEGMENT < items[i].end(step); s++) {
      parts.push_back({i, s, offset});
      offset += Partial::size(items[i].rows(step), padded);
    }
  }
  std::vector<float> memory(offset);
  const auto partial = [&](const Part& part) {
    return Partial::in(memory.data() + part.offset, items[part.item].rows(step), padded);
  };
  parallel(parts.size(), [&](int64_t task) {
    Partial mine = partial(parts[task]);
    attend_segment(step, items[parts[task].item], parts[task].segment, mine, nullptr);
  });
  for (size_t p = 0; p < parts.size();) {
    const Item& item = items[parts[p].item];
    const int64_t rows = item.rows(step);
    Partial seen = Partial::in(scratch(2, Partial::size(rows, padded)), rows, padded);
    seen.clear(rows);
    const size_t of = parts[p].item;
    for (; p < parts.size() && parts[p].item == of; p++) seen.merge(partial(parts[p]), rows);
    write_result(step, item, seen);
  }
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& layer, const at::Tensor& query_starts,
                     const at::Tensor& context_lens, const at::Tensor& tables, int64_t window) {
  const int64_t num_heads = query.size(1), head_dim = query.size(2), num_kv_heads = key.size(1);
  for (const auto& heads : {query, key, value})
    TORCH_CHECK(heads.stride(2) == 1 && heads.stride(1) == head_dim, "heads must be side by side");
  const bool is_bf16 = layer.scalar_type() == at::kBFloat16;
  TORCH_CHECK(is_bf16 || layer.scalar_type() == at::kFloat, "a cache of float32 or bfloat16");
  const int64_t item_bytes = is_bf16 ? 2 : 4;
  at::Tensor out = at::empty({query.size(0), num_heads, head_dim}, query.options());
  const Step step{
      {static_cast<char*>(layer.data_ptr()), layer.stride(0) * item_bytes,
       layer.stride(1) * item_bytes, layer.size(2), num_kv_heads, head_dim, is_bf16},
      query.const_data_ptr<float>(), key.const_data_ptr<float>(), value.const_data_ptr<float>(),
      query.stride(0), key.stride(0), value.stride(0), out.mutable_data_ptr<float>(),
      query_starts.const_data_ptr<int32_t>(), context_lens.const_data_ptr<int32_t>(),
      tables.const_data_ptr<int32_t>(), tables.size(1), context_lens.size(0),
      num_heads / num_kv_heads, window > 0 ? window : INT64_MAX / 2,
      1.0f / std::sqrt(static_cast<float>(head_dim))};
  const auto write = [&](int64_t seq) {
    for (int64_t t = step.query_starts[seq]; t < step.query_starts[seq + 1]; t++)
      write_token(step, seq, t);
  };
  if (query.size(0) <= 64) {
    for (int64_t seq = 0; seq < step.num_seqs; seq++) write(seq);
  } else {
    parallel(step.num_seqs, write);
  }
  const std::vector<Item> items = items_of(step);
  const int64_t num_threads = at::get_num_threads();
  if (num_threads > 1 && static_cast<int64_t>(items.size()) < num_threads * 4) {
    attend_in_segments(step, items);
  } else {
    attend(step, items);
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("linear", &linear, no_gil);
  module.def("linear_packed", &linear_packed, no_gil);
#ifdef __AMX_BF16__
  module.attr("has_amx") = request_amx();
  module.def("linear_of_many_rows", &linear_of_many_rows, no_gil);
  module.def("linear_packed_of_many_rows", &linear_packed_of_many_rows, no_gil);
#else
  module.attr("has_amx") = false;
#endif
  module.def("rms_norm", &rms_norm, no_gil);
  module.def("silu_and_mul", &silu_and_mul, no_gil);
  module.def("rotate", &rotate, no_gil);
  module.def("attention", &attention, no_gil);
}
