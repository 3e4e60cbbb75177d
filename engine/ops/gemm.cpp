// Matrix products through dnnl_sgemm; see gemm.h. Where a product is cut for a team is decided by Cut alone.
// Measured on two Zen 5 cores (FMA peak 503 GFLOP/s) at GPT-2 124M's shapes: dnnl_sgemm on a slice a thread gives 450
// to 490 GFLOP/s in every form; oneDNN 2.6's matmul primitive 283 to 499, as its brgemm path is slow for dy·w.
#include "engine/ops/gemm.h"

#include <dnnl.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "engine/ops/vector.h"
#include "strata/convert.h"
#include "strata/error.h"

namespace strata {
namespace {

// While one lives oneDNN makes primitives for a single thread, whichever thread asks: there is one of them for each of
// our own.
struct ForOneThread {
  int before = omp_get_max_threads();
  ForOneThread() { omp_set_num_threads(1); }
  ~ForOneThread() { omp_set_num_threads(before); }
};

// oneDNN makes its kernels in a process's first products and takes it for granted that there is memory for them:
// without it the process would end by SIGSEGV. So the first ones are made here, while other threads, which would take
// of that memory, wait: a small product makes the kernels of nearly all, those of few columns have one of their own.
void make_kernels() {
  constexpr size_t kRoom = size_t{32} << 20;
  static const bool made = [] {
    void* const memory = mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    munmap(memory, kRoom);
    const ForOneThread one;
    for (const dnnl_dim_t size : {64, 8})
      for (const char a : {'N', 'T'})
        for (const char b : {'N', 'T'}) {
          const std::vector<float> x(size_t(size * size));
          std::vector<float> y(x);
          if (dnnl_sgemm(a, b, size, size, size, 1.0f, x.data(), size, x.data(), size, 0, y.data(), size) !=
              dnnl_success)
            throw std::bad_alloc();
        }
    return true;
  }();
  (void)made;
}

}  // namespace

void gemm(Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda, const float* B,
          int64_t ldb, float beta, float* C, int64_t ldc) {
  make_kernels();
  const auto letter = [](Transpose t) { return t == Transpose::yes ? 'T' : 'N'; };
  const dnnl_status_t status = dnnl_sgemm(letter(a), letter(b), m, n, k, 1.0f, A, lda, B, ldb, beta, C, ldc);
  if (status != dnnl_success)
    throw Error("a matrix product failed with the library's status " + std::to_string(int(status)) + " (" +
                    std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k) + ").",
                ExitCode::failed);
}

namespace {

constexpr int64_t kBlock = 16;                           // columns of one vector; a piece's border never cuts one
constexpr int64_t kPieces = 16, kMostBlocks = 512 / 16;  // by size: pieces of at most 512, and enough for a team

}  // namespace

Cut::Cut(int threads, Threads::Cut how, int64_t size) : size_(size) {
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  if (how == Threads::Cut::by_threads) {
    pieces_ = std::min<int64_t>(blocks, threads);
    return;
  }
  blocks_a_piece_ = std::clamp<int64_t>(blocks / kPieces, 1, kMostBlocks);
  pieces_ = (blocks + blocks_a_piece_ - 1) / blocks_a_piece_;
}

int64_t Cut::begin(int64_t piece) const {
  const int64_t blocks = (size_ + kBlock - 1) / kBlock;
  const int64_t before = blocks_a_piece_ > 0 ? piece * blocks_a_piece_ : blocks * piece / pieces_;
  return std::min(size_, before * kBlock);
}

void gemm(Threads& threads, Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda,
          const float* B, int64_t ldb, float beta, float* C, int64_t ldc) {
  const Cut cut(threads, std::max(m, n));
  cut.each(threads, [&](int, int64_t piece) {
    const int64_t i = cut.begin(piece), count = cut.end(piece) - i;
    if (n >= m)
      gemm(a, b, m, count, k, A, lda, B + (b == Transpose::yes ? i * ldb : i), ldb, beta, C + i, ldc);
    else
      gemm(a, b, count, n, k, A + (a == Transpose::yes ? i : i * lda), lda, B, ldb, beta, C + i * ldc, ldc);
  });
}

namespace {

constexpr int64_t kPanel = 512;  // rows, columns and depth of a panel: three of them are 3 MiB in f32
int64_t panel_bytes(int threads) { return threads * (3 * kPanel + 1) * kPanel * 4; }

bool has_bf16() {
  static const bool has = dnnl_get_effective_cpu_isa() >= dnnl_cpu_isa_avx512_core_bf16;
  return has;
}

// Rows [row, row + rows) and columns [column, column + columns) of a stored matrix as f32, rows kPanel apart.
void panel(DType type, const void* matrix, int64_t stride, int64_t row, int64_t rows, int64_t column, int64_t columns,
           float* out) {
  for (int64_t r = 0; r < rows; ++r)
    to_f32(type, at(matrix, type, (row + r) * stride + column), out + r * kPanel, columns);
}

STRATA_SIMD void add_row(const float* x, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c)
                   STRATA_INLINE_LAMBDA { simd::put(y + i, simd::get(y + i, c) + simd::get(x + i, c), c); });
}

}  // namespace

