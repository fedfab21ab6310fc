// Moves runs between two affine layouts in memory that the device can address: one kernel for gather and scatter.
// No headers: compiled by NVRTC or hipRTC as it stands, and by a C++ compiler under the tests' shim.
//
// A launch serves nests of one shape (run length and loops) that differ in their places. The bytes of one step are
//   for nest, for i0 in len[0] .. i3 in len[3], for byte in run_bytes:
//     dst[nest.dst + step part + i . dst_stride + byte] = src[nest.src + step part + i . src_stride + byte]
// and are cut into pieces; a group of 32 threads moves one piece at a time, by the rule of copy/rounds.py, which is here
// as constants. A group is 32 threads by number and no warp: a wavefront of 64 lanes holds two, and nothing is exchanged.

typedef unsigned int u32;
typedef long long i64;

#ifndef GROUP_THREADS
#define GROUP_THREADS 32
#endif
#ifndef UNROLL
#define UNROLL 8
#endif
#ifndef WORDS
#define WORDS 16, 8, 4
#endif
#ifndef MAX_BLOCK_THREADS
#define MAX_BLOCK_THREADS 1024
#endif

static_assert(GROUP_THREADS == 32, "a copy group is 32 threads, whatever the width of the hardware's");
static_assert(MAX_BLOCK_THREADS % GROUP_THREADS == 0, "a block is whole groups");
static_assert(UNROLL == 1 || UNROLL == 2 || UNROLL == 4 || UNROLL == 8, "rounds of a piece");

constexpr u32 PIECE_WORDS = GROUP_THREADS * UNROLL;

constexpr u32 word_of(i64 bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 0; }

constexpr u32 pieces_of(u32 words) { return (words + PIECE_WORDS - 1) / PIECE_WORDS; }

template <i64 ROW_BYTES> struct Rounds {
    static constexpr u32 word_bytes = word_of(ROW_BYTES);
    static_assert(word_bytes != 0, "no word of 16, 8 or 4 bytes divides this row");
    static constexpr u32 round_bytes = word_bytes * GROUP_THREADS;
    static constexpr u32 pieces = pieces_of(ROW_BYTES / word_bytes);
    static constexpr u32 tail_bytes = ROW_BYTES % (word_bytes * PIECE_WORDS);
};

template <u32... ADMITTED> struct Host {
    static constexpr bool has(u32 word) { return ((ADMITTED == word) || ...); }
    static_assert(((word_of(ADMITTED) == ADMITTED) && ...), "the host admits rows that no word moves");
    static_assert(has(16) && has(8) && has(4), "the host refuses rows that a word moves");
};
static_assert(sizeof(Host<WORDS>) > 0, "both rules are compared");

#ifdef USE_ROCM  // single wide accesses with the non-temporal hint, which need vectors of the compiler's own
typedef u32 Word16 __attribute__((ext_vector_type(4)));
typedef u32 Word8 __attribute__((ext_vector_type(2)));
#else
struct alignas(16) Word16 { u32 x, y, z, w; };
struct alignas(8) Word8 { u32 x, y; };
#endif

template <u32 WORD_BYTES> struct Word;
template <> struct Word<16> { typedef Word16 Type; };
template <> struct Word<8> { typedef Word8 Type; };
template <> struct Word<4> { typedef u32 Type; };

struct Place { i64 src, dst; };  // addresses, or offsets to `src_base` and `dst_base`

struct Side {
    i64 base;          // added to every address
    i64 unit_stride;
    i64 block_stride;  // where an id names a page and a step is one of its blocks
    i64 stride[4];
    const i64* ids;    // one a unit; null: unit u is u
    i64 per_unit;      // steps of one unit
};

struct Relayout {
    Side src, dst;
    const Place* places;
    i64 num_places, num_steps, run_bytes;
    i64 length[4];     // loops, outermost first; 1 where there is none
};

