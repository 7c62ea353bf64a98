// The arguments of an operation, whatever it is: on which device, what is read and written, whose
// random numbers are drawn.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "generator.h"
#include "streams.h"

namespace sim {

using Stack = torch::jit::Stack;
// Call `act` on each tensor of an argument, in lists, too.
template <class Act>
void for_each_tensor(const c10::IValue& value, const Act& act) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) act(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) act(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) act(*tensor);
  }
}

// Replace each tensor of a value.
template <class Make>
void replace_tensors(c10::IValue& value, const Make& make) {
  if (value.isTensor()) {
    value = make(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(make(tensor));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional(make(*tensor)) : std::nullopt);
    value = made;
  }
}

// Where an operation runs: on the device of all its tensors, which may be one alone. As on CUDA,
// a number may be a tensor of the CPU, and so may indices.
int device_of_call(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

// What an operation reads and writes, as its schema says. Views only look.
std::vector<Range> ranges_of(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

// Lets a kernel of the CPU draw from a device's generator: as an argument where it takes one,
// otherwise in the place of the default one.
class Drawing {
 public:
  Drawing(const c10::OperatorHandle& op, Stack& stack, int device);
  ~Drawing();

 private:
  at::Generator ours_, cpus_, before_;
};

// Have new memory count as written by the newest operation of a stream.
void say_created(int stream, const char* name, const std::vector<c10::Storage>& storages);

}  // namespace sim
