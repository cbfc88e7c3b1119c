#pragma once

namespace sim {

void register_hooks();  // makes torch know the device, its memory and its generators

}  // namespace sim
