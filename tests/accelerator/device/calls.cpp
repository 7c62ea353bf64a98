#include "calls.h"

#include "views.h"

namespace sim {

int device_of_call(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      bool is_number = argument.isTensor() && tensor.dim() == 0;
      if (tensor.device().is_cpu() && (is_number || argument.isOptionalTensorList())) return;
      TORCH_CHECK(
          !found || *found == tensor.device(), schema.name(),
          ": expected all tensors to be on the same device, but found at least two, ", *found,
          " and ", tensor.device());
      found = tensor.device();
    });
  }
  for (const auto& argument : arguments)
    if (!found && argument.isDevice()) found = argument.toDevice();
  if (!found || !found->has_index()) return current_device();
  TORCH_CHECK(
      found->type() == kSim, schema.name(), ": its tensors are on ", *found, ", not on a sim");
  return found->index();
}

std::vector<Range> ranges_of(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  std::vector<Range> ranges;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (alias && !writes) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!is_sim(tensor) || tensor.numel() == 0) return;
      if (auto* block = block_of(*tensor.storage().unsafeGetStorageImpl()))
        ranges.push_back(range_of(tensor, writes, &block->history));
    });
  }
  return ranges;
}

namespace {

at::CPUGeneratorImpl& state_of(const at::Generator& generator) {
  return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}
void copy(const at::Generator& from, const at::Generator& to) {
  copy_state(state_of(from), state_of(to));
}

}  // namespace

Drawing::Drawing(const c10::OperatorHandle& op, Stack& stack, int device) {
  const auto& arguments = op.schema().arguments();
  size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") continue;
    auto& value = stack[first + i];
    ours_ = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(
        ours_.device() == c10::Device(kSim, static_cast<c10::DeviceIndex>(device)),
        op.schema().name(), ": expected a generator of sim:", device, ", but found one of ",
        ours_.device());
    cpus_ = at::detail::createCPUGenerator();
    copy(ours_, cpus_);
    value = cpus_;
  }
  if (!ours_.defined() && op.hasTag(at::Tag::nondeterministic_seeded)) {
    ours_ = default_generator(device);
    cpus_ = at::detail::getDefaultCPUGenerator();
    before_ = at::detail::createCPUGenerator();
    copy(cpus_, before_);
    copy(ours_, cpus_);
  }
}

Drawing::~Drawing() {
  if (ours_.defined()) copy(cpus_, ours_);
  if (before_.defined()) copy(before_, cpus_);
}

void say_created(int stream, const char* name, const std::vector<c10::Storage>& storages) {
  for (const auto& storage : storages) {
    auto* begin = static_cast<const char*>(storage.data());
    auto& history = block_of(*storage.unsafeGetStorageImpl())->history;
    created(stream, name, {begin, begin + storage.nbytes(), true, &history});
  }
}

}  // namespace sim
