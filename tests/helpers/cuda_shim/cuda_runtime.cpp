// The fibers, barriers and errors behind cuda_runtime.h. One launch at a time, from one thread.
//
// For ThreadSanitizer this file is compiled without -fsanitize=thread and with -DCUDA_SHIM_TSAN: each thread of a block
// is then a thread of the race detector, ordered after the launching one and by barriers, but by nothing that is done
// here to run them.

#include "cuda_runtime.h"

#include <ucontext.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef CUDA_SHIM_TSAN
#include <sanitizer/tsan_interface.h>
#endif

int cuda_shim_last_device = -1;
cudaStream_t cuda_shim_last_stream = nullptr;

namespace cuda_shim {
namespace {

constexpr int kDevices = 2;
constexpr unsigned kMaxBlock = 1024;
constexpr unsigned kMaxGridX = 2147483647;
constexpr unsigned kMaxGridYZ = 65535;
constexpr std::size_t kStackBytes = 256 << 10;
#ifdef CUDA_SHIM_TSAN
constexpr bool kFiberForEachThread = true;
#else
constexpr bool kFiberForEachThread = false;  // but for each that meets a barrier: many blocks have none
#endif

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Position position;
    int line = 0;  // of the barrier at which it waits; 0: its thread has ended
    void* sanitizer_state = nullptr;
};

struct Scheduler {
    Fiber self;  // the launching thread
    std::deque<Fiber> fibers;
    std::vector<Fiber*> idle;
    Fiber* running = nullptr;
    const std::function<void()>* thread = nullptr;
    Position next;           // thread of the block to be started
    std::size_t left = 0;    // to be started
    unsigned phase = 0;  // barriers that all threads have passed
    bool any = false;    // what the threads that have arrived at barrier_or say together
    bool passed_any = false;
    char order[2] = {};  // addresses for the race detector: arrivals at even and odd barriers
    char ended = 0;      // and the end of a block
};

int current_device = 0;
cudaError_t last_error = cudaSuccess;
std::string launch_failure;
Scheduler scheduler;

void switch_fibers(Fiber& from, Fiber& to, [[maybe_unused]] bool is_ordered) {
    scheduler.running = &to;
#ifdef __SANITIZE_ADDRESS__
    const bool is_back = &to == &scheduler.self;
    __sanitizer_start_switch_fiber(&from.sanitizer_state, is_back ? to.context.uc_stack.ss_sp : to.stack.get(),
                                   is_back ? to.context.uc_stack.ss_size : kStackBytes);
#endif
#ifdef CUDA_SHIM_TSAN
    __tsan_switch_to_fiber(to.sanitizer_state, is_ordered ? 0 : __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&from.context, &to.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from.sanitizer_state, nullptr, nullptr);
#endif
}

void acquire([[maybe_unused]] char* address) {
#ifdef CUDA_SHIM_TSAN
    __tsan_acquire(address);
#endif
}

void release([[maybe_unused]] char* address) {
#ifdef CUDA_SHIM_TSAN
    __tsan_release(address);
#endif
}

void run_next_thread(Fiber& self) {
    self.position = scheduler.next;
    --scheduler.left;
    dim3& next = scheduler.next.thread;
    if (++next.x == self.position.block_size.x) {
        next.x = 0;
        if (++next.y == self.position.block_size.y) {
            next.y = 0;
            ++next.z;
        }
    }
    (*scheduler.thread)();
    self.line = 0;
    release(&scheduler.ended);
}

void run_fiber() {
    Fiber& self = *scheduler.running;
#ifdef __SANITIZE_ADDRESS__
    const void* bottom;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &scheduler.self.context.uc_stack.ss_size);
    scheduler.self.context.uc_stack.ss_sp = const_cast<void*>(bottom);
#endif
    for (;;) {
        do run_next_thread(self);
        while (scheduler.left && !kFiberForEachThread);
        switch_fibers(self, scheduler.self, false);
    }
}

Fiber* new_fiber() {
    Fiber* fiber = &scheduler.fibers.emplace_back();
    fiber->stack.reset(new char[kStackBytes]);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber->context, run_fiber, 0);
#ifdef CUDA_SHIM_TSAN
    fiber->sanitizer_state = __tsan_create_fiber(0);
#endif
    return fiber;
}

