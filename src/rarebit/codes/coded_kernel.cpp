// Rows out of coded tables on the CPU: find the run of each id, take the integers of its row out of the bits, add up.
//
//     id -> run -> class, first bit -> integers of few bits -> mean + sum of (integer - middle) times term
//
// The integers of eight directions are taken out of one word at once; directions without bits are left out.
//
// What the parts are is said in coded.py. The sum is taken in the order of the directions, multiply first and then add, as
// plain torch does it, so that both give the same bits. The list may lie in memory that somebody writes to after it was
// checked, so that nothing is read before it is known to lie within it.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t OUT_OF_RANGE = -1;
// Rows that are located before the first of them is read: time for memory to answer.
constexpr int64_t IDS_A_BLOCK = 64;
// Blocks a thread takes at a time: threads that are slowed down take fewer.
constexpr int64_t BLOCKS_A_TURN = 8;
constexpr int64_t ROWS_A_BLOCK = 64;
constexpr int LANES = 8;

// Eight directions with bits, of a class: `Decoder.lanes`.
struct Lanes {
    int32_t count, before, half, bits;  // how many there are; bits of the row before them, and of the first four; all bits
    uint16_t direction[LANES];
    uint32_t shift[LANES], mask[LANES];  // within their half of the word
    float middle[LANES];
};
static_assert(sizeof(Lanes) == 128, "as Decoder.lanes");

typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct Tables {
    const uint8_t* list;
    int64_t num_bytes;
    const int64_t* table_of_slot;
    int64_t num_slots;
    const int64_t* num_rows;
    int64_t num_runs;
    const int64_t *run_rows, *run_class, *run_bit;
    const void* row_class;
    int class_bytes;
    const int32_t* row_bit;
    const int64_t *block_bit, *first_row;
    const Lanes* lanes;  // by class
    int64_t num_lanes, num_directions;
    const float *terms, *base;
    int64_t width;
};

struct Place {
    int64_t kind, bit, bits_of_row;
};

inline bool locate(const Tables& t, int64_t id, int64_t slot, const int64_t* bits_of_row, Place& place) {
    const int64_t table = t.table_of_slot[slot];
    // Without a sign, ids below zero are the largest of all.
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(t.num_rows[table])) return false;
    if (t.row_class) {
        const int64_t row = id + t.first_row[table];
        place.kind = t.class_bytes == 1 ? int64_t{static_cast<const uint8_t*>(t.row_class)[row]}
                                        : int64_t{static_cast<const int16_t*>(t.row_class)[row]};
        place.bit = t.block_bit[row / ROWS_A_BLOCK] + t.row_bit[row];
    } else {
        const int64_t* rows = t.run_rows + table * t.num_runs;
        // the last run that begins at the id or before; the number of runs is a power of two
        int64_t run = 0;
        for (int64_t step = t.num_runs / 2; step; step /= 2) run += id >= rows[run + step] ? step : 0;
        const int64_t at = table * t.num_runs + run;
        place.kind = t.run_class[at];
        place.bit = t.run_bit[at] + (id - rows[run]) * bits_of_row[place.kind];
    }
    place.bits_of_row = bits_of_row[place.kind];
    return place.bit >= 0 && place.bit + place.bits_of_row <= 8 * t.num_bytes;
}

// Eight bytes of the list, or what is left of it.
inline uint64_t word_at(const Tables& t, int64_t byte) {
    uint64_t word = 0;
    if (t.num_bytes - byte >= 8)
        std::memcpy(&word, t.list + byte, 8);
    else
        for (int64_t i = 0; i < t.num_bytes - byte; ++i) word |= uint64_t{t.list[byte + i]} << 8 * i;
    return word;
}

// The integers of these directions, less their middles.
inline void take(const Tables& t, const Lanes& lanes, int64_t first, float* numbers) {
    const int64_t bit = first + lanes.before, byte = bit >> 3, shift = bit & 7;
    uint64_t word = word_at(t, byte) >> shift;
    if (lanes.bits + shift > 64) word |= uint64_t{t.list[byte + 8]} << (64 - shift);
    const uint32_t low = static_cast<uint32_t>(word), high = static_cast<uint32_t>(word >> lanes.half);
    const Words both = {low, low, low, low, high, high, high, high};
    const Words codes = (both >> *reinterpret_cast<const Words*>(lanes.shift)) &
                        *reinterpret_cast<const Words*>(lanes.mask);
    *reinterpret_cast<Floats*>(numbers) = __builtin_convertvector(reinterpret_cast<const Integers&>(codes), Floats) -
                                          *reinterpret_cast<const Floats*>(lanes.middle);
}

