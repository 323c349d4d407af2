// Success, or an error that says where it arose, which condition failed and with what values.

#ifndef JAX_TCGEMM_COMMON_STATUS_H_
#define JAX_TCGEMM_COMMON_STATUS_H_

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace jax_tcgemm {

class [[nodiscard]] Status {
 public:
  enum class Code { kOk, kInvalidArgument, kInternal };

  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Appends a value's text, without iostream: its locale clashes with jaxlib's own C++ library.
template <typename Value>
void append_value(std::string* text, const Value& value) {
  if constexpr (std::is_convertible_v<Value, std::string_view>) {
    text->append(std::string_view(value));
  } else if constexpr (std::is_pointer_v<Value>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%p", static_cast<const void*>(value));
    text->append(digits);
  } else {
    text->append(std::to_string(value));
  }
}

// Returns the file's name without folders. Compilers have __FILE_NAME__ for that, but GCC only from
// 12 on.
consteval const char* base_name(const char* path) {
  const char* name = path;
  for (; *path != '\0'; ++path) {
    if (*path == '/') name = path + 1;
  }
  return name;
}

template <typename... Values>
Status make_status(Status::Code code, const char* file, int line, const char* expression,
                   const Values&... values) {
  std::string message = "jax_tcgemm: ";
  message.append(file).append(":");
  append_value(&message, line);
  message.append(": ").append(expression).append(": ");
  (append_value(&message, values), ...);
  return Status(code, std::move(message));
}

}  // namespace jax_tcgemm

// Returns an invalid-argument Status from the enclosing function unless `condition` holds. The
// message consists of the further arguments and their values.
#define JAX_TCGEMM_REQUIRE(condition, ...)                                                      \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      return ::jax_tcgemm::make_status(::jax_tcgemm::Status::Code::kInvalidArgument,            \
                                       ::jax_tcgemm::base_name(__FILE__), __LINE__, #condition, \
                                       __VA_ARGS__);                                            \
    }                                                                                           \
  } while (0)

#define JAX_TCGEMM_RETURN_IF_ERROR(expression)                                      \
  do {                                                                              \
    if (::jax_tcgemm::Status status_ = (expression); !status_.ok()) return status_; \
  } while (0)

// Returns an internal-error Status unless a CUDA call succeeded.
#define JAX_TCGEMM_CUDA_CHECK(expression, ...)                                                    \
  do {                                                                                            \
    if (const cudaError_t cuda_check_error_ = (expression); cuda_check_error_ != cudaSuccess) {   \
      return ::jax_tcgemm::make_status(::jax_tcgemm::Status::Code::kInternal,                     \
                                       ::jax_tcgemm::base_name(__FILE__), __LINE__, #expression,  \
                                       cudaGetErrorName(cuda_check_error_), " (",                 \
                                       cudaGetErrorString(cuda_check_error_), ") ", __VA_ARGS__); \
    }                                                                                             \
  } while (0)

#endif  // JAX_TCGEMM_COMMON_STATUS_H_
