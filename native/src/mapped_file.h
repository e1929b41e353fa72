// A file in memory: read-only, and shared with every process that maps it.
#pragma once

#include <cstddef>
#include <span>

namespace monolith {

// Stays when the file is deleted or its name given to another. A file that is cut short while it is mapped
// ends the process that reads beyond its end: files that are mapped are replaced, never changed.
class MappedFile {
 public:
  // Maps all of the file that `descriptor` stands for, which may be closed after. Throws std::system_error.
  explicit MappedFile(int descriptor);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace monolith
