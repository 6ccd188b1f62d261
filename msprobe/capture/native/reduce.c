/* One pass over a tensor in host memory: its l2 norm, or all its statistics.
 *
 * capture/kernel.py calls these through ctypes with pointers to dense elements; statistics.py and reduce.py hold the same reductions in
 * torch, for devices and for installs without this library. Sums are taken in double around the first element, so that neither a large
 * mean nor 10^8 elements cost digits: the shift is one of the elements, hence at most sqrt(n) deviations away from the mean, and n * 2^-53
 * is what cancellation can lose. Values that are not finite, and squares that overflow or vanish, take a second, careful pass.
 * Nothing here allocates, writes to the tensor, or keeps a pointer.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION 1
#define BLOCK 16384 /* elements that are looked at before the running totals are updated: what is converted stays in the cache */
#define TRUSTED_LOW 1e-280 /* below this a double sum of squares has lost digits to underflow */

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { NAN_COUNT, POSINF, NEGINF, ZEROS, MINIMUM, MAXIMUM, MEAN, DEVIATION, L2, ABSMAX, STATISTICS };
enum { TRUE_NORM, FINITE_NORM, NORM_NAN, NORM_POSINF, NORM_NEGINF, NORMS };

#if defined(MSPROBE_CLONES)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

static size_t width(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

CLONES
static void widen_bfloat16(const uint16_t *source, float *target, size_t count) {
    for (size_t i = 0; i < count; i++) target[i] = from_bits((uint32_t)source[i] << 16);
}

/* Exponent and mantissa move into their places in a float; the product with 2^112 sets the bias right, for subnormals too. */
CLONES
static void widen_float16(const uint16_t *source, float *target, size_t count) {
    const float bias = from_bits(0x77800000u); /* 2^112 */
    for (size_t i = 0; i < count; i++) {
        uint32_t sign = (uint32_t)(source[i] & 0x8000u) << 16, rest = (uint32_t)(source[i] & 0x7fffu) << 13;
        uint32_t special = rest | 0x7f800000u, scaled;
        float value = from_bits(rest) * bias;
        memcpy(&scaled, &value, 4);
        target[i] = from_bits(sign | (rest >= 0x0f800000u ? special : scaled));
    }
}

struct totals {
    double sum, squares, low, high, shift;
    int64_t zeros;
};

#define ADD_TOTALS(NAME, TYPE)                                                                            \
    CLONES static void NAME(const TYPE *x, size_t count, struct totals *t) {                              \
        double sum = 0, squares = 0, shift = t->shift;                                                    \
        TYPE low = (TYPE)INFINITY, high = -(TYPE)INFINITY;                                                \
        int32_t zeros = 0;                                                                                \
        _Pragma("omp simd reduction(+ : sum, squares, zeros) reduction(min : low) reduction(max : high)") \
        for (size_t i = 0; i < count; i++) {                                                              \
            TYPE value = x[i];                                                                            \
            double apart = (double)value - shift;                                                         \
            sum += apart;                                                                                 \
            squares += apart * apart;                                                                     \
            low = value < low ? value : low;                                                              \
            high = value > high ? value : high;                                                           \
            zeros += value == 0;                                                                          \
        }                                                                                                 \
        t->sum += sum;                                                                                    \
        t->squares += squares;                                                                            \
        t->low = low < t->low ? low : t->low;                                                             \
        t->high = high > t->high ? high : t->high;                                                        \
        t->zeros += zeros;                                                                                \
    }
ADD_TOTALS(add_totals_float, float)
ADD_TOTALS(add_totals_double, double)

#define ADD_SQUARES(NAME, TYPE)                                    \
    CLONES static double NAME(const TYPE *x, size_t count) {       \
        double squares = 0;                                        \
        _Pragma("omp simd reduction(+ : squares)")                 \
        for (size_t i = 0; i < count; i++) {                       \
            double value = x[i];                                   \
            squares += value * value;                              \
        }                                                          \
        return squares;                                            \
    }
ADD_SQUARES(add_squares_float, float)
ADD_SQUARES(add_squares_double, double)

/* Return `count` elements from `start` as floats or doubles: in place, or widened into `space`. */
static const void *elements(const void *data, int dtype, size_t start, size_t count, float *space) {
    const char *from = (const char *)data + start * width(dtype);
    if (dtype == BFLOAT16) widen_bfloat16((const uint16_t *)from, space, count);
    else if (dtype == FLOAT16) widen_float16((const uint16_t *)from, space, count);
    else return from;
    return space;
}

static double at(const void *block, int dtype, size_t i) { return dtype == FLOAT64 ? ((const double *)block)[i] : ((const float *)block)[i]; }

/* The careful pass: special values counted and left out, squares in units of the largest magnitude. */
struct careful {
    int64_t nan, posinf, neginf, zeros, finite;
    double low, high, mean, deviation, l2;
};

static void first_look(const void *data, size_t count, int dtype, struct careful *found) {
    float space[BLOCK];
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t some = count - start < BLOCK ? count - start : BLOCK;
        const void *block = elements(data, dtype, start, some, space);
        for (size_t i = 0; i < some; i++) {
            double value = at(block, dtype, i);
            if (isnan(value)) found->nan++;
            else if (isinf(value)) *(value > 0 ? &found->posinf : &found->neginf) += 1;
            else {
                found->finite++;
                found->zeros += value == 0;
                if (value < found->low) found->low = value;
                if (value > found->high) found->high = value;
            }
        }
    }
}

