#include "cuda_driver.h"

#include <dlfcn.h>

#include <utility>

namespace monolith {
namespace {

constexpr int kInvalidContext = 201;  // CUDA_ERROR_INVALID_CONTEXT

template <class Function>
void find_symbol(void* library, const char* name, Function& found) {
  found = reinterpret_cast<Function>(dlsym(library, name));
}

template <class Function>
void find_required(void* library, const char* name, Function& found) {
  find_symbol(library, name, found);
  if (found == nullptr) throw CudaError(std::string("the CUDA driver has no function ") + name);
}

std::size_t bytes_of(ArgumentKind kind) {
  switch (kind) {
    case ArgumentKind::kPointer:
    case ArgumentKind::kInt64:
    case ArgumentKind::kUint64:
      return 8;
    case ArgumentKind::kInt32:
    case ArgumentKind::kUint32:
    case ArgumentKind::kFloat:
      return 4;
    case ArgumentKind::kStruct:
      return 0;
  }
  throw CudaError(std::string("a kernel's signature has the unknown letter '") + static_cast<char>(kind) +
                  "'");
}

}  // namespace

CudaFunctions CudaFunctions::open(const std::string& library) {
  // RTLD_LOCAL: nothing else must be resolved against the driver by accident. It is torch's copy if that is
  // loaded already.
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) throw CudaError(std::string("the CUDA driver cannot be loaded: ") + dlerror());
  CudaFunctions found{};
  find_required(opened, "cuInit", found.init);
  find_required(opened, "cuDeviceGet", found.device_get);
  find_required(opened, "cuDevicePrimaryCtxRetain", found.retain_context);
  find_required(opened, "cuCtxSetCurrent", found.set_context);
  find_required(opened, "cuModuleLoadData", found.load);
  find_required(opened, "cuModuleGetFunction", found.find);
  find_required(opened, "cuLaunchKernel", found.launch);
  find_required(opened, "cuGetErrorName", found.error_name);
  find_required(opened, "cuGetErrorString", found.error_string);
  find_symbol(opened, "cuFuncGetParamInfo", found.parameter_info);
  return found;
}

CudaDriver::CudaDriver(const CudaFunctions& functions, int device) : functions_(functions) {
  check(functions_.init(0), "initializing the driver");
  int number = 0;
  check(functions_.device_get(&number, device), "opening device " + std::to_string(device));
  check(functions_.retain_context(&context_, number), "opening device " + std::to_string(device));
}

void CudaDriver::enter() const {
  check(functions_.set_context(context_), "entering the device's context");
}

void CudaDriver::check(int status, const std::string& doing) const {
  if (status == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  functions_.error_name(status, &name);
  functions_.error_string(status, &text);
  throw CudaError("CUDA: " + doing + " failed with " + (name != nullptr ? name : "an unknown error") + ": " +
                  (text != nullptr ? text : "") + " (error " + std::to_string(status) + ")");
}

CudaModule::CudaModule(std::shared_ptr<const CudaDriver> driver, const void* image)
    : driver_(std::move(driver)) {
  driver_->enter();
  driver_->check(driver_->functions().load(&module_, image), "loading a compiled module");
}

CudaKernel CudaModule::kernel(const std::string& name, std::string_view signature) const {
  driver_->enter();
  void* function = nullptr;
  driver_->check(driver_->functions().find(&function, module_, name.c_str()),
                 "finding kernel '" + name + "'");
  return {driver_, function, name, signature};
}

CudaKernel::CudaKernel(std::shared_ptr<const CudaDriver> driver, void* function, std::string name,
                       std::string_view signature)
    : driver_(std::move(driver)), function_(function), name_(std::move(name)) {
  const auto parameter_info = driver_->functions().parameter_info;
  for (const char letter : signature) {
    const auto kind = static_cast<ArgumentKind>(letter);
    Parameter parameter{kind, bytes_of(kind)};
    // The driver knows what the image was compiled with. A signature that differs would have the device read
    // past an argument or half of it, which nothing would report.
    std::size_t offset = 0, bytes = 0;
    if (parameter_info != nullptr) {
      const std::size_t index = parameters_.size();
      driver_->check(parameter_info(function_, index, &offset, &bytes),
                     "reading parameter " + std::to_string(index) + " of kernel '" + name_ + "'");
      if (kind != ArgumentKind::kStruct && bytes != parameter.bytes)
        throw CudaError("kernel '" + name_ + "': parameter " + std::to_string(index) + " has " +
                        std::to_string(bytes) + " bytes, its type '" + letter + "' has " +
                        std::to_string(parameter.bytes));
      parameter.bytes = bytes;
    }
    parameters_.push_back(parameter);
  }
}

void CudaKernel::launch(unsigned blocks, unsigned threads, void* stream, void** arguments) const {
  const auto launch = driver_->functions().launch;
  int status = launch(function_, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  if (status == kInvalidContext) {
    // A thread that has not computed on the device before, such as autograd's, has no current context yet.
    driver_->enter();
    status = launch(function_, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  }
  if (status != 0) driver_->check(status, "launching kernel '" + name_ + "'");
}

}  // namespace monolith
