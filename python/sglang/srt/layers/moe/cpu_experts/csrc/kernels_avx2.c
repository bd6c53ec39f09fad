/* Kernels for AVX2 with FMA and F16C.
 *
 * A strip of a row of weights becomes fp32, scales included, in the order of its columns, in a buffer that stays in the
 * first cache; products are in fp32. */
#include <immintrin.h>
#include <string.h>

#include "experts.h"

#define INLINE static inline __attribute__((always_inline))
/* Loops whose arrays are registers. */
#define UNROLL _Pragma("GCC unroll 8")

static const float E2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

static void start(void) {}

/* --- weights to fp32 ---------------------------------------------------------------------------------------------- */

/* Eight e2m1 codes, the low three bits of `size` and bit 31 of `sign`. */
INLINE __m256 e2m1(__m256i size, __m256i sign) {
    __m256 values = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1), size);
    return _mm256_or_ps(values, _mm256_castsi256_ps(_mm256_and_si256(sign, _mm256_set1_epi32((int)0x80000000))));
}

/* Stores even and odd columns of 16 by turns. */
INLINE void store_by_turns(float *to, __m256 even, __m256 odd) {
    __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

INLINE void unpack_bf16(const uint8_t *from, float *to) {
    for (int i = 0; i < STRIP; i += 8) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 2 * i)));
        _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
}

/* As half precision e4m3 codes are 256 times smaller; the conversion is exact, subnormal numbers included. */
INLINE void unpack_e4m3(const uint8_t *from, float *to) {
    __m256 grown = _mm256_set1_ps(256.0f);
    for (int i = 0; i < STRIP; i += 8) {
        __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(from + i)));
        __m128i sign = _mm_and_si128(codes, _mm_set1_epi16((short)0x8000));
        __m128i size = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x7f)), 7);
        _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, size)), grown));
    }
}

INLINE void unpack_packed(const uint8_t *from, float *to) {
    for (int i = 0; i < STRIP; i += 16) {
        __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + i / 2)));
        __m256 even = e2m1(bytes, _mm256_slli_epi32(bytes, 28));
        __m256 odd = e2m1(_mm256_srli_epi32(bytes, 4), _mm256_slli_epi32(bytes, 24));
        store_by_turns(to + i, even, odd);
    }
}

INLINE void unpack_planes(int element, const uint8_t *from, float *to) {
    UNROLL for (int half = 0; half < 2; half++) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(from + 32 * half));
        for (int plane = 0; plane < 8; plane++) {
            __m256i code = _mm256_srli_epi32(words, 4 * plane);
            float *at = to + 16 * plane + 8 * half;
            if (element == E2M1_PLANES) {
                _mm256_storeu_ps(at, e2m1(code, _mm256_slli_epi32(words, 28 - 4 * plane)));
            } else {
                code = _mm256_and_si256(code, _mm256_set1_epi32(15));
                int middle = element == INT4_PLANES ? 8 : 0;
                _mm256_storeu_ps(at, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(middle))));
            }
        }
    }
}

/* A plane of even columns, in the low halves of words; of odd columns if both arguments are exchanged. */
INLINE __m256 pairs_plane(int plane, __m256i words, __m256i odd_words) {
    __m256i one = _mm256_set1_epi32(1), size;
    switch (plane) {
    case 0: return e2m1(words, _mm256_slli_epi32(words, 22));
    case 1: return e2m1(_mm256_srli_epi32(words, 4), _mm256_slli_epi32(words, 18));
    case 2: return e2m1(_mm256_srli_epi32(words, 10), _mm256_slli_epi32(odd_words, 28)); /* signs are exchanged */
    default:
        size = _mm256_and_si256(_mm256_srli_epi32(words, 6), _mm256_set1_epi32(6));
        size = _mm256_or_si256(size, _mm256_and_si256(_mm256_srli_epi32(words, 14), one));
        return e2m1(size, _mm256_slli_epi32(words, 16));
    }
}

INLINE void unpack_pairs(const uint8_t *from, float *to) {
    for (int half = 0; half < 2; half++) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(from + 32 * half)), odd = _mm256_srli_epi32(words, 16);
        for (int plane = 0; plane < 4; plane++)
            store_by_turns(to + 32 * plane + 16 * half, pairs_plane(plane, words, odd), pairs_plane(plane, odd, words));
    }
}

INLINE void unpack(int element, const uint8_t *from, float *to) {
    switch (element) {
    case BF16: unpack_bf16(from, to); break;
    case E4M3: unpack_e4m3(from, to); break;
    case E2M1_PACKED: unpack_packed(from, to); break;
    case E2M1_PAIRS: unpack_pairs(from, to); break;
    default: unpack_planes(element, from, to);
    }
}

/* --- rows of x, and products -------------------------------------------------------------------------------------- */

static size_t row_bytes(const struct matrix *w) { return (size_t)padded(w->cols) * 4; }

