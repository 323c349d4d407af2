// Times of what runs on the streams of XLA's programs, by events: a profiler would not bear another
// one in the process. Programs that hold marks are enqueued among those that are timed.

#ifndef JAX_TCGEMM_FFI_STOPWATCH_H_
#define JAX_TCGEMM_FFI_STOPWATCH_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jax_tcgemm {

// Says which configuration the calls behind a gate take that have `config` "measured": one compiled
// program times many. Gates of a device are counted since the process began, from 1 on.
void configure_gate(int ordinal, uint32_t gate, const std::string& config);

// Says if a call's attribute `config` leaves it to gates.
bool is_measured(std::string_view config);

// The configuration that the device's last enqueued gate names.
std::string measured_config(int ordinal);

// Opens the first `count` gates that a device's programs have passed or will pass, counted since
// the process began.
void open_gates(int ordinal, uint32_t count);

// Waits for the marks of a device, and forgets them. Returns for each gate the seconds from its
// mark to the next one behind it, from that to the next, and so on.
//
// Throws std::runtime_error: CUDA failed.
std::vector<std::vector<double>> stopwatch_seconds(int ordinal);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_STOPWATCH_H_
