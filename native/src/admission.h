// Admission: which unseen ids earn a row.
#pragma once

#include <cstdint>

namespace monolith {

// Asked by a table about ids it does not hold. Thread-safe.
class Admission {
 public:
  virtual ~Admission() = default;

  // Records `count` sightings of `id`; true when the id must wait.
  virtual bool refuses(std::int64_t id, std::uint32_t count) = 0;
};

}  // namespace monolith
