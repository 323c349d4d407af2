// Accesses to shared memory by 32-bit shared addresses.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared_address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(shared_address));
  return word;
}

__device__ __forceinline__ uint8_t load_shared_1(uint32_t shared_address) {
  uint16_t value;
  asm volatile("ld.shared.u8 %0, [%1];\n" : "=h"(value) : "r"(shared_address) : "memory");
  return static_cast<uint8_t>(value);
}

__device__ __forceinline__ uint16_t load_shared_2(uint32_t shared_address) {
  uint16_t value;
  asm volatile("ld.shared.b16 %0, [%1];\n" : "=h"(value) : "r"(shared_address) : "memory");
  return value;
}

__device__ __forceinline__ void load_shared_8(float& first, float& second,
                                              uint32_t shared_address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(first), "=f"(second)
               : "r"(shared_address));
}

__device__ __forceinline__ void load_shared_8(int32_t& first, int32_t& second,
                                              uint32_t shared_address) {
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];\n"
               : "=r"(first), "=r"(second)
               : "r"(shared_address));
}

__device__ __forceinline__ void load_shared_16(float (&value)[4], uint32_t shared_address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(shared_address));
}

__device__ __forceinline__ void load_shared_16(uint32_t (&word)[4], uint32_t shared_address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(shared_address)
               : "memory");
}

__device__ __forceinline__ void store_shared_1(uint32_t shared_address, uint8_t value) {
  asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(shared_address), "h"(uint16_t{value}) : "memory");
}

__device__ __forceinline__ void store_shared_2(uint32_t shared_address, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(shared_address), "h"(value) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared_address, float value) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(shared_address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared_address, int32_t value) {
  asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(shared_address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t shared_address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(shared_address), "f"(first), "f"(second)
               : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared_address,
                                                const uint32_t (&word)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

}  // namespace jax_tcgemm::ptx
