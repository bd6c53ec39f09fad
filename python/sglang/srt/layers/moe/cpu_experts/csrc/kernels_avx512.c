/* Kernels for AVX-512 with BF16 products and byte permutations (Sapphire Rapids, Zen 4 and newer).
 *
 * Weights become bfloat16 in registers, exactly, and are multiplied in pairs with fp32 sums. Where unpacking leaves
 * columns in another order, rows of x are put into the same order once. */
#include <immintrin.h>
#include <string.h>

#include "experts.h"

#define INLINE static inline __attribute__((always_inline))
/* Loops whose arrays are registers. */
#define UNROLL _Pragma("GCC unroll 8")
/* Bytes that are prefetched ahead of each row. */
#define AHEAD 1024

/* --- weights to bfloat16 ------------------------------------------------------------------------------------------ */

static const uint16_t E2M1[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};

/* What unpacking needs beside the weights: values by code, or (e4m3) their high and low bytes; selections of bits. */
struct tables {
    __m512i values[4];
    __m512i bits[4];
};

static uint8_t stored_tables[NUM_ELEMENTS][8][64];

static void fill_values(int element) {
    uint8_t(*values)[64] = stored_tables[element];
    for (int code = 0; element == E4M3 && code < 128; code++) {
        uint16_t value = code == 127 ? 0x7fc0 : to_bf16(e4m3((uint8_t)code));
        values[code / 64][code % 64] = (uint8_t)(value >> 8);
        values[2 + code / 64][code % 64] = (uint8_t)value;
    }
    for (int i = 0; element != E4M3 && i < 32; i++) {
        int code = i & 15; /* permutations read five bits of an index: the tables repeat */
        uint16_t value[2] = {0, 0};
        switch (element) {
        case INT4_PLANES: value[0] = to_bf16((float)(code - 8)); break;
        case INT4_ZEROS: value[0] = to_bf16((float)code); break;
        case E2M1_PAIRS: /* without the sign; the last plane has the mantissa above the exponent */
            value[0] = E2M1[code & 7];
            value[1] = E2M1[(code & 3) << 1 | (code >> 2 & 1)];
            break;
        default: value[0] = (uint16_t)(E2M1[code & 7] | (code & 8) << 12);
        }
        for (int table = 0; table < 2; table++) memcpy(values[table] + 2 * i, value + table, 2);
    }
}

static void fill_bits(int element) {
    /* Packed: both columns of a byte, of two words; planes: one plane of two words, then the next plane. */
    int packed = element == E2M1_PACKED, next_pair = packed ? 32 : 4, second = packed ? 4 : 32;
    for (int g = 0; g < 4; g++)
        for (int i = 0; i < 64; i++)
            stored_tables[element][4 + g][i] = (uint8_t)(8 * g + (i & 4 ? next_pair : 0) + (i & 2 ? second : 0));
}

static void start(void) {
    for (int element = 0; element < NUM_ELEMENTS; element++) {
        fill_values(element);
        fill_bits(element);
    }
}

INLINE struct tables tables_of(int element) {
    struct tables t;
    for (int i = 0; i < 4; i++) {
        t.values[i] = _mm512_loadu_si512(stored_tables[element][i]);
        t.bits[i] = _mm512_loadu_si512(stored_tables[element][4 + i]);
    }
    return t;
}

