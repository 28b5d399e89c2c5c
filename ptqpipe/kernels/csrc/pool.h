// Parts of a call on the threads that torch's operators run on: those of the OpenMP runtime that torch has loaded.
// Threads of our own would share the cores with OpenMP's, which look for work a while after their last.
//
// A thread takes parts until none is left, so one that comes late costs little. Without a runtime that the process shows,
// and in a child that forked after it ran, which has none of its threads, the caller does all the parts.
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
    std::atomic<int64_t> next{0};

    static void take_parts(void *call) {
        Call *mine = (Call *)call;
        for (int64_t part; (part = mine->next.fetch_add(1)) < mine->parts;) mine->run(mine->argument, part);
    }
};

std::atomic<bool> has_run{false}, left_behind{false};

parallel_fn openmp() {
    pthread_atfork(nullptr, nullptr, [] { left_behind = left_behind || has_run; });
    return (parallel_fn)dlsym(RTLD_DEFAULT, "GOMP_parallel");  // GNU's name; the runtimes of LLVM and Intel have it too
}

void in_parallel(part_fn run, void *argument, int64_t parts, int64_t threads) {
    static const parallel_fn parallel = openmp();
    Call call;
    call.run = run;
    call.argument = argument;
    call.parts = parts;
    if (threads > parts) threads = parts;
    if (threads < 2 || !parallel || left_behind) return Call::take_parts(&call);
    has_run = true;
    parallel(Call::take_parts, &call, (unsigned)threads, 0);
}

}  // namespace

#endif
