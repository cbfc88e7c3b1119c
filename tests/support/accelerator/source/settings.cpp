#include "settings.h"

#include <algorithm>
#include <cstdlib>

namespace sim {
namespace {

long from_environment(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

}  // namespace

int num_devices() {
  static const int value = std::clamp<long>(from_environment("SIM_DEVICES", 2), 0, kMaxDevices);
  return value;
}

size_t total_bytes() {
  static const size_t value = size_t(from_environment("SIM_MEMORY_MB", 4096)) << 20;
  return value;
}

bool is_protected() {
  static const bool value = from_environment("SIM_PROTECT", 0);
  return value;
}

Options::Options()
    : delay_us(from_environment("SIM_DELAY_US", 0)),
      jitter(from_environment("SIM_JITTER", 0)),
      eager_free(from_environment("SIM_EAGER_FREE", 0)),
      pin_mb(from_environment("SIM_PIN_MB", 1 << 20)) {}

Options& options() {
  static Options all;
  return all;
}

std::map<std::string, Option*> options_by_name() {
  auto& all = options();
  return {{"delay_us", &all.delay_us},
          {"jitter", &all.jitter},
          {"eager_free", &all.eager_free},
          {"pin_mb", &all.pin_mb}};
}

}  // namespace sim
