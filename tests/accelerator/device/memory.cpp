#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>

namespace sim {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;
constexpr size_t kAlignment = 64;  // the CPU's, on which the order of its additions may depend
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

struct Memory {
  size_t limit = size_t{1} << 40;
  Stats stats;
};

struct Pools {
  std::array<Memory, kDevices> devices;
  // Freed while another stream may have used them: looked at when their stream allocates again.
  std::vector<Block> freed;
  // Begin and end of memory of the host that devices copy from and to directly.
  std::map<const char*, const char*> pinned;
};

Pools& pools() {
  static auto* it = new Pools;  // never destroyed, as tensors are freed until the very end
  return *it;
}

std::shared_ptr<void> host_bytes(size_t size) {
  size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  void* bytes = std::aligned_alloc(kAlignment, rounded);
  TORCH_CHECK(bytes, "the host has no ", size, " bytes left");
  return {bytes, std::free};
}

void count(Stats& stats, size_t size, bool allocated) {
  for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                      &stats.requested_bytes})
    allocated ? (*bytes)[kAll].increase(size) : (*bytes)[kAll].decrease(size);
  for (auto* number : {&stats.allocation, &stats.active})
    allocated ? (*number)[kAll].increase(1) : (*number)[kAll].decrease(1);
}

void reserve(int device, size_t size) {
  auto& memory = pools().devices[device];
  auto used = static_cast<size_t>(memory.stats.allocated_bytes[kAll].current);
  if (used + size > memory.limit) {
    ++memory.stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim:", device, " is out of memory: ", size,
        " bytes were asked for, ", used, " of ", memory.limit, " are in use");
  }
  count(memory.stats, size, true);
}

// Whoever allocates on a stream may get what was freed there, as with torch's caching allocators.
void reuse_freed(int stream) {
  auto& freed = pools().freed;
  std::vector<Block> reused;
  for (auto it = freed.begin(); it != freed.end();) {
    if (it->stream == stream) {
      reused.push_back(std::move(*it));
      it = freed.erase(it);
    } else {
      ++it;
    }
  }
  for (const Block& block : reused) check_reuse(stream, block.history, block.recorded);
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (!block) return;
  Locked locked;
  count(pools().devices[block->device].stats, block->size, false);
  if (is_used_by_others(block->stream, block->history)) pools().freed.push_back(std::move(*block));
}

c10::DataPtr make_block(std::shared_ptr<void> bytes, size_t size, int device) {
  void* pointer = bytes.get();
  auto* block = new Block{std::move(bytes), size, device, current_stream(device), {}, {}};
  return {pointer, block, &free_block, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    if (size == 0)
      return {nullptr, nullptr, &free_block, {kSim, static_cast<c10::DeviceIndex>(device)}};
    {
      Locked locked;
      reuse_freed(current_stream(device));
      reserve(device, size);
    }
    auto bytes = host_bytes(size);
    std::memset(bytes.get(), 0xFF, size);  // NaN, so that nobody reads it unnoticed
    return make_block(std::move(bytes), size, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer, number_of(stream));
  }
  Stats getDeviceStats(c10::DeviceIndex device) override {
    Locked locked;
    return pools().devices.at(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked locked;
    pools().devices.at(device).stats.allocated_bytes[kAll].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked locked;
    auto& stats = pools().devices.at(device).stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                       &stats.requested_bytes, &stats.allocation, &stats.active})
      (*each)[kAll].reset_peak();
  }
  // Not in every version of torch.
  virtual std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    Locked locked;
    auto& memory = pools().devices.at(device);
    auto used = static_cast<size_t>(memory.stats.allocated_bytes[kAll].current);
    return {memory.limit - std::min(used, memory.limit), memory.limit};
  }
};

void free_pinned(void* pointer) {
  Locked locked;
  pools().pinned.erase(static_cast<char*>(pointer));
  std::free(pointer);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    size_t rounded = (std::max<size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment;
    auto* bytes = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    TORCH_CHECK(bytes, "the host has no ", size, " bytes left");
    Locked locked;
    pools().pinned[bytes] = bytes + rounded;
    return {bytes, bytes, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kSim, &device_memory);

thread_local int device_of_thread = 0;

}  // namespace

c10::Allocator* allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* pointer) {
  Locked locked;
  auto* byte = static_cast<const char*>(pointer);
  auto after = pools().pinned.upper_bound(byte);
  return after != pools().pinned.begin() && byte < std::prev(after)->second;
}

Block* block_of(const c10::StorageImpl& storage) {
  return storage.data_ptr().cast_context<Block>(&free_block);
}

c10::DataPtr adopt(const c10::Storage& of_the_host, int device) {
  size_t size = of_the_host.nbytes();
  Locked locked;
  reuse_freed(current_stream(device));
  reserve(device, size);
  auto keep = std::make_shared<c10::Storage>(of_the_host);
  return make_block({keep, keep->mutable_data()}, size, device);
}

void record_stream(const c10::DataPtr& pointer, int stream) {
  Locked locked;
  if (auto* block = pointer.cast_context<Block>(&free_block)) block->recorded.push_back(stream);
}

int current_device() { return device_of_thread; }

int exchange_device(int device) {
  TORCH_CHECK(
      0 <= device && device < kDevices, "there is no sim:", device, ", only sim:0 to sim:",
      kDevices - 1);
  return std::exchange(device_of_thread, device);
}

int number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

c10::Stream stream_of(int number) {
  c10::Device device(kSim, static_cast<c10::DeviceIndex>(device_of(number)));
  return c10::Stream(c10::Stream::UNSAFE, device, number < kDevices ? 0 : number);
}

}  // namespace sim

extern "C" {

void sim_limit(int device, size_t bytes) {
  sim::Locked locked;
  sim::pools().devices[device].limit = bytes;
}

// As cudaHostRegister and cudaHostUnregister.
void sim_register(char* begin, size_t size) {
  sim::Locked locked;
  sim::pools().pinned[begin] = begin + size;
}

void sim_unregister(char* begin) {
  sim::Locked locked;
  sim::pools().pinned.erase(begin);
}

}  // extern "C"
