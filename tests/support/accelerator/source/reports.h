// The lock of the simulation, and what it counts and reports.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace sim {

// Guards all state that threads share, except the queues of streams. Re-entrant. Never held while waiting, and never
// while the interpreter is asked for.
class Locked {
 public:
  Locked();
  ~Locked();
  Locked(const Locked&) = delete;
};

// Worker threads may need the interpreter, for operators written in Python, so nobody waits for them while holding it.
class WithoutInterpreter {
 public:
  WithoutInterpreter();
  ~WithoutInterpreter();

 private:
  void* state_ = nullptr;
};

// The child of a fork has no worker threads, and perhaps a lock that nobody opens: all it can do is let go.
bool is_forked();
void note_fork();

using Counts = std::map<std::string, int64_t>;
using Callback = std::function<void(const std::string& kind, const std::string& text)>;

void count(const std::string& kind);
Counts counts();
int64_t count_of(const std::string& kind);
void reset_counts();

// Counts, and calls the callback in this thread: at once, or, where this thread holds the lock, with its next report.
void report(const std::string& kind, const std::string& text);
void set_callback(Callback callback);  // an empty one is no callback

}  // namespace sim
