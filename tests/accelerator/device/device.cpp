// What torch asks of every accelerator: devices, streams, events, generators, pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstring>

#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace sim {
namespace {

// Until then torch, which may have this library loaded, is not to start threads for devices.
bool is_installed = false;

c10::Device device(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }

// Devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return is_installed ? kDevices : 0; }
  c10::Device getDevice() const override { return device(current_device()); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(exchange_device(to.index()));
  }
  void setDevice(c10::Device to) const override { exchange_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange_device(to.index()); }

  c10::Stream getStream(c10::Device of) const override {
    return stream_of(current_stream(index_of(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream_of(index_of(of)); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return stream_of(new_stream(index_of(of)));
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return stream_of(new_stream(index_of(of)));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream_of(exchange_stream(number_of(to)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked locked;
    return query(number_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note("stream");
    Locked locked;
    synchronize(number_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    note("device");
    Locked locked;
    synchronize_device(index);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    Locked locked;
    if (!*event) *event = new Event;
    sim::record(number_of(stream), *static_cast<Event*>(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked locked;
    if (event) wait(number_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    Locked locked;
    return !event || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    note("event");
    Locked locked;
    if (event) synchronize(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> between =
        static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return between.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, number_of(stream));
  }

 private:
  static int index_of(c10::Device of) { return of.has_index() ? of.index() : current_device(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Generators

std::array<at::Generator, kDevices>& defaults() {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kDevices>;
    for (int index = 0; index < kDevices; ++index) {
      (*made)[index] = at::make_generator<Generator>(index);
      (*made)[index].seed();
    }
    return made;
  }();
  return *generators;
}

// Python can make generators but not ask for a default one, so it makes those when it installs us.
bool gives_defaults = false;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex to) const override { exchange_device(to); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(to));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return exchangeDevice(to < 0 ? getCurrentDevice() : to);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    int of = index < 0 ? current_device() : index;
    return gives_defaults ? default_generator(of) : at::make_generator<Generator>(of);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    OnDevice on(storage.device().index());
    auto grown = allocator()->allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) std::memcpy(grown.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(size);
  }
};

}  // namespace

const at::Generator& default_generator(int index) { return defaults().at(index); }

}  // namespace sim

extern "C" {

void sim_install() {
  sim::is_installed = true;
  static sim::Hooks hooks;
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
}

void sim_give_default_generators(bool given) { sim::gives_defaults = given; }
int sim_current_device() { return sim::current_device(); }
int sim_exchange_device(int device) { return sim::exchange_device(device); }
int sim_device_count() { return sim::kDevices; }

}  // extern "C"
