#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>

namespace sim {
namespace {

constexpr int kStreamsPerDevice = 32;  // then they are given out again, as CUDA's are
constexpr int kQueries = 2;  // so often a stream or an event says that it is not done yet

// A late copy or a wait for another stream; `operation` is the stream's newest when it came.
struct Pending {
  uint64_t operation;
  bool is_copy;
  std::function<void()> run;
};

struct Stream {
  int device;
  uint64_t operations = 0;
  Clock clock;
  std::deque<Pending> pending;
  int queries_left = 0;
};

struct State {
  std::recursive_mutex mutex;
  std::vector<Stream> streams;
  std::array<int, kDevices> made{};
  Clock host;  // what the host has seen finished
  // Destroyed without the lock.
  std::vector<Pending> finished;
  History forgotten;
};

// Never destroyed: tensors may outlive everything else at the end of a process.
State& state() {
  static State* it = [] {
    auto* made = new State;
    made->streams.reserve(kDevices * (1 + kStreamsPerDevice));  // none ever moves
    for (int device = 0; device < kDevices; ++device) made->streams.push_back({device});
    return made;
  }();
  return *it;
}

std::atomic<void (*)(const char*)> listener{nullptr};

uint64_t at(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void set(Clock& clock, int stream, uint64_t operation) {
  if (static_cast<int>(clock.size()) <= stream) clock.resize(stream + 1);
  clock[stream] = operation;
}

// Do what is pending on a stream, up to an operation.
void run_until(int stream, uint64_t operation) {
  auto& pending = state().streams[stream].pending;
  while (!pending.empty() && pending.front().operation <= operation) {
    Pending next = std::move(pending.front());
    pending.pop_front();
    next.run();
    state().finished.push_back(std::move(next));
  }
}

bool is_ordered(const Use& use, int stream, const Clock& clock) {
  return use.stream == stream || use.operation <= at(clock, use.stream);
}

std::string place(int stream) {
  return c10::str(
      stream < kDevices ? "the default stream" : c10::str("stream ", stream), " of sim:",
      device_of(stream));
}

void check(int stream, const char* name, const Clock& clock, const Range& range) {
  for (const Use& use : *range.history) {
    bool overlaps = use.begin < range.end && range.begin < use.end;
    if (!overlaps || !(use.writes || range.writes) || is_ordered(use, stream, clock)) continue;
    TORCH_CHECK(
        false, name, " on ", place(stream), range.writes ? " writes" : " reads", " memory that ",
        use.name, " on ", place(use.stream), use.writes ? " writes" : " reads",
        ", and nothing orders the two: let one stream wait for the other (wait_stream, or an event "
        "and wait_event), or the host for the first");
  }
}

// Remember a use, and forget those that no later operation can conflict with.
void remember(int stream, const Clock& clock, const char* name, const Range& range) {
  auto& history = *range.history;
  auto keep = std::partition(history.begin(), history.end(), [&](const Use& use) {
    if (use.operation <= at(state().host, use.stream)) return false;
    bool covered = range.begin <= use.begin && use.end <= range.end;
    return !covered || !(range.writes || !use.writes) || !is_ordered(use, stream, clock);
  });
  std::move(keep, history.end(), std::back_inserter(state().forgotten));
  history.erase(keep, history.end());
  history.push_back(
      {range.begin, range.end, range.writes, stream, clock[stream], name, range.keep});
}

void begin(int stream, const char* name, const std::vector<Range>& ranges) {
  auto& on = state().streams[stream];
  join(on.clock, state().host);
  for (const Range& range : ranges) check(stream, name, on.clock, range);
  set(on.clock, stream, ++on.operations);
  on.queries_left = kQueries;
  for (const Range& range : ranges) remember(stream, on.clock, name, range);
}

}  // namespace

Locked::Locked() : lock_(state().mutex) {}

Locked::~Locked() {
  std::vector<Pending> finished;
  History forgotten;
  finished.swap(state().finished);
  forgotten.swap(state().forgotten);
  lock_.unlock();
}

// Streams

thread_local std::array<int, kDevices> streams_of_thread = [] {
  std::array<int, kDevices> defaults{};
  for (int device = 0; device < kDevices; ++device) defaults[device] = device;
  return defaults;
}();

int new_stream(int device) {
  Locked locked;
  auto& streams = state().streams;
  int number = state().made[device]++;
  if (number >= kStreamsPerDevice) {
    int skip = number % kStreamsPerDevice;
    for (int i = kDevices; i < static_cast<int>(streams.size()); ++i)
      if (streams[i].device == device && skip-- == 0) return i;
  }
  streams.push_back({device});
  return static_cast<int>(streams.size()) - 1;
}

int device_of(int stream) { return state().streams.at(stream).device; }
int current_stream(int device) { return streams_of_thread[device]; }
int exchange_stream(int stream) {
  return std::exchange(streams_of_thread[device_of(stream)], stream);
}

// Work

void issue(int stream, const char* name, const std::vector<Range>& ranges) {
  begin(stream, name, ranges);
  run_until(stream, state().streams[stream].operations);
}

void issue_late(
    int stream, const char* name, std::vector<Range> ranges, std::function<void()> copy) {
  begin(stream, name, ranges);
  auto& on = state().streams[stream];
  on.pending.push_back({on.operations, true, std::move(copy)});
}

void created(int stream, const char* name, const Range& range) {
  remember(stream, state().streams[stream].clock, name, range);
}

bool is_used_by_others(int stream, const History& history) {
  return std::any_of(history.begin(), history.end(), [&](const Use& use) {
    return use.stream != stream && use.operation > at(state().host, use.stream);
  });
}

void check_reuse(int stream, const History& history, const std::vector<int>& recorded) {
  auto& on = state().streams[stream];
  join(on.clock, state().host);
  for (const Use& use : history) {
    bool waited = std::find(recorded.begin(), recorded.end(), use.stream) != recorded.end();
    TORCH_CHECK(
        waited || is_ordered(use, stream, on.clock), "an allocation on ", place(stream),
        " gets memory that was freed while ", use.name, " on ", place(use.stream),
        " may still use it: call record_stream on the tensor before it goes, or keep it until ",
        "one stream has waited for the other");
  }
}

// Events and waits

void record(int stream, Event& event) {
  auto& on = state().streams[stream];
  join(on.clock, state().host);
  set(on.clock, stream, on.operations);
  event = {stream, on.operations, on.clock, kQueries, std::chrono::steady_clock::now()};
}

void wait(int stream, const Event& event) {
  if (event.stream < 0 || event.stream == stream) return;
  auto& on = state().streams[stream];
  join(on.clock, event.clock);
  on.pending.push_back({on.operations, false, [from = event.stream, until = event.operation] {
                          run_until(from, until);
                        }});
}

void synchronize(const Event& event) {
  if (event.stream < 0) return;
  run_until(event.stream, event.operation);
  join(state().host, event.clock);
}

void synchronize(int stream) {
  Event now;
  record(stream, now);
  synchronize(now);
  state().streams[stream].queries_left = 0;
}

void synchronize_device(int device) {
  for (int i = 0; i < static_cast<int>(state().streams.size()); ++i)
    if (state().streams[i].device == device) synchronize(i);
}

bool query(Event& event) {
  if (event.stream < 0 || event.operation <= at(state().host, event.stream)) return true;
  if (event.queries_left-- > 0) return false;
  synchronize(event);
  return true;
}

bool query(int stream) {
  auto& on = state().streams[stream];
  if (on.operations <= at(state().host, stream)) return true;
  if (on.queries_left-- > 0) return false;
  synchronize(stream);
  return true;
}

void note(const char* kind) {
  if (auto* told = listener.load()) told(kind);
}

}  // namespace sim

// What Python's side calls.

extern "C" {

int sim_pending_copies(int device) {
  sim::Locked locked;
  int copies = 0;
  for (const auto& stream : sim::state().streams)
    for (const auto& pending : stream.pending) copies += stream.device == device && pending.is_copy;
  return copies;
}

void sim_listen(void (*told)(const char*)) { sim::listener = told; }

}  // extern "C"
