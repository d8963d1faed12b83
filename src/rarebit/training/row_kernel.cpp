// Row-wise optimizers on the CPU: sort the lookups of a step, sum them row by row, update those rows.
//
//     ids      7  3  7  3  9        one a lookup
//     rows           3  7  9        one a distinct row, ascending
//     values   a  b  c  d  e   ->   b+d  a+c  e        summed in the order of the lookups
//
// A row belongs to one thread from its first lookup to its update, so the bits do not depend on the
// number of threads. Plain C++17 behind C functions; the equations are in row_kernel.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t OUT_OF_RANGE = -1;
constexpr int64_t OUT_OF_MEMORY = -2;

// 2048 counters stay in the first cache, and two digits cover four million rows.
constexpr int DIGIT_BITS = 11;
// Far enough ahead for memory to answer, near enough for the first cache to hold what came.
constexpr int64_t ROWS_AHEAD = 12;
constexpr int64_t LOOKUPS_AHEAD = 16;
// Rows a thread takes at a time: threads that are slowed down, or have popular rows, take fewer.
constexpr int64_t ROWS_A_TURN = 256;
constexpr int64_t FLOATS_A_LINE = 16;

#define INLINE inline __attribute__((always_inline))
// Numbers of a row do not depend on each other, which the compiler cannot see through pointers.
#define FOR_EACH_NUMBER(i, width) _Pragma("omp simd") for (int64_t i = 0; i < width; ++i)

int thread_index() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

