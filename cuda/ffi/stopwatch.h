// Times the work on the streams of XLA's programs by events: a profiler would not work beside
// another one in the process. Programs that hold marks are enqueued among the programs to time.

#ifndef JAX_TCGEMM_FFI_STOPWATCH_H_
#define JAX_TCGEMM_FFI_STOPWATCH_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jax_tcgemm {

// Sets the configuration for the calls behind a gate whose `config` is "measured", so that one
// compiled program times many configurations. A device's gates are counted from 1 since the process
// began.
void configure_gate(int ordinal, uint32_t gate, const std::string& config);

// Checks if a call's attribute `config` leaves the choice to gates.
bool is_measured(std::string_view config);

// Returns the configuration that the device's last enqueued gate names.
std::string measured_config(int ordinal);

// Opens the first `count` gates that a device's programs have passed or will pass, counted since
// the process began.
void open_gates(int ordinal, uint32_t count);

// Waits for the marks of a device, and forgets them. Returns, for each gate, the seconds between
// its mark and the next one, between that one and the next, and so on.
//
// Throws std::runtime_error: CUDA failed.
std::vector<std::vector<double>> stopwatch_seconds(int ordinal);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_STOPWATCH_H_
