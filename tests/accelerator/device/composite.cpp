// Where torch's code for all devices asks which device it is: say what makes the CPU's bits.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <set>

#include "calls.h"
#include "views.h"

namespace sim {
namespace {

// Attention: the kernel that the CPU chooses, which may depend on who needs gradients.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
    bool grouped) {
  Views views;
  auto view = [&](const at::Tensor& tensor) {
    auto made = views.view(tensor);
    return tensor.requires_grad() ? made.set_requires_grad(true) : made;
  };
  std::optional<at::Tensor> mask_view;
  if (mask) mask_view = view(*mask);
  return at::_fused_sdp_choice(
      view(query), view(key), view(value), mask_view, dropout, causal, scale, grouped);
}

// Dropout: torch has a fused kernel for all but the CPU, whose scaling rounds otherwise.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(0 <= p && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input * at::zeros_like(input);
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

// Autocast: the same operations in the same types as with the CPU's, which keeps no list that can
// be asked for: what it knows and is not here runs in float32.
const std::set<std::string> kLowerPrecision{
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "conv_tbc", "_convolution", "bmm", "mm", "baddbmm", "addmm", "addbmm", "linear", "matmul",
    "linalg_vecdot", "mkldnn_rnn_layer", "scaled_dot_product_attention",
    "_native_multi_head_attention", "_addmm_activation"};
const std::set<std::string> kWidest{"stack", "cat", "index_copy"};

enum class Policy { kLower, kFloat, kWidest };

template <Policy policy>
void cast_and_call(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(
      c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  auto type = policy == Policy::kFloat ? at::kFloat : at::autocast::get_autocast_dtype(kSim);
  auto begin = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  if (policy == Policy::kWidest)
    for (auto it = begin; it != stack->end(); ++it)
      for_each_tensor(*it, [&](const at::Tensor& tensor) {
        type = at::autocast::prioritize(type, tensor, kSim);
      });
  for (auto it = begin; it != stack->end(); ++it)
    replace_tensors(*it, [&](const at::Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(type, tensor, kSim) : tensor;
    });
  op.callBoxed(stack);
}

torch::CppFunction autocast_of(const std::string& name) {
  if (kLowerPrecision.count(name))
    return torch::CppFunction::makeFromBoxedFunction<&cast_and_call<Policy::kLower>>();
  if (kWidest.count(name))
    return torch::CppFunction::makeFromBoxedFunction<&cast_and_call<Policy::kWidest>>();
  return torch::CppFunction::makeFromBoxedFunction<&cast_and_call<Policy::kFloat>>();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) continue;
    m.impl(c10::toString(name).c_str(), autocast_of(name.name.substr(sizeof("aten::") - 1)));
  }
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}