struct HalfGemm::Native {
  struct Slice {
    int64_t first, count;  // of columns, or of rows
    dnnl::matmul primitive;
    dnnl::memory a, b, bias, c, scratch;
    dnnl::stream stream;
    std::unordered_map<int, dnnl::memory> arguments;
  };
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  bool by_columns;
  int64_t scratch_bytes = 0;  // of a thread
  std::vector<std::unique_ptr<Slice>> slices;

  // What a piece of `count` columns or rows is to oneDNN.
  struct Described {
    dnnl::memory::desc a, b, bias, c;
    dnnl::matmul::primitive_desc what;
    int64_t scratch_bytes() const { return (int64_t(what.scratchpad_desc().get_size()) + 4095) / 4096 * 4096; }
  };
  static Described describe(const dnnl::engine& engine, const HalfShape& s, int64_t count) {
    using dnnl::memory;
    const ForOneThread one;
    const auto type = memory::data_type::bf16;
    const auto result = s.result == DType::f32 ? memory::data_type::f32 : type;
    const auto strides = [](Transpose t, int64_t ld) {
      return t == Transpose::yes ? memory::dims{1, ld} : memory::dims{ld, 1};
    };
    const int64_t m = s.n >= s.m ? s.m : count, n = s.n >= s.m ? count : s.n;
    const memory::desc a({m, s.k}, type, strides(s.a, s.lda)), b({s.k, n}, type, strides(s.b, s.ldb)),
        bias({1, n}, type, memory::dims{n, 1}), c({m, n}, result, memory::dims{s.ldc, 1});
    dnnl::primitive_attr attributes;
    // Its scratch memory is ours, so that it is planned, and one for all products that never run at once.
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (s.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR >= 3
    return {a, b, bias, c,
            s.bias ? dnnl::matmul::primitive_desc(engine, a, b, bias, c, attributes)
                   : dnnl::matmul::primitive_desc(engine, a, b, c, attributes)};
#else
    return {a, b, bias, c,
            dnnl::matmul::primitive_desc(s.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c),
                                         attributes, engine)};
#endif
  }

  Native(const Cut& cut, const HalfShape& s) : by_columns(s.n >= s.m) {
    using dnnl::memory;
    const ForOneThread one;
    for (int64_t piece = 0; piece < cut.pieces(); ++piece) {
      auto slice = std::make_unique<Slice>();
      slice->first = cut.begin(piece);
      slice->count = cut.end(piece) - slice->first;
      const Described piece_of = describe(engine, s, slice->count);
      slice->primitive = dnnl::matmul(piece_of.what);
      scratch_bytes = std::max(scratch_bytes, piece_of.scratch_bytes());
      slice->scratch = memory(piece_of.what.scratchpad_desc(), engine, nullptr);
      slice->a = memory(piece_of.a, engine, nullptr);
      slice->b = memory(piece_of.b, engine, nullptr);
      slice->c = memory(piece_of.c, engine, nullptr);
      slice->arguments = {{DNNL_ARG_SRC, slice->a},
                          {DNNL_ARG_WEIGHTS, slice->b},
                          {DNNL_ARG_DST, slice->c},
                          {DNNL_ARG_SCRATCHPAD, slice->scratch}};
      if (s.bias) {
        slice->bias = memory(piece_of.bias, engine, nullptr);
        slice->arguments.emplace(DNNL_ARG_BIAS, slice->bias);
      }
      slice->stream = dnnl::stream(engine);
      slices.push_back(std::move(slice));
    }
  }

  void run(const HalfShape& s, int64_t piece, const void* A, const void* B, const void* bias, void* C,
           void* scratch) const {
    Slice& slice = *slices[size_t(piece)];
    const int64_t i = slice.first;
    const int64_t a = by_columns ? 0 : s.a == Transpose::yes ? i : i * s.lda;
    const int64_t b = !by_columns ? 0 : s.b == Transpose::yes ? i * s.ldb : i;
    slice.a.set_data_handle(const_cast<void*>(at(A, s.type, a)));
    slice.b.set_data_handle(const_cast<void*>(at(B, s.type, b)));
    slice.c.set_data_handle(at(C, s.result, by_columns ? i : i * s.ldc));
    if (s.bias) slice.bias.set_data_handle(const_cast<void*>(at(bias, s.type, by_columns ? i : 0)));
    slice.scratch.set_data_handle(scratch);
    slice.primitive.execute(slice.stream, slice.arguments);
    slice.stream.wait();
  }
};

