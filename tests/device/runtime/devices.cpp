// Devices, their contexts, errors, and the calls by which programs register kernels, which never run.
#include "emulator.h"

#include "layout.h"  // generated: where the fields of cudaDeviceProp lie in this version

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <pthread.h>
#include <set>
#include <unordered_map>

// never destroyed: the device's thread runs to the end of the process
std::recursive_mutex& the_lock = *new std::recursive_mutex;
std::condition_variable_any& changed = *new std::condition_variable_any;
thread_local int current_device = 0;
int device_count = 1;
static thread_local Error last_error = SUCCESS;
static std::vector<std::string> contexts;        // by device: which call made it, in which thread
static std::vector<std::set<std::string>> uses;  // by device: calls and threads

std::string thread_name() {
  char name[64] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

static void begin() {
  static bool begun = false;
  if (begun) return;
  begun = true;
  if (auto count = getenv("EMU_DEVICES")) device_count = atoi(count);
  contexts.resize(device_count), uses.resize(device_count);
  reserve_memory();
  start_device();
}

Entry::Entry(const char* function, bool touches_device) : lock(the_lock) {
  begin();
  touch();
  if (!touches_device) return;
  auto name = thread_name();
  if (contexts[current_device].empty()) contexts[current_device] = std::string(function) + " in thread " + name;
  uses[current_device].insert(std::string(function) + " in thread " + name);
}

Error fail(Error error) {
  if (error) last_error = error;
  return error;
}

// ---- what torch's allocator records when it frees --------------------------------------------------

// So that a test can tell which streams were recorded for a block: torch records an event on each when the
// block is freed. They are told from others by who calls.
static std::map<pthread_t, std::vector<Stream*>> recorded_by_allocator;
void note_record_by_allocator(void* caller, Stream* stream) {
  static std::unordered_map<void*, bool> known;
  auto found = known.find(caller);
  if (found == known.end()) {
    Dl_info info{};
    bool ours = dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10_cuda");
    found = known.insert({caller, ours}).first;
  }
  if (found->second) recorded_by_allocator[pthread_self()].push_back(stream);
}
API int emu_recorded_by_allocator(pthread_t thread, void** handles, int room) {  // empties the list
  Entry entry("emu_recorded_by_allocator", false);
  int count = 0;
  for (auto stream : recorded_by_allocator[thread])
    if (count < room) handles[count++] = stream->id < device_count ? nullptr : (void*)stream;
  recorded_by_allocator[thread].clear();
  return count;
}

// ---- devices ---------------------------------------------------------------------------------------

API Error cudaGetDeviceCount(int* count) {
  Entry entry("cudaGetDeviceCount", false);
  *count = device_count;
  return SUCCESS;
}
API Error cudaGetDevice(int* device) {
  *device = current_device;
  return SUCCESS;
}
API Error cudaSetDevice(int device) {
  if (device < 0 || device >= device_count) {
    Entry entry("cudaSetDevice", false);
    return device_count > device && device >= 0 ? SUCCESS : fail(INVALID_DEVICE);
  }
  current_device = device;
  Entry entry("cudaSetDevice");  // makes the context, since CUDA 12
  return SUCCESS;
}
API Error cudaGetDeviceProperties(char* properties, int device) {
  Entry entry("cudaGetDeviceProperties", false);
  memset(properties, 0, PROPERTIES_BYTES);
  strcpy(properties, "emulated, no GPU");
  properties[UUID] = device + 1;
  auto put = [&](size_t offset, auto value) { memcpy(properties + offset, &value, sizeof value); };
  put(TOTAL_GLOBAL_MEM, memory_bytes());
  put(SHARED_MEM_PER_BLOCK, (size_t)49152);
  put(SHARED_MEM_PER_BLOCK_OPTIN, (size_t)101376);
  put(SHARED_MEM_PER_MULTIPROCESSOR, (size_t)102400);
  put(REGS_PER_BLOCK, 65536);
  put(REGS_PER_MULTIPROCESSOR, 65536);
  put(WARP_SIZE, 32);
  put(MAX_THREADS_PER_BLOCK, 1024);
  put(MAX_THREADS_PER_MULTIPROCESSOR, 2048);
  for (int axis = 0; axis < 3; axis++) {
    put(MAX_THREADS_DIM + 4 * axis, 1024);
    put(MAX_GRID_SIZE + 4 * axis, 65535);
  }
  put(MAJOR, 8);
  put(MINOR, 0);
  put(MULTI_PROCESSOR_COUNT, 4);
  put(L2_CACHE_SIZE, 1 << 20);
  put(UNIFIED_ADDRESSING, 1);
  put(CONCURRENT_KERNELS, 1);
  put(ASYNC_ENGINE_COUNT, 2);
  put(STREAM_PRIORITIES_SUPPORTED, 1);
  put(PCI_BUS_ID, device + 1);
  return SUCCESS;
}
API Error cudaGetDeviceProperties_v2(char* properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
API Error cudaDeviceGetAttribute(int* value, int, int) {
  *value = 1;
  return SUCCESS;
}
API Error cudaDeviceGetPCIBusId(char* text, int nbytes, int device) {
  snprintf(text, nbytes, "0000:%02x:00.0", device + 1);
  return SUCCESS;
}
API Error cudaDriverGetVersion(int* version) {
  *version = CUDA_MAJOR * 1000;
  return SUCCESS;
}
API Error cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API Error cudaGetLastError() {
  auto error = last_error;
  last_error = SUCCESS;
  return error;
}
API Error cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(Error error) {
  static thread_local char text[48];
  if (error == OUT_OF_MEMORY) return "out of memory";
  snprintf(text, sizeof text, "error %d of the emulated CUDA runtime", error);
  return text;
}
API const char* cudaGetErrorName(Error error) { return cudaGetErrorString(error); }

// ---- the driver ------------------------------------------------------------------------------------

API int emu_context_state(int device, unsigned* flags, int* active) {
  Entry entry("cuDevicePrimaryCtxGetState", false);
  if (flags) *flags = 0;
  *active = device < device_count && !contexts[device].empty();
  return SUCCESS;
}
static int unsupported() { return NOT_SUPPORTED; }
static void* driver_entry(const char* name) {
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) return (void*)emu_context_state;
  return (void*)unsupported;
}
API Error cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* found) {
  *function = driver_entry(name);
  if (found) *found = 0;
  return SUCCESS;
}
API Error cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                           unsigned long long flags, int* found) {
  return cudaGetDriverEntryPoint(name, function, flags, found);
}

