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

inline uint8_t e4m3_of(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::abs(value);
  if (std::isnan(value)) return sign | 0x7f;
  if (size >= 448.0f) return sign | 0x7e;
  int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
  int digits = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
  if (digits == 16) digits = 8, ++exponent;
  return sign | static_cast<uint8_t>(digits < 8 ? digits : (exponent + 7) << 3 | (digits - 8));
}

inline float value_of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, digits = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float size = exponent == 0 ? std::ldexp(digits, -9) : std::ldexp(8 + digits, exponent - 10);
  return code & 0x80 ? -size : size;
}

inline uint16_t e4m3_pair_of(float first, float second) { return e4m3_of(first) | e4m3_of(second) << 8; }

inline void values_of_e4m3_pair(uint16_t pair, float& first, float& second) {
  first = value_of_e4m3(pair & 255);
  second = value_of_e4m3(pair >> 8);
}

}  // namespace sgl_kernel
