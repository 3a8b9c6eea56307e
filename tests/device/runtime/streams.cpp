// Streams are queues that one thread, the device, works off, in an order that the schedule chooses.
//
//   eager   as soon as it can, the stream that was made first before the others
//   lazy    the latest possible: nothing until somebody waits, and then only what that wait needs
//   random  now and then nothing; any stream that can go on
//   fixed   as eager, but only while somebody waits
//
// Whoever waits in a thread that said `emu_served_last` is served when no other thread has called for a
// while: what only the library's own threads wait for comes as late as it can.
#include "emulator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <new>
#include <pthread.h>
#include <random>
#include <thread>

using Clock = std::chrono::steady_clock;

enum Schedule { EAGER, LAZY, RANDOM, FIXED };
static int schedule = EAGER;
static std::mt19937 chance;
static std::chrono::microseconds patience{4000};
static constexpr size_t LONGEST_QUEUE = 50000;  // then the device goes on by itself

static std::vector<Stream*>& streams() {
  static std::vector<Stream*> all;
  return all;
}
static std::list<std::shared_ptr<Mark>> awaited, awaited_last;
static thread_local bool served_last = false;
static Clock::time_point touched = Clock::now();
static size_t queued = 0;
static Stream* running = nullptr;  // whose task the device's thread is at

void touch() {
  if (!served_last) touched = Clock::now();
}

Stream* stream_of(void* handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;
  return streams()[current_device];  // the default streams come first
}

std::vector<Stream*> streams_of(int device) {
  std::vector<Stream*> found;
  for (auto stream : streams())
    if (stream->device == device) found.push_back(stream);
  return found;
}

static Stream* make_stream(int device, int priority) {
  auto stream = new Stream{(int)streams().size(), device, priority, {}};
  streams().push_back(stream);
  return stream;
}

static void push(Stream* stream, Task task) {
  if (stream->capture) {
    stream->told += task.kind == Task::RUN;
    stream->capture->tasks.push_back(std::move(task));
    return;
  }
  stream->queue.push_back(std::move(task));
  queued++;
  // else the device would do nothing: it is not woken by each kernel that is launched
  bool waits = awaited.empty() && awaited_last.empty() && queued <= LONGEST_QUEUE;
  if (schedule == EAGER || schedule == RANDOM || !waits) changed.notify_all();
}

void enqueue(Stream* stream, std::function<void()> work) {
  push(stream, {Task::RUN, std::move(work), nullptr});
}

std::shared_ptr<Mark> mark_now(Stream* stream) {
  auto mark = std::make_shared<Mark>(Mark{stream});
  push(stream, {Task::REACH, nullptr, mark});
  return mark;
}

// What runs has left the queue, but has not ended.
static bool idle(Stream* stream) { return stream->queue.empty() && running != stream; }

void await(const std::shared_ptr<Mark>& mark, Entry& entry) {
  if (mark->reached) return;
  auto& list = served_last ? awaited_last : awaited;
  auto place = list.insert(list.end(), mark);
  changed.notify_all();
  while (!mark->reached) changed.wait(entry.lock);
  list.erase(place);
}

void synchronize(int device, Entry& entry) {
  for (auto stream : streams_of(device))
    if (!idle(stream)) await(mark_now(stream), entry);
}

// ---- the device ------------------------------------------------------------------------------------

static bool can_go_on(Stream* stream) {
  if (stream->queue.empty()) return false;
  auto& head = stream->queue.front();
  return head.kind != Task::WAIT || head.mark->reached;
}

// The stream whose head must run next for a mark to be reached; by the marks that it waits for.
static Stream* needed_for(const Mark* mark) {
  for (auto stream = mark->stream;;) {
    if (stream->queue.empty()) return nullptr;
    auto& head = stream->queue.front();
    if (head.kind != Task::WAIT || head.mark->reached) return stream;
    stream = head.mark->stream;
  }
}

// One that was reached is in the list until its waiter has woken, and others may wait behind it.
static const Mark* first_of(const std::list<std::shared_ptr<Mark>>& marks) {
  for (auto& mark : marks)
    if (!mark->reached) return mark.get();
  return nullptr;
}