INLINE void unpack(int element, const struct tables *t, const uint8_t *from, __m512i w[4]) {
    if (element == BF16) {
        UNROLL for (int i = 0; i < 4; i++) w[i] = _mm512_loadu_si512(from + 64 * i);
    } else if (element == E4M3) {
        UNROLL for (int half = 0; half < 2; half++) {
            __m512i codes = _mm512_loadu_si512(from + 64 * half);
            __m512i high = _mm512_permutex2var_epi8(t->values[0], codes, t->values[1]);
            __m512i low = _mm512_permutex2var_epi8(t->values[2], codes, t->values[3]);
            high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* a | b & c */
            w[2 * half] = _mm512_unpacklo_epi8(low, high);
            w[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
        }
    } else if (element == E2M1_PAIRS) {
        __m512i words = _mm512_loadu_si512(from), sign = _mm512_set1_epi16((short)0x8000);
        __m512i last = _mm512_ternarylogic_epi32(
            _mm512_srli_epi16(words, 7), _mm512_srli_epi16(words, 12), _mm512_set1_epi16(3), 0xe4); /* a & c | b & ~c */
        w[0] = _mm512_permutexvar_epi16(words, t->values[0]);
        w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), t->values[0]);
        w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 10), t->values[0]);
        w[3] = _mm512_permutexvar_epi16(last, t->values[1]);
        w[0] = _mm512_ternarylogic_epi32(w[0], _mm512_slli_epi16(words, 6), sign, 0xf8);
        w[1] = _mm512_ternarylogic_epi32(w[1], _mm512_slli_epi16(words, 2), sign, 0xf8);
        w[2] = _mm512_ternarylogic_epi32(w[2], _mm512_ror_epi32(words, 4), sign, 0xf8);
        w[3] = _mm512_ternarylogic_epi32(w[3], words, sign, 0xf8);
    } else {
        __m512i words = _mm512_loadu_si512(from);
        UNROLL for (int g = 0; g < 4; g++)
            w[g] = _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(t->bits[g], words), t->values[0]);
    }
}

/* The column of a strip that `unpack` leaves at place `at`. */
static int column_at(int element, int at) {
    int vector = at / 32, word = at % 32;
    switch (element) {
    case E4M3: return at / 64 * 64 + word / 8 * 16 + vector % 2 * 8 + word % 8;
    case E2M1_PACKED: return word / 2 * 8 + vector * 2 + word % 2;
    case E2M1_PLANES:
    case INT4_PLANES:
    case INT4_ZEROS: return vector * 32 + word % 4 / 2 * 16 + word / 4 * 2 + word % 2;
    default: return at;
    }
}

/* --- rows of x ---------------------------------------------------------------------------------------------------- */

static size_t row_bytes(const struct matrix *w) {
    return (size_t)padded(w->cols) * 2 + (w->element == INT4_ZEROS ? (size_t)(padded(w->cols) / w->group + 16) * 4 : 0);
}

static void prepare(const struct matrix *w, const uint16_t *x, void *to) {
    uint16_t *out = to;
    int cols = w->cols, all = padded(cols);
    uint16_t order[STRIP];
    __m512i index[4];
    __mmask32 later[4];
    for (int i = 0; i < STRIP; i++) order[i] = (uint16_t)column_at(w->element, i);
    for (int v = 0; v < 4; v++) {
        index[v] = _mm512_loadu_si512(order + 32 * v);
        later[v] = _mm512_test_epi16_mask(index[v], _mm512_set1_epi16(64));
    }
    for (int start = 0; start < all; start += STRIP) {
        uint16_t rest[STRIP] = {0};
        const uint16_t *from = x + start;
        if (start + STRIP > cols) from = memcpy(rest, from, (size_t)(cols - start) * 2);
        __m512i part[4];
        for (int v = 0; v < 4; v++) part[v] = _mm512_loadu_si512(from + 32 * v);
        for (int v = 0; v < 4; v++) {
            __m512i first = _mm512_permutex2var_epi16(part[0], index[v], part[1]);
            __m512i second = _mm512_permutex2var_epi16(part[2], index[v], part[3]);
            _mm512_store_si512(out + start + 32 * v, _mm512_mask_blend_epi16(later[v], first, second));
        }
    }
    if (w->element != INT4_ZEROS) return;
    float *sums = (float *)(out + all);
    for (int g = 0; g < all / w->group; g++) {
        float sum = 0.0f;
        for (int i = g * w->group; i < (g + 1) * w->group && i < cols; i++) sum += from_bits((uint32_t)x[i] << 16);
        sums[g] = sum;
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* How many scales a strip has, by what their group is: one at the end of the row; one a strip; one for lanes of all
 * four vectors alike (packed); one for each vector, or each half of its lanes (planes). */
enum scaling { BY_ROW, BY_STRIP, BY_LANE, BY_VECTOR };

/* `row_scales`, 16 at a time for scales of one byte. */
INLINE void scales_of_row(const struct matrix *w, int expert, int row, float *scales, float *shifts) {
    if (w->scale_type != SCALE_E8M0 && w->scale_type != SCALE_E4M3) {
        row_scales(w, expert, row, scales, shifts);
        return;
    }
    const uint8_t *from = w->scale + expert * w->scale_expert + row * w->scale_row;
    int groups = groups_of(w);
    for (int g = 0; g < groups; g += 16) {
        __mmask16 there = groups - g < 16 ? (__mmask16)((1u << (groups - g)) - 1) : 0xffff;
        __m128i codes = _mm_maskz_loadu_epi8(there, from + g);
        __m512 values;
        if (w->scale_type == SCALE_E8M0) {
            __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
            __mmask16 least = _mm512_testn_epi32_mask(bits, bits);
            values = _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, least, _mm512_set1_epi32(1 << 22)));
        } else { /* as half precision they are 256 times smaller */
            __m256i wide = _mm256_cvtepi8_epi16(codes);
            __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
            __m256i half = _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi16((short)0x8000)), size);
            values = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
        }
        _mm512_storeu_ps(scales + g, values);
    }
}

