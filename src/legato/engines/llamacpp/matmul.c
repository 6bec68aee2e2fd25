// Products of quantised weights with few rows of activations, for x86-64 with AVX-512 VNNI.
//
// llama.cpp unpacks and scales each block of weights anew for every row of activations. Here a block is unpacked once
// for up to eight rows, 64 weights to an instruction. Each number of the result is computed by the same operations in
// the same order whatever else the call holds, so a token gets the same logits alone and beside others.
//
// `llamafile_sgemm` has the name and the parameters of llama.cpp's function for fast products, and takes its place: the
// dynamic linker finds the one that was loaded first. What it does not do itself it passes on. See matmul.py.

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

// ---------------------------------------------------------------------------------------------------------------------
// As in ggml

enum { TYPE_F32 = 0, TYPE_Q4_0 = 2, TYPE_Q5_0 = 6, TYPE_Q8_0 = 8, TYPE_Q4_K = 12, TYPE_Q6_K = 14, TYPE_Q8_K = 15 };

struct threadpool;

struct compute_params {
    int ith, nth;
    size_t wsize;
    void *wdata;
    struct threadpool *threadpool;
};

// 32 weights: (4 bits - 8) times d. Byte j has weights j and j + 16.
struct block_q4_0 {
    uint16_t d;
    uint8_t low[16];
};

// 32 weights: (4 bits and a high bit - 16) times d. Byte j of `low` has weights j and j + 16.
struct block_q5_0 {
    uint16_t d;
    uint8_t high[4];
    uint8_t low[16];
};

// 32 weights or activations: q times d.
struct block_q8_0 {
    uint16_t d;
    int8_t q[32];
};

// 256 weights, in eight parts with a scale and a minimum each, of 6 bits: 4 bits times (d times scale) - (least times
// minimum). Of 32 bytes, the low halves are a part, and the high halves the next.
struct block_q4_K {
    uint16_t d;
    uint16_t least;
    uint8_t scales[12];
    uint8_t q[128];
};

// 256 weights, in 16 parts with a scale each: (4 bits and 2 high bits - 32) times (d times scale).
struct block_q6_K {
    uint8_t low[128];
    uint8_t high[64];
    int8_t scales[16];
    uint16_t d;
};

// 256 activations: q times d.
struct block_q8_K {
    float d;
    int8_t q[256];
    int16_t sums[16];
};

typedef bool sgemm_function(const struct compute_params *, int64_t, int64_t, int64_t, const void *, int64_t,
                            const void *, int64_t, void *, int64_t, int, int, int);

static sgemm_function *original;
static void (*set_chunk)(struct threadpool *, int);
static int (*add_chunk)(struct threadpool *, int);
static void (*barrier)(struct threadpool *);
static long num_products;

// ---------------------------------------------------------------------------------------------------------------------
// Tiles: all of this is in pairs of blocks, 64 numbers

#define INLINE static inline __attribute__((always_inline))

enum { MAX_ROWS = 4, MAX_COLS = 8, MIN_CHUNK = 16, CHUNKS_PER_THREAD = 8 };

// 64 activations. The instruction multiplies unsigned by signed numbers; so weights are shifted to be unsigned, and sums
// start at what that adds, negated. With weights that have a minimum instead, `start` has what that is multiplied by.
struct pair {
    __m512i q;
    __m512i start;
    __m512 d;
};

// As many weights of a row.
struct weights {
    __m512i q;
    __m512 d;
    __m512 least;
};

// Bytes, about.
INLINE int64_t pair_size(int type) {
    switch (type) {
    case TYPE_Q4_0: return 2 * sizeof(struct block_q4_0);
    case TYPE_Q5_0: return 2 * sizeof(struct block_q5_0);
    case TYPE_Q8_0: return 2 * sizeof(struct block_q8_0);
    case TYPE_Q4_K: return sizeof(struct block_q4_K) / 4;
    default: return sizeof(struct block_q6_K) / 4;
    }
}

INLINE __m512i joined(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

INLINE __m512 halves(float first, float second) {
    return _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(first), _mm512_set1_ps(second));
}

INLINE __m512 scales(uint16_t first, uint16_t second) {
    const __m512i blocks = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(first | (int)((uint32_t)second << 16)));
    return _mm512_permutexvar_ps(blocks, _mm512_castps128_ps512(both));
}

