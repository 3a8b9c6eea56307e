// What the parts of the emulated CUDA runtime share: see README.md beside this directory.
//
// Types and numbers are those of CUDA's public documentation, as far as they are needed. Every entry point
// takes the one lock. Nobody who holds it ever waits for Python's GIL: kernels, which are Python functions,
// run in the device's thread without the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

using Error = int;
enum : Error {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_HANDLE = 400,
  NOT_READY = 600,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNJOINED = 904,
  CAPTURED_EVENT = 907,
};

struct Stream;

// A place in a stream's queue; reached when all before it is done.
struct Mark {
  Stream* stream;
  bool reached = false;
  std::chrono::steady_clock::time_point at;
};

// One entry of a queue: work to run, a mark to reach, or a mark to wait for.
struct Task {
  enum Kind { RUN, REACH, WAIT } kind;
  std::function<void()> work;
  std::shared_ptr<Mark> mark;
};

struct Graph {
  std::vector<Task> tasks;
  bool invalidated = false;
  int mode = 0;
  unsigned long long id = 0;
};

struct Stream {
  int id, device, priority;
  std::deque<Task> queue;
  Graph* capture = nullptr;  // what is enqueued goes there in place of the queue
  bool origin = false;       // of that capture
  size_t told = 0, joined = 0;  // what it was told during it; of that, what others of it wait for
};

struct Event {
  int device;
  bool timed;
  std::shared_ptr<Mark> mark;  // of the last record
  Graph* capture = nullptr;    // it was recorded on a stream that was being captured,
  Stream* stream = nullptr;    // this one,
  size_t told = 0;             // which had been told so much
};

// ---- one lock, and what it guards ------------------------------------------------------------------

// Held by every entry point. Remembers the call for the tests: which function, device and thread.
class Entry {
 public:
  explicit Entry(const char* function, bool touches_device = true);
  std::unique_lock<std::recursive_mutex> lock;
};

extern std::recursive_mutex& the_lock;
extern std::condition_variable_any& changed;
extern thread_local int current_device;
extern int device_count;

Error fail(Error error);  // remembers it as the thread's last error

// ---- streams.cpp -----------------------------------------------------------------------------------

Stream* stream_of(void* handle);  // 0, 1 and 2 are the current device's default stream
std::vector<Stream*> streams_of(int device);
void enqueue(Stream* stream, std::function<void()> work);
std::shared_ptr<Mark> mark_now(Stream* stream);
void await(const std::shared_ptr<Mark>& mark, Entry& entry);
void synchronize(int device, Entry& entry);
void start_device();
void touch();

// ---- memory.cpp ------------------------------------------------------------------------------------

void reserve_memory();
size_t memory_bytes();  // of each device
bool on_device(uintptr_t address);
int device_at(uintptr_t address);
uintptr_t host_address(uintptr_t address);  // where the host finds device memory; others as they are

// ---- capture.cpp -----------------------------------------------------------------------------------

bool prohibited(const char* function);  // by a capture; the capture is invalid then