Fiber* idle_fiber() {
    if (scheduler.idle.empty()) return new_fiber();
    Fiber* fiber = scheduler.idle.back();
    scheduler.idle.pop_back();
    return fiber;
}

// Continues these threads, the last one first, and returns those that wait at their next barrier.
std::vector<Fiber*> run(std::vector<Fiber*> fibers) {
    std::vector<Fiber*> waiting;
    for (auto fiber = fibers.rbegin(); fiber != fibers.rend(); ++fiber) {
        switch_fibers(scheduler.self, **fiber, true);
        ((*fiber)->line ? waiting : scheduler.idle).push_back(*fiber);
    }
    return waiting;
}

// Starts the threads of a block, each as far as its first barrier, and returns those that wait there.
std::vector<Fiber*> start(const Position& block, std::size_t threads) {
    std::vector<Fiber*> waiting, ended;
    scheduler.next = block;
    scheduler.left = threads;
    while (scheduler.left) {
        Fiber* fiber = idle_fiber();
        switch_fibers(scheduler.self, *fiber, true);
        (fiber->line ? waiting : ended).push_back(fiber);
    }
    scheduler.idle.insert(scheduler.idle.end(), ended.begin(), ended.end());
    return waiting;
}

// Whether no barrier was missed.
bool run_block(const Position& block) {
    const std::size_t threads = std::size_t{block.block_size.x} * block.block_size.y * block.block_size.z;
    std::vector<Fiber*> waiting = start(block, threads);
    while (!waiting.empty()) {
        for (const Fiber* fiber : waiting) {
            if (fiber->line == waiting[0]->line) continue;
            launch_failure = "threads of a block wait at different barriers, lines " +
                             std::to_string(waiting[0]->line) + " and " + std::to_string(fiber->line);
            return false;
        }
        if (waiting.size() < threads) {
            launch_failure = std::to_string(waiting.size()) + " of " + std::to_string(threads) +
                             " threads of a block wait at the barrier of line " + std::to_string(waiting[0]->line);
            return false;
        }
        ++scheduler.phase;
        scheduler.passed_any = std::exchange(scheduler.any, false);
        waiting = run(waiting);
    }
    acquire(&scheduler.ended);
    return true;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

}  // namespace

const Position& position() { return scheduler.running->position; }

bool barrier_or(int line, bool predicate) {
    Fiber& self = *scheduler.running;
    char* order = &scheduler.order[scheduler.phase % 2];
    scheduler.any |= predicate;
    self.line = line;
    release(order);
    switch_fibers(self, scheduler.self, false);
    acquire(order);
    return scheduler.passed_any;
}

void barrier(int line) { barrier_or(line, false); }

cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream, const std::function<void()>& thread) {
    const std::size_t threads = std::size_t{block.x} * block.y * block.z;
    if (!threads || threads > kMaxBlock || !grid.x || !grid.y || !grid.z || grid.x > kMaxGridX ||
        grid.y > kMaxGridYZ || grid.z > kMaxGridYZ) {
        return fail(cudaErrorInvalidConfiguration);
    }
    cuda_shim_last_device = current_device;
    cuda_shim_last_stream = stream;
#ifdef CUDA_SHIM_TSAN
    scheduler.self.sanitizer_state = __tsan_get_current_fiber();
#endif
    scheduler.thread = &thread;
    Position position{grid, block, {}, {}};
    for (position.block.z = 0; position.block.z < grid.z; ++position.block.z) {
        for (position.block.y = 0; position.block.y < grid.y; ++position.block.y) {
            for (position.block.x = 0; position.block.x < grid.x; ++position.block.x) {
                if (run_block(position)) continue;
                scheduler.idle.clear();  // those that wait will never end
                scheduler.fibers.clear();
                scheduler.any = false;
                return fail(cudaErrorLaunchFailure);
            }
        }
    }
    return cudaSuccess;
}

}  // namespace cuda_shim

extern "C" {

cudaError_t cudaGetDevice(int* device) {
    *device = cuda_shim::current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= cuda_shim::kDevices) return cuda_shim::fail(cudaErrorInvalidDevice);
    cuda_shim::current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(cuda_shim::last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorLaunchFailure: return cuda_shim::launch_failure.c_str();
    }
    return "unknown error";
}
}