INLINE __m512 lane_scales(const float *scales, int strip, int group) {
    if (group == 16)
        return _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0),
                                     _mm512_castps256_ps512(_mm256_loadu_ps(scales + 8 * strip)));
    return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                                 _mm512_castps128_ps512(_mm_loadu_ps(scales + 4 * strip)));
}

INLINE __m512 vector_scales(const float *scales, int strip, int vector, int group) {
    if (group == 16) {
        double both;
        memcpy(&both, scales + 8 * strip + 2 * vector, 8);
        return _mm512_castpd_ps(_mm512_set1_pd(both));
    }
    return _mm512_set1_ps(scales[(STRIP * strip + 32 * vector) / group]);
}

INLINE __m512 dot(__m512 sum, __m512i w, const uint16_t *x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_load_si512(x));
}

INLINE void some_rows(int element, int scaling, int num, int tokens, const struct matrix *w, const struct tables *t,
                      int expert, int row, const void *const *x, float *out, int stride) {
    float scales[2][MAX_GROUPS], shifts[2][MAX_GROUPS];
    const uint8_t *from[2];
    __m512 sum[2][PASS];
    int strips = padded(w->cols) / STRIP, bytes = strip_bytes(element), group = w->group;
    int whole = in_planes(element) ? strips : w->cols / STRIP;
    UNROLL for (int r = 0; r < num; r++) {
        from[r] = w->data + expert * w->data_expert + (row + r) * w->data_row;
        if (w->scale_type) scales_of_row(w, expert, row + r, scales[r], shifts[r]);
        UNROLL for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_setzero_ps();
    }
    for (int strip = 0; strip < strips; strip++) {
        UNROLL for (int r = 0; r < num; r++) {
            __m512i v[4];
            if (strip < whole) {
                for (int line = 0; line < bytes; line += 64)
                    _mm_prefetch((const char *)from[r] + (size_t)strip * bytes + line + AHEAD, _MM_HINT_T0);
                unpack(element, t, from[r] + (size_t)strip * bytes, v);
            } else {
                uint8_t rest[2 * STRIP] = {0};
                memcpy(rest, from[r] + (size_t)strip * bytes, (size_t)(w->cols - strip * STRIP) * bytes / STRIP);
                unpack(element, t, rest, v);
            }
            UNROLL for (int m = 0; m < tokens; m++) {
                const uint16_t *at = (const uint16_t *)x[m] + strip * STRIP;
                if (scaling == BY_ROW) {
                    UNROLL for (int i = 0; i < 4; i++) sum[r][m] = dot(sum[r][m], v[i], at + 32 * i);
                } else if (scaling == BY_VECTOR) {
                    UNROLL for (int i = 0; i < 4; i++)
                        sum[r][m] = _mm512_fmadd_ps(dot(_mm512_setzero_ps(), v[i], at + 32 * i),
                                                    vector_scales(scales[r], strip, i, group), sum[r][m]);
                } else {
                    __m512 part = _mm512_setzero_ps();
                    UNROLL for (int i = 0; i < 4; i++) part = dot(part, v[i], at + 32 * i);
                    __m512 by = scaling == BY_STRIP ? _mm512_set1_ps(scales[r][strip * STRIP / group])
                                                    : lane_scales(scales[r], strip, group);
                    sum[r][m] = _mm512_fmadd_ps(part, by, sum[r][m]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < num; r++) {
        float factor = w->factor ? w->factor[expert] : 1.0f;
        if (scaling == BY_ROW && w->scale_type) factor *= scales[r][0];
        float bias = w->bias ? from_bits((uint32_t)w->bias[(size_t)expert * w->rows + row + r] << 16) : 0.0f;
        UNROLL for (int m = 0; m < tokens; m++) {
            float total = _mm512_reduce_add_ps(sum[r][m]);
            if (element == INT4_ZEROS) {
                const float *sums = (const float *)((const uint16_t *)x[m] + padded(w->cols));
                for (int g = 0; g < groups_of(w); g++) total -= shifts[r][g] * sums[g];
            }
            out[m * stride + r] = total * factor + bias;
        }
    }
}

INLINE void all_rows(int element, int scaling, int tokens, const struct matrix *w, int expert, int begin, int count,
                     const void *const *x, float *out, int stride) {
    struct tables t = tables_of(element);
    int r = 0;
    for (; r + 2 <= count; r += 2)
        some_rows(element, scaling, 2, tokens, w, &t, expert, begin + r, x, out + r, stride);
    if (r < count) some_rows(element, scaling, 1, tokens, w, &t, expert, begin + r, x, out + r, stride);
}

#define FORM(NAME, ELEMENT, SCALING)                                                                                   \
    static void NAME(const struct matrix *w, int expert, int begin, int count, const void *const *x, int tokens,       \
                     float *out, int stride) {                                                                         \
        switch (tokens) {                                                                                              \
        case 1: all_rows(ELEMENT, SCALING, 1, w, expert, begin, count, x, out, stride); break;                         \
        case 2: all_rows(ELEMENT, SCALING, 2, w, expert, begin, count, x, out, stride); break;                         \
        case 3: all_rows(ELEMENT, SCALING, 3, w, expert, begin, count, x, out, stride); break;                         \
        default: all_rows(ELEMENT, SCALING, 4, w, expert, begin, count, x, out, stride);                               \
        }                                                                                                              \
    }

FORM(bf16_rows, BF16, BY_ROW)
FORM(e4m3_rows, E4M3, BY_ROW)
FORM(e4m3_strips, E4M3, BY_STRIP)
FORM(e2m1_packed, E2M1_PACKED, BY_LANE)
FORM(e2m1_planes, E2M1_PLANES, BY_VECTOR)
FORM(e2m1_pairs, E2M1_PAIRS, BY_VECTOR)
FORM(int4_planes, INT4_PLANES, BY_VECTOR)
FORM(int4_strips, INT4_PLANES, BY_STRIP)
FORM(int4_zeros, INT4_ZEROS, BY_VECTOR)
FORM(int4_zeros_strips, INT4_ZEROS, BY_STRIP)

static void rows(const struct matrix *w, int expert, int begin, int count, const void *const *x, int tokens, float *out,
                 int stride) {
    static void (*const by_vector[NUM_ELEMENTS])(const struct matrix *, int, int, int, const void *const *, int, float *,
                                                 int) = {
        bf16_rows, e4m3_rows, e2m1_packed, e2m1_planes, e2m1_pairs, int4_planes, int4_zeros};
    static void (*const by_strip[NUM_ELEMENTS])(const struct matrix *, int, int, int, const void *const *, int, float *,
                                                int) = {
        bf16_rows, e4m3_strips, e2m1_packed, e2m1_planes, e2m1_pairs, int4_strips, int4_zeros_strips};
    (w->group >= STRIP ? by_strip : by_vector)[w->element](w, expert, begin, count, x, tokens, out, stride);
}

static void activate(const struct activation *a, const float *gate, const float *up, uint16_t *out, int n) {
    activate_rows(a, gate, up, out, n);
}

const struct kernels kernels_avx512 = {"avx512_bf16", start, row_bytes, prepare, rows, activate};
