#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "streams.h"

namespace sim {
namespace {

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(kSim, device), key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  static c10::DeviceType device_type() { return kSim; }
  Generator* clone_impl() const override {
    auto* made = new Generator(device_.index());
    made->set_state(*get_state());
    return made;
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < num_devices(); ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator drawn(const std::optional<at::Generator>& given, int device) {
  auto generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              generator.device().type(), "'");
  std::lock_guard<std::mutex> guard(generator.mutex());
  auto* state = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  return at::detail::createCPUGenerator(state->random64());
}

}  // namespace sim
