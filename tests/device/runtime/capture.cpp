// Captures and graphs: what a captured stream is told is noted and runs at each launch of the graph.
//
// While a capture lasts, calls that could make it depend on what other threads do are prohibited, and make
// it invalid: by its mode, in all threads (global, the default), in its own (thread local), or nowhere
// (relaxed). A thread exempts itself with cudaThreadExchangeStreamCaptureMode.
#include "emulator.h"

#include <set>

enum Mode { GLOBAL, THREAD_LOCAL, RELAXED };
static std::set<Graph*> under_way;
static thread_local std::set<Graph*> begun_here;
static thread_local int thread_mode = GLOBAL;
static unsigned long long last_id = 0;
static std::vector<std::string> offences;  // prohibited calls: function and thread
std::string thread_name();                 // devices.cpp

bool prohibited(const char* function) {
  if (thread_mode == RELAXED) return false;
  bool found = false;
  for (auto graph : under_way) {
    bool here = begun_here.count(graph) && graph->mode != RELAXED;
    bool anywhere = thread_mode == GLOBAL && graph->mode == GLOBAL;
    if (here || anywhere) graph->invalidated = found = true;
  }
  if (found) offences.push_back(std::string(function) + " in thread " + thread_name());
  return found;
}

API Error cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(thread_mode, *mode);
  return SUCCESS;
}
API Error cudaStreamBeginCapture(void* handle, int mode) {
  Entry entry("cudaStreamBeginCapture");
  auto stream = stream_of(handle);
  if ((uintptr_t)handle <= 2 || stream->capture) return fail(CAPTURE_UNSUPPORTED);
  stream->capture = new Graph{{}, false, mode, ++last_id};
  stream->origin = true;
  stream->told = stream->joined = 0;
  under_way.insert(stream->capture);
  begun_here.insert(stream->capture);
  return SUCCESS;
}
API Error cudaStreamEndCapture(void* handle, void** result) {
  Entry entry("cudaStreamEndCapture");
  auto stream = stream_of(handle);
  auto graph = stream->capture;
  *result = nullptr;
  if (!graph || !stream->origin) return fail(INVALID_VALUE);
  bool unjoined = false;
  for (int device = 0; device < device_count; device++)
    for (auto each : streams_of(device))
      if (each->capture == graph) {
        unjoined |= !each->origin && each->told > each->joined;
        each->capture = nullptr, each->origin = false;
      }
  under_way.erase(graph);
  begun_here.erase(graph);
  if (graph->invalidated) return fail(CAPTURE_INVALIDATED);
  if (unjoined) return fail(CAPTURE_UNJOINED);
  *result = graph;
  return SUCCESS;
}
static int status_of(Stream* stream) {
  return !stream->capture ? 0 : stream->capture->invalidated ? 2 : 1;
}
API Error cudaStreamIsCapturing(void* handle, int* status) {
  Entry entry("cudaStreamIsCapturing", false);
  *status = status_of(stream_of(handle));
  return SUCCESS;
}
static Error capture_info(void* handle, int* status, unsigned long long* id, void** graph,
                          const void*** dependencies, size_t* count) {
  Entry entry("cudaStreamGetCaptureInfo", false);
  auto stream = stream_of(handle);
  if (status) *status = status_of(stream);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = stream->capture;
  if (dependencies) *dependencies = nullptr;
  if (count) *count = 0;
  return SUCCESS;
}
API Error cudaStreamGetCaptureInfo(void* handle, int* status, unsigned long long* id, void** graph,
                                   const void*** dependencies, const void**, size_t* count) {
  return capture_info(handle, status, id, graph, dependencies, count);
}
API Error cudaStreamGetCaptureInfo_v2(void* handle, int* status, unsigned long long* id,
                                      void** graph, const void*** dependencies, size_t* count) {
  return capture_info(handle, status, id, graph, dependencies, count);
}
API Error cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = graph;
  return SUCCESS;
}
API Error cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
API Error cudaGraphLaunch(void* executable, void* handle) {
  Entry entry("cudaGraphLaunch");
  for (auto& task : ((Graph*)executable)->tasks)
    if (task.kind == Task::RUN) enqueue(stream_of(handle), task.work);
  return SUCCESS;
}
API Error cudaGraphGetNodes(void* graph, void**, size_t* count) {
  *count = ((Graph*)graph)->tasks.size();
  return SUCCESS;
}
API Error cudaGraphDestroy(void*) { return SUCCESS; }  // what is launched may outlive it
API Error cudaGraphExecDestroy(void*) { return SUCCESS; }

// ---- for the tests ---------------------------------------------------------------------------------

API const char* emu_offence(int number) {
  Entry entry("emu_offence", false);
  return number < (int)offences.size() ? offences[number].c_str() : "";
}
