// A header for NVRTC, which has no host headers: the parts that device code of this package uses.

#pragma once

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using intptr_t = long;
using uintptr_t = unsigned long;

#define INT32_MAX 2147483647
