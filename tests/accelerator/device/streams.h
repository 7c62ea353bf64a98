// Streams and events: which work is ordered before which, and which copies are still to be made.
//
// Kernels run when they are issued, which is one order that a real device might choose. Two things
// make a forgotten wait show all the same:
//
//   * Copies between the host and a device that were issued with `non_blocking=True` are made late:
//     when something that was issued later on the same stream runs, or when somebody waits. A host
//     that reads too early reads what was there before.
//   * Every stream has a clock: how many operations of each stream are known to have finished
//     before its next one begins. Waits join clocks. Each range of bytes remembers who used it, and
//     an operation that touches bytes whose last use is not ordered before it is an error, whatever
//     the bytes happen to be.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace sim {

constexpr int kDevices = 4;

// clock[s] operations of stream s are known to have finished.
using Clock = std::vector<uint64_t>;

// One operation's use of a range of bytes.
struct Use {
  const char* begin;
  const char* end;
  bool writes;
  int stream;
  uint64_t operation;
  const char* name;
  std::shared_ptr<void> keep;  // memory of the host: its address is not given to others meanwhile
};
using History = std::vector<Use>;

// What an operation is about to use, and where uses of that memory are remembered.
struct Range {
  const char* begin;
  const char* end;
  bool writes;
  History* history;
  std::shared_ptr<void> keep = nullptr;
};

struct Event {
  int stream = -1;  // never recorded
  uint64_t operation = 0;
  Clock clock;
  int queries_left = 0;
  std::chrono::steady_clock::time_point time;
};

// Holds the lock of all state of this library. Nobody who has it may wait for Python's lock, whose
// holder may wait for this one. So a tensor of Python's is neither first nor last referred to under
// it: views are made before, and what operations leave behind is destroyed after it is given back.
class Locked {
 public:
  Locked();
  ~Locked();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// Streams 0 to 3 are the default ones of the devices.
int new_stream(int device);
int device_of(int stream);
int current_stream(int device);
int exchange_stream(int stream);

// Begin an operation that runs at once: check what it uses, and make the late copies before it.
void issue(int stream, const char* name, const std::vector<Range>& ranges);
// Begin a copy that is made later.
void issue_late(
    int stream, const char* name, std::vector<Range> ranges, std::function<void()> copy);
// Say that the newest operation of a stream wrote a range that did not exist before.
void created(int stream, const char* name, const Range& range);
// Check that nobody still uses memory that a stream allocates again.
void check_reuse(int stream, const History& history, const std::vector<int>& recorded);
// Tell whether an allocation on this stream may overwrite what others use.
bool is_used_by_others(int stream, const History& history);

void record(int stream, Event& event);
void wait(int stream, const Event& event);

// The host waits. Counted by the caller.
void synchronize(int stream);
void synchronize(const Event& event);
void synchronize_device(int device);
bool query(int stream);
bool query(Event& event);

// Tell the listener that the host waits for a device. Never with the lock held: it runs Python.
void note(const char* kind);

}  // namespace sim
