#include "reports.h"

#include <Python.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace sim {
namespace {

// Nothing global is ever destroyed: worker threads and tensors outlive the end of the interpreter.
std::recursive_mutex& mutex() {
  static auto* made = new std::recursive_mutex;
  return *made;
}
Counts& all_counts() {
  static auto* made = new Counts;
  return *made;
}
std::shared_ptr<Callback>& the_callback() {
  static auto* made = new std::shared_ptr<Callback>;
  return *made;
}
bool forked = false;
thread_local int depth = 0;

}  // namespace

Locked::Locked() {
  if (!forked) mutex().lock();
  ++depth;
}
Locked::~Locked() {
  --depth;
  if (!forked) mutex().unlock();
}

WithoutInterpreter::WithoutInterpreter() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutInterpreter::~WithoutInterpreter() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

bool is_forked() { return forked; }
void note_fork() { forked = true; }

void count(const std::string& kind) {
  Locked locked;
  ++all_counts()[kind];
}
Counts counts() {
  Locked locked;
  return all_counts();
}
int64_t count_of(const std::string& kind) {
  Locked locked;
  return all_counts()[kind];
}
void reset_counts() {
  Locked locked;
  all_counts().clear();
}

void report(const std::string& kind, const std::string& text) {
  static thread_local std::vector<std::pair<std::string, std::string>> kept;
  count(kind);
  std::shared_ptr<Callback> callback;
  {
    Locked locked;
    callback = the_callback();
  }
  if (!callback || !Py_IsInitialized()) return;
  kept.emplace_back(kind, text);
  if (depth) return;  // the callback takes the interpreter
  auto now = std::move(kept);
  kept.clear();
  for (auto& [its_kind, its_text] : now) (*callback)(its_kind, its_text);
}

void set_callback(Callback callback) {
  auto fresh = callback ? std::make_shared<Callback>(std::move(callback)) : nullptr;
  Locked locked;
  std::swap(the_callback(), fresh);
}

}  // namespace sim
