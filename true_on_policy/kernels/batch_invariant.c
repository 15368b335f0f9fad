// Matrix products and attention whose bits for one output depend on that output's own inputs alone.
//
// How it is so: every output owns its accumulators, terms enter them in the order of K (or of the keys), and lanes are
// added up in one fixed tree. Blocking over rows, columns and threads then only decides who computes what. Every
// multiply-add is an explicit fma and the file is compiled with -ffp-contract=off, so that no two instances of a
// kernel are contracted differently.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(64)));
typedef int32_t int_lanes __attribute__((vector_size(64)));

// ---------------------------------------------------------------------------------------------------- vectors of floats

INLINE lanes fma16(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE lanes broadcast(float x) {
    return (lanes){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

INLINE lanes load_f32(const float *x) {
    lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

INLINE void store_f32(float *x, lanes v) { memcpy(x, &v, sizeof v); }

INLINE lanes load_bf16(const bf16 *x) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return (lanes)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#else
    int_lanes bits;
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)((uint32_t)x[i] << 16);
    return (lanes)bits;
#endif
}

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// To nearest, ties to even; a NaN keeps its sign and becomes quiet.
INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// Halves of a and b: lanes with (i & half) == 0 of the result are from a, the others from b, each the sum of two lanes
// of its source that lie `half` apart.
#define FOLD(half, a, b, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)                         \
    (__builtin_shufflevector(a, b, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15) +             \
     __builtin_shufflevector(a, b, (x0) ^ half, (x1) ^ half, (x2) ^ half, (x3) ^ half, (x4) ^ half, (x5) ^ half,       \
                             (x6) ^ half, (x7) ^ half, (x8) ^ half, (x9) ^ half, (x10) ^ half, (x11) ^ half,           \
                             (x12) ^ half, (x13) ^ half, (x14) ^ half, (x15) ^ half))
INLINE lanes fold8(lanes a, lanes b) { return FOLD(8, a, b, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31); }
INLINE lanes fold4(lanes a, lanes b) { return FOLD(4, a, b, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31); }
INLINE lanes fold2(lanes a, lanes b) { return FOLD(2, a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31); }
INLINE lanes fold1(lanes a, lanes b) { return FOLD(1, a, b, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31); }

// Lane i of the result: the lanes of v[i] added up as one binary tree, (i, i + 8) first, neighbours last.
INLINE lanes add_up_16(const lanes *v) {
    lanes e[8], f[4], g[2];
    for (int i = 0; i < 8; i++) e[i] = fold8(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) f[i] = fold4(e[i], e[i + 4]);
    for (int i = 0; i < 2; i++) g[i] = fold2(f[i], f[i + 2]);
    return fold1(g[0], g[1]);
}

INLINE float add_up(lanes v) {
    float x[LANES];
    store_f32(x, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// ----------------------------------------------------------------------------------- products over lanes along K (A @ B^T)

typedef struct {
    long batch, rows, columns, depth;  // rows of A and C, columns of C (= rows of B as stored), terms of each sum
    const void *a, *b;
    void *c;
    long a_batch, a_row, b_batch, b_row, c_batch, c_row;  // strides in elements; the last dimension is contiguous
    int c_is_f32;
} product;

// Terms of a sum that are added up before the next ones: a panel of B of so many terms stays in the first-level cache.
#define LEAF_BYTES 2048
#define PANEL 8
// Elements between the rows of a copied panel: a cache line more than a leaf, so that rows do not share a cache set.
#define PITCH(type) ((LEAF_BYTES + 64) / (long)sizeof(type))
#define TILE_ROWS 3
#define BLOCK_ROWS 96
#define CHUNK_COLUMNS 64

INLINE void store_row(const product *p, long batch, long row, long column, long count, const float *sums) {
    long at = batch * p->c_batch + row * p->c_row + column;
    if (p->c_is_f32)
        memcpy((float *)p->c + at, sums, count * sizeof(float));
    else
        for (long j = 0; j < count; j++) ((bf16 *)p->c)[at + j] = narrow(sums[j]);
}

// One kernel for each element type: STEP elements are a vector, LOAD reads one, TAIL reads `count` and zeros after it.
#define DEFINE_PRODUCT(NAME, TYPE, VECTOR, STEP, LOAD, TAIL, FMA)                                                      \
    INLINE void NAME##_tile(int rows, const TYPE *a, long a_row, const TYPE *b, long b_row, long depth, float *sums) { \
        lanes acc[2 * LANES] = {0};                                                                                    \
        long k = 0;                                                                                                    \
        for (; k + STEP <= depth; k += STEP) {                                                                         \
            VECTOR left[TILE_ROWS];                                                                                    \
            _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++) left[i] = LOAD(a + i * a_row + k);                  \
            _Pragma("GCC unroll 8") for (int j = 0; j < PANEL; j++) {                                                  \
                VECTOR right = LOAD(b + j * b_row + k);                                                                \
                _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++)                                                 \
                    acc[i * PANEL + j] = FMA(left[i], right, acc[i * PANEL + j]);                                      \
            }                                                                                                          \
        }                                                                                                              \
        if (k < depth) {                                                                                               \
            _Pragma("GCC unroll 8") for (int j = 0; j < PANEL; j++) {                                                  \
                VECTOR right = TAIL(b + j * b_row + k, depth - k);                                                     \
                _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++)                                                 \
                    acc[i * PANEL + j] = FMA(TAIL(a + i * a_row + k, depth - k), right, acc[i * PANEL + j]);           \
            }                                                                                                          \
        }                                                                                                              \
        store_f32(sums, load_f32(sums) + add_up_16(acc));                                                              \
        if (rows > 2) {                                                                                                \
            lanes last = load_f32(sums + 2 * PANEL) + add_up_16(acc + LANES);                                          \
            memcpy(sums + 2 * PANEL, &last, PANEL * sizeof(float));                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    /* C[rows, columns] of one block; sums has room for (rows + 1) * PANEL floats, panel for PANEL leaves. */          \
    static void NAME##_block(const product *p, long batch, long row, long rows, long column, long columns,             \
                             float *sums, TYPE *panel) {                                                               \
        const long leaf = LEAF_BYTES / sizeof(TYPE);                                                                   \
        const TYPE *a = (const TYPE *)p->a + batch * p->a_batch + row * p->a_row;                                      \
        const TYPE *b = (const TYPE *)p->b + batch * p->b_batch;                                                       \
        for (long j = column; j < column + columns; j += PANEL) {                                                      \
            long width = MIN(PANEL, column + columns - j);                                                             \
            memset(sums, 0, (rows + 1) * PANEL * sizeof(float));                                                       \
            for (long k = 0; k < p->depth; k += leaf) {                                                                \
                long depth = MIN(leaf, p->depth - k);                                                                  \
                const TYPE *right = b + j * p->b_row + k;                                                              \
                long right_row = p->b_row;                                                                             \
                if (width < PANEL || rows > TILE_ROWS) {                                                                                 \
                    for (long i = 0; i < width; i++) memcpy(panel + i * PITCH(TYPE), right + i * right_row, depth * sizeof(TYPE)); \
                    right = panel, right_row = PITCH(TYPE);                                                                   \
                }                                                                                                      \
                long i = 0;                                                                                            \
                for (; i + 3 <= rows; i += 3)                                                                          \
                    NAME##_tile(3, a + i * p->a_row + k, p->a_row, right, right_row, depth, sums + i * PANEL);         \
                if (rows - i == 2)                                                                                     \
                    NAME##_tile(2, a + i * p->a_row + k, p->a_row, right, right_row, depth, sums + i * PANEL);         \
                else if (rows - i == 1)                                                                                \
                    NAME##_tile(1, a + i * p->a_row + k, p->a_row, right, right_row, depth, sums + i * PANEL);         \
            }                                                                                                          \
            for (long i = 0; i < rows; i++) store_row(p, batch, row + i, j, width, sums + i * PANEL);                  \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME##_product(const product *p, int threads) {                                                        \
        long row_blocks = (p->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;                                                     \
        long chunks = (p->columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;                                                \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (long unit = 0; unit < p->batch * row_blocks * chunks; unit++) {                                           \
            float sums[(BLOCK_ROWS + 1) * PANEL];                                                                      \
            TYPE panel[PANEL * PITCH(TYPE)];                                                            \
            if (p->columns % PANEL) memset(panel, 0, sizeof panel);                                                    \
            long column = unit % chunks * CHUNK_COLUMNS, row = unit / chunks % row_blocks * BLOCK_ROWS;                \
            NAME##_block(p, unit / chunks / row_blocks, row, MIN(BLOCK_ROWS, p->rows - row), column,                   \
                         MIN(CHUNK_COLUMNS, p->columns - column), sums, panel);                                        \
        }                                                                                                              \
    }

INLINE lanes tail_f32(const float *x, long count) {
    lanes v = {0};
    memcpy(&v, x, count * sizeof(float));
    return v;
}

DEFINE_PRODUCT(f32, float, lanes, LANES, load_f32, tail_f32, fma16)

#if defined(__AVX512BF16__)
// Two products a lane; the instruction rounds to nearest, keeps the pair's order and flushes subnormals, always.
typedef struct { __m512i bits; } pairs;
INLINE pairs load_pairs(const bf16 *x) { return (pairs){_mm512_loadu_si512(x)}; }
INLINE pairs tail_pairs(const bf16 *x, long count) {
    pairs v = {_mm512_setzero_si512()};
    memcpy(&v, x, count * sizeof(bf16));
    return v;
}
INLINE lanes fma_pairs(pairs a, pairs b, lanes c) {
    return (lanes)_mm512_dpbf16_ps((__m512)c, (__m512bh)a.bits, (__m512bh)b.bits);
}
DEFINE_PRODUCT(b16, bf16, pairs, 2 * LANES, load_pairs, tail_pairs, fma_pairs)
#else
INLINE lanes tail_bf16(const bf16 *x, long count) {
    bf16 padded[LANES] = {0};
    memcpy(padded, x, count * sizeof(bf16));
    return load_bf16(padded);
}
DEFINE_PRODUCT(b16, bf16, lanes, LANES, load_bf16, tail_bf16, fma16)
#endif

// Returns 0, or 1 when memory ran out.
int bi_product_f32(const product *p, int threads) {
    f32_product(p, threads);
    return 0;
}

int bi_product_bf16(const product *p, int threads) {
    b16_product(p, threads);
    return 0;
}
