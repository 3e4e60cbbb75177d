// Matrix products on the CPU: oneDNN's, one slice of the result a thread. Row-major; f32, or bf16 and f16 summed in
// f32.
#pragma once
#include <cstdint>
#include <memory>

#include "strata/tensor.h"
#include "strata/threads.h"

namespace strata {

enum class Transpose : bool { no, yes };

// C (m, n) = op(A) op(B) + beta·C on the calling thread; op(A) is (m, k), op(B) (k, n); lda, ldb, ldc are row strides
// of the matrices as stored.
void gemm(Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda, const float* B,
          int64_t ldb, float beta, float* C, int64_t ldc);

// Where the larger dimension of a product is cut for a team: at multiples of 16, columns of one vector, and by its
// Threads::cut() into a piece a thread or into pieces of a size that the dimension alone decides. A product of another
// size may be summed in another order, so only the latter gives the same bits for any number of threads.
class Cut {
 public:
  Cut(int threads, Threads::Cut how, int64_t size);
  Cut(const Threads& threads, int64_t size) : Cut(threads.count(), threads.cut(), size) {}
  int64_t pieces() const { return pieces_; }
  int64_t begin(int64_t piece) const;
  int64_t end(int64_t piece) const { return begin(piece + 1); }

  // Calls body(thread, piece) for every piece.
  template <class Body>
  void each(Threads& threads, Body&& body) const {
    if (pieces_ <= 1) {
      if (pieces_ == 1) body(0, int64_t{0});
      return;
    }
    threads.parallel([&](int thread) {
      for (int64_t piece = thread; piece < pieces_; piece += threads.count()) body(thread, piece);
    });
  }

 private:
  int64_t size_, pieces_, blocks_a_piece_ = 0;  // blocks_a_piece_: 0 where they are shared out evenly
};

// The same with the larger dimension of C cut for the team.
void gemm(Threads& threads, Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda,
          const float* B, int64_t ldb, float beta, float* C, int64_t ldc);

// What a product of matrices of 16 bits is about: C (m, n) = op(A) op(B) [+ bias (n)] [+ C], where A, B and bias are of
// `type` and C is of `type` or f32. Strides are those of the matrices as stored.
struct HalfShape {
  Transpose a, b;
  int64_t m, n, k, lda, ldb, ldc;
  DType type, result;
  bool bias = false, accumulate = false;
};

// Prepared once, run many times: bf16 by oneDNN's matmul where the CPU has instructions for it, anything else panel by
// panel in f32.
class HalfGemm {
 public:
  // How: what the CPU is best at, or one of the two (for tests).
  enum class How { best, native, panels };
  HalfGemm(Threads& threads, const HalfShape& shape, How how = How::best);
  ~HalfGemm();
  // Bytes of scratch memory that are enough for run() by any team of at most `threads`, with `how` it is best at.
  static int64_t workspace(const HalfShape& shape, int threads);
  int64_t workspace() const;  // of this one
  void run(const void* A, const void* B, const void* bias, void* C, void* workspace) const;

 private:
  struct Native;
  void panels(const void* A, const void* B, const void* bias, void* C, void* workspace) const;
  Threads& threads_;
  HalfShape shape_;
  Cut cut_;
  std::unique_ptr<Native> native_;
};

}  // namespace strata