INLINE __m512i nibbles(const uint8_t *first, const uint8_t *second) {
    const __m512i twice = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)first)),
                                           _mm_loadu_si128((const __m128i *)second), 1);
    __m512i q = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(both));
    return _mm512_and_si512(_mm512_mask_srli_epi16(q, 0xFF00FF00u, q, 4), _mm512_set1_epi8(15));
}

INLINE struct weights load_q4_0(const struct block_q4_0 *block) {
    return (struct weights){.q = nibbles(block[0].low, block[1].low), .d = scales(block[0].d, block[1].d)};
}

INLINE struct weights load_q5_0(const struct block_q5_0 *block) {
    __m512i q = nibbles(block[0].low, block[1].low);
    uint32_t high[2];
    __builtin_memcpy(&high[0], block[0].high, 4);
    __builtin_memcpy(&high[1], block[1].high, 4);
    q = _mm512_mask_add_epi8(q, high[0] | (uint64_t)high[1] << 32, q, _mm512_set1_epi8(16));
    return (struct weights){.q = q, .d = scales(block[0].d, block[1].d)};
}

INLINE __m512i load_activations(const struct block_q8_0 *block) {
    return joined(_mm256_loadu_si256((const __m256i *)block[0].q), _mm256_loadu_si256((const __m256i *)block[1].q));
}

INLINE struct weights load_q8_0(const struct block_q8_0 *block) {
    __m512i q = _mm512_xor_si512(load_activations(block), _mm512_set1_epi8((char)0x80));
    return (struct weights){.q = q, .d = scales(block[0].d, block[1].d)};
}

INLINE struct weights load_q4_K(const struct block_q4_K *block, int part) {
    __m256i both = _mm256_loadu_si256((const __m256i *)(block->q + 32 * part));
    __m512i q = _mm512_and_si512(joined(both, _mm256_srli_epi16(both, 4)), _mm512_set1_epi8(15));
    // Two parts' scales and minima. Those of the last four parts lie in four bits here and two bits there.
    const uint8_t *at = block->scales + 2 * (part & 1);
    int scale[2], least[2];
    for (int i = 0; i < 2; i++) {
        scale[i] = part < 2 ? at[i] & 63 : (at[i + 8] & 15) | (at[i] >> 6) << 4;
        least[i] = part < 2 ? at[i + 4] & 63 : at[i + 8] >> 4 | (at[i + 4] >> 6) << 4;
    }
    float d = _cvtsh_ss(block->d), m = -_cvtsh_ss(block->least);
    return (struct weights){
        .q = q, .d = halves(d * scale[0], d * scale[1]), .least = halves(m * least[0], m * least[1])};
}

INLINE struct weights load_q6_K(const struct block_q6_K *block, int part) {
    const __m512i quarters = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const int half = part / 2, shift = part % 2 * 4;
    __m512i low = _mm512_loadu_si512(block->low + 64 * half);
    low = _mm512_and_si512(_mm512_srl_epi16(low, _mm_cvtsi32_si128(shift)), _mm512_set1_epi8(15));
    __m256i bits = _mm256_loadu_si256((const __m256i *)(block->high + 32 * half));
    __m512i high = joined(_mm256_srl_epi16(bits, _mm_cvtsi32_si128(shift)),
                          _mm256_srl_epi16(bits, _mm_cvtsi32_si128(shift + 2)));
    high = _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi8(3)), 4);
    int four;
    __builtin_memcpy(&four, block->scales + 4 * part, 4);
    __m128 scale = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
    scale = _mm_mul_ps(scale, _mm_set1_ps(_cvtsh_ss(block->d)));
    return (struct weights){.q = _mm512_or_si512(low, high),
                            .d = _mm512_permutexvar_ps(quarters, _mm512_castps128_ps512(scale))};
}

INLINE struct weights load(const char *row, int64_t index, int type) {
    switch (type) {
    case TYPE_Q4_0: return load_q4_0((const struct block_q4_0 *)row + 2 * index);
    case TYPE_Q5_0: return load_q5_0((const struct block_q5_0 *)row + 2 * index);
    case TYPE_Q8_0: return load_q8_0((const struct block_q8_0 *)row + 2 * index);
    case TYPE_Q4_K: return load_q4_K((const struct block_q4_K *)row + index / 4, index % 4);
    default: return load_q6_K((const struct block_q6_K *)row + index / 4, index % 4);
    }
}

