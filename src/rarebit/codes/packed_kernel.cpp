// Rows out of a packed table on the CPU: find the run of each id, clear its row, put its entries there.
//
//     id -> word of `filled` -> its bit, and the bits below it + rank directory -> row -> offsets -> run
//
// What the parts are is told in packed_parts.py. They may lie in a file that somebody writes to after it
// was checked, so that nothing is read or written before it is known to lie within its part.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t OUT_OF_RANGE = -1;
// Runs that are found before the first of them is read: time for memory to answer.
constexpr int64_t IDS_A_BLOCK = 64;
// Blocks a thread takes at a time: threads that are slowed down take fewer.
constexpr int64_t BLOCKS_A_TURN = 8;

struct Table {
    int64_t num_rows, num_filled, num_values, width;
    const uint64_t* filled;
    const int32_t *before, *offsets;
    const void *columns, *values;
    float scale;
};

struct Run {
    int64_t row, start, end;
};

inline bool find_run(const Table& table, int64_t id, Run& run) {
    // Without a sign, ids below zero are the largest of all.
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(table.num_rows)) return false;
    const int64_t block = id >> 6, bit = id & 63;
    const uint64_t word = table.filled[block];
    const int64_t here = word >> bit & 1;
    const int64_t below = __builtin_popcountll(word & ((uint64_t{1} << bit) - 1));
    run.row = table.before[block] + below;
    if (run.row < 0 || run.row + here > table.num_filled) return false;
    run.start = table.offsets[run.row];
    run.end = table.offsets[run.row + here];  // an empty row ends where it starts
    return 0 <= run.start && run.start <= run.end && run.end <= table.num_values;
}

template <class Column>
struct Numbers {
    const Column* columns;

    explicit Numbers(const Table& table) : columns(static_cast<const Column*>(table.columns)) {}

    const void* of(const Run& run) const { return columns + run.start; }

    // Call `put(column, position)` for each entry of a run; false where a column is none of the row's.
    template <class Put>
    bool for_each(const Run& run, int64_t width, Put put) const {
        for (int64_t position = run.start; position < run.end; ++position) {
            const int64_t column = columns[position];
            if (static_cast<uint64_t>(column) >= static_cast<uint64_t>(width)) return false;
            put(column, position);
        }
        return true;
    }
};

struct Bits {
    const uint8_t* bytes;
    int64_t bytes_a_row;

    explicit Bits(const Table& table)
        : bytes(static_cast<const uint8_t*>(table.columns)), bytes_a_row((table.width + 7) / 8) {}

    const void* of(const Run& run) const { return bytes + run.row * bytes_a_row; }

    // Eight bytes of a row at a time, or what is left of it: the end of each loop is a wrong guess.
    uint64_t word_at(int64_t row, int64_t byte) const {
        const uint8_t* start = bytes + row * bytes_a_row + byte;
        uint64_t word = 0;
        if (bytes_a_row - byte >= 8)
            std::memcpy(&word, start, 8);
        else
            for (int64_t i = 0; i < bytes_a_row - byte; ++i) word |= uint64_t{start[i]} << 8 * i;
        return word;
    }

    template <class Put>
    bool for_each(const Run& run, int64_t width, Put put) const {
        int64_t position = run.start;
        for (int64_t byte = 0; position < run.end && byte < bytes_a_row; byte += 8)
            for (uint64_t left = word_at(run.row, byte); left; left &= left - 1) {
                const int64_t column = 8 * byte + __builtin_ctzll(left);
                if (column >= width || position >= run.end) return false;
                put(column, position++);
            }
        return position == run.end;
    }
};

inline float number_of(float value, float) { return value; }
inline float number_of(int8_t code, float scale) { return static_cast<float>(code) * scale; }

template <class Columns, class Value>
bool fill_block(const Table& table, const int64_t* ids, int64_t num_ids, float* rows) {
    const Columns columns(table);
    const Value* values = static_cast<const Value*>(table.values);
    const int64_t width = table.width;
    const float scale = table.scale;
    Run runs[IDS_A_BLOCK];
    for (int64_t i = 0; i < num_ids; ++i) {
        if (!find_run(table, ids[i], runs[i])) return false;
        __builtin_prefetch(columns.of(runs[i]));
        __builtin_prefetch(values + runs[i].start);
        __builtin_prefetch(values + runs[i].end);  // a run may go on in the next cache line
    }
    std::memset(rows, 0, num_ids * width * sizeof(float));
    for (int64_t i = 0; i < num_ids; ++i) {
        float* row = rows + i * width;
        const auto put = [=](int64_t column, int64_t position) {
            row[column] = number_of(values[position], scale);
        };
        if (!columns.for_each(runs[i], width, put)) return false;
    }
    return true;
}

template <class Columns, class Value>
int64_t fill(const Table& table, const int64_t* ids, int64_t num_ids, int threads, float* rows) {
    const int64_t num_blocks = (num_ids + IDS_A_BLOCK - 1) / IDS_A_BLOCK;
    int wrong = 0;
#pragma omp parallel for num_threads(threads) if (num_blocks > BLOCKS_A_TURN) \
    schedule(dynamic, BLOCKS_A_TURN) reduction(| : wrong)
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * IDS_A_BLOCK, count = std::min(IDS_A_BLOCK, num_ids - first);
        wrong |= !fill_block<Columns, Value>(table, ids + first, count, rows + first * table.width);
    }
    return wrong ? OUT_OF_RANGE : num_ids;
}

template <class Value>
int64_t fill_by_columns(int column_bytes, const Table& table, const int64_t* ids, int64_t num_ids,
                        int threads, float* rows) {
    switch (column_bytes) {
        case 1: return fill<Numbers<uint8_t>, Value>(table, ids, num_ids, threads, rows);
        case 2: return fill<Numbers<int16_t>, Value>(table, ids, num_ids, threads, rows);
        case 4: return fill<Numbers<int32_t>, Value>(table, ids, num_ids, threads, rows);
        default: return fill<Bits, Value>(table, ids, num_ids, threads, rows);
    }
}

}  // namespace

extern "C" {

// Return the number of ids, or what went wrong. `column_bytes` is 0 where columns are bits.
int64_t rarebit_packed_rows(const int64_t* ids, int64_t num_ids, int threads, float* rows,
                            int64_t num_rows, int64_t num_filled, int64_t num_values, int64_t width,
                            const uint64_t* filled, const int32_t* before, const int32_t* offsets,
                            const void* columns, int column_bytes, const void* values,
                            int value_bytes, float scale) {
    const Table table{num_rows, num_filled, num_values, width,  filled,
                      before,   offsets,    columns,    values, scale};
    const auto fill = value_bytes == 1 ? fill_by_columns<int8_t> : fill_by_columns<float>;
    return fill(column_bytes, table, ids, num_ids, threads, rows);
}
}