static Stream* choose() {
  bool patience_ends = !awaited_last.empty() && Clock::now() - touched > patience;
  bool overflow = queued > LONGEST_QUEUE;
  if (schedule == LAZY && !overflow) {
    const Mark* mark = first_of(awaited);
    if (!mark && awaited.empty() && patience_ends) mark = first_of(awaited_last);
    return mark ? needed_for(mark) : nullptr;
  }
  if (schedule == FIXED && awaited.empty() && !patience_ends && !overflow) return nullptr;
  std::vector<Stream*> ready;
  for (auto stream : streams())
    if (can_go_on(stream)) ready.push_back(stream);
  if (ready.empty()) return nullptr;
  return ready[schedule == RANDOM ? chance() % ready.size() : 0];
}

static void work() {
  std::unique_lock<std::recursive_mutex> lock(the_lock);
  while (true) {
    auto stream = choose();
    if (!stream) {
      if (awaited_last.empty())
        changed.wait(lock);
      else
        changed.wait_for(lock, patience / 4);
      continue;
    }
    if (schedule == RANDOM && chance() % 4 == 0) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
      lock.lock();
    }
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    queued--;
    if (task.kind == Task::RUN) {
      running = stream;
      lock.unlock();
      task.work();
      task.work = nullptr;
      lock.lock();
      running = nullptr;
    } else if (task.kind == Task::REACH) {
      task.mark->at = Clock::now();
      task.mark->reached = true;
      changed.notify_all();
    }
  }
}

void start_device() {
  if (auto name = getenv("EMU_SCHEDULE")) {
    const char* names[] = {"eager", "lazy", "random", "fixed"};
    for (int i = 0; i < 4; i++)
      if (!strcmp(name, names[i])) schedule = i;
  }
  if (auto seed = getenv("EMU_SEED")) chance.seed(atoi(seed));
  for (int device = 0; device < device_count; device++) make_stream(device, 0);
  std::thread(work).detach();
  // a forked child must not touch CUDA, but what runs at its end may still take the lock
  pthread_atfork(nullptr, nullptr, [] {
    new (&the_lock) std::recursive_mutex;
    new (&changed) std::condition_variable_any;
  });
}

// ---- entry points ----------------------------------------------------------------------------------

API Error cudaStreamCreateWithPriority(void** stream, unsigned, int priority) {
  Entry entry("cudaStreamCreateWithPriority");
  *stream = make_stream(current_device, priority);
  return SUCCESS;
}
API Error cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API Error cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API Error cudaStreamDestroy(void*) { return SUCCESS; }  // torch never does
API Error cudaStreamGetPriority(void* stream, int* priority) {
  Entry entry("cudaStreamGetPriority");
  *priority = stream_of(stream)->priority;
  return SUCCESS;
}
API Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return SUCCESS;
}
API Error cudaStreamSynchronize(void* handle) {
  Entry entry("cudaStreamSynchronize");
  if (prohibited("cudaStreamSynchronize")) return fail(CAPTURE_UNSUPPORTED);
  auto stream = stream_of(handle);
  if (stream->capture) return fail(CAPTURE_UNSUPPORTED);
  if (!idle(stream)) await(mark_now(stream), entry);
  return SUCCESS;
}
API Error cudaStreamQuery(void* handle) {
  Entry entry("cudaStreamQuery");
  if (prohibited("cudaStreamQuery")) return fail(CAPTURE_UNSUPPORTED);
  return idle(stream_of(handle)) ? SUCCESS : NOT_READY;
}
API Error cudaDeviceSynchronize() {
  Entry entry("cudaDeviceSynchronize");
  if (prohibited("cudaDeviceSynchronize")) return fail(CAPTURE_UNSUPPORTED);
  synchronize(current_device, entry);
  return SUCCESS;
}
API Error cudaStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  Entry entry("cudaStreamWaitEvent");
  auto event = (Event*)event_handle;
  auto stream = stream_of(handle);
  if (event->capture) {  // draws the stream into the graph
    if (stream->capture && stream->capture != event->capture) return fail(CAPTURE_INVALIDATED);
    if (!stream->capture) stream->told = stream->joined = 0;
    stream->capture = event->capture;
    event->stream->joined = std::max(event->stream->joined, event->told);
    return SUCCESS;
  }
  if (stream->capture) return fail(event->mark ? CAPTURE_UNSUPPORTED : SUCCESS);
  if (event->mark && !event->mark->reached) push(stream, {Task::WAIT, nullptr, event->mark});
  return SUCCESS;
}

