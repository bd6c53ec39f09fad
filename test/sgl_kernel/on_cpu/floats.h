// Bits of floats, by the names of sgl-kernel/csrc/machine.cuh, on a CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sgl_kernel {

inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float value_of_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t bfloat16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float value_of_half(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

inline uint16_t half_of(float value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}

}  // namespace sgl_kernel
