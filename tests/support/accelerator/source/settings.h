// What the environment and the tests may choose. See the docstring of the Python package for the meaning of each.
#pragma once
#include <atomic>
#include <cstddef>
#include <map>
#include <string>

namespace sim {

constexpr int kMaxDevices = 8;
constexpr int kStreams = 33;                // of a device: 0 is the default one, the others are a pool like CUDA's
constexpr size_t kSpan = size_t(64) << 30;  // of the addresses of a device
constexpr size_t kPage = 4096;

// Read when the module is loaded, and then the same for the life of the process.
int num_devices();
size_t total_bytes();  // of each device
bool is_protected();

// May be changed at any time. They begin with the value of SIM_<NAME>.
using Option = std::atomic<long>;
struct Options {
  Option delay_us, jitter, eager_free, pin_mb;
  Options();
};
Options& options();
std::map<std::string, Option*> options_by_name();

}  // namespace sim
