// The CUDA driver, as far as launching kernels needs it.
//
//   CudaDriver ──load(image)──► CudaModule ──kernel(name, signature)──► CudaKernel ──launch(...)──► a stream
//
// The core is built without CUDA: the driver's library is opened at run time, and the few functions of its C
// interface that are used here are declared below. Their types are part of the driver's stable ABI.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace monolith {

// A call of the driver failed; says which, for which kernel, and the driver's own name for the error.
class CudaError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The functions of the driver. Each returns 0 (CUDA_SUCCESS) or the number of an error.
struct CudaFunctions {
  int (*init)(unsigned flags);                              // cuInit
  int (*device_get)(int* device, int ordinal);              // cuDeviceGet
  int (*retain_context)(void** context, int device);        // cuDevicePrimaryCtxRetain
  int (*set_context)(void* context);                        // cuCtxSetCurrent
  int (*load)(void** module, const void* image);            // cuModuleLoadData
  int (*find)(void** function, void* module, const char*);  // cuModuleGetFunction
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                void** extra);                        // cuLaunchKernel
  int (*error_name)(int error, const char** text);    // cuGetErrorName
  int (*error_string)(int error, const char** text);  // cuGetErrorString
  int (*parameter_info)(void* function, std::size_t index, std::size_t* offset,
                        std::size_t* size);  // cuFuncGetParamInfo; null before CUDA 12.4

  // Opens the driver's library, which stays open until the process ends.
  // Throws CudaError if there is none, or if it lacks one of the functions.
  static CudaFunctions open(const std::string& library);
};

// What a kernel's parameter is, by the letters of Python's struct module; kStruct is passed by its bytes.
enum class ArgumentKind : char {
  kPointer = 'P',
  kInt32 = 'i',
  kUint32 = 'I',
  kInt64 = 'q',
  kUint64 = 'Q',
  kFloat = 'f',
  kStruct = 's',
};

// One device, in the context that torch works in, too. Immutable, so any thread may use it.
class CudaDriver {
 public:
  CudaDriver(const CudaFunctions& functions, int device);

  // Makes the device's context the current one of this thread.
  void enter() const;
  // Throws CudaError if `status` is an error; `doing` says what failed.
  void check(int status, const std::string& doing) const;
  const CudaFunctions& functions() const { return functions_; }

 private:
  CudaFunctions functions_;
  void* context_ = nullptr;  // retained, never released: kernels live as long as the process
};

// A kernel and its typed parameters. Immutable, so any thread may launch it.
class CudaKernel {
 public:
  struct Parameter {
    ArgumentKind kind;
    std::size_t bytes;  // 0 for a struct whose size the driver does not tell
  };

  CudaKernel(std::shared_ptr<const CudaDriver> driver, void* function, std::string name,
             std::string_view signature);

  const std::string& name() const { return name_; }
  std::span<const Parameter> parameters() const { return parameters_; }

  // Puts a launch on a stream and returns. `arguments` has the address of each argument's bytes; they are
  // copied before the call returns.
  void launch(unsigned blocks, unsigned threads, void* stream, void** arguments) const;

 private:
  std::shared_ptr<const CudaDriver> driver_;
  void* function_;
  std::string name_;
  std::vector<Parameter> parameters_;
};

// The kernels of one compiled image. Never unloaded: a launch may still run when its last owner is gone.
class CudaModule {
 public:
  // `image` is a cubin, or PTX that ends with a zero byte.
  CudaModule(std::shared_ptr<const CudaDriver> driver, const void* image);

  // Throws CudaError if the image has no such kernel, or if it has other parameters than `signature` says.
  CudaKernel kernel(const std::string& name, std::string_view signature) const;

 private:
  std::shared_ptr<const CudaDriver> driver_;
  void* module_ = nullptr;
};

}  // namespace monolith
