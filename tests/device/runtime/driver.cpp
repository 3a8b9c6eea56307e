// The driver's library, of which torch calls these few functions itself.
#include "emulator.h"
#include "layout.h"

#include <dlfcn.h>

#include <string>

extern "C" int emu_context_state(int device, unsigned* flags, int* active);  // of the runtime

API int cuInit(unsigned) { return SUCCESS; }
API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return SUCCESS;
}
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return emu_context_state(device, flags, active);
}
API int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return SUCCESS;
}
API int cuThreadExchangeStreamCaptureMode(int* mode) {  // the runtime keeps it
  static auto library = "libcudart.so." + std::to_string(CUDA_MAJOR);
  static auto runtime = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!runtime) return NOT_SUPPORTED;
  return ((int (*)(int*))dlsym(runtime, "cudaThreadExchangeStreamCaptureMode"))(mode);
}
API int cuGetErrorString(int, const char** text) {
  *text = "the emulated driver has no such function";
  return SUCCESS;
}