int bits_of(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

// ---------------------------------------------------------------------------------------- the sort

// The lookups of one step, sorted by row. Its memory is kept for the next step.
struct Order {
    std::vector<int64_t> ids;        // as they came
    std::vector<int64_t> positions;  // of the lookups, sorted by id, equal ids as they came
    std::vector<int64_t> rows;       // distinct ids, ascending
    std::vector<int64_t> starts;     // where the lookups of each row begin in positions, and the end
    std::vector<uint64_t> keys, spare;
    std::vector<int64_t> counts;
    std::vector<float> scratch;
    int64_t num_rows = 0;
    uint64_t largest = 0;
    bool is_valid = false;

    bool is_of(const int64_t* other, int64_t num_lookups) const {
        return is_valid && static_cast<int64_t>(ids.size()) == num_lookups &&
               std::memcmp(ids.data(), other, num_lookups * sizeof(int64_t)) == 0;
    }
};

// Keys are (id, position) in one number. They arrive in the order of their positions, and each pass
// is stable, so only the digits of the id have to be sorted.
void sort_keys(Order& order, int position_bits, int id_bits) {
    const int passes = (id_bits + DIGIT_BITS - 1) / DIGIT_BITS;
    if (passes == 0) return;
    const int digit_bits = (id_bits + passes - 1) / passes;
    const int64_t buckets = int64_t{1} << digit_bits;
    const uint64_t mask = buckets - 1;
    order.counts.assign(passes * buckets, 0);
    for (const uint64_t key : order.keys)
        for (int pass = 0; pass < passes; ++pass)
            ++order.counts[pass * buckets + ((key >> (position_bits + pass * digit_bits)) & mask)];
    for (int pass = 0; pass < passes; ++pass) {
        int64_t* next = order.counts.data() + pass * buckets;
        for (int64_t bucket = 0, total = 0; bucket < buckets; ++bucket) {
            const int64_t count = next[bucket];
            next[bucket] = total;
            total += count;
        }
        const int shift = position_bits + pass * digit_bits;
        for (const uint64_t key : order.keys) order.spare[next[(key >> shift) & mask]++] = key;
        order.keys.swap(order.spare);
    }
}

// Without a branch: whether the next lookup is of another row cannot be guessed.
template <class IdOf>
void find_rows(Order& order, IdOf id_of) {
    const int64_t num_lookups = order.ids.size();
    int64_t found = 0, previous = -1;
    order.starts[0] = 0;
    for (int64_t lookup = 0; lookup < num_lookups; ++lookup) {
        const int64_t id = id_of(lookup);
        found += id != previous;
        order.rows[found - 1] = previous = id;
        order.starts[found] = lookup + 1;  // the last lookup of a row leaves the start of the next
    }
    order.num_rows = found;
}

void sort_packed(Order& order, int position_bits, int id_bits) {
    const int64_t num_lookups = order.ids.size();
    order.keys.resize(num_lookups);
    order.spare.resize(num_lookups);
    for (int64_t lookup = 0; lookup < num_lookups; ++lookup)
        order.keys[lookup] = static_cast<uint64_t>(order.ids[lookup]) << position_bits | lookup;
    sort_keys(order, position_bits, id_bits);
    const uint64_t mask = (uint64_t{1} << position_bits) - 1;
    for (int64_t lookup = 0; lookup < num_lookups; ++lookup)
        order.positions[lookup] = order.keys[lookup] & mask;
    find_rows(order, [&](int64_t lookup) { return order.keys[lookup] >> position_bits; });
}

// For ids so large that id and position do not fit into one key: no table has them, a merge may.
void sort_by_comparison(Order& order) {
    const int64_t* ids = order.ids.data();
    for (size_t lookup = 0; lookup < order.ids.size(); ++lookup) order.positions[lookup] = lookup;
    std::stable_sort(order.positions.begin(), order.positions.end(),
                     [ids](int64_t left, int64_t right) { return ids[left] < ids[right]; });
    find_rows(order, [&](int64_t lookup) { return ids[order.positions[lookup]]; });
}

void sort_lookups(Order& order, const int64_t* ids, int64_t num_lookups) {
    order.ids.assign(ids, ids + num_lookups);
    order.positions.resize(num_lookups);
    order.rows.resize(num_lookups);
    order.starts.resize(num_lookups + 1);
    const int position_bits = bits_of(num_lookups - 1), id_bits = bits_of(order.largest);
    if (position_bits + id_bits <= 64)
        sort_packed(order, position_bits, id_bits);
    else
        sort_by_comparison(order);
}

// Return the order of these lookups, or nothing if an id is below 0 or not below `limit`.
//
// Tables of one model are looked up with the same ids, one after the other: the last order is kept,
// for each thread its own, since two models may train at once.
Order* find_order(const int64_t* ids, int64_t num_lookups, int64_t limit) {
    static thread_local Order order;
    if (!order.is_of(ids, num_lookups)) {
        order.is_valid = false;  // and stays so if memory runs out on the way
        order.largest = 0;
        // Without a sign, ids below zero are the largest of all.
        for (int64_t lookup = 0; lookup < num_lookups; ++lookup)
            order.largest = std::max(order.largest, static_cast<uint64_t>(ids[lookup]));
        if (order.largest >= static_cast<uint64_t>(limit)) return nullptr;
        sort_lookups(order, ids, num_lookups);
        order.is_valid = true;
    }
    return order.largest < static_cast<uint64_t>(limit) ? &order : nullptr;
}

// --------------------------------------------------------------------------------------- the rules

// A rule takes the summed gradient of one row. `Width` is the row's width where it is a common one,
// which lets loops vanish into registers, and 0 where `dim` says it.

// Always inlined: the compiler takes a function that only prefetches for one without effect, and
// drops the calls.
template <bool ForWriting = true>
INLINE void prefetch(const float* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += FLOATS_A_LINE) __builtin_prefetch(row + i, ForWriting);
    __builtin_prefetch(row + dim - 1, ForWriting);  // a row may begin inside a cache line
}

struct Decay {
    float keep;  // decoupled: the factor of the weight
    float pull;  // coupled: the share of the weight that joins the gradient

    template <int Width>
    INLINE void apply(float* __restrict gradient, float* __restrict weight, int64_t dim) const {
        const int64_t width = Width ? Width : dim;
        if (keep != 1.0f)
            FOR_EACH_NUMBER(i, width) weight[i] *= keep;
        if (pull != 0.0f)  // not always: 0 times an infinite weight is not 0
            FOR_EACH_NUMBER(i, width) gradient[i] += pull * weight[i];
    }
};

struct Merge {
    int64_t* rows;
    float* sums;

    INLINE void expect(int64_t, int64_t) const {}

    template <int Width>
    INLINE void update(int64_t slot, int64_t row, float* gradient, int64_t dim) const {
        const int64_t width = Width ? Width : dim;
        rows[slot] = row;
        FOR_EACH_NUMBER(i, width) sums[slot * width + i] = gradient[i];
    }
};