// ---- kernels are registered and never launched -----------------------------------------------------

static std::unordered_map<const void*, const char*>& kernels() {
  static std::unordered_map<const void*, const char*> names;
  return names;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                                void*, void*, int*) {
  kernels()[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 0; }
static Error launch(const void* function) {
  auto found = kernels().find(function);
  fprintf(stderr, "the emulated device cannot run kernels of CUDA: %s\n",
          found == kernels().end() ? "of unknown name" : found->second);
  return fail(NOT_SUPPORTED);
}
struct Dimensions { unsigned x, y, z; };
API Error cudaLaunchKernel(const void* function, Dimensions, Dimensions, void**, size_t, void*) {
  return launch(function);
}
API Error __cudaLaunchKernel(void* kernel, Dimensions, Dimensions, void**, size_t, void*) {
  return launch(kernel);
}
API Error cudaLaunchKernelExC(const void*, const void* function, void**) { return launch(function); }
API Error __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return SUCCESS;
}
API unsigned __cudaPushCallConfiguration(Dimensions, Dimensions, size_t, void*) { return 0; }
API Error __cudaPopCallConfiguration(Dimensions*, Dimensions*, size_t*, void*) { return SUCCESS; }

// ---- for the tests ---------------------------------------------------------------------------------

API const char* emu_context(int device) {  // the call that made it; "" if there is none
  Entry entry("emu_context", false);
  return contexts[device].c_str();
}
API const char* emu_uses(int device) {  // calls with this device current, a line each
  Entry entry("emu_uses", false);
  static thread_local std::string text;
  text.clear();
  for (auto& use : uses[device]) text += use + "\n";
  return text.c_str();
}
API void emu_forget_uses() {
  Entry entry("emu_forget_uses", false);
  for (auto& calls : uses) calls.clear();
}
