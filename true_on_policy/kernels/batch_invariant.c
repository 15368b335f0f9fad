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
#if defined(__x86_64__)
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

// Sums run over 16 lanes everywhere. Of these the hardware works on CHUNK at once; lanes do not meet before add_up, so
// that its width changes no bit.
#if defined(__AVX512F__)
#define CHUNK 16
#else
#define CHUNK 8
#endif
typedef float chunk __attribute__((vector_size(4 * CHUNK)));

// ---------------------------------------------------------------------------------------------------- vectors of floats

INLINE chunk fma_chunk(chunk a, chunk b, chunk c) {
#if defined(__AVX512F__)
    return (chunk)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (chunk)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < CHUNK; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE chunk load_chunk(const float *x) {
    chunk v;
    memcpy(&v, x, sizeof v);
    return v;
}

INLINE chunk load_wide_chunk(const bf16 *x) {
    chunk v;
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    v = (chunk)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    v = (chunk)_mm256_slli_epi32(wide, 16);
#else
    uint32_t bits[CHUNK];
    for (int i = 0; i < CHUNK; i++) bits[i] = (uint32_t)x[i] << 16;
    memcpy(&v, bits, sizeof v);
#endif
    return v;
}

// The first `count` elements that are left and zeros; none where `count` is not positive.
INLINE long left_of(long count, long most) { return count < 0 ? 0 : MIN(count, most); }

INLINE chunk tail_chunk(const float *x, long count) {
    chunk v = {0};
    memcpy(&v, x, left_of(count, CHUNK) * sizeof(float));
    return v;
}

INLINE chunk tail_wide_chunk(const bf16 *x, long count) {
    bf16 padded[CHUNK] = {0};
    memcpy(padded, x, left_of(count, CHUNK) * sizeof(bf16));
    return load_wide_chunk(padded);
}

INLINE chunk broadcast_chunk(float x) {
    chunk v;
    for (int i = 0; i < CHUNK; i++) v[i] = x;
    return v;
}

INLINE lanes fma16(lanes a, lanes b, lanes c) {
    chunk x[LANES / CHUNK], y[LANES / CHUNK], z[LANES / CHUNK];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
    for (int i = 0; i < LANES / CHUNK; i++) z[i] = fma_chunk(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
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

INLINE float add_up(lanes v) {
    float x[LANES];
    store_f32(x, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// Lane i of the result: the lanes of v[i] added up as the tree of add_up.
#if defined(__AVX512F__)
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

INLINE lanes add_up_16(const lanes *v) {
    lanes e[8], f[4], g[2];
    for (int i = 0; i < 8; i++) e[i] = fold8(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) f[i] = fold4(e[i], e[i + 4]);
    for (int i = 0; i < 2; i++) g[i] = fold2(f[i], f[i + 2]);
    return fold1(g[0], g[1]);
}
#elif defined(__SSE3__)
INLINE __m128 fold_to_4(lanes v) {
    __m128 q[4];
    memcpy(q, &v, sizeof q);
    return _mm_add_ps(_mm_add_ps(q[0], q[2]), _mm_add_ps(q[1], q[3]));
}

INLINE __m128 fold_to_2(lanes a, lanes b) {
    __m128 x = fold_to_4(a), y = fold_to_4(b);
    return _mm_add_ps(_mm_movelh_ps(x, y), _mm_movehl_ps(y, x));
}

INLINE lanes add_up_16(const lanes *v) {
    __m128 sums[4];
    for (int i = 0; i < 4; i++)
        sums[i] = _mm_hadd_ps(fold_to_2(v[4 * i], v[4 * i + 1]), fold_to_2(v[4 * i + 2], v[4 * i + 3]));
    return load_f32((const float *)sums);
}
#else
INLINE lanes add_up_16(const lanes *v) {
    lanes sums;
    for (int i = 0; i < LANES; i++) sums[i] = add_up(v[i]);
    return sums;
}
#endif

// -------------------------------------------------------------------------------------------------------- transposition

#define SWAP(half, a, b, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)                         \
    do {                                                                                                               \
        int_lanes low = __builtin_shufflevector(a, b, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, \
                                                x15);                                                                  \
        b = __builtin_shufflevector(a, b, (x0) + half, (x1) + half, (x2) + half, (x3) + half, (x4) + half,             \
                                    (x5) + half, (x6) + half, (x7) + half, (x8) + half, (x9) + half, (x10) + half,     \
                                    (x11) + half, (x12) + half, (x13) + half, (x14) + half, (x15) + half);             \
        a = low;                                                                                                       \
    } while (0)

// v[i] lane j and v[j] lane i change places: blocks of 8, then 4, 2 and 1.
INLINE void transpose(int_lanes *v) {
    for (int i = 0; i < 8; i++)
        SWAP(8, v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    for (int i = 0; i < LANES; i++)
        if (!(i & 4)) SWAP(4, v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    for (int i = 0; i < LANES; i++)
        if (!(i & 2)) SWAP(2, v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    for (int i = 0; i < LANES; i++)
        if (!(i & 1)) SWAP(1, v[i], v[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
}

INLINE int_lanes load_element_lanes(const void *x, long at, int bytes) {
    int_lanes v;
    if (bytes == 4) memcpy(&v, (const int32_t *)x + at, sizeof v);
    else for (int i = 0; i < LANES; i++) v[i] = ((const uint16_t *)x)[at + i];
    return v;
}

INLINE void store_element_lanes(void *x, long at, int bytes, int_lanes v) {
    if (bytes == 4) memcpy((int32_t *)x + at, &v, sizeof v);
    else for (int i = 0; i < LANES; i++) ((uint16_t *)x)[at + i] = (uint16_t)v[i];
}

INLINE void copy_element(const void *from, long at, void *to, long place, int bytes) {
    if (bytes == 4) ((int32_t *)to)[place] = ((const int32_t *)from)[at];
    else ((uint16_t *)to)[place] = ((const uint16_t *)from)[at];
}

// 16 columns of x[rows, columns], from `column` on, become 16 rows of out[columns, rows].
INLINE void transpose_columns(const void *x, long x_row, long rows, long column, long columns, void *out, int bytes) {
    long row = 0, width = MIN(LANES, columns - column);
    for (; width == LANES && row + LANES <= rows; row += LANES) {
        int_lanes v[LANES];
        for (int i = 0; i < LANES; i++) v[i] = load_element_lanes(x, (row + i) * x_row + column, bytes);
        transpose(v);
        for (int i = 0; i < LANES; i++) store_element_lanes(out, (column + i) * rows + row, bytes, v[i]);
    }
    for (; row < rows; row++)
        for (long j = 0; j < width; j++) copy_element(x, row * x_row + column + j, out, (column + j) * rows + row, bytes);
}

// out[batch, columns, rows] = x[batch, rows, columns], of elements of 2 or 4 bytes; x's columns are contiguous.
void bi_transpose(const void *x, long batch, long rows, long columns, long x_batch, long x_row, void *out, int bytes,
                  int threads) {
    long strips = (columns + LANES - 1) / LANES;
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (long unit = 0; unit < batch * strips; unit++) {
        const char *from = (const char *)x + unit / strips * x_batch * bytes;
        char *to = (char *)out + unit / strips * rows * columns * bytes;
        if (bytes == 4) transpose_columns(from, x_row, rows, unit % strips * LANES, columns, to, 4);
        else transpose_columns(from, x_row, rows, unit % strips * LANES, columns, to, 2);
    }
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
// Columns whose sums are held in registers at once: 24 of 32 at 512 bits, 12 of 16 at 256.
#define GROUP (CHUNK == LANES ? PANEL : 4)
#define BLOCK_ROWS 96
#define CHUNK_COLUMNS 64

INLINE void store_row(const product *p, long batch, long row, long column, long count, const float *sums) {
    long at = batch * p->c_batch + row * p->c_row + column;
    if (p->c_is_f32)
        memcpy((float *)p->c + at, sums, count * sizeof(float));
    else
        for (long j = 0; j < count; j++) ((bf16 *)p->c)[at + j] = narrow(sums[j]);
}

// One kernel for each element type: PER_LANE elements make a lane, LOAD reads a vector of them, TAIL one that ends early.
#define DEFINE_PRODUCT(NAME, TYPE, VECTOR, PER_LANE, LOAD, TAIL, FMA)                                                  \
    INLINE void NAME##_tile(int rows, const TYPE *a, long a_row, const TYPE *b, long b_row, long depth, float *sums) { \
        const int step = LANES * PER_LANE;                                                                             \
        lanes acc[2 * LANES] = {0};                                                                                    \
        _Pragma("GCC unroll 2") for (int part = 0; part < LANES; part += CHUNK)                                        \
        _Pragma("GCC unroll 8") for (int first = 0; first < PANEL; first += GROUP) {                                   \
            const TYPE *left = a + part * PER_LANE, *right = b + first * b_row + part * PER_LANE;                      \
            chunk sum[TILE_ROWS][GROUP] = {0};                                                                         \
            long k = 0;                                                                                                \
            for (; k + step <= depth; k += step) {                                                                     \
                VECTOR row[TILE_ROWS];                                                                                 \
                _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++) row[i] = LOAD(left + i * a_row + k);            \
                _Pragma("GCC unroll 8") for (int j = 0; j < GROUP; j++) {                                              \
                    VECTOR column = LOAD(right + j * b_row + k);                                                       \
                    _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++) sum[i][j] = FMA(row[i], column, sum[i][j]); \
                }                                                                                                      \
            }                                                                                                          \
            long rest = depth - k - part * PER_LANE;                                                                   \
            if (rest > 0)                                                                                              \
                _Pragma("GCC unroll 8") for (int j = 0; j < GROUP; j++) {                                              \
                    VECTOR column = TAIL(right + j * b_row + k, rest);                                                 \
                    _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++)                                             \
                        sum[i][j] = FMA(TAIL(left + i * a_row + k, rest), column, sum[i][j]);                          \
                }                                                                                                      \
            _Pragma("GCC unroll 3") for (int i = 0; i < rows; i++)                                                     \
                _Pragma("GCC unroll 8") for (int j = 0; j < GROUP; j++)                                                \
                    memcpy((float *)(acc + i * PANEL + first + j) + part, &sum[i][j], sizeof(chunk));                  \
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
            _Alignas(64) float sums[(BLOCK_ROWS + 1) * PANEL];                                                                      \
            _Alignas(64) TYPE panel[PANEL * PITCH(TYPE)];                                                            \
            if (p->columns % PANEL) memset(panel, 0, sizeof panel);                                                    \
            long column = unit % chunks * CHUNK_COLUMNS, row = unit / chunks % row_blocks * BLOCK_ROWS;                \
            NAME##_block(p, unit / chunks / row_blocks, row, MIN(BLOCK_ROWS, p->rows - row), column,                   \
                         MIN(CHUNK_COLUMNS, p->columns - column), sums, panel);                                        \
        }                                                                                                              \
    }

DEFINE_PRODUCT(f32, float, chunk, 1, load_chunk, tail_chunk, fma_chunk)

#if defined(__AVX512BF16__)
// Two products a lane; the instruction rounds to nearest, keeps the pair's order and flushes subnormals, always.
typedef struct { __m512i bits; } pairs;
INLINE pairs load_pairs(const bf16 *x) { return (pairs){_mm512_loadu_si512(x)}; }
INLINE pairs tail_pairs(const bf16 *x, long count) {
    pairs v = {_mm512_setzero_si512()};
    memcpy(&v, x, left_of(count, 2 * CHUNK) * sizeof(bf16));
    return v;
}
INLINE chunk fma_pairs(pairs a, pairs b, chunk c) {
    return (chunk)_mm512_dpbf16_ps((__m512)c, (__m512bh)a.bits, (__m512bh)b.bits);
}
DEFINE_PRODUCT(b16, bf16, pairs, 2, load_pairs, tail_pairs, fma_pairs)
#else
DEFINE_PRODUCT(b16, bf16, chunk, 1, load_wide_chunk, tail_wide_chunk, fma_chunk)
#endif

#if HAS_AMX
// -------------------------------------------------------------------------------- bfloat16 products on the matrix unit
//
// Tiles of C^T = B @ A^T: the weight's rows are read where they lie, the few rows of A are transposed once a call. The
// instruction adds 32 products to each output on its own, in the order of K, whatever the other rows and columns hold.

#define TILE 16
#define STEP_K 32
#define TILE_PAIRS (TILE * TILE)  // 32-bit pairs of one packed tile
#define AMX_ROWS 128
#define AMX_COLUMNS 64

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

// Once a process: the kernel hands out the matrix unit on request only.
static int has_matrix_unit(void) {
    static int answer = -1;
    const long request_permission = 0x1023, tile_data = 18;
    if (answer < 0) answer = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return answer;
}

// 16 rows of A from `row` on, as tiles of pairs: pair k of row m lies at [k][m]. Rows and terms beyond A are zero.
static void pack_rows(const bf16 *a, long a_row, long rows, long depth, uint32_t *packed) {
    for (long k = 0; k < depth; k += STEP_K, packed += TILE_PAIRS) {
        int_lanes v[TILE] = {0};
        for (long i = 0; i < MIN(rows, TILE); i++) memcpy(v + i, a + i * a_row + k, MIN(STEP_K, depth - k) * sizeof(bf16));
        transpose(v);
        memcpy(packed, v, sizeof v);
    }
}

// A tile of C^T becomes rows of C: columns [skip, TILE) of the tile are columns `column` and after of C.
static void store_tile(const product *p, long batch, long row, long column, long skip, const float *tile) {
    int_lanes v[TILE];
    memcpy(v, tile, sizeof v);
    transpose(v);
    for (long i = 0; i < MIN(TILE, p->rows - row); i++)
        store_row(p, batch, row + i, column, MIN(TILE - skip, p->columns - column), (const float *)(v + i) + skip);
}

// Tiles 0 to 3 add up, 4 and 5 hold rows of B, 6 and 7 rows of A.
static void four_by_one(const bf16 *const b[4], long b_row, const uint32_t *a, long steps, float (*out)[TILE_PAIRS]) {
    long stride = b_row * sizeof(bf16);
    __asm__ volatile("" ::: "memory");  // the tile loads name no memory that they read
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (long k = 0; k < steps; k++) {
        _tile_loadd(6, a + k * TILE_PAIRS, 64);
        _tile_loadd(4, b[0] + k * STEP_K, stride); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, b[1] + k * STEP_K, stride); _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, b[2] + k * STEP_K, stride); _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, b[3] + k * STEP_K, stride); _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, out[0], 64); _tile_stored(1, out[1], 64); _tile_stored(2, out[2], 64); _tile_stored(3, out[3], 64);
}

static void two_by_two(const bf16 *const b[2], long b_row, const uint32_t *const a[2], long steps,
                       float (*out)[TILE_PAIRS]) {
    long stride = b_row * sizeof(bf16);
    __asm__ volatile("" ::: "memory");  // the tile loads name no memory that they read
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (long k = 0; k < steps; k++) {
        _tile_loadd(4, b[0] + k * STEP_K, stride); _tile_loadd(6, a[0] + k * TILE_PAIRS, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, b[1] + k * STEP_K, stride); _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, a[1] + k * TILE_PAIRS, 64); _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out[0], 64); _tile_stored(1, out[1], 64); _tile_stored(2, out[2], 64); _tile_stored(3, out[3], 64);
}

// The last tile of B begins earlier, so that it is whole; it computes some columns twice and stores them once.
INLINE long tile_start(const product *p, long column) {
    return MIN(column, (p->columns > TILE ? p->columns : TILE) - TILE);
}

static void amx_block(const product *p, long batch, const uint32_t *packed, long row, long rows, long column) {
    long steps = (p->depth + STEP_K - 1) / STEP_K, columns = MIN(AMX_COLUMNS, p->columns - column);
    const bf16 *b = (const bf16 *)p->b + batch * p->b_batch;
    _Alignas(64) float out[4][TILE_PAIRS];
    int wide = rows > TILE ? 2 : 4;  // tiles of B that are worked on at once
    for (long j = 0; j < columns; j += wide * TILE) {
        const bf16 *right[4];
        for (int t = 0; t < wide; t++) right[t] = b + tile_start(p, column + j + t * TILE) * p->b_row;
        for (long i = 0; i < rows; i += 2 * TILE) {
            const uint32_t *first = packed + (row + i) / TILE * steps * TILE_PAIRS;
            const uint32_t *left[2] = {first, i + TILE < rows ? first + steps * TILE_PAIRS : first};
            if (wide == 4) four_by_one(right, p->b_row, first, steps, out);
            else two_by_two(right, p->b_row, left, steps, out);
            for (int t = 0; t < 4; t++) {
                long to_column = column + j + t % wide * TILE, to_row = row + i + t / wide * TILE;
                if (to_column < p->columns && to_row < p->rows)
                    store_tile(p, batch, to_row, to_column, to_column - tile_start(p, to_column), out[t]);
            }
        }
    }
}

// B as rows that are whole tiles: a copy with zeros where K is no multiple of 32 or there are fewer than 16 rows.
static bf16 *whole_tiles(product *p) {
    long rows = p->columns < TILE ? TILE : p->columns, depth = (p->depth + STEP_K - 1) / STEP_K * STEP_K;
    bf16 *copy = calloc(p->batch * rows * depth, sizeof(bf16));
    for (long i = 0; copy && i < p->batch * p->columns; i++) {
        const bf16 *from = (const bf16 *)p->b + i / p->columns * p->b_batch + i % p->columns * p->b_row;
        memcpy(copy + (i / p->columns * rows + i % p->columns) * depth, from, p->depth * sizeof(bf16));
    }
    p->b = copy, p->b_row = depth, p->b_batch = rows * depth;
    return copy;
}

// Returns 1 without memory.
static int amx_product(product p, int threads) {
    const tile_config ours = {.palette = 1, .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64},
                              .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    long steps = (p.depth + STEP_K - 1) / STEP_K, row_tiles = (p.rows + TILE - 1) / TILE;
    long row_blocks = (p.rows + AMX_ROWS - 1) / AMX_ROWS, chunks = (p.columns + AMX_COLUMNS - 1) / AMX_COLUMNS;
    uint32_t *packed = aligned_alloc(64, (p.batch * row_tiles * steps * TILE_PAIRS + LANES) * sizeof(uint32_t));
    int needs_copy = p.columns < TILE || p.depth % STEP_K;
    bf16 *copy = needs_copy ? whole_tiles(&p) : NULL;
    int failed = packed == NULL || (needs_copy && copy == NULL);
    #pragma omp parallel num_threads(threads) if (!failed)
    {
        tile_config found;
        _tile_storeconfig(&found);
        _tile_loadconfig(&ours);
        #pragma omp for schedule(static)
        for (long tile = 0; tile < (failed ? 0 : p.batch * row_tiles); tile++) {
            long row = tile % row_tiles * TILE;
            pack_rows((const bf16 *)p.a + tile / row_tiles * p.a_batch + row * p.a_row, p.a_row, p.rows - row, p.depth,
                      packed + tile * steps * TILE_PAIRS);
        }
        #pragma omp for schedule(static)
        for (long unit = 0; unit < (failed ? 0 : p.batch * row_blocks * chunks); unit++) {
            long batch = unit / chunks / row_blocks, row = unit / chunks % row_blocks * AMX_ROWS;
            amx_block(&p, batch, packed + batch * row_tiles * steps * TILE_PAIRS, row, MIN(AMX_ROWS, p.rows - row),
                      unit % chunks * AMX_COLUMNS);
        }
        if (found.palette) _tile_loadconfig(&found);
        else _tile_release();
    }
    free(packed), free(copy);
    return failed;
}
#endif

// Both return 0, or 1 when memory ran out.
int bi_product_f32(const product *p, int threads) {
    f32_product(p, threads);
    return 0;
}

int bi_product_bf16(const product *p, int threads) {
#if HAS_AMX
    if (has_matrix_unit()) return amx_product(*p, threads);
#endif
    b16_product(p, threads);
    return 0;
}

// What computes bfloat16 products here: machines that differ in it differ in bits.
const char *bi_instructions(void) {
#if HAS_AMX
    if (has_matrix_unit()) return "amx_bf16";
#endif
#if defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return "fma";
#else
    return "software fma";
#endif
}

// ------------------------------------------------------------------------------------------------------------- attention

typedef struct {
    long batch, heads, groups, queries, keys, width;  // `groups` heads of keys, each serves heads / groups of queries
    const void *q, *k, *v;
    const float *bias;  // added to the scores, or NULL; -inf and a dtype's lowest number hide a key
    void *out;          // [batch, queries, heads, width]
    float *logsumexp;   // [batch, queries, heads]
    long q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, bias_batch, bias_head, bias_row;
    float scale;
    int is_causal, is_bf16;
} attention;

#define HIDDEN -1e38f
#define BLOCK_QUERIES 24
#define CHUNK_QUERIES 192
#define WEIGH_ROWS 4
#define WEIGH_VECTORS (CHUNK == LANES ? 4 : 2)
#define ROUND_UP(n) (((n) + LANES - 1) / LANES * LANES)

// The keys that a query sees: [begin, end), and whether all of those.
typedef struct { long begin, end, count; } keys_seen;

static keys_seen see(const attention *t, const float *bias, long query) {
    long begin = 0, end = t->is_causal ? MIN(query + 1, t->keys) : t->keys, count = 0;
    if (bias == NULL) return (keys_seen){begin, end, end};
    while (begin < end && !(bias[begin] > HIDDEN)) begin++;
    while (begin < end && !(bias[end - 1] > HIDDEN)) end--;
    for (long j = begin; j < end; j++) count += bias[j] > HIDDEN;
    return (keys_seen){begin, end, count};
}

// e^x for x <= 0, to about one unit in the last place (Cephes expf); 0 where the result would be subnormal.
INLINE lanes exp16(lanes x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    lanes shifted = fma16(x, broadcast(1.44269504088896341f), broadcast(shift));
    lanes n = shifted - broadcast(shift);
    lanes r = fma16(n, broadcast(-0.693359375f), x);
    r = fma16(n, broadcast(2.12194440e-4f), r);
    lanes y = broadcast(1.9875691500e-4f);
    y = fma16(y, r, broadcast(1.3981999507e-3f));
    y = fma16(y, r, broadcast(8.3334519073e-3f));
    y = fma16(y, r, broadcast(4.1665795894e-2f));
    y = fma16(y, r, broadcast(1.6666665459e-1f));
    y = fma16(y, r, broadcast(5.0000001201e-1f));
    y = fma16(y, r * r, r + broadcast(1.0f));
    int_lanes scaled = (int_lanes)y + (((int_lanes)shifted - (int_lanes)broadcast(shift)) << 23);
    return (lanes)(scaled & ~(x < broadcast(-87.3f)));
}

// Scores [count] become e^(score - max); `scores` has room for LANES more. Returns the sum of the weights.
static float exponentiate(float *scores, long count, float *max) {
    for (long j = count; j < count + LANES; j++) scores[j] = -INFINITY;
    lanes highest = load_f32(scores), sum = {0};
    for (long j = LANES; j < count; j += LANES) {
        lanes s = load_f32(scores + j);
        int_lanes higher = s > highest;
        highest = (lanes)(((int_lanes)s & higher) | ((int_lanes)highest & ~higher));
    }
    *max = highest[0];
    for (int i = 1; i < LANES; i++) *max = highest[i] > *max ? highest[i] : *max;
    for (long j = 0; j < count; j += LANES) {
        lanes weight = exp16(load_f32(scores + j) - broadcast(*max));
        store_f32(scores + j, weight);
        sum += weight;
    }
    return add_up(sum);
}

// out[rows, CHUNK * vectors] += weights[rows, count] @ v[count, ...], the keys in order.
INLINE void weigh_tile(int rows, int vectors, const float *weights, long weights_row, const float *v, long v_row,
                       long count, float *out, long out_row) {
    chunk acc[WEIGH_ROWS][WEIGH_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < vectors; d++) acc[i][d] = load_chunk(out + i * out_row + d * CHUNK);
    for (long j = 0; j < count; j++) {
        chunk value[WEIGH_VECTORS];
        _Pragma("GCC unroll 4") for (int d = 0; d < vectors; d++) value[d] = load_chunk(v + j * v_row + d * CHUNK);
        _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++) {
            chunk weight = broadcast_chunk(weights[i * weights_row + j]);
            _Pragma("GCC unroll 4") for (int d = 0; d < vectors; d++)
                acc[i][d] = fma_chunk(weight, value[d], acc[i][d]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < vectors; d++) memcpy(out + i * out_row + d * CHUNK, &acc[i][d], sizeof(chunk));
}

INLINE void weigh_columns(int rows, int vectors, const float *weights, long weights_row, const float *v, long v_row,
                          long count, float *out, long out_row) {
    if (rows == WEIGH_ROWS)
        weigh_tile(WEIGH_ROWS, vectors, weights, weights_row, v, v_row, count, out, out_row);
    else
        weigh_tile(1, vectors, weights, weights_row, v, v_row, count, out, out_row);
}

// The same over all columns; `rows` is WEIGH_ROWS or 1.
static void weigh(int rows, const float *weights, long weights_row, const float *v, long v_row, long count, float *out,
                  long width) {
    long d = 0;
    for (; d + WEIGH_VECTORS * CHUNK <= width; d += WEIGH_VECTORS * CHUNK)
        weigh_columns(rows, WEIGH_VECTORS, weights, weights_row, v + d, v_row, count, out + d, width);
    for (; d < width; d += CHUNK)
        weigh_columns(rows, 1, weights, weights_row, v + d, v_row, count, out + d, width);
}

// What one work unit needs beside its inputs. Rows of `queries`, `values` and `out` are `width` long, those of `scores`
// `score_row`.
typedef struct {
    const float *keys, *values;
    float *queries, *scores, *out;
    long key_row, value_row, width, score_row;
    long *order;
    keys_seen *seen;
} workspace;

static const float *bias_row(const attention *t, long b, long head, long query) {
    return t->bias ? t->bias + b * t->bias_batch + head * t->bias_head + query * t->bias_row : NULL;
}

static void copy_row(const attention *t, const void *x, long at, float *row, long width) {
    if (t->is_bf16)
        for (long d = 0; d < t->width; d++) row[d] = widen(((const bf16 *)x)[at + d]);
    else
        memcpy(row, (const float *)x + at, t->width * sizeof(float));
    for (long d = t->width; d < width; d++) row[d] = 0;
}

// Where a head's rows lie as floats: in place if they are floats of whole vectors, else copied to `wide`.
static const float *float_rows(const attention *t, const void *x, long at, long row, float *wide, long width, long *row_out) {
    *row_out = wide ? width : row;
    for (long j = 0; wide && j < t->keys; j++) copy_row(t, x, at + j * row, wide + j * width, width);
    return wide ? wide : (const float *)x + at;
}

// Scores [count] of one row become its weights; what it does not see between its first and last key is left out and
// `order` names the rest. Returns their sum.
static float weights_of(const attention *t, keys_seen seen, const float *bias, float *scores, long *order, float *max) {
    long count = seen.end - seen.begin, kept = 0;
    for (long j = 0; j < count; j++)
        scores[j] = __builtin_fmaf(scores[j], t->scale, bias ? bias[seen.begin + j] : 0.0f);
    for (long j = 0; seen.count < count && j < count; j++)
        if (bias[seen.begin + j] > HIDDEN) scores[kept] = scores[j], order[kept++] = j;
    return exponentiate(scores, seen.count, max);
}

// One row's output from its weights; `done` keys were added already.
static void weigh_row(const workspace *w, keys_seen seen, const float *weights, long done, float *out) {
    const float *values = w->values + seen.begin * w->value_row;
    if (seen.count == seen.end - seen.begin) {
        weigh(1, weights + done, 0, values + done * w->value_row, w->value_row, seen.count - done, out, w->width);
        return;
    }
    for (long j = 0; j < seen.count; j++)
        weigh(1, weights + j, 0, values + w->order[j] * w->value_row, w->value_row, 1, out, w->width);
}

// How many keys the next WEIGH_ROWS rows all see from one first key on: 0 where they are not alike.
static long shared_keys(const keys_seen *seen, long rows) {
    long shared = rows < WEIGH_ROWS ? 0 : seen[0].count;
    for (int i = 0; shared && i < WEIGH_ROWS; i++) {
        int alike = seen[i].begin == seen[0].begin && seen[i].count == seen[i].end - seen[i].begin;
        shared = alike ? MIN(shared, seen[i].count) : 0;
    }
    return shared;
}

static void store_output(const attention *t, long b, long head, long query, const float *out, float sum, float max) {
    long row = (b * t->queries + query) * t->heads + head;
    t->logsumexp[row] = sum > 0 ? max + logf(sum) : 0.0f;
    for (long d = 0; d < t->width; d++) {
        float value = sum > 0 ? out[d] / sum : 0.0f;
        if (t->is_bf16) ((bf16 *)t->out)[row * t->width + d] = narrow(value);
        else ((float *)t->out)[row * t->width + d] = value;
    }
}

// Rows [first, first + rows) of a unit's (head, query) pairs.
static void attend_block(const attention *t, const workspace *w, long b, long head0, long query0, long queries,
                         long first, long rows) {
    const keys_seen *seen = w->seen + first;
    long from = t->keys, to = 0;
    for (long i = 0; i < rows; i++) {
        long head = head0 + (first + i) / queries, query = query0 + (first + i) % queries;
        copy_row(t, t->q, b * t->q_batch + head * t->q_head + query * t->q_row, w->queries + i * w->width, w->width);
        if (seen[i].count) from = MIN(from, seen[i].begin), to = to > seen[i].end ? to : seen[i].end;
    }
    _Alignas(64) float sums[(BLOCK_QUERIES + 1) * PANEL];
    _Alignas(64) float panel[PANEL * PITCH(float)];
    product scores = {1, rows, to - from, w->width, w->queries, w->keys + from * w->key_row, w->scores,
                      0, w->width, 0, w->key_row, 0, w->score_row, 1};
    memset(panel, 0, sizeof panel);
    memset(w->out, 0, BLOCK_QUERIES * w->width * sizeof(float));
    if (from < to) f32_block(&scores, 0, 0, rows, 0, to - from, sums, panel);
    for (long i = 0, next; i < rows; i = next) {
        long shared = shared_keys(seen + i, rows - i);
        next = i + (shared ? WEIGH_ROWS : 1);
        float sum[WEIGH_ROWS] = {0}, max[WEIGH_ROWS] = {0};
        for (long r = i; r < next; r++) {
            long head = head0 + (first + r) / queries, query = query0 + (first + r) % queries;
            if (seen[r].count)
                sum[r - i] = weights_of(t, seen[r], bias_row(t, b, head, query),
                                        w->scores + r * w->score_row + seen[r].begin - from, w->order, max + r - i);
        }
        if (shared)
            weigh(WEIGH_ROWS, w->scores + i * w->score_row + seen[i].begin - from, w->score_row,
                  w->values + seen[i].begin * w->value_row, w->value_row, shared, w->out + i * w->width, w->width);
        for (long r = i; r < next; r++) {
            long head = head0 + (first + r) / queries, query = query0 + (first + r) % queries;
            if (seen[r].count)
                weigh_row(w, seen[r], w->scores + r * w->score_row + seen[r].begin - from, shared,
                          w->out + r * w->width);
            store_output(t, b, head, query, w->out + r * w->width, sum[r - i], max[r - i]);
        }
    }
}

// All queries of one chunk that attend to one group of keys, `heads / groups` heads of them. Returns 1 without memory.
static int attend_unit(const attention *t, long b, long group, long query0, long queries) {
    long share = t->heads / t->groups, rows = share * queries, head0 = group * share, width = ROUND_UP(t->width);
    int copies = t->is_bf16 || width != t->width;
    long score_row = ROUND_UP(t->keys) + 2 * LANES, wide = copies ? t->keys * width : 0;
    float *floats = malloc((2 * wide + BLOCK_QUERIES * (2 * width + score_row)) * sizeof(float));
    keys_seen *seen = malloc(rows * sizeof(keys_seen));
    long *order = malloc((t->keys + 1) * sizeof(long));
    int failed = !floats || !seen || !order;
    if (!failed) {
        for (long r = 0; r < rows; r++) {
            long query = query0 + r % queries;
            seen[r] = see(t, bias_row(t, b, head0 + r / queries, query), query);
        }
        workspace w = {.width = width, .score_row = score_row, .order = order, .seen = seen};
        w.queries = floats + 2 * wide, w.out = w.queries + BLOCK_QUERIES * width, w.scores = w.out + BLOCK_QUERIES * width;
        w.keys = float_rows(t, t->k, b * t->k_batch + group * t->k_head, t->k_row, copies ? floats : NULL, width, &w.key_row);
        w.values = float_rows(t, t->v, b * t->v_batch + group * t->v_head, t->v_row, copies ? floats + wide : NULL, width,
                              &w.value_row);
        for (long r = 0; r < rows; r += BLOCK_QUERIES)
            attend_block(t, &w, b, head0, query0, queries, r, MIN(BLOCK_QUERIES, rows - r));
    }
    free(floats), free(seen), free(order);
    return failed;
}

// Returns 0, or 1 when memory ran out.
int bi_attention(const attention *t, int threads) {
    long chunks = (t->queries + CHUNK_QUERIES - 1) / CHUNK_QUERIES;
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : failed)
    for (long unit = 0; unit < t->batch * t->groups * chunks; unit++) {
        long query = unit % chunks * CHUNK_QUERIES;
        failed |= attend_unit(t, unit / chunks / t->groups, unit / chunks % t->groups, query,
                              MIN(CHUNK_QUERIES, t->queries - query));
    }
    return failed;
}
