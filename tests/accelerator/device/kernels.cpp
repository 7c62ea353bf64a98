// Every kernel is the CPU's, run on a view of the device's bytes, so that every bit is the CPU's.
//
// What is written here by hand is what must not be: making tensors, changing their sizes, copies
// between devices and the host, reading a number. All else comes through `run_on_cpu`.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "calls.h"
#include "streams.h"
#include "views.h"

namespace sim {
namespace {

const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

// Say what the host of a GPU waits for: a result, or how large it is, or indices that it copies.
const char* host_waits_for(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto& name = op.schema().name();
  if (name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0) {
    const char* kind = nullptr;
    for (const auto& argument : arguments)
      if (argument.isOptionalTensorList())
        for_each_tensor(argument, [&](const at::Tensor& tensor) {
          if (tensor.device().is_cpu()) kind = "copy from the host";
          if (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)
            kind = "result";
        });
    return kind;
  }
  bool waits = op.hasTag(at::Tag::data_dependent_output) ||
      (op.hasTag(at::Tag::dynamic_output_shape) && name.find("ctc_loss") == std::string::npos);
  return waits ? "result" : nullptr;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  auto arguments = c10::ArrayRef<c10::IValue>(*stack).slice(first);
  OnDevice on(device_of_call(schema, arguments));
  int device = current_device(), stream = current_stream(device);
  const char* name = schema.name().c_str();

  const char* waits = host_waits_for(op, arguments);
  if (waits) note(waits);
  {
    Locked locked;
    issue(stream, name, ranges_of(schema, arguments));
    if (waits) synchronize(stream);
  }
  Views views;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    replace_tensors(value, [&](const at::Tensor& tensor) { return views.view(tensor); });
    if (value.isDevice()) value = c10::Device(c10::kCPU);
  }
  {
    Drawing drawing(op, *stack, device);
    op.redispatchBoxed(kCpu, stack);
  }
  views.put_back(device);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    replace_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      return views.home(tensor, device);
    });
  Locked locked;
  say_created(stream, name, views.adopted());
}

// Making tensors

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  OnDevice on(device && device->has_index() ? device->index() : current_device());
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device && device->has_index() ? device->index() : current_device());
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

void grow(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  if (tensor.numel() && needed > storage.nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, needed);
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  grow(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  grow(self);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  OnDevice on(self.device().index());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return set_storage(self, std::move(nothing), 0, {0}, {1});
}

// Copies

History& host_history() {
  static auto* history = new History;
  return *history;
}

Range range_to_copy(const at::Tensor& tensor, bool writes) {
  if (auto* block = block_of(*tensor.storage().unsafeGetStorageImpl()))
    return range_of(tensor, writes, &block->history);
  auto range = range_of(tensor, writes, &host_history());
  range.keep = std::make_shared<c10::Storage>(tensor.storage());
  return range;
}

void copy_on_cpu(const at::Tensor& from, const at::Tensor& to) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python(c10::python_ks);
  to.copy_(from);
}

// Between two devices: on the source's stream, which waits for the other's before and lets it wait
// after, as torch does it on CUDA.
void copy_across(const at::Tensor& from, const at::Tensor& to, const std::vector<Range>& ranges) {
  int source = current_stream(from.device().index()), target = current_stream(to.device().index());
  Event before, after;
  record(target, before);
  wait(source, before);
  issue(source, "a copy between devices", ranges);
  record(source, after);
  wait(target, after);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  bool to_host = !is_sim(to), from_host = !is_sim(from);
  const char* name = to_host ? "a copy to the host" : from_host ? "a copy from the host" : "a copy";
  int device = (to_host ? from : to).device().index(), stream = current_stream(device);
  Views views;
  auto host_from = views.view(from), host_to = views.view(to);

  bool crosses = to_host || from_host;
  bool pinned = !crosses || is_pinned((to_host ? to : from).storage().data());
  if (crosses && !non_blocking) note(to_host ? "copy to the host" : "copy from the host");
  if (crosses && non_blocking && !pinned) note("copy of pageable memory");

  Locked locked;
  std::vector<Range> ranges{range_to_copy(from, false), range_to_copy(to, true)};
  if (crosses && non_blocking) {
    issue_late(stream, name, std::move(ranges), [host_from, host_to] {
      copy_on_cpu(host_from, host_to);
    });
    return to;
  }
  if (from.device() == to.device() || crosses)
    issue(stream, name, ranges);
  else
    copy_across(from, to, ranges);
  copy_on_cpu(host_from, host_to);
  if (crosses) synchronize(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  note("item");
  int stream = current_stream(self.device().index());
  Views views;
  auto view = views.view(self);
  Locked locked;
  issue(stream, "reading a number", {range_to_copy(self, false)});
  synchronize(stream);
  return at::cpu::_local_scalar_dense(view);
}

void record_on_stream(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), number_of(stream));
}

// Some operations have a kernel for the CPU and code for all devices besides, which would be taken
// here and rounds otherwise, and convolution's asks a private device for kernels of its own.
bool has_code_for_all_devices(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  if (name == "aten::convolution" || name == "aten::convolution_backward") return true;
  using Key = c10::DispatchKey;
  return op.hasKernelForDispatchKey(Key::CPU) &&
      (op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
       op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// torch's code for conjugates makes copies by copying; `copy_from` reads the bit instead.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_", set_nothing);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_on_stream);

  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || !has_code_for_all_devices(*op)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

}  // namespace sim
