// The fibers, barriers and errors behind cuda_runtime.h. One launch at a time, from one thread.

#include "cuda_runtime.h"

#include <ucontext.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

int cuda_shim_last_device = -1;
cudaStream_t cuda_shim_last_stream = nullptr;

namespace cuda_shim {
namespace {

constexpr int kDevices = 2;
constexpr unsigned kMaxBlock = 1024;
constexpr unsigned kMaxGridX = 2147483647;
constexpr unsigned kMaxGridYZ = 65535;
constexpr std::size_t kStackBytes = 256 << 10;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Position position;
    int line = 0;  // of the barrier at which it waits; 0: its thread has ended
};

struct Scheduler {
    Fiber self;  // the launching thread
    std::deque<Fiber> fibers;
    std::vector<Fiber*> idle;
    Fiber* running = nullptr;
    const std::function<void()>* thread = nullptr;
    Position next;         // thread of the block to be started
    std::size_t left = 0;  // to be started
    bool any = false;      // what the threads that have arrived at barrier_or say together
    bool passed_any = false;
};

int current_device = 0;
cudaError_t last_error = cudaSuccess;
std::string launch_failure;
Scheduler scheduler;

void switch_fibers(Fiber& from, Fiber& to) {
    scheduler.running = &to;
    swapcontext(&from.context, &to.context);
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
}

void run_fiber() {
    Fiber& self = *scheduler.running;
    for (;;) {
        do run_next_thread(self);
        while (scheduler.left);
        switch_fibers(self, scheduler.self);
    }
}

Fiber* new_fiber() {
    Fiber* fiber = &scheduler.fibers.emplace_back();
    fiber->stack.reset(new char[kStackBytes]);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber->context, run_fiber, 0);
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
        switch_fibers(scheduler.self, **fiber);
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
        switch_fibers(scheduler.self, *fiber);
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
        scheduler.passed_any = std::exchange(scheduler.any, false);
        waiting = run(waiting);
    }
    return true;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

}  // namespace

const Position& position() { return scheduler.running->position; }

bool barrier_or(int line, bool predicate) {
    Fiber& self = *scheduler.running;
    scheduler.any |= predicate;
    self.line = line;
    switch_fibers(self, scheduler.self);
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