struct Adam {
    float *weight, *exp_avg, *exp_avg_sq;
    Decay decay;
    float step_size, beta1, rest1, beta2, rest2, correction2, eps;

    INLINE void expect(int64_t row, int64_t dim) const {
        prefetch(weight + row * dim, dim);
        prefetch(exp_avg + row * dim, dim);
        prefetch(exp_avg_sq + row * dim, dim);
    }

    template <int Width>
    INLINE void update(int64_t, int64_t row, float* __restrict gradient, int64_t dim) const {
        const int64_t width = Width ? Width : dim;
        float* __restrict w = weight + row * width;
        float* __restrict m = exp_avg + row * width;
        float* __restrict v = exp_avg_sq + row * width;
        decay.apply<Width>(gradient, w, width);
        FOR_EACH_NUMBER(i, width) {
            const float g = gradient[i];
            m[i] = beta1 * m[i] + rest1 * g;
            v[i] = beta2 * v[i] + rest2 * g * g;
            w[i] -= step_size * m[i] / (std::sqrt(v[i]) / correction2 + eps);
        }
    }
};

// Eight running sums: one alone would wait for itself at every number.
template <int Width>
INLINE float sum_of_squares(const float* numbers, int64_t dim) {
    const int64_t width = Width ? Width : dim;
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= width; i += 8)
        for (int lane = 0; lane < 8; ++lane) lanes[lane] += numbers[i + lane] * numbers[i + lane];
    for (; i < width; ++i) lanes[i % 8] += numbers[i] * numbers[i];
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
           ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

struct Adagrad {
    float *weight, *sums;
    Decay decay;
    float lr, eps;

    INLINE void expect(int64_t row, int64_t dim) const {
        prefetch(weight + row * dim, dim);
        prefetch(sums + row, 1);
    }

    template <int Width>
    INLINE void update(int64_t, int64_t row, float* __restrict gradient, int64_t dim) const {
        const int64_t width = Width ? Width : dim;
        float* __restrict w = weight + row * width;
        decay.apply<Width>(gradient, w, width);
        const float sum = sums[row] + sum_of_squares<Width>(gradient, width) / width;
        sums[row] = sum;
        const float denominator = std::sqrt(sum) + eps;
        FOR_EACH_NUMBER(i, width) w[i] -= lr * gradient[i] / denominator;
    }
};

struct Sgd {
    float *weight, *buffer;  // no buffer without momentum
    Decay decay;
    float lr, momentum;

    INLINE void expect(int64_t row, int64_t dim) const {
        prefetch(weight + row * dim, dim);
        if (buffer) prefetch(buffer + row * dim, dim);
    }

    template <int Width>
    INLINE void update(int64_t, int64_t row, float* __restrict gradient, int64_t dim) const {
        const int64_t width = Width ? Width : dim;
        float* __restrict w = weight + row * width;
        decay.apply<Width>(gradient, w, width);
        if (buffer) {
            float* __restrict b = buffer + row * width;
            FOR_EACH_NUMBER(i, width) {
                b[i] = momentum * b[i] + gradient[i];
                gradient[i] = b[i];
            }
        }
        FOR_EACH_NUMBER(i, width) w[i] -= lr * gradient[i];
    }
};

// ---------------------------------------------------------------------------------------- the walk

struct Lookups {
    const int64_t* ids;
    int64_t num_lookups;
    const float* values;
    int64_t dim;
    int threads;
};

template <int Width>
INLINE void sum_lookups(const Order& order, int64_t slot, const float* values, int64_t dim, float* sum) {
    const int64_t width = Width ? Width : dim;
    const int64_t* positions = order.positions.data();
    const int64_t begin = order.starts[slot], end = order.starts[slot + 1];
    const int64_t last = static_cast<int64_t>(order.positions.size()) - 1;
    FOR_EACH_NUMBER(i, width) sum[i] = values[positions[begin] * width + i];
    for (int64_t lookup = begin + 1; lookup < end; ++lookup)
        FOR_EACH_NUMBER(i, width) sum[i] += values[positions[lookup] * width + i];
    for (int64_t lookup = begin; lookup < end; ++lookup)
        prefetch<false>(values + positions[std::min(lookup + LOOKUPS_AHEAD, last)] * width, width);
}

