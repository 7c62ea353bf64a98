// Memory of the devices, which is the host's, and who uses it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <optional>
#include <memory>
#include <vector>

#include "streams.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// One allocation, as the context of a storage's pointer.
struct Block {
  std::shared_ptr<void> bytes;
  size_t size;
  int device;
  int stream;  // it was allocated on this one, and will be given out again on it
  History history;
  std::vector<int> recorded;  // streams that `record_stream` named
};

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// The block of a storage of a device; none if it is empty.
Block* block_of(const c10::StorageImpl& storage);
// Let a device have memory that a kernel of the CPU allocated.
c10::DataPtr adopt(const c10::Storage& of_the_host, int device);
void record_stream(const c10::DataPtr& pointer, int stream);

// The device that the calling thread computes on.
int current_device();
int exchange_device(int device);
struct OnDevice {
  explicit OnDevice(int device) : before(exchange_device(device)) {}
  ~OnDevice() { exchange_device(before); }
  int before;
};

// The library's number of a stream of torch's, and back.
int number_of(const c10::Stream& stream);
c10::Stream stream_of(int number);

}  // namespace sim
