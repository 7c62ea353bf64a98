// Tensors of the CPU on the bytes of a device's, for one operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace sim {

inline bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// A tensor with another's type, sizes and strides on another storage.
inline at::Tensor on_storage(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

// What a tensor's elements occupy; `writes` says what is to be done there.
inline Range range_of(const at::Tensor& tensor, bool writes, History* history) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto item = static_cast<int64_t>(tensor.element_size());
  auto* begin = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * item;
  return {begin, begin + (last + 1) * item, writes, history};
}

// Views of the CPU for the arguments of one operation, and what becomes of them afterwards.
class Views {
 public:
  // The same elements for the CPU; tensors of the CPU as they are.
  at::Tensor view(const at::Tensor& tensor) {
    if (!is_sim(tensor)) return tensor;
    auto made = on_storage(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    seen_.emplace_back(made, tensor);
    return made;
  }

  // What the CPU returned, as a tensor of the device: an argument itself, a view of an argument, or
  // new memory, which the device takes over.
  at::Tensor home(const at::Tensor& result, int device) {
    if (!result.defined()) return result;
    for (const auto& [view, tensor] : seen_)
      if (view.is_same(result)) return tensor;
    TORCH_CHECK(result.layout() == at::kStrided, "sim: only strided tensors are simulated");
    return on_storage(
        device_storage(result.storage(), device), c10::DispatchKey::PrivateUse1, result);
  }

  // Give arguments the sizes and the memory that the operation gave their views (`out=`).
  void put_back(int device) {
    for (const auto& [view, tensor] : seen_) {
      auto storage = device_storage(view.storage(), device);
      auto* impl = tensor.unsafeGetTensorImpl();
      if (!storage.is_alias_of(tensor.storage())) impl->set_storage_keep_dtype(storage);
      if (view.sizes() != tensor.sizes() || view.strides() != tensor.strides())
        impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    }
  }

  // New memory that came home.
  const std::vector<c10::Storage>& adopted() const { return adopted_; }

 private:
  struct Pair {
    c10::Storage host, device;
    const void* bytes;  // the host's, as they were
  };

  c10::Storage host_storage(const c10::Storage& storage) {
    for (const Pair& pair : pairs_)
      if (pair.device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return pair.host;
    // The view keeps the bytes, so that a late copy never touches memory that is gone.
    c10::DataPtr pointer(nullptr, c10::Device(c10::kCPU));
    if (auto* block = block_of(*storage.unsafeGetStorageImpl())) {
      auto* keep = new std::shared_ptr<void>(block->bytes);
      pointer = {
          const_cast<void*>(storage.data()), keep,
          [](void* kept) { delete static_cast<std::shared_ptr<void>*>(kept); },
          c10::Device(c10::kCPU)};
    }
    c10::Storage host(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
        c10::GetAllocator(c10::kCPU), /*resizable=*/true);
    pairs_.push_back({host, storage, storage.data()});
    return host;
  }

  c10::Storage device_storage(const c10::Storage& host, int device) {
    for (Pair& pair : pairs_) {
      if (pair.host.unsafeGetStorageImpl() != host.unsafeGetStorageImpl()) continue;
      if (pair.bytes != host.data()) {  // it has grown
        pair.device.set_data_ptr_noswap(adopt(host, device));
        pair.device.set_nbytes(host.nbytes());
        pair.bytes = host.data();
        adopted_.push_back(pair.device);
      }
      return pair.device;
    }
    c10::DataPtr pointer(nullptr, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
    if (host.nbytes()) pointer = adopt(host, device);
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), host.nbytes(), std::move(pointer), allocator(),
        /*resizable=*/true);
    pairs_.push_back({host, storage, host.data()});
    if (host.nbytes()) adopted_.push_back(storage);
    return storage;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;
  std::vector<Pair> pairs_;
  std::vector<c10::Storage> adopted_;
};

}  // namespace sim
