/* The waits of gloo for the end of one transfer, and an end for those that nothing else ends. See gloo_waits.py.

Gloo calls `waitRecv` and `waitSend` of a buffer through its table of virtual functions. The functions here take their
places there: they note which buffers are waited for, and call gloo's. In the C++ ABI of Linux (Itanium) a method is a
function whose first argument is the object, and a duration is passed as the number in it.

Gloo's functions throw. So this is compiled with -fexceptions, and what must be done in any case is a cleanup. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef bool (*wait_function)(void *buffer, int *rank, int64_t timeout_ms);
typedef void (*abort_function)(void *buffer);

static wait_function gloo_wait_recv, gloo_wait_send;
static abort_function gloo_abort_recv, gloo_abort_send;

/* One thread that waits. They form a list through the stacks of these threads. */
struct waiting {
    void *buffer;
    abort_function abort;
    bool is_ended; /* with the mutex */
    struct waiting *older;
    struct waiting **place; /* what points to this one */
};

static struct waiting *newest;
static atomic_bool ended_any; /* since this process began */
static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;

static void enter(struct waiting *one) {
    pthread_mutex_lock(&list_mutex);
    one->older = newest;
    one->place = &newest;
    if (one->older)
        one->older->place = &one->older;
    newest = one;
    pthread_mutex_unlock(&list_mutex);
}

static void leave(struct waiting *one) {
    pthread_mutex_lock(&list_mutex);
    *one->place = one->older;
    if (one->older)
        one->older->place = one->place;
    pthread_mutex_unlock(&list_mutex);
}

/* Returns true: the transfer is complete. Throws what gloo throws; also if the wait was ended, because then gloo waits
once more, and after 1 ms throws its error of a timeout. Most of gloo ignores false, and would go on as if the bytes had
come. So a wait is not asked whether it was ended itself: an end that comes when a wait is just over is found by the next
one for the same buffer. False, as without us: torch has aborted the operation, and no wait was ever ended. */
static bool wait(wait_function gloo_wait, abort_function gloo_abort, void *buffer, int *rank, int64_t timeout_ms) {
    __attribute__((cleanup(leave))) struct waiting one = {.buffer = buffer, .abort = gloo_abort};
    enter(&one);
    bool done = gloo_wait(buffer, rank, timeout_ms);
    while (!done && atomic_load(&ended_any))
        done = gloo_wait(buffer, rank, 1);
    return done;
}

static bool wait_recv(void *buffer, int *rank, int64_t timeout_ms) {
    return wait(gloo_wait_recv, gloo_abort_recv, buffer, rank, timeout_ms);
}

static bool wait_send(void *buffer, int *rank, int64_t timeout_ms) {
    return wait(gloo_wait_send, gloo_abort_send, buffer, rank, timeout_ms);
}

/* Set the functions of gloo: waitRecv, waitSend, abortWaitRecv, abortWaitSend. Write the addresses of the functions to
put in the places of the first two to `replacements`. */
void inprocess_gloo_functions(void *const functions[4], void *replacements[2]) {
    gloo_wait_recv = (wait_function)functions[0];
    gloo_wait_send = (wait_function)functions[1];
    gloo_abort_recv = (abort_function)functions[2];
    gloo_abort_send = (abort_function)functions[3];
    replacements[0] = (void *)wait_recv;
    replacements[1] = (void *)wait_send;
}

/* End all waits with an exception; return how many were not ended before. Any thread. Those ended before are ended
again: an end that comes just before gloo begins to wait may be lost. */
int inprocess_end_gloo_waits(void) {
    int count = 0;
    pthread_mutex_lock(&list_mutex);
    for (struct waiting *one = newest; one; one = one->older) {
        atomic_store(&ended_any, true);
        count += !one->is_ended;
        one->is_ended = true;
        one->abort(one->buffer);
    }
    pthread_mutex_unlock(&list_mutex);
    return count;
}