// The width is known when this is compiled, or 0: then any. Sums of a whole vector stay in registers.
template <int64_t WIDTH>
inline void decode(const Tables& t, const Place& place, float* row) {
    const int64_t width = WIDTH ? WIDTH : t.width;
    const Lanes* lanes = t.lanes + place.kind * t.num_lanes;
    const float* terms = t.terms + place.kind * t.num_directions * width;
    const float* base = t.base + place.kind * width;
    float numbers[LANES];
    if constexpr (WIDTH && (WIDTH & (WIDTH - 1)) == 0) {
        typedef float Row __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));
        Row sum = *reinterpret_cast<const Row*>(base);
        for (int64_t i = 0; i < t.num_lanes && lanes[i].count; ++i) {
            take(t, lanes[i], place.bit, numbers);
#pragma GCC unroll 8
            for (int32_t k = 0; k < LANES; ++k)
                sum += numbers[k] * *reinterpret_cast<const Row*>(terms + lanes[i].direction[k] * WIDTH);
        }
        *reinterpret_cast<Row*>(row) = sum;
    } else {
        for (int64_t d = 0; d < width; ++d) row[d] = base[d];
        for (int64_t i = 0; i < t.num_lanes && lanes[i].count; ++i) {
            take(t, lanes[i], place.bit, numbers);
            for (int32_t k = 0; k < lanes[i].count; ++k) {
                const float* term = terms + lanes[i].direction[k] * width;
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) row[d] += numbers[k] * term[d];
            }
        }
    }
}

template <int64_t WIDTH>
int64_t fill(const Tables& t, const int64_t* ids, int64_t num_ids, const int64_t* bits_of_row, int threads,
             float* rows) {
    const int64_t num_blocks = (num_ids + IDS_A_BLOCK - 1) / IDS_A_BLOCK;
    int wrong = 0;
#pragma omp parallel for num_threads(threads) if (num_blocks > BLOCKS_A_TURN) \
    schedule(dynamic, BLOCKS_A_TURN) reduction(| : wrong)
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * IDS_A_BLOCK, count = std::min(IDS_A_BLOCK, num_ids - first);
        Place places[IDS_A_BLOCK];
        int bad = 0;
        int64_t slot = first % t.num_slots;
        for (int64_t i = 0; i < count; ++i) {
            if (!locate(t, ids[first + i], slot, bits_of_row, places[i])) {
                bad = 1;
                break;
            }
            if (++slot == t.num_slots) slot = 0;
            __builtin_prefetch(t.list + (places[i].bit >> 3));
        }
        if (!bad)
            for (int64_t i = 0; i < count; ++i) decode<WIDTH>(t, places[i], rows + (first + i) * t.width);
        wrong |= bad;
    }
    return wrong ? OUT_OF_RANGE : num_ids;
}

}  // namespace

extern "C" {

// Return the number of ids, or what went wrong. `row_class` is null where tables have runs.
int64_t rarebit_coded_rows(const int64_t* ids, int64_t num_ids, int threads, float* rows, const uint8_t* list,
                           int64_t num_bytes, const int64_t* table_of_slot, int64_t num_slots,
                           const int64_t* num_rows, int64_t num_runs, const int64_t* run_rows,
                           const int64_t* run_class, const int64_t* run_bit, const void* row_class, int class_bytes,
                           const int32_t* row_bit, const int64_t* block_bit, const int64_t* first_row,
                           const void* lanes, int64_t num_lanes, int64_t num_directions, const float* terms, const float* base, int64_t width,
                           const int64_t* bits_of_row) {
    const Tables t{list,      num_bytes, table_of_slot, num_slots, num_rows,  num_runs, run_rows,
                   run_class, run_bit,   row_class,     class_bytes, row_bit, block_bit, first_row,
                   static_cast<const Lanes*>(lanes), num_lanes, num_directions, terms, base, width};
    switch (width) {
        case 1: return fill<1>(t, ids, num_ids, bits_of_row, threads, rows);
        case 8: return fill<8>(t, ids, num_ids, bits_of_row, threads, rows);
        case 10: return fill<10>(t, ids, num_ids, bits_of_row, threads, rows);
        case 16: return fill<16>(t, ids, num_ids, bits_of_row, threads, rows);
        case 32: return fill<32>(t, ids, num_ids, bits_of_row, threads, rows);
        case 64: return fill<64>(t, ids, num_ids, bits_of_row, threads, rows);
        default: return fill<0>(t, ids, num_ids, bits_of_row, threads, rows);
    }
}
}
