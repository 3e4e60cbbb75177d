// Exchanges between the ranks of a mesh axis, grouped: any number of tensors in one operation. They run on the exchange
// stream and nowhere else, and take a group from the executor (OpKind::exchange, strata/communicator.h).
#include <algorithm>

#include "engine/ops/registration.h"
#include "strata/communicator.h"

namespace strata {
namespace {

// Rows [begin, end) of each rank of a whole tensor at `data`.
void add_rows(std::vector<Pieces>& parts, std::byte* data, int64_t rows, int64_t bytes) {
  const int size = int(parts.size());
  for (int r = 0; r < size; ++r) {
    const Range share = share_of(rows, r, size);
    parts[size_t(r)].add({data + share.begin * (bytes / rows), share.count() * (bytes / rows)});
  }
}

// The rank whose share of the rows result i is; 0 while its layout doesn't say.
int rank_of(const OpView& v, int i, int size) {
  if (i >= v.outputs() || v.output(i).layout.empty()) return 0;
  const Split& split = v.output(i).layout.back();
  if (split.dimension != 0 || split.axis != v.attributes().string("axis")) return 0;
  int rank = 0;
  while (rank + 1 < size && share_of(v.input(i).shape[0], rank, size).begin < split.first) ++rank;
  return rank;
}

std::vector<TensorSpec> same(const OpView& v) {
  require(v.inputs() == v.outputs() || v.outputs() == 0, v, "as many outputs as inputs");
  std::vector<TensorSpec> specs;
  for (int i = 0; i < v.inputs(); ++i) specs.push_back({v.input(i).shape, v.input(i).dtype});
  return specs;
}

// What is exchanged is the whole tensors, which are the larger of inputs and outputs; `passes` times.
std::function<Cost(const OpView&)> moved(double passes) {
  return [passes](const OpView& v) {
    double in = 0, out = 0;
    for (int i = 0; i < v.inputs(); ++i) in += double(v.input(i).bytes());
    for (int i = 0; i < v.outputs(); ++i) out += double(v.output(i).bytes());
    return Cost{.flops = 0, .bytes = 3 * (in + out), .wire = passes * std::max(in, out)};
  };
}

void add(std::string name, std::string summary, std::function<std::vector<TensorSpec>(const OpView&)> shape,
         bool in_place, double passes, Kernel kernel) {
  OpKind kind{.name = std::move(name), .summary = std::move(summary), .shape = std::move(shape), .cost = moved(passes)};
  kind.exchange = true;
  if (in_place)
    for (int i = 0; i < 256; ++i) kind.in_place.push_back({i, i});
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

const AtLoad registered([] {
  add("all_reduce", "x (…), … -> the sum or largest over an axis, the same shapes", same, true,
      2,  // reduced, then gathered
      {[](const Binding& b) -> Launch {
         const Reduction reduction = b.attributes().string("reduction") == "max" ? Reduction::max : Reduction::sum;
         Pieces data;
         std::vector<std::pair<const std::byte*, Piece>> copies;
         for (int i = 0; i < b.outputs(); ++i) {
           const Piece out{b.out<std::byte>(i), b.output(i).bytes()};
           data.add(out);
           if (b.in<std::byte>(i) != out.data) copies.push_back({b.in<std::byte>(i), out});
         }
         return [data, copies, reduction, &group = b.group(), dtype = b.input(0).dtype] {
           for (const auto& [from, to] : copies) group.copy_bytes(to.data, from, to.bytes);
           group.all_reduce(data, dtype, reduction);
         };
       },
       {}});
  // The shape is the first rank's, which holds the most rows, or that of the rank whose rows a result's layout names.
  add("reduce_scatter", "x (rows, …), … -> sums over an axis, this rank's share of the rows",
      [](const OpView& v) -> std::vector<TensorSpec> {
        std::vector<TensorSpec> specs;
        const int size = int(v.attributes().integer("size"));
        for (int i = 0; i < v.inputs(); ++i) {
          require(v.has_input(i) && v.input(i).shape[0] >= size, v, "tensors of at least a row a rank");
          Shape shape = v.input(i).shape;
          shape[0] = share_of(shape[0], rank_of(v, i, size), size).count();
          specs.push_back({shape, v.input(i).dtype});
        }
        return specs;
      },
      false, 1,
      {[](const Binding& b) -> Launch {
         std::vector<Pieces> parts(size_t(b.group().size()));
         Pieces result;
         for (int i = 0; i < b.outputs(); ++i) {
           add_rows(parts, const_cast<std::byte*>(b.in<std::byte>(i)), b.input(i).shape[0], b.input(i).bytes());
           result.add({b.out<std::byte>(i), b.output(i).bytes()});
         }
         return [parts, result, &group = b.group(), dtype = b.input(0).dtype] {
           group.reduce_scatter(parts, result, dtype);
         };
       },
       {}});
  add("all_gather", "x (share of rows, …), … -> all rows (rows, …), …",
      [](const OpView& v) -> std::vector<TensorSpec> {
        std::vector<TensorSpec> specs;
        for (int i = 0; i < v.inputs(); ++i) {
          // It undoes the last split; what was split before stays so.
          require(v.has_input(i) && !v.input(i).layout.empty() && v.input(i).layout.back().dimension == 0 &&
                      v.input(i).layout.back().axis == v.attributes().string("axis"),
                  v, "tensors whose rows are split over the axis, last of their splits");
          Shape shape = v.input(i).shape;
          shape[0] = v.input(i).layout.back().full;
          specs.push_back({shape, v.input(i).dtype});
        }
        return specs;
      },
      false, 1,
      {[](const Binding& b) -> Launch {
         std::vector<Pieces> parts(size_t(b.group().size()));
         std::vector<std::tuple<std::byte*, const std::byte*, int64_t>> own;
         for (int i = 0; i < b.outputs(); ++i) {
           const int64_t rows = b.output(i).shape[0];
           add_rows(parts, b.out<std::byte>(i), rows, b.output(i).bytes());
           const Range share = share_of(rows, b.group().rank(), b.group().size());
           own.push_back({b.out<std::byte>(i) + share.begin * (b.output(i).bytes() / rows), b.in<std::byte>(i),
                          b.input(i).bytes()});
         }
         return [parts, own, &group = b.group()] {
           for (const auto& [to, from, bytes] : own) group.copy_bytes(to, from, bytes);
           group.all_gather(parts);
         };
       },
       {}});
  add("gather_rows", "x (rows, …) of which this rank's share is right, … -> all rows, in place", same, false, 1,
      {[](const Binding& b) -> Launch {
         std::vector<Pieces> parts(size_t(b.group().size()));
         for (int i = 0; i < b.outputs(); ++i)
           add_rows(parts, b.out<std::byte>(i), b.output(i).shape[0], b.output(i).bytes());
         return [parts, &group = b.group()] { group.all_gather(parts); };
       },
       {}});
});

}  // namespace
}  // namespace strata
