// Operations on streams, and which bytes they use: races between streams.
//
//     stream 1   write x  --record e--                         x: [stream 1, operation 7, writes]
//                                     \ (clock of e: stream 1 up to 7)
//     stream 2             wait e -----+--> read x             ordered: the clock of stream 2 has stream 1 at 7
//     stream 3                              read x             a race: the clock of stream 3 has stream 1 at 0
//
// The order is that of clocks alone: a race is found also where both happened at a good distance.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "streams.h"

namespace sim {

struct Access {
  size_t begin, end;
  Stream* stream;
  uint64_t number;
  bool writes;
  const char* what;
};

// The uses of some memory that are not over for the host yet. Under the lock.
struct Shadow {
  std::vector<Access> accesses;
};

struct Use {
  Shadow* shadow;  // none: nothing to follow
  size_t begin, end;
  bool writes;
};

const char* interned(const std::string& text);  // the same text for the life of the process
bool is_over(const Access& access);             // under the lock
bool is_ordered(const Stream& stream, const Access& access);

// Puts a job into the queue of the stream, notes what it uses, and reports a race. `is_late`: it takes its time.
uint64_t launch(Stream& stream, std::function<void()> job, const char* what, const std::vector<Use>& uses = {},
                bool is_late = true);

struct Event {
  Stream* stream = nullptr;  // none: not recorded yet
  uint64_t number = 0;
  Clock clock{};
  std::shared_ptr<std::atomic<double>> milliseconds;
};
void record(Event& event, Stream& stream);
void wait(Stream& stream, const Event& event);
bool query(const Event& event);
void synchronize(const Event& event);

}  // namespace sim
