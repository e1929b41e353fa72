// The CUDA driver's interface, as far as the core uses it: see native/src/cuda_driver.h. A device's number is
// the seed of its launches, and an image is the path of a library made of kernels.
//
// A library of its own, opened by the core and for the core alone: on a machine with a GPU these names must
// not take the place of the real driver's.

#include <dlfcn.h>

#include <cstddef>
#include <string>

namespace {

using u32 = unsigned;
using u64 = unsigned long long;

struct Module {
  void* library;
  u64 seed;
};

struct Function {
  const char* (*launch)(void**, u32, u32, u64);
  int (*size_of)(int);
  u64 seed;
};

enum Status {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  FAILED = 719
};

thread_local u64 context;  // one more than the seed; 0 for none
thread_local std::string last_failure;

}  // namespace

extern "C" {

int cuInit(u32) {
  return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** found, int device) {
  *found = (void*)(u64)(device + 1);
  return SUCCESS;
}

int cuCtxSetCurrent(void* entered) {
  context = (u64)entered;
  return SUCCESS;
}

int cuModuleLoadData(void** module, const void* path) {
  void* const library = dlopen((const char*)path, RTLD_NOW);
  if (library == nullptr) last_failure = dlerror();
  *module = new Module{library, context - 1};
  return library == nullptr ? INVALID_IMAGE : SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  const Module& own = *(const Module*)module;
  const auto find = [&](const char* what) { return dlsym(own.library, (std::string(what) + name).c_str()); };
  auto* const found = new Function{(decltype(Function::launch))find("emulated_launch_"),
                                   (decltype(Function::size_of))find("emulated_size_"), own.seed};
  *function = found;
  last_failure = std::string("no kernel ") + name;
  return found->launch != nullptr ? SUCCESS : NOT_FOUND;
}

int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  const Function& own = *(const Function*)function;
  last_failure = "no such parameter";
  if ((int)index >= own.size_of(-1)) return INVALID_VALUE;
  *offset = 0;  // not asked for
  *size = own.size_of((int)index);
  return SUCCESS;
}

int cuLaunchKernel(void* function, u32 blocks, u32, u32, u32 many, u32, u32, u32, void*, void** arguments,
                   void**) {
  if (context == 0) return INVALID_CONTEXT;  // as a thread of autograd finds it at its first launch
  const Function& own = *(const Function*)function;
  const char* const said = own.launch(arguments, blocks, many, own.seed);
  if (said == nullptr) return SUCCESS;
  last_failure = said;
  return FAILED;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR";
  return SUCCESS;
}

int cuGetErrorString(int, const char** text) {
  *text = last_failure.c_str();
  return SUCCESS;
}

}  // extern "C"
