#include "ffi/peers.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "common/driver.h"
#include "common/saturating.h"
#include "ffi/handlers.h"
#include "shared_limits.h"

namespace jax_tcgemm {
namespace {

// The numbers of devices in the programs of calls.
struct Numbers {
  std::mutex mutex;
  std::map<int64_t, int> executables;  // that have a call
  std::map<std::pair<int64_t, int32_t>, int32_t> known;
  int64_t reads = 0;

  static Numbers& get() {
    static auto* const numbers = new Numbers();  // never freed: threads may outlive the interpreter
    return *numbers;
  }
};

// Reads the number of this device in the program, which only the program itself can tell.
//
// XLA compiles a program for an order of devices, so in one executable a device always has the same
// number, and the host waits for it once, in the first run. JAX's persistent cache, however, loads
// an executable again for the same devices in another order. Then several executables have the
// call, and the host waits for the number in each run.
//
// Waiting cannot hang: the peers have enqueued all that comes before this call, or will, without
// waiting for this device's host.
Status read_number(int64_t call, int32_t ordinal, const ffi::AnyBuffer& buffer, cudaStream_t stream,
                   int32_t* number) {
  Numbers& numbers = Numbers::get();
  {
    const std::lock_guard<std::mutex> lock(numbers.mutex);
    const auto found = numbers.known.find({call, ordinal});
    if (numbers.executables[call] == 1 && found != numbers.known.end()) {
      *number = found->second;
      return Status();
    }
  }
  JAX_TCGEMM_CUDA_CHECK(cudaMemcpyAsync(number, buffer.untyped_data(), sizeof(*number),
                                        cudaMemcpyDeviceToHost, stream),
                        "the number of device ", ordinal);
  JAX_TCGEMM_CUDA_CHECK(cudaStreamSynchronize(stream), "the number of device ", ordinal);
  const std::lock_guard<std::mutex> lock(numbers.mutex);
  numbers.known[{call, ordinal}] = *number;
  ++numbers.reads;
  return Status();
}

}  // namespace

int64_t signature_of(int64_t m, int64_t n, int64_t k, int kind) {
  uint64_t signature = 0;  // attributes may be any numbers
  for (const int64_t part : {m, n, k, int64_t{kind}}) {
    signature = signature * 31 + static_cast<uint64_t>(part);
  }
  return static_cast<int64_t>(signature);
}

Status decode_peers(const PeersAttributes& at, ffi::RemainingArgs& operands, int64_t signature,
                    int64_t run, int32_t ordinal, cudaStream_t stream, Peers* peers) {
  const auto total = static_cast<int64_t>(at.devices.size());
  JAX_TCGEMM_REQUIRE(
      2 <= at.group_size && at.group_size <= kMostPeers && total % at.group_size == 0, total,
      " devices in groups of ", at.group_size);
  JAX_TCGEMM_REQUIRE(operands.size() >= 3, operands.size(), " operands");
  const auto buffer = operands.get<ffi::AnyBuffer>(operands.size() - 1);
  JAX_TCGEMM_REQUIRE(
      buffer.has_value() && buffer->element_type() == ffi::S32 && buffer->element_count() == 1,
      "the device's number is missing");
  int32_t number = 0;
  JAX_TCGEMM_RETURN_IF_ERROR(read_number(at.call, ordinal, *buffer, stream, &number));
  const auto found = std::find(at.devices.begin(), at.devices.end(), number);
  JAX_TCGEMM_REQUIRE(found != at.devices.end(), "no group has device ", number);
  const int64_t index = found - at.devices.begin();
  peers->key = {run, at.call, index / at.group_size};
  peers->count = static_cast<int>(at.group_size);
  peers->rank = static_cast<int>(index % at.group_size);
  peers->signature = signature;
  return Status();
}

void count_executable(int64_t call) {
  Numbers& numbers = Numbers::get();
  const std::lock_guard<std::mutex> lock(numbers.mutex);
  ++numbers.executables[call];
}

Status check_uncaptured(cudaStream_t stream) {
  bool capturing = false;
  JAX_TCGEMM_RETURN_IF_ERROR(is_captured(stream, &capturing));
  JAX_TCGEMM_REQUIRE(!capturing,
                     "an overlapped product cannot be captured into a CUDA graph; set "
                     "JAX_TCGEMM_OVERLAP=off");
  return Status();
}

Status decode_rows(const PeersAttributes& at, ffi::RemainingArgs& operands, size_t index,
                   int64_t divided, int64_t length, int64_t row_stride, int64_t column_stride,
                   GatheredRows* rows) {
  const auto all = operands.get<ffi::AnyBuffer>(index);
  const auto own = operands.get<ffi::AnyBuffer>(operands.size() - 2);
  JAX_TCGEMM_REQUIRE(all.has_value() && own.has_value(), "no rows");
  *rows = {own->untyped_data(), static_cast<char*>(all->untyped_data()),
           static_cast<int64_t>(own->size_bytes()), static_cast<int64_t>(all->size_bytes())};
  // The rows lie one after the other, so that those of a device do, too.
  const auto elements = static_cast<int64_t>(all->element_count());
  JAX_TCGEMM_REQUIRE(
      divided % at.group_size == 0 && elements == mul_sat(divided, length) &&
          row_stride == length && column_stride == 1 &&
          rows->bytes == mul_sat(rows->shard_bytes, at.group_size) && rows->shard_bytes % 16 == 0,
      divided, " rows of ", length, " elements with stride ", row_stride, ", of which ",
      at.group_size, " devices have ", rows->shard_bytes, " bytes each");
  return Status();
}

int64_t overlapped_number_reads() {
  Numbers& numbers = Numbers::get();
  const std::lock_guard<std::mutex> lock(numbers.mutex);
  return numbers.reads;
}

}  // namespace jax_tcgemm
