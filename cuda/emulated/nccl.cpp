// NCCL between threads of one process: an operation begins when it is at the head of every rank's stream, and is then
// done for all at once, ranks added in ascending order. Grouped operations are one.
#include "nccl.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/reduce.h"
#include "cuda/emulated/machine.h"
#include "strata/tensor.h"

namespace {

enum class What { all_reduce, reduce_scatter, reduce, all_gather, broadcast, send, receive };

struct Operation {
  What what;
  const std::byte* from;
  std::byte* to;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t operation;
  int root;  // or peer
};

// One group of calls of one rank, from its arrival at the head of its stream.
struct Batch {
  std::vector<Operation> operations;
  std::vector<size_t> ranks;  // that take part
  bool arrived = false;
};

struct Clique {
  int size = 0, joined = 0;
  std::vector<std::vector<Batch*>> arrived;  // by rank: batches at the head of streams, not done yet
  std::set<size_t> aborted;  // ranks: their operations end without having been, those of others go on waiting
};

std::mutex registry_mutex;
std::map<std::string, std::shared_ptr<Clique>> registry;
int next_id = 0;

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank;
};

namespace {

struct Open {
  int depth = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Operation> operations;
};
thread_local Open open_group;

size_t size_of_type(ncclDataType_t type) {
  return type == ncclInt8 ? 1 : type == ncclFloat16 || type == ncclBfloat16 ? 2 : type == ncclFloat64 ? 8 : 4;
}
strata::DType dtype_of(ncclDataType_t type) {
  return type == ncclFloat32    ? strata::DType::f32
         : type == ncclFloat64  ? strata::DType::f64
         : type == ncclBfloat16 ? strata::DType::bf16
         : type == ncclFloat16  ? strata::DType::f16
                                : strata::DType::i32;
}

void reduce(const std::vector<const std::byte*>& from, std::byte* to, const Operation& o) {
  strata::reduce_tree(from, to, int64_t(o.count * size_of_type(o.type)), dtype_of(o.type),
                      o.operation == ncclMax ? strata::Reduction::max : strata::Reduction::sum);
}

// Everybody's operation number i of a batch; sends and receives pair up in their order.
void run(Clique& clique, const Batch& batch) {
  const size_t size = size_t(clique.size), count = batch.operations.size();
  const auto of = [&](size_t rank) -> std::vector<Operation>& { return clique.arrived[rank].front()->operations; };
  const bool pairs = batch.operations[0].what >= What::send;
  for (size_t i = 0; i < count && !pairs; ++i) {
    const Operation o = of(0)[i];
    const size_t bytes = o.count * size_of_type(o.type);
    for (size_t r = 0; r < size; ++r)
      if (of(r).size() != count || of(r)[i].what != o.what || of(r)[i].count != o.count || of(r)[i].type != o.type ||
          of(r)[i].root != o.root)
        throw std::logic_error("ranks call NCCL differently");
    std::vector<std::vector<std::byte>> copies;  // operations may be in place
    std::vector<const std::byte*> from;
    const size_t sent = o.what == What::reduce_scatter ? bytes * size : bytes;
    for (size_t r = 0; r < size; ++r) copies.emplace_back(of(r)[i].from, of(r)[i].from + sent);
    for (auto& copy : copies) from.push_back(copy.data());
    for (size_t r = 0; r < size; ++r) {
      std::byte* const to = of(r)[i].to;
      if (o.what == What::all_reduce || (o.what == What::reduce && int(r) == o.root)) reduce(from, to, o);
      if (o.what == What::reduce_scatter) {
        std::vector<const std::byte*> part;
        for (const std::byte* data : from) part.push_back(data + r * bytes);
        reduce(part, to, o);
      }
      if (o.what == What::broadcast) std::memcpy(to, from[size_t(o.root)], bytes);
      if (o.what == What::all_gather)
        for (size_t s = 0; s < size; ++s) std::memcpy(to + s * bytes, from[s], bytes);
    }
  }
  for (size_t r : batch.ranks)
    for (size_t s : batch.ranks) {
      if (!pairs) break;
      std::vector<Operation> sends, receives;
      for (const Operation& o : of(r))
        if (o.what == What::send && o.root == int(s)) sends.push_back(o);
      for (const Operation& o : of(s))
        if (o.what == What::receive && o.root == int(r)) receives.push_back(o);
      if (sends.size() != receives.size()) throw std::logic_error("NCCL sends without receives");
      for (size_t i = 0; i < sends.size(); ++i) std::memcpy(receives[i].to, sends[i].from, sends[i].count);
    }
  for (size_t r : std::vector(batch.ranks)) clique.arrived[r].erase(clique.arrived[r].begin());
}

ncclResult_t close(Open& open) {
  if (!open.comm) return ncclSuccess;
  const auto batch = std::make_shared<Batch>();
  batch->operations = std::move(open.operations);
  const auto clique = open.comm->clique;
  const size_t rank = size_t(open.comm->rank);
  for (size_t r = 0; r < size_t(clique->size); ++r) {
    bool part = r == rank || batch->operations[0].what < What::send;
    for (const Operation& o : batch->operations) part |= o.root == int(r) && o.what >= What::send;
    if (part) batch->ranks.push_back(r);
  }
  const auto ready = [batch, clique, rank] {
    if (!batch->arrived && !clique->aborted.contains(rank)) {
      batch->arrived = true;
      clique->arrived[rank].push_back(batch.get());
      strata::cuda::look_again();
    }
    if (clique->aborted.contains(rank)) return true;
    if (clique->arrived[rank].empty() || clique->arrived[rank].front() != batch.get()) return true;  // others ran it
    for (size_t r : batch->ranks)
      if (clique->arrived[r].empty()) return false;
    return true;
  };
  const auto work = [batch, clique, rank] {
    const auto& arrived = clique->arrived[rank];
    if (!clique->aborted.contains(rank) && !arrived.empty() && arrived.front() == batch.get()) run(*clique, *batch);
    batch->arrived = false;
  };
  strata::cuda::enqueue(open.stream, work, ready);
  open = {};
  return ncclSuccess;
}

ncclResult_t call(ncclComm_t comm, cudaStream_t stream, Operation operation) {
  if (open_group.comm && open_group.comm != comm) return ncclInvalidUsage;
  open_group.comm = comm;
  open_group.stream = stream;
  open_group.operations.push_back(operation);
  return open_group.depth == 0 ? close(open_group) : ncclSuccess;
}

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(registry_mutex);
  *id = {};
  std::strcpy(id->internal, std::to_string(++next_id).c_str());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  const std::lock_guard lock(registry_mutex);
  auto& clique = registry[id.internal];
  if (!clique) {
    clique = std::make_shared<Clique>();
    clique->size = size;
    clique->arrived.resize(size_t(size));
  }
  *comm = new ncclComm{clique, rank};
  if (++clique->joined == size) registry.erase(id.internal);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  strata::cuda::change([&, rank = size_t(comm->rank)] {
    comm->clique->aborted.insert(rank);
    comm->clique->arrived[rank].clear();
  });
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  *state = ncclSuccess;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the emulation"; }
const char* ncclGetLastError(ncclComm_t) { return "no more is known"; }
ncclResult_t ncclGroupStart() {
  ++open_group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --open_group.depth == 0 ? close(open_group) : ncclSuccess; }

namespace {
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
}  // namespace

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {What::all_reduce, bytes(from), bytes(to), count, type, operation, 0});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {What::reduce_scatter, bytes(from), bytes(to), count, type, operation, 0});
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {What::reduce, bytes(from), bytes(to), count, type, operation, root});
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream, {What::all_gather, bytes(from), bytes(to), count, type, ncclSum, 0});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream, {What::broadcast, bytes(from), bytes(to), count, type, ncclSum, root});
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {What::send, bytes(from), nullptr, count, type, ncclSum, peer});
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {What::receive, nullptr, bytes(to), count, type, ncclSum, peer});
}
