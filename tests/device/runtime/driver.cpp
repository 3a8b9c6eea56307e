// The driver's library, of which torch calls these few functions itself.
#include "emulator.h"

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
API int cuGetErrorString(int, const char** text) {
  *text = "the emulated driver has no such function";
  return SUCCESS;
}
