// Gathers of parameters as codes; see gather.h. One op packs, exchanges and reads, so a program is planned as it is
// with gathers of numbers: the codes of all ranks are its workspace, and it hides behind compute as any exchange does.
#include "plugins/quantized_exchange/gather.h"

#include <algorithm>
#include <map>
#include <set>

#include "plugins/quantized_exchange/codes.h"
#include "plugins/quantized_exchange/lists.h"
#include "strata/builder.h"
#include "strata/communicator.h"
#include "strata/convert.h"
#include "strata/layout.h"
#include "strata/op_kind.h"

namespace strata::quantized {
namespace {

bool can_be_packed(const Tensor& tensor) { return tensor.dtype == DType::f32 || size_of(tensor.dtype) == 2; }

std::vector<TensorSpec> whole(const OpView& v, int tensors, bool in_place) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < tensors; ++i) {
    require(v.has_input(i) && can_be_packed(v.input(i)), v, "tensors in f32, bf16 or f16");
    Shape shape = v.input(i).shape;
    if (!in_place) {
      const Split* split = last_split(v.input(i), 0, v.attributes().string("axis"));
      require(split, v, "tensors whose rows are split over the axis, last of their splits");
      shape[0] = split->full;
    }
    specs.push_back({shape, v.input(i).dtype});
  }
  return specs;
}

void read(const Binding& b, Format format, const std::vector<List>& lists, const std::byte* codes) {
  for (const List& list : lists) {
    const DType dtype = b.output(list.tensor).dtype;
    unpack(b.threads(), format, codes + list.offset, 1, 0, list.elements, dtype,
           at(b.out<void>(list.tensor), dtype, list.first));
  }
}