// Multiply `rows` rows of weights with `cols` rows of activations. Loops over constants are unrolled, so that all sums
// stay in registers. What the next call needs is fetched meanwhile: that is where most of the time goes otherwise.
INLINE void multiply(const char *a, int64_t stride, int type, const struct pair *b, int64_t num_pairs, float *c,
                     int64_t ldc, int rows, int cols) {
    __m512 sums[MAX_ROWS][MAX_COLS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < cols; j++) sums[r][j] = _mm512_setzero_ps();
    for (int64_t p = 0; p < num_pairs; p++) {
        struct weights w[MAX_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            w[r] = load(a + r * stride, p, type);
            _mm_prefetch(a + (r + rows) * stride + p * pair_size(type), _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int j = 0; j < cols; j++) {
            const struct pair *other = b + p * cols + j;
            __m512i start = type == TYPE_Q4_K ? _mm512_setzero_si512() : other->start;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m512 dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, w[r].q, other->q));
                sums[r][j] = _mm512_fmadd_ps(dot, _mm512_mul_ps(w[r].d, other->d), sums[r][j]);
                if (type == TYPE_Q4_K)
                    sums[r][j] = _mm512_fmadd_ps(w[r].least, _mm512_castsi512_ps(other->start), sums[r][j]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < cols; j++) c[j * ldc + r] = _mm512_reduce_add_ps(sums[r][j]);
}

INLINE void multiply_rows(const char *a, int64_t stride, int type, const struct pair *b, int64_t num_pairs, float *c,
                          int64_t ldc, int64_t first, int64_t end, int cols) {
    const int rows = cols <= 4 ? 4 : 2;
    for (; first + rows <= end; first += rows)
        multiply(a + first * stride, stride, type, b, num_pairs, c + first, ldc, rows, cols);
    for (; first < end; first++) multiply(a + first * stride, stride, type, b, num_pairs, c + first, ldc, 1, cols);
}

typedef void rows_function(const char *, int64_t, const struct pair *, int64_t, float *, int64_t, int64_t, int64_t);

#define SHAPE(type, cols)                                                                                             \
    static void rows_##type##_##cols(const char *a, int64_t stride, const struct pair *b, int64_t num_pairs,          \
                                     float *c, int64_t ldc, int64_t first, int64_t end) {                             \
        multiply_rows(a, stride, TYPE_##type, b, num_pairs, c, ldc, first, end, cols);                                \
    }
#define SHAPES(type)                                                                                                  \
    SHAPE(type, 1)                                                                                                    \
    SHAPE(type, 2)                                                                                                    \
    SHAPE(type, 3)                                                                                                    \
    SHAPE(type, 4)                                                                                                    \
    SHAPE(type, 5)                                                                                                    \
    SHAPE(type, 6)                                                                                                    \
    SHAPE(type, 7)                                                                                                    \
    SHAPE(type, 8)                                                                                                    \
    static rows_function *const shapes_##type[] = {rows_##type##_1, rows_##type##_2, rows_##type##_3,                 \
                                                   rows_##type##_4, rows_##type##_5, rows_##type##_6,                 \
                                                   rows_##type##_7, rows_##type##_8};
SHAPES(Q4_0)
SHAPES(Q5_0)
SHAPES(Q8_0)
SHAPES(Q4_K)
SHAPES(Q6_K)

static const struct {
    int type, other, shift;
    int64_t size;
    rows_function *const *shapes;
} kinds[] = {
    {TYPE_Q4_0, TYPE_Q8_0, 8, sizeof(struct block_q4_0), shapes_Q4_0},
    {TYPE_Q5_0, TYPE_Q8_0, 16, sizeof(struct block_q5_0), shapes_Q5_0},
    {TYPE_Q8_0, TYPE_Q8_0, 128, sizeof(struct block_q8_0), shapes_Q8_0},
    {TYPE_Q4_K, TYPE_Q8_K, 0, sizeof(struct block_q4_K), shapes_Q4_K},
    {TYPE_Q6_K, TYPE_Q8_K, 32, sizeof(struct block_q6_K), shapes_Q6_K},
};

// Prepare rows of activations; blocks of 64 of one row lie `cols` apart.
static void pack(const char *b, int64_t ldb, int type, int64_t num_pairs, int cols, int shift, struct pair *out) {
    const __m512i ones = _mm512_set1_epi8(1);
    for (int j = 0; j < cols; j++)
        for (int64_t p = 0; p < num_pairs; p++) {
            struct pair *pair = out + p * cols + j;
            if (type == TYPE_Q8_0) {
                const struct block_q8_0 *block = (const struct block_q8_0 *)b + j * ldb + 2 * p;
                pair->q = load_activations(block);
                pair->d = scales(block[0].d, block[1].d);
            } else {
                const struct block_q8_K *block = (const struct block_q8_K *)b + j * ldb + p / 4;
                pair->q = _mm512_loadu_si512(block->q + p % 4 * 64);
                pair->d = _mm512_set1_ps(block->d);
            }
            __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, pair->q);
            pair->start = shift ? _mm512_mullo_epi32(sum, _mm512_set1_epi32(-shift))
                                : _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), pair->d));
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The functions that others call

