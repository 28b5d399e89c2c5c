// Runs the kernels of another processor for tests on this one. emulated.py starts it under an emulator and sends calls.
//
// A call is a name and up to eight integers, pointers among them, whose addresses are those of the tests' process with
// one bit changed (so that they meet nothing of the emulator's). The kernel faults where it follows one; the handler
// asks for the memory there and maps it. After the call the words that were changed go back, and all is forgotten.
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

enum { PAGE = 4096, AHEAD = 16, MOST_RUNS = 1 << 16, MOST_ARGUMENTS = 8 };
const uint64_t LOWEST = 1ull << 40;  // addresses of the other process begin here

struct Run {  // pages that came together: as they are now, and as they came
    uint64_t *now, *before;
    uint64_t words;
};
Run runs[MOST_RUNS];
int64_t run_count = 0;

void get(void *to, size_t n) {
    for (char *p = (char *)to; n;) {
        const ssize_t got = read(STDIN_FILENO, p, n);
        if (got <= 0) _exit(0);  // nobody is left to work for
        p += got, n -= (size_t)got;
    }
}

void put(const void *from, size_t n) {
    for (const char *p = (const char *)from; n;) {
        const ssize_t done = write(STDOUT_FILENO, p, n);
        if (done <= 0) _exit(1);
        p += done, n -= (size_t)done;
    }
}

void put_number(uint64_t v) { put(&v, sizeof v); }

uint64_t get_number() {
    uint64_t v;
    get(&v, sizeof v);
    return v;
}

// The pages from `at` on, no more than AHEAD and none that is here already.
uint64_t wanted_pages(uint64_t at) {
    uint64_t pages = AHEAD;
    for (int64_t i = 0; i < run_count; ++i) {
        const uint64_t first = (uint64_t)runs[i].now;
        if (first > at && (first - at) / PAGE < pages) pages = (first - at) / PAGE;
    }
    return pages;
}

void on_fault(int, siginfo_t *info, void *) {
    const uint64_t at = (uint64_t)info->si_addr / PAGE * PAGE;
    if (at < LOWEST || run_count == MOST_RUNS) {
        signal(SIGSEGV, SIG_DFL);  // a fault of this program's own
        return;
    }
    put("p", 1);
    put_number(at);
    put_number(wanted_pages(at));
    const uint64_t size = get_number();  // in bytes, whole pages
    if (!size) _exit(2);                 // the other side has said what is wrong
    void *now = mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    void *before = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (now == MAP_FAILED || before == MAP_FAILED) _exit(3);
    get(now, size);
    memcpy(before, now, size);
    runs[run_count++] = {(uint64_t *)now, (uint64_t *)before, size / 8};
}

void send_changes(const Run &run) {
    for (uint64_t i = 0; i < run.words; ++i) {
        if (run.now[i] == run.before[i]) continue;
        uint64_t end = i + 1;
        while (end < run.words && run.now[end] != run.before[end]) ++end;
        put("w", 1);
        put_number((uint64_t)(run.now + i));
        put_number((end - i) * 8);
        put(run.now + i, (end - i) * 8);
        i = end;
    }
}

void forget_all() {
    for (int64_t i = 0; i < run_count; ++i) {
        send_changes(runs[i]);
        munmap(runs[i].now, runs[i].words * 8);
        munmap(runs[i].before, runs[i].words * 8);
    }
    run_count = 0;
}

typedef int64_t (*function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

void serve(void *library) {
    for (;;) {
        char name[256] = {0};
        const uint64_t length = get_number();
        if (length >= sizeof name) _exit(4);
        get(name, length);
        const bool is_call = get_number() != 0;
        int64_t a[MOST_ARGUMENTS];
        get(a, sizeof a);
        const function f = (function)dlsym(library, name);
        int64_t result = f != nullptr;
        if (is_call && f) result = f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
        forget_all();
        put("r", 1);
        put_number((uint64_t)result);
    }
}

}  // namespace

int main(int count, char **arguments) {
    void *library = count == 2 ? dlopen(arguments[1], RTLD_LAZY) : nullptr;  // lazily: nothing of Python's is called
    if (!library) {
        fprintf(stderr, "usage: %s LIBRARY; %s\n", arguments[0], count == 2 ? dlerror() : "no library named");
        return 2;
    }
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    serve(library);
}
