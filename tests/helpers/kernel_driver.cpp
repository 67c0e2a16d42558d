// Calls kernels of csrc/ as a file says and writes down what they have written: for CPUs that tests have in an
// emulator, and for sanitizers. kernel_cases.py writes the file and compares the results.
//
//     driver CASES RESULTS
//
// CASES: int64 numbers and bytes. For each case the number of characters in the kernel's name, and these; the number of
// blocks of memory; of each its size, its bytes, the number of addresses in it, and for each of these where it lies,
// and the block and byte that it is of; the number of arguments, and of each its kind, and two numbers; the number of
// outputs, and which blocks these are. RESULTS: the bytes of the outputs.

#include "no_repeat_ngram.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

// As the kernels have them, which see addresses of numbers where these have any.
#define OF_EACH_TYPE(kernel, ...)                                                                                      \
    extern "C" void kernel(__VA_ARGS__), kernel##_bf16(__VA_ARGS__), kernel##_fp16(__VA_ARGS__);
OF_EACH_TYPE(fastgen_skinny_gemm, void *, void *, void *, void *, void *, int64_t, int64_t, int64_t, int32_t, int32_t,
             int32_t)
OF_EACH_TYPE(fastgen_few_queries, void *, void *, float, int32_t)
OF_EACH_TYPE(fastgen_flash_attention, void *, void *, float, int32_t)
OF_EACH_TYPE(fastgen_layer_norm, void *, void *, void *, void *, void *, int64_t, int64_t, float, int32_t)
OF_EACH_TYPE(fastgen_rms_norm, void *, void *, void *, int64_t, int64_t, float, int32_t)
extern "C" {
void fastgen_gelu(void *, void *, int64_t, int32_t, int32_t);
void fastgen_lookup(void *, void *, void *, int64_t, int32_t);
void fastgen_move_rows(void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int32_t);
void fastgen_beam_top_k(void *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int32_t);
void fastgen_no_repeat_ngram_cpu(const NGramProblem *, int32_t);
void fastgen_threads(void *run, void *number, void *count);
}

namespace {

// What OpenMP has: a part of the work for each thread.
thread_local int number = 0, count = 1;

void run_in_threads(void (*part)(void *), void *data, unsigned threads, unsigned) {
    std::vector<std::thread> team;
    for (unsigned i = 0; i < threads; i++)
        team.emplace_back([=] {
            number = i, count = threads;
            part(data);
        });
    for (std::thread &thread : team) thread.join();
}

class Input {
public:
    explicit Input(const char *path) {
        std::ifstream file(path, std::ios::binary);
        bytes.assign(std::istreambuf_iterator<char>(file), {});
    }

    bool has_more() const { return place < bytes.size(); }

    void read(void *to, size_t size) {
        if (size > bytes.size() - place) std::fprintf(stderr, "the cases end too early\n"), std::exit(1);
        if (size) std::memcpy(to, bytes.data() + place, size);
        place += size;
    }

    int64_t next() {
        int64_t value;
        read(&value, sizeof value);
        return value;
    }

private:
    std::vector<char> bytes;
    size_t place = 0;
};

struct Block { // no byte larger, so that a sanitizer sees what is read behind it
    int64_t size;
    std::unique_ptr<char[]> bytes;
};

enum Kind { INTEGER, FLOAT, ADDRESS }; // of an argument: a number; its bits; a block, or -1 for null, and a byte of it

struct Arguments {
    Input &input;
    const std::vector<Block> &blocks;

    template <typename T>
    T next() {
        const int64_t kind = input.next(), value = input.next(), byte = input.next();
        if (kind != (std::is_pointer_v<T> ? ADDRESS : std::is_floating_point_v<T> ? FLOAT : INTEGER))
            std::fprintf(stderr, "an argument is of kind %d\n", (int)kind), std::exit(1);
        if constexpr (std::is_pointer_v<T>) return value < 0 ? nullptr : (T)(blocks[value].bytes.get() + byte);
        else if constexpr (std::is_floating_point_v<T>) {
            T result;
            std::memcpy(&result, &value, sizeof result);
            return result;
        } else return (T)value;
    }
};

typedef std::function<void(Arguments &)> Call;

template <typename... T>
Call call_of(void (*kernel)(T...)) {
    return [kernel](Arguments &arguments) {
        std::tuple<T...> values{arguments.next<T>()...}; // in this order, as braces have it
        std::apply(kernel, values);
    };
}

#define ENTRY(kernel) {#kernel, call_of(kernel)}
#define ENTRIES(kernel) ENTRY(kernel), ENTRY(kernel##_bf16), ENTRY(kernel##_fp16)
const std::map<std::string, Call> KERNELS = {
    ENTRIES(fastgen_skinny_gemm),
    ENTRIES(fastgen_few_queries),
    ENTRIES(fastgen_flash_attention),
    ENTRIES(fastgen_layer_norm),
    ENTRIES(fastgen_rms_norm),
    ENTRY(fastgen_gelu),
    ENTRY(fastgen_lookup),
    ENTRY(fastgen_move_rows),
    ENTRY(fastgen_beam_top_k),
    ENTRY(fastgen_no_repeat_ngram_cpu),
};

std::vector<Block> read_blocks(Input &input) {
    struct Address {
        int64_t block, at, of, byte;
    };
    std::vector<Block> blocks(input.next());
    std::vector<Address> addresses;
    for (size_t i = 0; i < blocks.size(); i++) {
        const int64_t size = input.next();
        blocks[i] = {size, std::unique_ptr<char[]>(new char[size])};
        input.read(blocks[i].bytes.get(), size);
        for (int64_t left = input.next(); left > 0; left--) {
            const int64_t at = input.next(), of = input.next(), byte = input.next();
            addresses.push_back({(int64_t)i, at, of, byte});
        }
    }
    for (const Address &address : addresses) {
        const char *target = blocks[address.of].bytes.get() + address.byte;
        std::memcpy(blocks[address.block].bytes.get() + address.at, &target, sizeof target);
    }
    return blocks;
}

} // namespace

int main(int count, char **words) {
    if (count != 3) return std::fprintf(stderr, "driver CASES RESULTS\n"), 2;
    fastgen_threads((void *)run_in_threads, (void *)+[] { return number; }, (void *)+[] { return ::count; });
    Input input(words[1]);
    std::ofstream results(words[2], std::ios::binary);
    while (input.has_more()) {
        std::string name(input.next(), ' ');
        input.read(name.data(), name.size());
        const auto kernel = KERNELS.find(name);
        if (kernel == KERNELS.end()) return std::fprintf(stderr, "no kernel is called %s\n", name.c_str()), 1;
        const std::vector<Block> blocks = read_blocks(input);
        input.next(); // how many arguments there are, which the kernel knows
        Arguments arguments{input, blocks};
        kernel->second(arguments);
        for (int64_t left = input.next(); left > 0; left--) {
            const Block &output = blocks[input.next()];
            results.write(output.bytes.get(), output.size);
        }
    }
    return results.flush() ? 0 : 1;
}
