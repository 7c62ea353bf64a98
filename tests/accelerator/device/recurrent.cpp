// LSTM, GRU and their kin: torch has code of its own for whole layers on the CPU, and asks private
// devices for kernels that the CPU does not have.
//
// So the whole operation runs on views, gradients recorded as the CPU records them, and stands as
// one node in the device's graph. Gradients of gradients do not come through it.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "calls.h"
#include "views.h"

namespace sim {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autocasts on the CPU as on the device.
class AutocastToo {
 public:
  AutocastToo() : enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
                  type_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, at::autocast::is_autocast_enabled(kSim));
    at::autocast::set_autocast_dtype(at::kCPU, at::autocast::get_autocast_dtype(kSim));
  }
  ~AutocastToo() {
    at::autocast::set_autocast_enabled(at::kCPU, enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, type_);
  }

 private:
  bool enabled_;
  at::ScalarType type_;
};

struct OnCpu : torch::autograd::Function<OnCpu> {
  // `tensors` are those in the stack's arguments, for torch to see who needs gradients.
  static variable_list forward(
      AutogradContext* context, at::TensorList tensors, const c10::OperatorHandle* op,
      torch::jit::Stack* stack) {
    const auto& schema = op->schema();
    int device = device_of_call(schema, *stack), stream = current_stream(device);
    OnDevice on(device);
    {
      Locked locked;
      issue(stream, schema.name().c_str(), ranges_of(schema, *stack));
    }
    Views views;
    c10::List<at::Tensor> leaves, results;
    for (auto& value : *stack)
      replace_tensors(value, [&](const at::Tensor& tensor) {
        leaves.push_back(views.view(tensor).set_requires_grad(tensor.requires_grad()));
        return leaves.get(leaves.size() - 1);
      });
    {
      at::AutoGradMode with_gradients(true);
      AutocastToo autocast;
      Drawing drawing(*op, *stack, device);
      op->callBoxed(stack);
    }
    variable_list home;
    for (const auto& value : *stack) {
      results.push_back(value.toTensor());
      home.push_back(views.home(value.toTensor().detach(), device));
    }
    context->saved_data["leaves"] = leaves;
    context->saved_data["results"] = results;
    Locked locked;
    say_created(stream, schema.name().c_str(), views.adopted());
    return home;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    int device = current_device(), stream = current_stream(device);
    const char* name = "a recurrent layer's backward pass";
    auto leaves = context->saved_data["leaves"].toTensorVector();
    auto results = context->saved_data["results"].toTensorVector();
    Views views;
    variable_list from, given, wanted;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined() || !results[i].requires_grad()) continue;
      from.push_back(results[i]);
      given.push_back(views.view(gradients[i]));
    }
    for (const auto& leaf : leaves)
      if (leaf.requires_grad()) wanted.push_back(leaf);
    {
      Locked locked;
      issue(stream, name, {});
    }
    auto found = torch::autograd::grad(from, wanted, given, /*retain_graph=*/true, false, true);
    variable_list all;
    size_t next = 0;
    for (const auto& leaf : leaves)
      all.push_back(leaf.requires_grad() ? views.home(found[next++], device) : at::Tensor());
    all.resize(leaves.size() + 2);  // nothing for the operation and its arguments
    Locked locked;
    say_created(stream, name, views.adopted());
    return all;
  }
};

void run_whole_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  variable_list tensors;
  for (const auto& argument : arguments)
    for_each_tensor(argument, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  torch::jit::Stack inner(arguments.begin(), arguments.end());
  for (auto& result : OnCpu::apply(at::TensorList(tensors), &op, &inner)) stack->emplace_back(std::move(result));
}

void register_all(torch::Library& library) {
  for (const char* name :
       {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data",
        "rnn_relu.input", "rnn_relu.data", "lstm_cell", "gru_cell", "rnn_tanh_cell",
        "rnn_relu_cell"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_whole_on_cpu>());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_all(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_all(m); }

}  // namespace sim
