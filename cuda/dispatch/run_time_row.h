// Kernels of table rows that the build lacks. Each is compiled for the known facts of its problem:
// a layout, a type of D, an epilogue.

#ifndef JAX_TCGEMM_DISPATCH_RUN_TIME_ROW_H_
#define JAX_TCGEMM_DISPATCH_RUN_TIME_ROW_H_

#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/kernel_entry.h"
#include "dispatch/launch.h"
#include "kernel_set.h"

namespace jax_tcgemm {

// Checks if such kernels may be chosen for a device: no attempt to compile one has failed yet.
bool may_compile_rows(const DeviceProperties& device);

// Checks the same for all devices.
bool may_compile_rows();

// Begins to compile the row's kernel for a request, whose addresses need not be known.
void begin_row_kernel(const KernelEntry& entry, const LaunchRequest& request);

// Returns the row's kernel for a request; the first request compiles and loads it. Returns null if
// that fails. The device may then compile no rows any more, and the caller chooses another row.
KernelHandle* row_kernel(const KernelEntry& entry, const LaunchRequest& request);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RUN_TIME_ROW_H_
