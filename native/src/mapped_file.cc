#include "mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace monolith {

MappedFile::MappedFile(int descriptor) {
  struct stat about;
  if (fstat(descriptor, &about) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  size_ = static_cast<std::size_t>(about.st_size);
  if (size_ == 0) return;
  void* const mapping = mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  data_ = static_cast<const std::byte*>(mapping);
#ifdef MADV_HUGEPAGE
  madvise(mapping, size_, MADV_HUGEPAGE);  // a wish: not every filesystem has large pages
#endif
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace monolith