template <int Width, class Rule>
void walk(Order& order, const Lookups& lookups, const Rule& rule) {
    const int64_t dim = Width ? Width : lookups.dim, num_rows = order.num_rows;
    // Memory that cannot be had must be noticed before the threads start: none may throw.
    const int64_t stride = (dim + FLOATS_A_LINE - 1) / FLOATS_A_LINE * FLOATS_A_LINE;
    if (!Width) order.scratch.resize(lookups.threads * stride);
    float* scratch = order.scratch.data();
#pragma omp parallel num_threads(lookups.threads) if (num_rows > ROWS_A_TURN)
    {
        const Rule own = rule;  // a copy cannot change with the rows that are written
        const float* values = lookups.values;
#pragma omp for schedule(dynamic, ROWS_A_TURN)
        for (int64_t slot = 0; slot < num_rows; ++slot) {
            float registers[Width ? Width : 1];
            float* sum = Width ? registers : scratch + thread_index() * stride;
            own.expect(order.rows[std::min(slot + ROWS_AHEAD, num_rows - 1)], dim);
            sum_lookups<Width>(order, slot, values, dim, sum);
            own.template update<Width>(slot, order.rows[slot], sum, dim);
        }
    }
}

template <class Rule>
void walk_by_width(Order& order, const Lookups& lookups, const Rule& rule) {
    switch (lookups.dim) {
        case 1: return walk<1>(order, lookups, rule);
        case 4: return walk<4>(order, lookups, rule);
        case 8: return walk<8>(order, lookups, rule);
        case 10: return walk<10>(order, lookups, rule);
        case 16: return walk<16>(order, lookups, rule);
        case 32: return walk<32>(order, lookups, rule);
        case 64: return walk<64>(order, lookups, rule);
        default: return walk<0>(order, lookups, rule);
    }
}

// Return the number of distinct rows, or what went wrong; then nothing was written.
template <class Rule>
int64_t apply(const Lookups& lookups, int64_t limit, const Rule& rule) {
    if (lookups.num_lookups == 0) return 0;
    try {
        Order* order = find_order(lookups.ids, lookups.num_lookups, limit);
        if (!order) return OUT_OF_RANGE;
        walk_by_width(*order, lookups, rule);
        return order->num_rows;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    } catch (const std::length_error&) {
        return OUT_OF_MEMORY;
    }
}

}  // namespace

extern "C" {

int64_t rarebit_merge(const int64_t* ids, int64_t num_lookups, const float* values, int64_t dim,
                      int threads, int64_t* rows, float* sums) {
    return apply({ids, num_lookups, values, dim, threads}, INT64_MAX, Merge{rows, sums});
}

int64_t rarebit_adam(const int64_t* ids, int64_t num_lookups, const float* values, int64_t dim,
                     int threads, int64_t num_rows, float* weight, float keep, float pull,
                     float* exp_avg, float* exp_avg_sq, float step_size, float beta1, float rest1,
                     float beta2, float rest2, float correction2, float eps) {
    const Adam rule{weight, exp_avg, exp_avg_sq, {keep, pull}, step_size,   beta1,
                    rest1,  beta2,   rest2,      correction2,  eps};
    return apply({ids, num_lookups, values, dim, threads}, num_rows, rule);
}

int64_t rarebit_adagrad(const int64_t* ids, int64_t num_lookups, const float* values, int64_t dim,
                        int threads, int64_t num_rows, float* weight, float keep, float pull,
                        float* sums, float lr, float eps) {
    const Adagrad rule{weight, sums, {keep, pull}, lr, eps};
    return apply({ids, num_lookups, values, dim, threads}, num_rows, rule);
}

int64_t rarebit_sgd(const int64_t* ids, int64_t num_lookups, const float* values, int64_t dim,
                    int threads, int64_t num_rows, float* weight, float keep, float pull,
                    float* buffer, float lr, float momentum) {
    const Sgd rule{weight, buffer, {keep, pull}, lr, momentum};
    return apply({ids, num_lookups, values, dim, threads}, num_rows, rule);
}
}
