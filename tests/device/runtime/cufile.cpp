// libcufile for tests: what Penstock calls of NVIDIA's library, over pread and pwrite.
//
// Written from the public reference of the interface; numbers and structures are those. Over the emulated
// runtime it moves device memory; without that, host memory by the addresses that it is given. It refuses
// what the reference says is refused: how a file is opened, and memory of another device than the thread's.
//
// CUFILE_MAPPING_BYTES: a transfer that crosses an address which is a multiple of that fails, as one that
// crosses from one mapping of GPU memory to the next may.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define API extern "C" __attribute__((visibility("default")))

enum {
  SUCCESS = 0,
  POINTER_RANGE_ERROR = 5014,
  CONTEXT_MISMATCH = 5015,
  INVALID_FILE_OPEN_FLAG = 5019,
  DIO_NOT_SET = 5020,
  INVALID_VALUE = 5022,
};

struct Status {
  int error, cuda_error;
};
struct Description {
  int type;
  union {
    int fd;
    void* handle;
  } target;
  const void* operations;
};
struct Properties {
  struct {
    unsigned major, minor;
    size_t poll_threshold, max_direct_io;
    unsigned status, control;
  } module;
  unsigned features, max_device_cache, per_buffer_cache, max_pinned, max_batch, batch_timeout;
};
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

template <typename Function>
static Function* found(const char* name) {
  return (Function*)dlsym(RTLD_DEFAULT, name);
}

API Status cuFileDriverOpen() { return {SUCCESS, 0}; }

API Status cuFileDriverGetProperties(Properties* properties) {
  *properties = {};
  properties->module.major = 2;
  properties->module.minor = 20;
  properties->module.status = 1 << 4;  // NVMe
  return {SUCCESS, 0};
}

API Status cuFileHandleRegister(void** handle, Description* description) {
  if (description->type != 1) return {INVALID_VALUE, 0};
  int fd = description->target.fd;
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0) return {INVALID_VALUE, 0};
  if (flags & O_TMPFILE & ~O_DIRECTORY) return {INVALID_FILE_OPEN_FLAG, 0};
  if (!(flags & O_DIRECT)) return {DIO_NOT_SET, 0};
  char path[32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int buffered = open(path, (flags & O_ACCMODE) | O_CLOEXEC);  // takes addresses that are not aligned
  if (buffered < 0) return {INVALID_VALUE, 0};
  *handle = new int(buffered);
  return {SUCCESS, 0};
}

API void cuFileHandleDeregister(void* handle) {
  close(*(int*)handle);
  delete (int*)handle;
}

// Where the host finds memory that the calling thread may move; null, and why not.
static char* host_memory(void* pointer, size_t nbytes, int* error) {
  auto address = (uintptr_t)pointer;
  if (auto text = getenv("CUFILE_MAPPING_BYTES")) {
    auto mapping = strtoull(text, nullptr, 10);
    if (mapping && address / mapping != (address + nbytes - 1) / mapping) {
      *error = POINTER_RANGE_ERROR;
      return nullptr;
    }
  }
  auto translate = found<uintptr_t(uintptr_t)>("emu_host_address");
  if (!translate) return (char*)address;
  auto attributes_of = found<int(PointerAttributes*, const void*)>("cudaPointerGetAttributes");
  auto current = found<int(int*)>("cudaGetDevice");
  PointerAttributes attributes;
  int device = -1;
  const int on_a_device = 2;
  if (attributes_of(&attributes, pointer) || current(&device) ||
      (attributes.type == on_a_device && attributes.device != device)) {
    *error = CONTEXT_MISMATCH;
    return nullptr;
  }
  return (char*)translate(address);
}

API ssize_t cuFileRead(void* handle, void* base, size_t nbytes, off_t offset, off_t beyond) {
  int error = 0;
  char* memory = host_memory((char*)base + beyond, nbytes, &error);
  return memory ? pread(*(int*)handle, memory, nbytes, offset) : -error;
}

API ssize_t cuFileWrite(void* handle, const void* base, size_t nbytes, off_t offset, off_t beyond) {
  int error = 0;
  char* memory = host_memory((char*)base + beyond, nbytes, &error);
  return memory ? pwrite(*(int*)handle, memory, nbytes, offset) : -error;
}