HalfGemm::HalfGemm(Threads& threads, const HalfShape& shape, How how)
    : threads_(threads), shape_(shape), cut_(threads, std::max(shape.m, shape.n)) {
  if (how == How::native || (how == How::best && shape.type == DType::bf16 && has_bf16()))
    native_ = std::make_unique<Native>(cut_, shape);
}
HalfGemm::~HalfGemm() = default;

// Asked for every op whenever a program is planned, so the answers are kept: the library takes some 50 µs for one.
int64_t HalfGemm::workspace(const HalfShape& s, int threads) {
  if (s.type != DType::bf16 || !has_bf16()) return panel_bytes(threads);
  static std::mutex mutex;
  static std::map<
      std::tuple<Transpose, Transpose, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, bool, bool, int>,
      int64_t>
      known;
  // A plan does not know which team will run it, nor how that cuts: enough for any of at most `threads`, in either way.
  // A small piece may need none where a larger one does, so the larger team needs not more.
  const auto ask = [&] {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    std::map<int64_t, int64_t> scratch;  // by columns or rows of a piece
    int64_t most = 0;
    for (int team = 1; team <= threads; ++team)
      for (const auto how : {Threads::Cut::by_threads, Threads::Cut::by_size}) {
        const Cut cut(team, how, std::max(s.m, s.n));
        for (int64_t piece = 0; piece < cut.pieces(); ++piece) {
          const int64_t count = cut.end(piece) - cut.begin(piece);
          if (!scratch.contains(count)) scratch[count] = Native::describe(engine, s, count).scratch_bytes();
          most = std::max(most, team * scratch[count]);
        }
      }
    return most;
  };
  const std::tuple key(s.a, s.b, s.m, s.n, s.k, s.lda, s.ldb, s.ldc, s.result, s.bias, s.accumulate, threads);
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known[key] = ask();
}

int64_t HalfGemm::workspace() const {
  return native_ ? threads_.count() * native_->scratch_bytes : panel_bytes(threads_.count());
}

void HalfGemm::run(const void* A, const void* B, const void* bias, void* C, void* workspace) const {
  if (!native_) return panels(A, B, bias, C, workspace);
  cut_.each(threads_, [&](int t, int64_t piece) {
    native_->run(shape_, piece, A, B, bias, C, static_cast<std::byte*>(workspace) + t * native_->scratch_bytes);
  });
}

// A piece of C at a time, tile by tile; a tile is summed in f32 over the depth and rounded once.
void HalfGemm::panels(const void* A, const void* B, const void* bias, void* C, void* workspace) const {
  const HalfShape& s = shape_;
  const bool by_columns = s.n >= s.m;
  cut_.each(threads_, [&](int t, int64_t piece) {
    float* a = static_cast<float*>(workspace) + t * (3 * kPanel + 1) * kPanel;
    float *b = a + kPanel * kPanel, *c = b + kPanel * kPanel, *add = c + kPanel * kPanel;
    const int64_t begin = cut_.begin(piece), end = cut_.end(piece);
    const int64_t rows_end = by_columns ? s.m : end, columns_end = by_columns ? end : s.n;
    for (int64_t j = by_columns ? begin : 0; j < columns_end; j += kPanel)
      for (int64_t i = by_columns ? 0 : begin; i < rows_end; i += kPanel) {
        const int64_t columns = std::min(kPanel, columns_end - j), rows = std::min(kPanel, rows_end - i);
        for (int64_t l = 0; l < s.k; l += kPanel) {
          const int64_t depth = std::min(kPanel, s.k - l);
          if (s.a == Transpose::no)
            panel(s.type, A, s.lda, i, rows, l, depth, a);
          else
            panel(s.type, A, s.lda, l, depth, i, rows, a);
          if (s.b == Transpose::no)
            panel(s.type, B, s.ldb, l, depth, j, columns, b);
          else
            panel(s.type, B, s.ldb, j, columns, l, depth, b);
          gemm(s.a, s.b, rows, columns, depth, a, kPanel, b, kPanel, l > 0 ? 1.0f : 0.0f, c, kPanel);
        }
        for (int64_t r = 0; r < rows; ++r) {
          void* row = at(C, s.result, (i + r) * s.ldc + j);
          if (s.bias) {
            to_f32(s.type, at(bias, s.type, j), add, columns);
            add_row(add, c + r * kPanel, columns);
          }
          if (s.accumulate) {
            to_f32(s.result, row, add, columns);
            add_row(add, c + r * kPanel, columns);
          }
          from_f32(s.result, c + r * kPanel, row, columns);
        }
      }
  });
}

}  // namespace strata
