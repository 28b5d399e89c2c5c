// Working space of the kernels.
#ifndef PTQ_ROOM_H
#define PTQ_ROOM_H

#include <stdlib.h>

namespace {

// Room that a thread keeps from call to call: fresh pages cost more than what is done in them.
struct kept_room {
    void *bytes = nullptr;
    size_t size = 0;
    void *of(size_t wanted) {
        if (wanted <= size) return bytes;
        free(bytes);
        size = (wanted + 4095) / 4096 * 4096;
        bytes = aligned_alloc(4096, size);
        if (!bytes) size = 0;
        return bytes;
    }
    ~kept_room() { free(bytes); }
};

}  // namespace

#endif
