// What exceptions say to users.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace fluxion {

// Memory does not hold what was written to it.
class CorruptMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// For std::bad_alloc, whose own text is a name.
inline constexpr const char* kNoMemory =
    "Memory ran out (std::bad_alloc); lower host_tokens or host_memory_gb, so that more is left for the work "
    "of a pass.";

inline std::string sentence_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "Something was thrown that is no std::exception, which is a mistake in the native library; report "
           "it.";
  }
}

}  // namespace fluxion
