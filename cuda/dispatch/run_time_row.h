// Kernels of rows of the table that the build lacks. Each is compiled for what is known of its
// problem: a layout, a type of D, an epilogue.

#ifndef JAX_TCGEMM_DISPATCH_RUN_TIME_ROW_H_
#define JAX_TCGEMM_DISPATCH_RUN_TIME_ROW_H_

#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/kernel_entry.h"
#include "dispatch/launch.h"
#include "kernel_set.h"

namespace jax_tcgemm {

// Says if such kernels may be chosen for a device: none was refused yet.
bool may_compile_rows(const DeviceProperties& device);

// The same of all devices.
bool may_compile_rows();

// Begins to compile the row's kernel for a request, whose addresses need not be known.
void begin_row_kernel(const KernelEntry& entry, const LaunchRequest& request);

// The row's kernel for a request: compiled and loaded by the first who asks. Null where it cannot
// be; then the device may compile no rows any more, and another one is to be chosen.
KernelHandle* row_kernel(const KernelEntry& entry, const LaunchRequest& request);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RUN_TIME_ROW_H_