static void look_carefully(const void *data, size_t count, int dtype, struct careful *found) {
    float space[BLOCK];
    memset(found, 0, sizeof *found);
    found->low = INFINITY, found->high = -INFINITY;
    first_look(data, count, dtype, found);
    double scale = fmax(fabs(found->low), fabs(found->high)), sum = 0, squares = 0, around = 0;
    if (!found->finite || scale == 0) return;
    /* The second pass takes the mean, the third what lies around it. */
    for (int pass = 0; pass < 2; pass++) {
        double mean = pass ? sum / (double)found->finite : 0;
        for (size_t start = 0; start < count; start += BLOCK) {
            size_t some = count - start < BLOCK ? count - start : BLOCK;
            const void *block = elements(data, dtype, start, some, space);
            for (size_t i = 0; i < some; i++) {
                double value = at(block, dtype, i);
                if (!isfinite(value)) continue;
                value /= scale;
                if (pass) around += (value - mean) * (value - mean);
                else sum += value, squares += value * value;
            }
        }
    }
    found->mean = scale * (sum / (double)found->finite);
    found->deviation = scale * sqrt(around / (double)found->finite);
    found->l2 = scale * sqrt(squares);
}

static void describe_carefully(const void *data, size_t count, int dtype, double *row) {
    struct careful found;
    look_carefully(data, count, dtype, &found);
    row[NAN_COUNT] = (double)found.nan, row[POSINF] = (double)found.posinf, row[NEGINF] = (double)found.neginf;
    row[ZEROS] = (double)found.zeros;
    for (int column = MINIMUM; column < STATISTICS; column++) row[column] = NAN;
    if (!found.finite) return;
    row[MINIMUM] = found.low, row[MAXIMUM] = found.high, row[MEAN] = found.mean, row[DEVIATION] = found.deviation;
    row[L2] = found.l2, row[ABSMAX] = fmax(fabs(found.low), fabs(found.high));
}

static void describe(const void *data, size_t count, int dtype, double *row) {
    float space[BLOCK];
    struct totals t = {.low = INFINITY, .high = -INFINITY};
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t some = count - start < BLOCK ? count - start : BLOCK;
        const void *block = elements(data, dtype, start, some, space);
        if (start == 0) t.shift = at(block, dtype, 0);
        if (dtype == FLOAT64) add_totals_double(block, some, &t);
        else add_totals_float(block, some, &t);
    }
    double n = (double)count, apart = t.sum / n, around = t.squares - t.sum * apart, absmax = fmax(fabs(t.low), fabs(t.high));
    double of_shift = t.shift * (2 * t.sum + n * t.shift), squares = t.squares + of_shift;
    int is_plain = isfinite(t.squares) && isfinite(of_shift) && (t.squares > TRUSTED_LOW || t.low == t.high) && (absmax == 0 || absmax * absmax > TRUSTED_LOW);
    if (!count || !is_plain) {
        describe_carefully(data, count, dtype, row);
        return;
    }
    row[NAN_COUNT] = row[POSINF] = row[NEGINF] = 0, row[ZEROS] = (double)t.zeros;
    row[MINIMUM] = t.low, row[MAXIMUM] = t.high, row[MEAN] = t.shift + apart;
    row[DEVIATION] = around > 0 ? sqrt(around / n) : 0, row[L2] = squares > 0 ? sqrt(squares) : 0, row[ABSMAX] = absmax;
}

static void measure(const void *data, size_t count, int dtype, double *row) {
    float space[BLOCK];
    double squares = 0;
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t some = count - start < BLOCK ? count - start : BLOCK;
        const void *block = elements(data, dtype, start, some, space);
        squares += dtype == FLOAT64 ? add_squares_double(block, some) : add_squares_float(block, some);
    }
    row[TRUE_NORM] = row[FINITE_NORM] = sqrt(squares), row[NORM_NAN] = row[NORM_POSINF] = row[NORM_NEGINF] = 0;
    if (isfinite(squares) && squares > TRUSTED_LOW) return;
    struct careful found;
    look_carefully(data, count, dtype, &found);
    row[FINITE_NORM] = found.l2;
    row[NORM_NAN] = (double)found.nan, row[NORM_POSINF] = (double)found.posinf, row[NORM_NEGINF] = (double)found.neginf;
    row[TRUE_NORM] = found.nan ? NAN : found.posinf || found.neginf ? INFINITY : found.l2;
}

int msprobe_kernel_version(void) { return VERSION; }

/* Write STATISTICS columns for each of `tensors` tensors into `rows`, one row each. */
void msprobe_statistics(size_t tensors, const void *const *data, const int64_t *counts, const int32_t *dtypes, double *rows) {
    for (size_t i = 0; i < tensors; i++) describe(data[i], (size_t)counts[i], dtypes[i], rows + i * STATISTICS);
}

/* Write NORMS columns for each of `tensors` tensors into `rows`, one row each. */
void msprobe_norms(size_t tensors, const void *const *data, const int64_t *counts, const int32_t *dtypes, double *rows) {
    for (size_t i = 0; i < tensors; i++) measure(data[i], (size_t)counts[i], dtypes[i], rows + i * NORMS);
}

/* The same for one tensor, without arrays around its pointer. */
void msprobe_statistics_of_one(const void *data, int64_t count, int32_t dtype, double *row) { describe(data, (size_t)count, dtype, row); }
void msprobe_norms_of_one(const void *data, int64_t count, int32_t dtype, double *row) { measure(data, (size_t)count, dtype, row); }
