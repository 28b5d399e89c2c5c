// Threads that wait for parts of a call. One call at a time; a call that finds the threads busy runs on its own thread.
//
// A call takes parts itself, so threads that wake late cost nothing. Threads stay until the process ends, and are made
// again after a fork, which leaves them behind.
#ifndef PTQ_POOL_H
#define PTQ_POOL_H

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

typedef void (*part_fn)(void *argument, int64_t part);

struct Call {
    part_fn run;
    void *argument;
    int64_t parts;
    std::atomic<int64_t> next{0};

    void take_parts() {
        for (int64_t part; (part = next.fetch_add(1)) < parts;) run(argument, part);
    }
};

struct Pool {
    std::mutex busy, lock;
    std::condition_variable wake, idle;
    std::atomic<uint64_t> calls{0};
    Call *call = nullptr;
    int64_t wanted = 0, working = 0, size = 0;
    pid_t owner = getpid();

    void serve(int64_t index) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            if (!call || calls == seen || index >= wanted) {
                hold.unlock();
                for (int i = 0; i < 4000 && calls == seen; ++i) pause();  // the next layer's call is often near
                hold.lock();
                if (!call || calls == seen || index >= wanted) {
                    wake.wait(hold, [&] { return call && calls != seen && index < wanted; });
                }
            }
            seen = calls;
            Call *mine = call;
            ++working;
            hold.unlock();
            mine->take_parts();
            hold.lock();
            if (--working == 0) idle.notify_one();
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void grow(int64_t threads) {
        try {
            for (; size < threads; ++size) std::thread(&Pool::serve, this, size).detach();
        } catch (const std::system_error &) {  // no more threads: those that there are will do
        }
    }

    void run(Call *mine, int64_t threads) {
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> hold(lock);
            call = mine;
            wanted = threads - 1;
            ++calls;
        }
        wake.notify_all();
        mine->take_parts();
        std::unique_lock<std::mutex> hold(lock);
        call = nullptr;
        idle.wait(hold, [&] { return working == 0; });
    }
};

void in_parallel(part_fn run, void *argument, int64_t parts, int64_t threads) {
    static std::mutex making;
    static Pool *pool = nullptr;
    Call call;
    call.run = run;
    call.argument = argument;
    call.parts = parts;
    if (threads < 2 || parts < 2) return call.take_parts();
    making.lock();
    if (!pool || pool->owner != getpid()) pool = new Pool;  // never freed: threads may still look at it at exit
    Pool *mine = pool;
    making.unlock();
    if (!mine->busy.try_lock()) return call.take_parts();
    mine->run(&call, threads);
    mine->busy.unlock();
}

}  // namespace

#endif
