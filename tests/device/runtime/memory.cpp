// Device memory is a file in memory that is mapped twice: where the program sees it nobody may touch it
// (whoever does it from the host dies, as with a real device), and where copies and kernels find it.
#include "emulator.h"

#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

static constexpr size_t SPACE = (size_t)64 << 30;  // of addresses, for each device
static constexpr size_t SEGMENT = 2 << 20;         // what cudaMalloc rounds up to
static uintptr_t seen = 0, found = 0;              // the two mappings
static size_t limit_bytes = (size_t)8 << 30;
static std::vector<size_t> used, top;  // by device
static std::map<uintptr_t, size_t> segments, pinned;
static std::vector<std::multimap<size_t, uintptr_t>> freed;
static long copies = 0, pageable_in = 0, pageable_out = 0;

void reserve_memory() {
  if (auto bytes = getenv("EMU_MEMORY_BYTES")) limit_bytes = atoll(bytes);
  int file = memfd_create("emulated device", MFD_CLOEXEC);
  size_t all = SPACE * device_count;
  if (file < 0 || ftruncate(file, all)) abort();
  seen = (uintptr_t)mmap(nullptr, all, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  found = (uintptr_t)mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if ((void*)seen == MAP_FAILED || (void*)found == MAP_FAILED) abort();
  used.resize(device_count), top.resize(device_count), freed.resize(device_count);
}

size_t memory_bytes() { return limit_bytes; }
bool on_device(uintptr_t address) {
  return address >= seen && address < seen + SPACE * device_count;
}
int device_at(uintptr_t address) { return (address - seen) / SPACE; }
uintptr_t host_address(uintptr_t address) {
  return on_device(address) ? address - seen + found : address;
}
static bool is_pinned(uintptr_t address, size_t nbytes) {
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  auto [start, length] = *--after;
  return address + nbytes <= start + length;
}

// ---- allocation ------------------------------------------------------------------------------------

API Error cudaMalloc(void** pointer, size_t nbytes) {
  Entry entry("cudaMalloc");
  if (prohibited("cudaMalloc")) return fail(CAPTURE_UNSUPPORTED);
  int device = current_device;
  nbytes = (nbytes + SEGMENT - 1) / SEGMENT * SEGMENT;
  *pointer = nullptr;
  if (!nbytes) return SUCCESS;
  if (used[device] + nbytes > limit_bytes) return fail(OUT_OF_MEMORY);
  auto fits = freed[device].find(nbytes);
  if (fits != freed[device].end()) {
    *pointer = (void*)fits->second;
    freed[device].erase(fits);
  } else {
    if (top[device] + nbytes > SPACE) return fail(OUT_OF_MEMORY);
    *pointer = (void*)(seen + device * SPACE + top[device]);
    top[device] += nbytes;
  }
  segments[(uintptr_t)*pointer] = nbytes;
  used[device] += nbytes;
  return SUCCESS;
}
API Error cudaFree(void* pointer) {
  Entry entry("cudaFree");
  if (!pointer) return SUCCESS;
  if (prohibited("cudaFree")) return fail(CAPTURE_UNSUPPORTED);
  auto segment = segments.find((uintptr_t)pointer);
  if (segment == segments.end()) return fail(INVALID_VALUE);
  auto [start, nbytes] = *segment;
  int device = device_at(start);
  synchronize(device, entry);
  // what was there is gone, so that whoever reads it later finds nothing of it
  madvise((void*)host_address(start), nbytes, MADV_REMOVE);
  segments.erase(start);
  freed[device].insert({nbytes, start});
  used[device] -= nbytes;
  return SUCCESS;
}
API Error cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Entry entry("cudaMemGetInfo");
  *total_bytes = limit_bytes;
  *free_bytes = limit_bytes - used[current_device];
  return SUCCESS;
}
API Error cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  Entry entry("cudaHostAlloc");
  if (prohibited("cudaHostAlloc")) return fail(CAPTURE_UNSUPPORTED);
  *pointer = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  if (!*pointer) return fail(OUT_OF_MEMORY);
  pinned[(uintptr_t)*pointer] = nbytes;
  return SUCCESS;
}
API Error cudaFreeHost(void* pointer) {
  Entry entry("cudaFreeHost");
  for (int device = 0; device < device_count; device++) synchronize(device, entry);
  if (!pinned.erase((uintptr_t)pointer)) return fail(INVALID_VALUE);
  free(pointer);
  return SUCCESS;
}
API Error cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
  Entry entry("cudaHostRegister");
  if (prohibited("cudaHostRegister")) return fail(CAPTURE_UNSUPPORTED);
  if (!nbytes) return fail(INVALID_VALUE);
  auto start = (uintptr_t)pointer;
  auto after = pinned.lower_bound(start + nbytes);
  if (after != pinned.begin()) {
    auto [other, length] = *--after;
    if (other + length > start) return fail(ALREADY_REGISTERED);
  }
  pinned[start] = nbytes;
  return SUCCESS;
}
API Error cudaHostUnregister(void* pointer) {
  Entry entry("cudaHostUnregister");
  return pinned.erase((uintptr_t)pointer) ? SUCCESS : fail(NOT_REGISTERED);
}
API Error cudaHostGetDevicePointer(void** found_at, void* pointer, unsigned) {
  *found_at = pointer;
  return SUCCESS;
}

struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;  // from CUDA 13 on more follows, which nobody reads
};
API Error cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
  Entry entry("cudaPointerGetAttributes", false);
  enum { UNREGISTERED, HOST, DEVICE };
  auto address = (uintptr_t)pointer;
  if (on_device(address))
    *attributes = {DEVICE, device_at(address), (void*)pointer, nullptr};
  else if (is_pinned(address, 1))
    *attributes = {HOST, current_device, (void*)pointer, (void*)pointer};
  else
    *attributes = {UNREGISTERED, -2, nullptr, (void*)pointer};
  return SUCCESS;
}

// ---- copies ----------------------------------------------------------------------------------------

// Between the device and memory that is not pinned the host waits: until its bytes have been read, or are
// there. (cudaMemcpyAsync, "API synchronization behavior" in CUDA's manual.)
static Error copy(void* target, const void* source, size_t nbytes, void* handle, bool wait) {
  Entry entry("cudaMemcpyAsync");
  if (!nbytes) return SUCCESS;
  copies++;
  auto to = (uintptr_t)target, from = (uintptr_t)source;
  auto stream = stream_of(handle);
  bool from_host = !on_device(from) && !is_pinned(from, nbytes);
  bool to_host = !on_device(to) && !is_pinned(to, nbytes);
  if (stream->capture && (from_host || to_host || wait)) return fail(CAPTURE_UNSUPPORTED);
  if (from_host && on_device(to)) {
    pageable_in++;
    await(mark_now(stream), entry);
    auto bytes = std::make_shared<std::string>((const char*)from, nbytes);
    enqueue(stream, [=] { memcpy((void*)host_address(to), bytes->data(), nbytes); });
  } else {
    pageable_out += to_host;
    enqueue(stream, [=] { memcpy((void*)host_address(to), (void*)host_address(from), nbytes); });
  }
  if (wait || to_host) await(mark_now(stream), entry);
  return SUCCESS;
}
API Error cudaMemcpyAsync(void* target, const void* source, size_t nbytes, int, void* stream) {
  return copy(target, source, nbytes, stream, false);
}
API Error cudaMemcpy(void* target, const void* source, size_t nbytes, int) {
  return copy(target, source, nbytes, nullptr, true);
}
API Error cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes,
                              void* stream) {
  return copy(target, source, nbytes, stream, false);
}
API Error cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                            size_t source_pitch, size_t width, size_t height, int, void* stream) {
  for (size_t row = 0; row < height; row++)
    if (auto error = copy((char*)target + row * target_pitch,
                          (const char*)source + row * source_pitch, width, stream, false))
      return error;
  return SUCCESS;
}
API Error cudaMemsetAsync(void* target, int value, size_t nbytes, void* stream) {
  Entry entry("cudaMemsetAsync");
  auto to = (uintptr_t)target;
  enqueue(stream_of(stream), [=] { memset((void*)host_address(to), value, nbytes); });
  return SUCCESS;
}
API Error cudaMemset(void* target, int value, size_t nbytes) {
  return cudaMemsetAsync(target, value, nbytes, nullptr);
}
API Error cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return SUCCESS;
}

// ---- for the tests ---------------------------------------------------------------------------------

API uintptr_t emu_host_address(uintptr_t address) { return host_address(address); }
API long emu_copies(int kind) {  // 0: all, 1: from memory that is not pinned, 2: to such memory
  Entry entry("emu_copies", false);
  return kind == 0 ? copies : kind == 1 ? pageable_in : pageable_out;
}
API void emu_limit(size_t nbytes) {
  Entry entry("emu_limit", false);
  limit_bytes = nbytes;
}
