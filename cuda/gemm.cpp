// cuBLASLt behind gemm.h, opened when the first product is bound: planning for a GPU needs no GPU library.
#include "cuda/gemm.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "cuda/choices.h"
#include "cuda/library.h"
#include "engine/runtime/cache_path.h"
#include "strata/error.h"

namespace strata::cuda {
namespace {

constexpr int64_t kWorkspace = 32 << 20;      // what NVIDIA recommends for Hopper
constexpr uintptr_t kWorkspaceAlignment = 256;  // what cublasLtMatmul asks for; tensors lie closer together

struct CublasLt {
  const Library library{"libcublasLt.so." + std::to_string(CUDART_VERSION / 1000),
                        "install the package libcublas-" + std::to_string(CUDART_VERSION / 1000) + "-" +
                            std::to_string(CUDART_VERSION % 1000 / 10) +
                            " of NVIDIA's repository, or set LD_LIBRARY_PATH.",
                        "is it another version of cuBLAS?"};
  decltype(&cublasLtCreate) create = STRATA_SYMBOL(library, cublasLtCreate);
  decltype(&cublasLtMatmul) matmul = STRATA_SYMBOL(library, cublasLtMatmul);
  decltype(&cublasLtMatmulDescCreate) describe = STRATA_SYMBOL(library, cublasLtMatmulDescCreate);
  decltype(&cublasLtMatmulDescSetAttribute) set = STRATA_SYMBOL(library, cublasLtMatmulDescSetAttribute);
  decltype(&cublasLtMatrixLayoutCreate) layout = STRATA_SYMBOL(library, cublasLtMatrixLayoutCreate);
  decltype(&cublasLtMatmulPreferenceCreate) prefer = STRATA_SYMBOL(library, cublasLtMatmulPreferenceCreate);
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference =
      STRATA_SYMBOL(library, cublasLtMatmulPreferenceSetAttribute);
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = STRATA_SYMBOL(library, cublasLtMatmulAlgoGetHeuristic);
  decltype(&cublasLtGetVersion) version = STRATA_SYMBOL(library, cublasLtGetVersion);
  cublasLtHandle_t handle = nullptr;

  CublasLt() { must(create(&handle), "cublasLtCreate"); }
  static void must(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
      throw Error(std::string(what) + " failed with status " + std::to_string(int(status)) + ".", ExitCode::failed);
  }
};

const CublasLt& library() {
  static const CublasLt& one = *new CublasLt;
  return one;
}

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::f32 ? CUDA_R_32F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

// Bytes that an address is a multiple of, up to those of one access: what is beyond depends on the plan, and another
// plan of the same run is to take the same algorithm. (cuBLASLt would take 256 for granted.)
uint32_t alignment_of(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return address == 0 ? 16 : uint32_t(std::min<uintptr_t>(16, address & -address));
}
constexpr int kOperands = 4;  // in cuBLAS's order: first, second, result, and bias or x
using Alignment = std::array<uint32_t, kOperands>;

constexpr const char* kNone = "none";
std::string bytes_of(const cublasLtMatmulAlgo_t& one) { return {reinterpret_cast<const char*>(&one), sizeof one}; }

// What a choice depends on, in words.
std::string key_of(const GemmShape& s, const Alignment& alignment) {
  int device = 0;
  cudaDeviceProp properties;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
    throw Error("cudaGetDeviceProperties failed.", ExitCode::failed);
  std::string text = std::string(properties.name) + ", cuBLASLt " + std::to_string(library().version()) + ", " +
                     std::string(name_of(s.in)) + " to " + std::string(name_of(s.out));
  for (const int64_t size : {s.m, s.n, s.k, s.lda, s.ldb, s.ldc}) text += " " + std::to_string(size);
  for (const auto& [flag, name] : {std::pair(s.transpose_a, " a'"),
                                   {s.transpose_b, " b'"},
                                   {s.bias, " bias"},
                                   {s.accumulate, " accumulate"},
                                   {s.gelu_gradient, " gelu'"}})
    if (flag) text += name;
  text += ", aligned";
  for (const uint32_t bytes : alignment) text += " " + std::to_string(bytes);
  return text;
}

}  // namespace

// In cuBLAS's column-major eyes C is its transpose, (n, m) = op(B)ᵀ op(A)ᵀ.
struct Gemm::Plan {
  cublasLtMatmulDesc_t what = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  // Products of one shape share a plan, and ranks that are threads multiply at once: from where pointers are put into
  // the descriptor until cuBLASLt has read them, it is one product's.
  mutable std::mutex mutex;

