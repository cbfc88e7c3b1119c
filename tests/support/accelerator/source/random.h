// Random numbers: an operator draws a seed of its own when it is issued, so that it does not matter when it runs.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// A generator of the host for one operator, seeded by the given generator, or by the default one of the device.
at::Generator drawn(const std::optional<at::Generator>& given, int device);

}  // namespace sim