static void prepare(const struct matrix *w, const uint16_t *x, void *to) {
    float *out = to;
    int all = padded(w->cols);
    for (int i = 0; i < w->cols; i++) out[i] = from_bits((uint32_t)x[i] << 16);
    for (int i = w->cols; i < all; i++) out[i] = 0.0f;
}

INLINE float sum_of(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE void one_row(int element, int tokens, const struct matrix *w, int expert, int row, const void *const *x,
                    float *out, int stride) {
    float scales[MAX_GROUPS], shifts[MAX_GROUPS], values[STRIP] __attribute__((aligned(64)));
    __m256 sum[PASS][2];
    int strips = padded(w->cols) / STRIP, bytes = strip_bytes(element), group = w->group;
    int whole = in_planes(element) ? strips : w->cols / STRIP;
    const uint8_t *from = w->data + expert * w->data_expert + row * w->data_row;
    if (w->scale_type) row_scales(w, expert, row, scales, shifts);
    UNROLL for (int m = 0; m < tokens; m++) sum[m][0] = sum[m][1] = _mm256_setzero_ps();
    for (int strip = 0; strip < strips; strip++) {
        if (strip < whole) {
            for (int line = 0; line < bytes; line += 64)
                _mm_prefetch((const char *)from + (size_t)strip * bytes + line + 1024, _MM_HINT_T0);
            unpack(element, from + (size_t)strip * bytes, values);
        } else {
            uint8_t rest[2 * STRIP] = {0};
            memcpy(rest, from + (size_t)strip * bytes, (size_t)(w->cols - strip * STRIP) * bytes / STRIP);
            unpack(element, rest, values);
        }
        for (int part = 0; group && part < STRIP; part += 16) {
            __m256 by = _mm256_set1_ps(scales[(strip * STRIP + part) / group]), less = _mm256_setzero_ps();
            if (element == INT4_ZEROS) less = _mm256_set1_ps(shifts[(strip * STRIP + part) / group]);
            for (int i = part; i < part + 16; i += 8)
                _mm256_store_ps(values + i, _mm256_fmsub_ps(_mm256_load_ps(values + i), by, less));
        }
        for (int i = 0; i < STRIP; i += 16)
            UNROLL for (int m = 0; m < tokens; m++) {
                const float *at = (const float *)x[m] + strip * STRIP + i;
                UNROLL for (int k = 0; k < 2; k++)
                    sum[m][k] = _mm256_fmadd_ps(_mm256_load_ps(values + i + 8 * k), _mm256_load_ps(at + 8 * k), sum[m][k]);
            }
    }
    float factor = w->factor ? w->factor[expert] : 1.0f;
    if (!group && w->scale_type) factor *= scales[0];
    float bias = w->bias ? from_bits((uint32_t)w->bias[(size_t)expert * w->rows + row] << 16) : 0.0f;
    UNROLL for (int m = 0; m < tokens; m++) out[m * stride] = sum_of(_mm256_add_ps(sum[m][0], sum[m][1])) * factor + bias;
}

#define FORM(NAME, ELEMENT)                                                                                            \
    static void NAME(const struct matrix *w, int expert, int begin, int count, const void *const *x, int tokens,       \
                     float *out, int stride) {                                                                         \
        for (int r = 0; r < count; r++) switch (tokens) {                                                              \
            case 1: one_row(ELEMENT, 1, w, expert, begin + r, x, out + r, stride); break;                              \
            case 2: one_row(ELEMENT, 2, w, expert, begin + r, x, out + r, stride); break;                              \
            case 3: one_row(ELEMENT, 3, w, expert, begin + r, x, out + r, stride); break;                              \
            default: one_row(ELEMENT, 4, w, expert, begin + r, x, out + r, stride);                                    \
            }                                                                                                          \
    }

FORM(bf16_rows, BF16)
FORM(e4m3_rows, E4M3)
FORM(e2m1_packed, E2M1_PACKED)
FORM(e2m1_planes, E2M1_PLANES)
FORM(e2m1_pairs, E2M1_PAIRS)
FORM(int4_planes, INT4_PLANES)
FORM(int4_zeros, INT4_ZEROS)

static void rows(const struct matrix *w, int expert, int begin, int count, const void *const *x, int tokens, float *out,
                 int stride) {
    static void (*const of[NUM_ELEMENTS])(const struct matrix *, int, int, int, const void *const *, int, float *, int) = {
        bf16_rows, e4m3_rows, e2m1_packed, e2m1_planes, e2m1_pairs, int4_planes, int4_zeros};
    of[w->element](w, expert, begin, count, x, tokens, out, stride);
}

static void activate(const struct activation *a, const float *gate, const float *up, uint16_t *out, int n) {
    activate_rows(a, gate, up, out, n);
}

const struct kernels kernels_avx2 = {"avx2", start, row_bytes, prepare, rows, activate};
