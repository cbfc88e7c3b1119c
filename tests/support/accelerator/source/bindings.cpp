// What the Python side calls.
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <future>

#include "hooks.h"
#include "memory.h"
#include "pinned.h"
#include "random.h"
#include "reports.h"

namespace sim {
namespace {

Callback from_python(py::object function) {
  if (function.is_none()) return {};
  // Reports come from threads without the interpreter, and the last of them may let go of the function.
  auto held = std::shared_ptr<py::object>(new py::object(std::move(function)), [](py::object* last) {
    py::gil_scoped_acquire interpreter;
    delete last;
  });
  return [held](const std::string& kind, const std::string& text) {
    py::gil_scoped_acquire interpreter;
    try {
      (*held)(kind, text);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("callback of the simulated accelerator");
    }
  };
}

py::dict memory(int device) {
  using namespace py::literals;
  auto counts = memory_counts(device);
  return py::dict("allocated"_a = counts.allocated, "peak"_a = counts.peak, "reserved"_a = counts.reserved,
                  "peak_reserved"_a = counts.peak_reserved, "pending"_a = counts.pending, "limit"_a = counts.limit,
                  "total"_a = total_bytes());
}

std::map<std::string, long> option_values() {
  std::map<std::string, long> values;
  for (auto& [name, option] : options_by_name()) values[name] = option->load();
  return values;
}
void set_option(const std::string& name, long value) {
  auto all = options_by_name();
  auto found = all.find(name);
  if (found == all.end()) throw py::key_error(name);
  *found->second = value;
}

void sleep(long microseconds) {
  launch(current_stream(current_device()), [microseconds] { usleep(microseconds); }, "sleep", {}, false);
}

// The current stream does nothing until the function that this returns is called.
py::cpp_function hold() {
  auto gate = std::make_shared<std::promise<void>>();
  launch(current_stream(current_device()), [opened = gate->get_future().share()] { opened.wait(); }, "hold", {}, false);
  return py::cpp_function([gate] { gate->set_value(); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pthread_atfork(nullptr, nullptr, [] { note_fork(); });
  register_hooks();
  m.def("is_forked", &is_forked);
  m.def("device_count", &num_devices);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("memory", &memory);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache);
  m.def("counts", &counts);
  m.def("reset_counts", &reset_counts);
  m.def("set_callback", [](py::object function) { set_callback(from_python(std::move(function))); });
  m.def("options", &option_values);
  m.def("set_option", &set_option);
  m.def("sleep", &sleep);
  m.def("hold", &hold);
  m.def("lose", &lose);
}

}  // namespace sim
