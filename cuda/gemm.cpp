// cuBLASLt behind gemm.h, opened when the first product is bound: planning for a GPU needs no GPU library.
#include "cuda/gemm.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "strata/error.h"

namespace strata::cuda {
namespace {

constexpr int64_t kWorkspace = 32 << 20;  // what NVIDIA recommends for Hopper

struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) describe;
  decltype(&cublasLtMatmulDescSetAttribute) set;
  decltype(&cublasLtMatrixLayoutCreate) layout;
  decltype(&cublasLtMatmulPreferenceCreate) prefer;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  cublasLtHandle_t handle = nullptr;

  Library() {
    const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen(("/usr/local/cuda/lib64/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library)
      throw Error(name + " was not found (" + std::string(dlerror()) + "); install the package libcublas-" +
                  std::to_string(CUDART_VERSION / 1000) + "-" + std::to_string(CUDART_VERSION % 1000 / 10) +
                  " of NVIDIA's repository, or set LD_LIBRARY_PATH.");
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (!function) throw Error(name + " lacks " + symbol + "; is it another version of cuBLAS?");
    };
    find(create, "cublasLtCreate");
    find(matmul, "cublasLtMatmul");
    find(describe, "cublasLtMatmulDescCreate");
    find(set, "cublasLtMatmulDescSetAttribute");
    find(layout, "cublasLtMatrixLayoutCreate");
    find(prefer, "cublasLtMatmulPreferenceCreate");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    must(create(&handle), "cublasLtCreate");
  }
  static void must(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
      throw Error(std::string(what) + " failed with status " + std::to_string(int(status)) + ".", ExitCode::failed);
  }
};

const Library& library() {
  static const Library& one = *new Library;
  return one;
}

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::f32 ? CUDA_R_32F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

// Bytes that an address is a multiple of, up to the 256 that cuBLASLt would otherwise take for granted.
uint32_t alignment_of(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return address == 0 ? 256 : uint32_t(std::min<uintptr_t>(256, address & -address));
}

}  // namespace

// In cuBLAS's column-major eyes C is its transpose, (n, m) = op(B)ᵀ op(A)ᵀ.
struct Gemm::Plan {
  cublasLtMatmulDesc_t what = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm;

  cublasStatus_t run(const GemmShape& s, const cublasLtMatmulAlgo_t& with, const void* A, const void* B,
                     const void* bias, void* C, void* workspace, void* queue) const {
    const float alpha = 1, beta = s.accumulate ? 1 : 0;
    if (s.bias) library().set(what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    return library().matmul(library().handle, what, &alpha, B, b, A, a, &beta, C, c, C, c, &with, workspace, kWorkspace,
                            static_cast<cudaStream_t>(queue));
  }
};

Gemm::Gemm(const GemmShape& shape, const void* A, const void* B, const void* bias, void* C, void* workspace)
    : shape_(shape) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<GemmShape, std::array<uint32_t, 4>>, std::shared_ptr<const Plan>>;
  const std::lock_guard lock(mutex);
  const std::array<uint32_t, 4> alignment{alignment_of(B), alignment_of(A), alignment_of(C), alignment_of(bias)};
  auto& found = known[{shape, alignment}];
  if (found) {
    plan_ = found;
    return;
  }
  const Library& lib = library();
  auto plan = std::make_shared<Plan>();
  const auto must = Library::must;
  must(lib.describe(&plan->what, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const cublasOperation_t first = shape.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                          second = shape.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "cublasLtMatmulDescSetAttribute");
  must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "cublasLtMatmulDescSetAttribute");
  if (shape.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = type_of(shape.in);
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue), "setting the epilogue");
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type), "setting the bias");
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias), "setting the bias");
  }
  const auto layout = [&](cublasLtMatrixLayout_t& to, DType type, int64_t rows, int64_t columns, int64_t stride) {
    must(lib.layout(&to, type_of(type), uint64_t(columns), uint64_t(rows), stride), "cublasLtMatrixLayoutCreate");
  };
  layout(plan->a, shape.in, shape.transpose_a ? shape.k : shape.m, shape.transpose_a ? shape.m : shape.k, shape.lda);
  layout(plan->b, shape.in, shape.transpose_b ? shape.n : shape.k, shape.transpose_b ? shape.k : shape.n, shape.ldb);
  layout(plan->c, shape.out, shape.m, shape.n, shape.ldc);
  cublasLtMatmulPreference_t preference;
  must(lib.prefer(&preference), "cublasLtMatmulPreferenceCreate");
  const size_t room = kWorkspace;
  must(lib.set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room), "the workspace");
  constexpr int kCandidates = 8;
  constexpr cublasLtMatmulPreferenceAttributes_t kAlignments[] = {
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
  for (int i = 0; i < 4; ++i)
    must(lib.set_preference(preference, kAlignments[i], &alignment[size_t(std::min(i, 2))], sizeof alignment[0]),
         "the alignment");
  cublasLtMatmulHeuristicResult_t candidates[kCandidates];
  int count = 0;
  must(lib.heuristic(lib.handle, plan->what, plan->b, plan->a, plan->c, plan->c, preference, kCandidates, candidates,
                     &count),
       "cublasLtMatmulAlgoGetHeuristic");
  if (count == 0)
    throw Error("cuBLASLt knows no way to multiply " + std::to_string(shape.m) + " x " + std::to_string(shape.k) +
                    " by " + std::to_string(shape.k) + " x " + std::to_string(shape.n) + " here.",
                ExitCode::failed);
  // The fastest of three runs each, on the memory they will run on; nothing lies there yet.
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float best = std::numeric_limits<float>::infinity();
  for (int i = 0; i < count; ++i)
    for (int round = 0; round < 3; ++round) {
      cudaEventRecord(start, nullptr);
      const cublasStatus_t status = plan->run(shape, candidates[i].algo, A, B, bias, C, workspace, nullptr);
      cudaEventRecord(stop, nullptr);
      cudaEventSynchronize(stop);
      float milliseconds = 0;
      cudaEventElapsedTime(&milliseconds, start, stop);
      if (status == CUBLAS_STATUS_SUCCESS && (i == 0 || round > 0) && milliseconds < best) {
        best = milliseconds;
        plan->algorithm = candidates[i].algo;
      }
    }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  if (best == std::numeric_limits<float>::infinity())
    throw Error("none of cuBLASLt's algorithms runs for a product of this shape.", ExitCode::failed);
  plan_ = found = plan;
}

Gemm::~Gemm() = default;
int64_t Gemm::workspace() { return kWorkspace; }

void Gemm::run(const void* A, const void* B, const void* bias, void* C, void* workspace, void* queue) const {
  Library::must(plan_->run(shape_, plan_->algorithm, A, B, bias, C, workspace, queue), "cublasLtMatmul");
}

}  // namespace strata::cuda
