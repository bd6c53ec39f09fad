/* Products of a few token rows with experts in main memory: what the files here share.
 *
 * The weights are read as GPU kernels read them (layers/moe/expert_weights.py says how they lie). The kernels come in
 * two versions, for AVX-512 with BF16 products and for AVX2; pool.c takes the one that the CPU can run. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Columns that are unpacked at once; prepared rows of x are padded to a multiple with zeros. */
#define STRIP 128
/* Token rows that one pass over the weights serves. */
#define PASS 4
/* Most groups of scales in a row: 16 columns each of 16,384. */
#define MAX_GROUPS 1024

enum element {
    BF16,
    E4M3,
    E2M1_PACKED,     /* two columns to a byte */
    E2M1_PLANES,
    E2M1_PAIRS,      /* planes of pairs */
    INT4_PLANES,     /* codes minus 8 */
    INT4_ZEROS,      /* codes minus the group's zero point */
    NUM_ELEMENTS,
};

enum scale { NO_SCALE, SCALE_F32, SCALE_E8M0, SCALE_E4M3, SCALE_BF16, SCALE_WORDS };

/* One product's weights of all experts of a layer. Strides in bytes. */
struct matrix {
    const uint8_t *data, *scale;
    const float *factor;   /* of each expert, or NULL */
    const uint16_t *bias;  /* bfloat16 [experts, rows], or NULL */
    int64_t data_row, data_expert, scale_row, scale_expert;
    int32_t rows, cols, element, scale_type;
    int32_t group;         /* columns that share a scale; 0: all */
    int32_t rows_of_scale; /* rows that share one */
};

/* The function between the two products, as `activated` of triton_ops/activation.py; limit 0 clamps nothing, and a
 * negative one clamps the result of the function instead of gate. */
struct activation {
    float alpha, cubic, offset, limit;
    int32_t gated;
};

struct kernels {
    const char *name;
    /* Prepares tables; once, before anything else. */
    void (*start)(void);
    /* Bytes of a row of x that is prepared for w. */
    size_t (*row_bytes)(const struct matrix *w);
    /* Prepares x [w->cols] bfloat16. `to` is aligned to 64 bytes. */
    void (*prepare)(const struct matrix *w, const uint16_t *x, void *to);
    /* out[t * stride + r] = x[t] . (row begin + r of the expert), with scales and bias, of 1 to PASS rows x. */
    void (*rows)(const struct matrix *w, int expert, int begin, int count, const void *const *x, int tokens, float *out,
                 int stride);
    /* out [n] bfloat16 = the activation of gate and up [n]; without a gate `gate` alone counts. */
    void (*activate)(const struct activation *a, const float *gate, const float *up, uint16_t *out, int n);
};

extern const struct kernels kernels_avx512, kernels_avx2;

static inline uint16_t to_bf16(float value) {
    union { float f; uint32_t u; } bits = {value};
    return (uint16_t)((bits.u + 0x7fff + (bits.u >> 16 & 1)) >> 16);
}

static inline float from_bits(uint32_t bits) {
    union { uint32_t u; float f; } value = {bits};
    return value.f;
}

static inline int groups_of(const struct matrix *w) { return w->group ? (w->cols + w->group - 1) / w->group : 1; }

static inline int strip_bytes(int element) { return element == BF16 ? 2 * STRIP : element == E4M3 ? STRIP : STRIP / 2; }

static inline int padded(int cols) { return (cols + STRIP - 1) / STRIP * STRIP; }

/* Whether rows hold whole strips, padded with zeros. */
static inline int in_planes(int element) { return element >= E2M1_PLANES; }

static inline float e4m3(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? from_bits((uint32_t)(exponent + 120) << 23 | (uint32_t)mantissa << 20) : mantissa / 512.0f;
    return code & 128 ? -value : value;
}

/* The scales of one row as fp32, and zero points times scales for INT4_ZEROS. Zeros follow up to whole strips. */
static inline void row_scales(const struct matrix *w, int expert, int row, float *restrict scales,
                              float *restrict shifts) {
    int groups = groups_of(w), group = w->group ? w->group : STRIP, all = w->group ? padded(w->cols) / group : 1;
    const uint8_t *at = w->scale + expert * w->scale_expert;
    if (w->rows_of_scale) at += row / w->rows_of_scale * w->scale_row;
    switch (w->scale_type) {
    case SCALE_F32:
        for (int g = 0; g < groups; g++) scales[g] = ((const float *)at)[g];
        break;
    case SCALE_E8M0:
        for (int g = 0; g < groups; g++) scales[g] = from_bits(at[g] ? (uint32_t)at[g] << 23 : 1u << 22);
        break;
    case SCALE_E4M3: /* the exponent is too small by 120 until the product */
        for (int g = 0; g < groups; g++) {
            uint32_t code = at[g];
            float small = (float)(code & 7) * 0x1p-9f;
            float value = from_bits(((code & 127) << 20) + (120u << 23));
            value = code & 0x78 ? value : small;
            scales[g] = code & 128 ? -value : value;
        }
        break;
    case SCALE_BF16:
        for (int g = 0; g < groups; g++) scales[g] = from_bits((uint32_t)((const uint16_t *)at)[g] << 16);
        break;
    case SCALE_WORDS: /* quantization/zero_points.py */
        for (int g = 0; g < groups; g++) {
            uint32_t word = ((const uint16_t *)at)[g];
            scales[g] = from_bits((word >> 4) << 16) * 0x1p97f;
            shifts[g] = scales[g] * (float)(word & 15);
        }
        break;
    }
    for (int g = groups; g < all; g++) scales[g] = shifts[g] = 0.0f;
}

/* exp for the activation: branch-free, so that compilers make vectors of it. Relative error below 2e-7 times |x|. */
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float steps = x * 1.44269504f;
    int32_t whole = (int32_t)(steps + (steps < 0 ? -0.5f : 0.5f));
    float rest = x - (float)whole * 0.693145752f;
    rest -= (float)whole * 1.42860677e-6f;
    float sum = 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    return sum * from_bits((uint32_t)(whole + 127) << 23);
}

static inline void activate_rows(const struct activation *a, const float *gate, const float *up, uint16_t *out, int n) {
    float limit = a->limit > 0 ? a->limit : a->limit < 0 ? -a->limit : 3e38f;
    float most_gate = a->limit > 0 ? limit : 3e38f, most_result = a->limit < 0 ? limit : 3e38f;
    if (!a->gated) {
        for (int i = 0; i < n; i++) {
            float positive = gate[i] > 0 ? gate[i] : 0.0f;
            out[i] = to_bf16(positive * positive);
        }
        return;
    }
    for (int i = 0; i < n; i++) {
        float g = gate[i] > most_gate ? most_gate : gate[i];
        float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
        float slope = g * (a->alpha + a->cubic * g * g);
        float result = g / (1.0f + exp_of(-slope));
        out[i] = to_bf16((u + a->offset) * (result > most_result ? most_result : result));
    }
}
