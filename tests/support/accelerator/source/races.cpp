#include "races.h"

#include <c10/util/StringUtil.h>

#include <chrono>
#include <set>

#include "reports.h"

namespace sim {
namespace {

std::string race_between(const Stream& stream, const Use& use, const char* what, const Access& other) {
  return c10::str(what, use.writes ? " writes" : " reads", " on ", stream.name(), " bytes [", use.begin, ", ", use.end,
                  ") that ", other.what, other.writes ? " writes" : " reads", " on ", other.stream->name(),
                  " with nothing that orders them");
}

// Under the lock: notes the use of some bytes, forgets what the new use covers, and says what it races with.
std::string note(Stream& stream, uint64_t number, const Use& use, const char* what) {
  std::string race;
  auto& all = use.shadow->accesses;
  for (size_t i = 0; i < all.size();) {
    auto& other = all[i];
    bool over = is_over(other), ordered = over || is_ordered(stream, other);
    bool overlap = other.begin < use.end && use.begin < other.end;
    if (!ordered && overlap && (other.writes || use.writes) && race.empty())
      race = race_between(stream, use, what, other);
    bool covered = ordered && use.begin <= other.begin && other.end <= use.end && (use.writes || !other.writes);
    if (over || covered) {
      other = all.back();
      all.pop_back();
    } else {
      ++i;
    }
  }
  all.push_back({use.begin, use.end, &stream, number, use.writes, what});
  return race;
}

double now_in_milliseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace

const char* interned(const std::string& text) {
  static auto* all = new std::set<std::string>;
  Locked locked;
  return all->insert(text).first->c_str();
}

bool is_over(const Access& access) { return host_clock()[access.stream->index] >= access.number; }
bool is_ordered(const Stream& stream, const Access& access) {
  return access.stream == &stream || stream.clock[access.stream->index] >= access.number || is_over(access);
}

uint64_t launch(Stream& stream, std::function<void()> job, const char* what, const std::vector<Use>& uses,
                bool is_late) {
  if (is_late) check_not_lost(stream.device);
  std::string race;
  uint64_t number;
  if (is_late)
    job = [job = std::move(job), &stream] {
      stream.dawdle();
      job();
    };
  {
    Locked locked;
    merge(stream.clock, host_clock());
    number = stream.push(std::move(job));
    stream.clock[stream.index] = number;
    for (auto& use : uses) {
      if (!use.shadow) continue;
      auto found = note(stream, number, use, what);
      if (race.empty()) race = found;
    }
  }
  if (!race.empty()) report("races", race);
  return number;
}

void record(Event& event, Stream& stream) {
  check_not_lost(stream.device);
  auto time = std::make_shared<std::atomic<double>>(0.0);
  Locked locked;
  event.number = launch(stream, [time] { *time = now_in_milliseconds(); }, "event", {}, false);
  event.stream = &stream, event.clock = stream.clock, event.milliseconds = time;
}

void wait(Stream& stream, const Event& event) {
  Locked locked;
  if (!event.stream || event.stream == &stream) return;
  check_not_lost(stream.device);
  merge(stream.clock, event.clock);
  launch(stream, [from = event.stream, number = event.number] { from->block(number); }, "wait", {}, false);
}

bool query(const Event& event) {
  if (!event.stream) return true;
  check_not_lost(event.stream->device);
  if (event.stream->done.load() < event.number) return false;
  host_wait(*event.stream, event.number, &event.clock);
  return true;
}

void synchronize(const Event& event) {
  if (!event.stream) return;
  check_not_lost(event.stream->device);
  host_wait(*event.stream, event.number, &event.clock);
  raise_fault(event.stream->device);
}

}  // namespace sim