  cublasStatus_t run(const GemmShape& s, const cublasLtMatmulAlgo_t& with, const GemmMemory& at, void* queue) const {
    const float alpha = 1, beta = s.accumulate ? 1 : 0;
    const std::lock_guard lock(mutex);
    if (s.bias) library().set(what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias, sizeof at.bias);
    if (s.gelu_gradient) library().set(what, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &at.x, sizeof at.x);
    const auto lowest = reinterpret_cast<uintptr_t>(at.workspace);
    void* workspace =
        reinterpret_cast<void*>((lowest + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
    return library().matmul(library().handle, what, &alpha, at.B, b, at.A, a, &beta, at.C, c, at.C, c, &with, workspace,
                            kWorkspace, static_cast<cudaStream_t>(queue));
  }

  // Of the candidates the fastest of two runs each after one, on the memory they will run on; nothing lies there yet.
  // As bytes: an algorithm is plain data that the same version of the library takes again. kNone where none runs.
  std::string fastest(const GemmShape& shape, std::span<const cublasLtMatmulHeuristicResult_t> candidates,
                      const GemmMemory& memory, cublasStatus_t& last) const {
    cudaEvent_t start, stop;
    cudaEventCreate(&start);
    cudaEventCreate(&stop);
    float best = std::numeric_limits<float>::infinity();
    std::string chosen = kNone;
    for (const auto& candidate : candidates)
      for (int round = 0; round < 3; ++round) {
        cudaEventRecord(start, nullptr);
        const cublasStatus_t status = last = run(shape, candidate.algo, memory, nullptr);
        cudaEventRecord(stop, nullptr);
        cudaEventSynchronize(stop);
        float milliseconds = 0;
        cudaEventElapsedTime(&milliseconds, start, stop);
        if (status == CUBLAS_STATUS_SUCCESS && round > 0 && milliseconds < best) {
          best = milliseconds;
          chosen = bytes_of(candidate.algo);
        }
      }
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    return chosen;
  }
};

Gemm::Gemm(const GemmShape& shape, const GemmMemory& memory) : shape_(shape) {
  if (shape.gelu_gradient && shape.ldc % 8 != 0) return;  // x's stride is to be a multiple of 8
  static std::mutex mutex;
  static auto& found = *new std::map<std::pair<GemmShape, Alignment>, std::shared_ptr<const Plan>>;
  static const Choices& choices = *new Choices(cache_path("products"));
  const std::lock_guard lock(mutex);
  const Alignment alignment{alignment_of(memory.B), alignment_of(memory.A), alignment_of(memory.C),
                            alignment_of(shape.gelu_gradient ? memory.x : memory.bias)};
  if (const auto before = found.find({shape, alignment}); before != found.end()) {
    plan_ = before->second;
    return;
  }
  const CublasLt& lib = library();
  auto plan = std::make_shared<Plan>();
  const auto must = CublasLt::must;
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
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &memory.bias, sizeof memory.bias), "setting the bias");
  }
  if (shape.gelu_gradient) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DGELU;
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue), "setting the epilogue");
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &shape.ldc, sizeof shape.ldc), "GELU's stride");
    must(lib.set(plan->what, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &memory.x, sizeof memory.x), "GELU's input");
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
  const cublasStatus_t status = lib.heuristic(lib.handle, plan->what, plan->b, plan->a, plan->c, plan->c, preference,
                                              kCandidates, candidates, &count);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) must(status, "cublasLtMatmulAlgoGetHeuristic");
  std::string chosen = kNone;
  cublasStatus_t last = status;
  if (status == CUBLAS_STATUS_SUCCESS && count > 0)
    chosen = choices.get(
        key_of(shape, alignment),
        [&] { return plan->fastest(shape, std::span(candidates, size_t(count)), memory, last); },
        [&] { return bytes_of(candidates[0].algo); });
  if (chosen.size() == sizeof plan->algorithm)
    std::memcpy(&plan->algorithm, chosen.data(), chosen.size());
  else if (shape.gelu_gradient)
    plan = nullptr;
  else
    throw Error("cuBLASLt has no algorithm that multiplies " + std::to_string(shape.m) + " x " +
                    std::to_string(shape.k) + " by " + std::to_string(shape.k) + " x " + std::to_string(shape.n) +
                    " here (of " + std::to_string(count) + ", the last with status " + std::to_string(int(last)) + ").",
                ExitCode::failed);
  plan_ = found[{shape, alignment}] = plan;
}

Gemm::~Gemm() = default;
int64_t Gemm::workspace() { return kWorkspace + int64_t(kWorkspaceAlignment); }

void Gemm::run(const GemmMemory& memory, void* queue) const {
  CublasLt::must(plan_->run(shape_, plan_->algorithm, memory, queue), "cublasLtMatmul");
}

}  // namespace strata::cuda