enum { DISABLE_TIMING = 2 };
API Error cudaEventCreateWithFlags(void** event, unsigned flags) {
  Entry entry("cudaEventCreateWithFlags");
  *event = new Event{current_device, !(flags & DISABLE_TIMING), nullptr};
  return SUCCESS;
}
API Error cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
API Error cudaEventDestroy(void* event) {
  Entry entry("cudaEventDestroy");
  delete (Event*)event;
  return SUCCESS;
}
void note_record_by_allocator(void* caller, Stream* stream);  // devices.cpp
API Error cudaEventRecord(void* event_handle, void* handle) {
  Entry entry("cudaEventRecord");
  auto event = (Event*)event_handle;
  auto stream = stream_of(handle);
  if (event->device != stream->device) return fail(INVALID_HANDLE);
  note_record_by_allocator(__builtin_return_address(0), stream);
  event->capture = stream->capture;
  event->stream = stream;
  event->told = stream->told;
  event->mark = stream->capture ? nullptr : mark_now(stream);
  return SUCCESS;
}
API Error cudaEventRecordWithFlags(void* event, void* stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API Error cudaEventQuery(void* event_handle) {
  Entry entry("cudaEventQuery");
  if (prohibited("cudaEventQuery")) return fail(CAPTURE_UNSUPPORTED);
  auto event = (Event*)event_handle;
  if (event->capture) return fail(CAPTURED_EVENT);
  return !event->mark || event->mark->reached ? SUCCESS : NOT_READY;
}
API Error cudaEventSynchronize(void* event_handle) {
  Entry entry("cudaEventSynchronize");
  if (prohibited("cudaEventSynchronize")) return fail(CAPTURE_UNSUPPORTED);
  auto event = (Event*)event_handle;
  if (event->capture) return fail(CAPTURED_EVENT);
  auto mark = event->mark;
  if (mark) await(mark, entry);
  return SUCCESS;
}
API Error cudaEventElapsedTime(float* milliseconds, void* start_handle, void* end_handle) {
  Entry entry("cudaEventElapsedTime");
  auto start = (Event*)start_handle, end = (Event*)end_handle;
  if (!start->timed || !end->timed || !start->mark || !end->mark) return fail(INVALID_HANDLE);
  if (!start->mark->reached || !end->mark->reached) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->mark->at - start->mark->at).count();
  return SUCCESS;
}
API Error cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  Entry entry("cudaLaunchHostFunc");
  enqueue(stream_of(stream), [=] { function(data); });
  return SUCCESS;
}
API Error cudaStreamAddCallback(void* handle, void (*function)(void*, Error, void*), void* data,
                                unsigned) {
  Entry entry("cudaStreamAddCallback");
  enqueue(stream_of(handle), [=] { function(handle, SUCCESS, data); });
  return SUCCESS;
}

// ---- for the tests ---------------------------------------------------------------------------------

API void emu_kernel(void* stream, void (*function)(long), long number) {
  Entry entry("kernel");
  enqueue(stream_of(stream), [=] { function(number); });
}
API int emu_capturing(void* stream) {
  Entry entry("emu_capturing", false);
  return stream_of(stream)->capture != nullptr;
}
API void emu_served_last(int yes) { served_last = yes; }
API void emu_schedule(int which, int seed, int patience_us) {
  Entry entry("emu_schedule", false);
  schedule = which;
  chance.seed(seed);
  patience = std::chrono::microseconds(patience_us);
  changed.notify_all();
}
API long emu_queued() {
  Entry entry("emu_queued", false);
  return queued;
}
