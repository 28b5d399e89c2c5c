// Parts of a call on the threads that torch's operators run on: those of the OpenMP runtime that torch has loaded.
// Threads of our own would share the cores with OpenMP's, which look for work a while after their last.
//
// A thread takes parts until none is left, so one that comes late costs little. Without a runtime that the process shows,
// and in a child that forked after it ran, which has none of its threads, the caller does all the parts.
//
// From both ends, if that is asked: every other thread takes them from the last back. Then each of two threads reads one
// stream, and what kernels and processor fetch beyond the end of a part is the same thread's next one, or its last.
#ifndef PTQ_POOL_H
#define PTQ_POOL_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

#include <atomic>

namespace {

typedef void (*part_fn)(void *argument, int64_t part);
typedef void (*parallel_fn)(void (*run)(void *), void *data, unsigned threads, unsigned flags);

struct Call {
    part_fn run;
    void *argument;
    int64_t parts;
    bool both_ends;
    std::atomic<int64_t> threads{0}, taken{0}, ends[2] = {};  // parts taken: in all; from the first on, from the last back

    static void take_parts(void *call) {
        Call *mine = (Call *)call;
        const bool back = mine->threads.fetch_add(1) % 2 && mine->both_ends;
        while (mine->taken.fetch_add(1) < mine->parts) {
            const int64_t at = mine->ends[back].fetch_add(1);
            mine->run(mine->argument, back ? mine->parts - 1 - at : at);
        }
    }
};

std::atomic<bool> has_run{false}, left_behind{false};

parallel_fn openmp() {
    pthread_atfork(nullptr, nullptr, [] { left_behind = left_behind || has_run; });
    return (parallel_fn)dlsym(RTLD_DEFAULT, "GOMP_parallel");  // GNU's name; the runtimes of LLVM and Intel have it too
}

void in_parallel(part_fn run, void *argument, int64_t parts, int64_t threads, bool both_ends = false) {
    static const parallel_fn parallel = openmp();
    Call call;
    call.run = run;
    call.argument = argument;
    call.parts = parts;
    call.both_ends = both_ends;
    if (threads > parts) threads = parts;
    if (threads < 2 || !parallel || left_behind) return Call::take_parts(&call);
    has_run = true;
    parallel(Call::take_parts, &call, (unsigned)threads, 0);
}

}  // namespace

#endif
