#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "cuda_driver.h"

namespace {

using namespace monolith;

// A driver that records launches. Functions of C have no state of their own, so it is here.
struct Fake {
  int current = 0;  // the context of the thread
  std::vector<std::vector<std::byte>> launched;
  std::vector<unsigned> sizes;  // blocks and threads of the last launch
  void* stream = nullptr;
  std::map<std::string, int> failing;  // by function, the error to return
} fake;

constexpr std::array<std::size_t, 4> kSizes{8, 4, 8, 12};  // of the parameters of the one kernel

int fails(const char* function) {
  const auto found = fake.failing.find(function);
  return found == fake.failing.end() ? 0 : found->second;
}

CudaFunctions functions() {
  return {
      .init = [](unsigned) { return fails("init"); },
      .device_get =
          [](int* device, int ordinal) {
            *device = ordinal;
            return ordinal < 2 ? 0 : 101;
          },
      .retain_context =
          [](void** context, int device) {
            *context = reinterpret_cast<void*>(std::uintptr_t(device) + 1);
            return 0;
          },
      .set_context =
          [](void* context) {
            fake.current = int(reinterpret_cast<std::uintptr_t>(context));
            return 0;
          },
      .load = [](void**, const void*) { return fails("load"); },
      .find = [](void**, void*, const char* name) { return std::string(name) == "step" ? 0 : 500; },
      .launch =
          [](void*, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
             void* stream, void** arguments, void**) {
            if (fake.current == 0) return 201;
            if (const int error = fails("launch")) return error;
            fake.launched.clear();
            for (std::size_t i = 0; i < kSizes.size(); ++i) {
              const auto* const bytes = static_cast<const std::byte*>(arguments[i]);
              fake.launched.emplace_back(bytes, bytes + kSizes[i]);
            }
            fake.sizes = {x, threads};
            fake.stream = stream;
            return 0;
          },
      .error_name =
          [](int error, const char** text) {
            *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                    : error == 1 ? "CUDA_ERROR_INVALID_VALUE"
                                 : nullptr;
            return 0;
          },
      .error_string =
          [](int, const char** text) {
            *text = "as the driver says it";
            return 0;
          },
      .parameter_info =
          [](void*, std::size_t index, std::size_t*, std::size_t* size) {
            if (index >= kSizes.size()) return 1;
            *size = kSizes[index];
            return 0;
          },
  };
}

CudaModule module() {
  fake = {};
  return {std::make_shared<CudaDriver>(functions(), 1), "image"};
}

void launch(const CudaKernel& kernel) {
  void* pointer = reinterpret_cast<void*>(std::uintptr_t{0x1234});
  std::int32_t small = -5;
  std::uint64_t large = ~std::uint64_t{0};
  std::array<float, 3> numbers{1.5F, 2.5F, 3.5F};
  std::array<void*, 4> arguments{&pointer, &small, &large, &numbers};
  kernel.launch(7, 256, reinterpret_cast<void*>(std::uintptr_t{9}), arguments.data());
}

void a_launch_reads_the_bytes_of_each_argument() {
  const CudaKernel kernel = module().kernel("step", "PiQs");
  launch(kernel);
  CHECK((fake.sizes == std::vector<unsigned>{7, 256}));
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(fake.stream), std::uintptr_t{9});
  std::array<float, 3> found{};
  std::memcpy(found.data(), fake.launched[3].data(), sizeof found);
  CHECK((found == std::array<float, 3>{1.5F, 2.5F, 3.5F}));
  std::int32_t small = 0;
  std::memcpy(&small, fake.launched[1].data(), sizeof small);
  CHECK_EQUAL(small, -5);
}

void a_thread_without_a_context_gets_that_of_the_device() {
  const CudaKernel kernel = module().kernel("step", "PiQs");
  fake.current = 0;
  launch(kernel);
  CHECK_EQUAL(fake.current, 2);
  CHECK_EQUAL(fake.launched.size(), std::size_t{4});
}

void parameters_have_the_sizes_of_the_image() {
  const CudaModule loaded = module();
  CHECK_EQUAL(loaded.kernel("step", "PiQs").parameters()[3].bytes, std::size_t{12});
  CHECK_THROWS(CudaError, "kernel 'step': parameter 1 has 4 bytes, its type 'q' has 8",
               loaded.kernel("step", "Pq"));
  CHECK_THROWS(CudaError, "reading parameter 4 of kernel 'step'", loaded.kernel("step", "PiQsi"));
  CHECK_THROWS(CudaError, "unknown letter 'x'", loaded.kernel("step", "x"));
}

void a_driver_that_tells_no_sizes_takes_any_struct() {
  fake = {};
  CudaFunctions old = functions();
  old.parameter_info = nullptr;
  const CudaModule loaded(std::make_shared<CudaDriver>(old, 0), "image");
  const CudaKernel kernel = loaded.kernel("step", "PiQs");
  CHECK_EQUAL(kernel.parameters()[0].bytes, std::size_t{8});
  CHECK_EQUAL(kernel.parameters()[3].bytes, std::size_t{0});
  launch(kernel);
  CHECK_EQUAL(fake.launched.size(), std::size_t{4});
}

void errors_name_the_kernel_and_the_error() {
  const CudaModule loaded = module();
  const CudaKernel kernel = loaded.kernel("step", "PiQs");
  fake.failing["launch"] = 700;
  CHECK_THROWS(CudaError,
               "CUDA: launching kernel 'step' failed with CUDA_ERROR_ILLEGAL_ADDRESS: as the driver says it "
               "(error 700)",
               launch(kernel));
  CHECK_THROWS(CudaError, "finding kernel 'other' failed with an unknown error", loaded.kernel("other", ""));
  CHECK_THROWS(CudaError, "opening device 2", CudaDriver(functions(), 2));
  fake.failing["init"] = 1;
  CHECK_THROWS(CudaError, "initializing the driver failed with CUDA_ERROR_INVALID_VALUE",
               CudaDriver(functions(), 0));
}

void a_library_that_is_not_there_or_no_driver_is_refused() {
  CHECK_THROWS(CudaError, "the CUDA driver cannot be loaded: libnowhere.so.1",
               CudaFunctions::open("libnowhere.so.1"));
  CHECK_THROWS(CudaError, "the CUDA driver has no function cuInit", CudaFunctions::open("libm.so.6"));
}

}  // namespace

int main() {
  return check::run({
      {"a launch reads the bytes of each argument", a_launch_reads_the_bytes_of_each_argument},
      {"a thread without a context gets that of the device",
       a_thread_without_a_context_gets_that_of_the_device},
      {"parameters have the sizes of the image", parameters_have_the_sizes_of_the_image},
      {"a driver that tells no sizes takes any struct", a_driver_that_tells_no_sizes_takes_any_struct},
      {"errors name the kernel and the error", errors_name_the_kernel_and_the_error},
      {"a library that is not there or no driver is refused",
       a_library_that_is_not_there_or_no_driver_is_refused},
  });
}