void legato_matmul_bind(sgemm_function *sgemm, void (*set)(struct threadpool *, int),
                        int (*add)(struct threadpool *, int), void (*wait)(struct threadpool *)) {
    original = sgemm;
    set_chunk = set;
    add_chunk = add;
    barrier = wait;
}

// How many products were computed here since the start.
long legato_matmul_count(void) { return num_products; }

// C = A * transposed B: m rows of k blocks of weights, n rows of k blocks of activations. All threads of llama.cpp call
// it, and take chunks of the work in turn, so that one whose core is busy holds up nobody.
bool llamafile_sgemm(const struct compute_params *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda,
                     const void *b, int64_t ldb, void *c, int64_t ldc, int type_a, int type_b, int type_c) {
    static _Thread_local struct pair *packed;
    static _Thread_local int64_t room;
    size_t kind = 0;
    while (kind < sizeof(kinds) / sizeof(kinds[0]) && (kinds[kind].type != type_a || kinds[kind].other != type_b)) kind++;
    const bool is_known = kind < sizeof(kinds) / sizeof(kinds[0]) && type_c == TYPE_F32;
    if (!is_known || (type_b == TYPE_Q8_0 && k % 2))
        return original != NULL && original(params, m, n, k, a, lda, b, ldb, c, ldc, type_a, type_b, type_c);
    const int64_t num_pairs = type_b == TYPE_Q8_0 ? k / 2 : 4 * k;
    if (room < num_pairs * MAX_COLS) {
        free(packed);
        room = num_pairs * MAX_COLS;
        packed = aligned_alloc(sizeof(__m512i), room * sizeof(struct pair));
        if (packed == NULL) abort();
    }
    const int64_t size_b = type_b == TYPE_Q8_0 ? sizeof(struct block_q8_0) : sizeof(struct block_q8_K);
    const int64_t least = m / (params->nth * CHUNKS_PER_THREAD);
    const int64_t size = least < MIN_CHUNK ? MIN_CHUNK : (least + 3) / 4 * 4;
    const int64_t num_chunks = (m + size - 1) / size;
    const int64_t num_tiles = (n + MAX_COLS - 1) / MAX_COLS;
    if (params->ith == 0) {
        num_products++;
        set_chunk(params->threadpool, params->nth);
    }
    barrier(params->threadpool);
    int64_t tile = -1;
    for (int64_t index = params->ith; index < num_chunks * num_tiles; index = add_chunk(params->threadpool, 1)) {
        const int64_t col = index / num_chunks * MAX_COLS, row = index % num_chunks * size;
        const int cols = n - col < MAX_COLS ? (int)(n - col) : MAX_COLS;
        if (tile != col) {
            tile = col;
            pack((const char *)b + col * ldb * size_b, ldb, type_b, num_pairs, cols, kinds[kind].shift, packed);
        }
        kinds[kind].shapes[cols - 1]((const char *)a, lda * kinds[kind].size, packed, num_pairs,
                                     (float *)c + col * ldc, ldc, row, row + size < m ? row + size : m);
    }
    barrier(params->threadpool);
    return true;
}
