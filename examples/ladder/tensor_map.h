// Describes a matrix to TMA.

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

namespace ladder {

// Describes boxes of 128 bytes by box_rows rows with the 128-byte swizzle: 16-byte chunk c of row r
// lies in the place of chunk c ^ (r % 8). It looks the driver's function up at run time, so that
// nothing links to the driver.
template <typename T>
cudaError_t describe(CUtensorMap* map, const T* data, int rows, int columns, int box_rows) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), 1};
  const cuuint64_t strides[] = {columns * sizeof(T), rows * (columns * sizeof(T))};
  const cuuint32_t box[] = {128 / sizeof(T), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3,
      const_cast<T*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace ladder