// `in_place`: of whole tensors of which each rank's own rows are right.
void register_gather(const char* name, const char* summary, bool in_place) {
  OpKind kind{.name = name, .summary = summary};
  kind.half = kind.exchange = true;
  kind.shape = [in_place](const OpView& v) { return whole(v, v.inputs(), in_place); };
  kind.layout = [in_place](const OpView& v) {
    std::vector<Layout> layouts;
    for (int i = 0; i < v.inputs(); ++i) {
      Layout layout = v.input(i).layout;
      const std::string axis = v.attributes().string("axis");
      if (!in_place) std::erase_if(layout, [&](const Split& s) { return s.dimension == 0 && s.axis == axis; });
      layouts.push_back(std::move(layout));
    }
    return layouts;
  };
  kind.cost = [](const OpView& v) {
    const auto codes = double(bytes_of(lists_of(v)));
    Cost cost{.flops = 0, .bytes = 4 * codes, .wire = codes};
    for (int i = 0; i < v.outputs(); ++i) {
      cost.flops += 4 * double(elements(v.output(i).shape));
      cost.bytes += double(v.input(i).bytes() + v.output(i).bytes());
    }
    return cost;
  };
  const Kernel kernel{[in_place](const Binding& b) -> Launch {
                        const std::vector<List> lists = lists_of(b);
                        const auto parts = pieces_of(lists, b.attributes().integer("size"), b.workspace<std::byte>());
                        return [b, in_place, lists, parts, format = format_of(b.attributes().string("format"))] {
                          auto* const codes = b.workspace<std::byte>();
                          Communicator& group = b.group();
                          for (const List& list : lists) {
                            if (list.rank != group.rank()) continue;
                            const DType dtype = b.input(list.tensor).dtype;
                            pack(b.threads(), format, dtype,
                                 at(b.in<void>(list.tensor), dtype, in_place ? list.first : 0), list.elements, nullptr,
                                 codes + list.offset);
                          }
                          group.all_gather(parts);
                          read(b, format, lists, codes);
                        };
                      },
                      [](const OpView& v, int) { return bytes_of(lists_of(v)); }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

// A working copy that has just been loaded is its master in fewer bits, on all ranks alike, and no rank's codes.
void register_rows() {
  OpKind kind{
      .name = "quantized_rows",
      .summary =
          "x (rows, …), a f64 scalar -> where that is 1, what ranks would read had they gathered it as codes of "
          "a share of its rows each, in place; attributes size, format"};
  kind.half = true;
  kind.shape = [](const OpView& v) {
    require(v.inputs() == 2 && v.has_input(1) && v.input(1).dtype == DType::f64, v, "a tensor and a scalar");
    return whole(v, 1, true);
  };
  kind.layout = [](const OpView& v) { return std::vector<Layout>{v.input(0).layout}; };
  kind.cost = [](const OpView&) { return Cost{.flops = 0, .bytes = 8}; };  // but for one step
  const Kernel kernel{[](const Binding& b) -> Launch {
                        return [b, lists = lists_of(b), format = format_of(b.attributes().string("format"))] {
                          if (*b.in<double>(1) == 0) return;
                          auto* const codes = b.workspace<std::byte>();
                          const DType dtype = b.input(0).dtype;
                          for (const List& list : lists)
                            pack(b.threads(), format, dtype, at(b.in<void>(0), dtype, list.first), list.elements,
                                 nullptr, codes + list.offset);
                          read(b, format, lists, codes);
                        };
                      },
                      [](const OpView& v, int) { return bytes_of(lists_of(v)); }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

// Puts the kinds of codes in the place of the engine's, one program at a time.
class Replaced {
 public:
  Replaced(ProgramStage& stage, GatheredAs& as) : program_(stage.program), mesh_(stage.mesh), as_(as) {}

  void run() {
    std::vector<Op> ops;
    for (const Op& op : program_.ops)
      for (Op& one : of(op)) ops.push_back(std::move(one));
    program_.ops = std::move(ops);
    for (auto& [tensor, forms] : program_.forms) {
      std::vector<RestingForm> replaced = forms;
      for (RestingForm& form : replaced) {
        std::vector<Op> restore;
        for (const Op& op : form.restore)
          for (Op& one : of(op)) restore.push_back(std::move(one));
        form.restore = std::move(restore);
      }
      forms = std::move(replaced);
    }
    if (!in_place_.empty()) round_what_is_loaded();
  }

 private:
  // What takes the op's place: itself, or a gather of codes and one of what is small.
  std::vector<Op> of(const Op& op) {
    const bool rows = op.kind->name == "gather_rows";
    if ((!rows && op.kind->name != "all_gather") || op.attributes.integer("dimension", 0) != 0) return {op};
    const std::string axis = op.attributes.string("axis");
    if (!mesh_.meet(kDataAxis, axis)) return {op};
    Op codes = op, plain = op;
    for (auto* list : {&codes.inputs, &codes.outputs, &plain.inputs, &plain.outputs}) list->clear();
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      const TensorId from = op.inputs[i], to = op.outputs[i];
      const bool as_codes = program_[from].role == Role::parameter && program_[from].persistent &&
                            can_be_packed(program_[from]) && elements(program_[to].shape) >= as_.minimum;
      as_.gathers |= program_[from].role == Role::parameter;
      Op& taken = as_codes ? codes : plain;
      taken.inputs.push_back(from), taken.outputs.push_back(to);
      if (!as_codes) continue;
      check(from, rows);
      if (rows) in_place_.insert({from.value, axis});
    }
    std::vector<Op> ops;
    if (!codes.inputs.empty()) {
      codes.kind = &find_kind(rows ? "quantized_gather_rows" : "quantized_gather");
      codes.attributes = {{"axis", axis}, {"size", int64_t(mesh_.size(axis))}, {"format", as_.format}};
      ops.push_back(std::move(codes));
      as_.any = true;
    }
    if (!plain.inputs.empty()) ops.push_back(std::move(plain));
    return ops;
  }

  void check(TensorId id, bool rows) const {
    const Tensor& parameter = program_[id];
    if (as_.format == "bf16" && size_of(parameter.dtype) == 2)
      throw Error("parameters = \"bf16\", but parameter " + parameter.name + " is " +
                  std::string(name_of(parameter.dtype)) + ", of 16 bits as it is; choose fewer bits, or leave it out.");
    if (rows && parameter.lasting->rounded_from.empty())
      throw Error("parameter " + parameter.name +
                  " is whole on each rank and has no master: what it is rounded to would be what training goes on "
                  "from. Let ranks keep shares of parameters alone (ZeRO-3), or train with masters (mixed precision).");
  }

  // Before each is read first.
  void round_what_is_loaded() {
    const TensorId loaded = Builder(program_).scalar(kLoadedScalar);
    as_.loaded = true;
    std::vector<Op> ops;
    for (Op& op : program_.ops) {
      for (TensorId id : op.inputs) {
        const TensorId whole = program_.whole(id);
        const auto found = whole ? in_place_.find(whole.value) : in_place_.end();
        if (found == in_place_.end()) continue;
        Op round = make_op("quantized_rows", {whole, loaded}, {whole},
                           {{"size", int64_t(mesh_.size(found->second))}, {"format", as_.format}});
        round.step_part = op.step_part;
        round.block = op.block;
        ops.push_back(std::move(round));
        in_place_.erase(found);
      }
      ops.push_back(std::move(op));
    }
    program_.ops = std::move(ops);
  }

  Program& program_;
  const Mesh& mesh_;
  GatheredAs& as_;
  std::map<int32_t, std::string> in_place_;  // parameters that are whole, and the axis they are gathered over
};

}  // namespace

void register_gathers() {
  register_gather("quantized_gather",
                  "x (a share of rows), … -> the whole tensors as every rank reads them from codes of each share, "
                  "rounded to nearest; attributes axis, size, format",
                  false);
  register_gather("quantized_gather_rows",
                  "x (rows, …) of which this rank's share is right, … -> all rows, in place, read from codes of each "
                  "share; attributes axis, size, format",
                  true);
  register_rows();
}

void gather_as_codes(ProgramStage& stage, GatheredAs& as) { Replaced(stage, as).run(); }

}  // namespace strata::quantized