#ifdef USE_ROCM
#ifdef KVHOIST_CPU
#define GLOBAL
#else
#define GLOBAL __attribute__((address_space(1)))  // else addresses out of memory are flat ones
#endif
template <typename W> __device__ __forceinline__ W load(const W* p) {
    return __builtin_nontemporal_load((const GLOBAL W*)p);
}
template <typename W> __device__ __forceinline__ void store(W* p, W v) { __builtin_nontemporal_store(v, (GLOBAL W*)p); }
#elif defined(KVHOIST_CPU)
template <typename W> static inline W load(const W* p) { return *p; }
template <typename W> static inline void store(W* p, W v) { *p = v; }
#else
__device__ __forceinline__ Word16 load(const Word16* p) {
    Word16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ Word8 load(const Word8* p) {
    Word8 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 load(const u32* p) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store(Word16* p, Word16 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store(Word8* p, Word8 v) {
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1,%2};" :: "l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store(u32* p, u32 v) {
    asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
#endif

__device__ __forceinline__ i64 unit_of(const Side& side, i64 step, i64* address) {
    const i64 unit = side.per_unit == 1 ? step : step / side.per_unit;
    const i64 id = side.ids ? side.ids[unit] : unit;
    *address = side.base + id * side.unit_stride + (step - unit * side.per_unit) * side.block_stride;
    return id;
}

template <typename W>
__device__ __forceinline__ void relayout(const Relayout& p, u32 group, u32 num_groups, u32 lane) {
    const u32 run_words = (u32)(p.run_bytes / (i64)sizeof(W));
    const u32 pieces = pieces_of(run_words);
    const u32 n3 = (u32)p.length[3], n2 = (u32)p.length[2], n1 = (u32)p.length[1], n0 = (u32)p.length[0];
    const u32 runs = n0 * n1 * n2 * n3;
    const u32 places = (u32)p.num_places;
    const i64 total = p.num_steps * (i64)places * runs * pieces;
    for (i64 item = group; item < total; item += num_groups) {
        const u32 piece = (u32)(item % pieces);
        i64 rest = item / pieces;
        u32 run = (u32)(rest % runs);
        rest /= runs;
        const u32 place = (u32)(rest % places);
        const i64 step = rest / places;
        i64 src, dst;
        if (unit_of(p.dst, step, &dst) < 0) continue;  // left out
        unit_of(p.src, step, &src);
        src += p.places[place].src;
        dst += p.places[place].dst;
        if (runs > 1) {
            const u32 i3 = run % n3; run /= n3;
            const u32 i2 = run % n2; run /= n2;
            const u32 i1 = run % n1; run /= n1;
            src += run * p.src.stride[0] + i1 * p.src.stride[1] + i2 * p.src.stride[2] + i3 * p.src.stride[3];
            dst += run * p.dst.stride[0] + i1 * p.dst.stride[1] + i2 * p.dst.stride[2] + i3 * p.dst.stride[3];
        }
        const u32 first = piece * PIECE_WORDS + lane;
        const W* from = (const W*)src + first;
        W* to = (W*)dst + first;
        if ((piece + 1) * PIECE_WORDS <= run_words) {
            W held[UNROLL];
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k) held[k] = load(from + k * GROUP_THREADS);
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k) store(to + k * GROUP_THREADS, held[k]);
        } else {
            for (u32 k = first; k < run_words; k += GROUP_THREADS, from += GROUP_THREADS, to += GROUP_THREADS)
                store(to, load(from));
        }
    }
}

#define KVHOIST_KERNEL(name, ROW_BYTES)                                                                         \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS) name(const Relayout p) {                    \
        typedef Word<Rounds<ROW_BYTES>::word_bytes>::Type W;                                                    \
        const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;                                               \
        relayout<W>(p, thread / GROUP_THREADS, gridDim.x * blockDim.x / GROUP_THREADS, thread % GROUP_THREADS); \
    }

KVHOIST_KERNEL(relayout16, 16)
KVHOIST_KERNEL(relayout8, 8)
KVHOIST_KERNEL(relayout4, 4)
