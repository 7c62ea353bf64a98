// Generators of random numbers: a device draws what the CPU draws from the same seed.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "memory.h"

namespace sim {

// Hand all that decides what is drawn next from one generator to another.
inline void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
  to.set_engine(from.engine());
  to.set_next_float_normal_sample(from.next_float_normal_sample());
  to.set_next_double_normal_sample(from.next_double_normal_sample());
}

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = {kSim, static_cast<c10::DeviceIndex>(device)};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

  // The offset is the number of words drawn since the seed, as the CPU's engine does not count:
  // walk from the seed until the state is the same, which it can be once in a block of words.
  uint64_t get_offset() const override {
    auto* self = const_cast<Generator*>(this);
    auto sought = self->engine().data();
    at::mt19937 engine(sought.seed_);
    int left = engine.data().left_;
    for (uint64_t offset = 0; offset < kFarthestOffset; ++offset) {
      if (left == sought.left_ && engine.data().state_ == sought.state_) return offset;
      left = left == 1 ? at::MERSENNE_STATE_N : left - 1;
      engine();
    }
    TORCH_CHECK(false, "this generator's state does not come from its seed");
  }

  void set_offset(uint64_t offset) override {
    at::mt19937 engine(current_seed());
    for (uint64_t i = 0; i < offset; ++i) engine();
    set_engine(engine);
    set_next_float_normal_sample(std::nullopt);
    set_next_double_normal_sample(std::nullopt);
  }

 private:
  static constexpr uint64_t kFarthestOffset = 100'000'000;
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy_state(const_cast<Generator&>(*this), *copy);
    return copy;
  }
};

const at::Generator& default_generator(int device);

}  // namespace sim
