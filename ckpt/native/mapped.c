/* Parts of files that are read where the page cache has them, without a copy by the kernel.
 *
 * A page of a mapped file that cannot be read, because the file was truncated meanwhile or the disk fails, is a SIGBUS.
 * A handler for that signal takes the thread back to where it began to read, and the caller reads in another way. The
 * handler is installed once, before the first read. SIGBUS of other memory goes to the handler that was there before. If
 * another one has been installed since, no file is mapped any more. */
#include "mapped.h"

#ifdef __linux__
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Less is read faster by one call that copies. Mappings are in units of huge pages, which the kernel maps at once. */
enum { LEAST_BYTES = 256 << 10, HUGE_BYTES = 2 << 20, CACHESTAT = 451 };

/* ------------------------------------------------------------ the guard -------------------------------------------- */

/* A thread that reads memory from `begin` to `end`, and where it goes back to. A free one has the thread 0. */
struct guard {
    atomic_int thread;
    uintptr_t begin, end;
    sigjmp_buf back;
};

static struct guard guards[32]; /* not on the stacks of threads: the handler looks at those of others, too */
static struct sigaction before; /* ours */

static int this_thread(void) { return (int)syscall(SYS_gettid); }

static void on_bus_error(int number, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    int thread = this_thread();
    if (info->si_code > 0) /* from the kernel */
        for (struct guard *guard = guards; guard < guards + sizeof guards / sizeof *guards; guard++)
            if (guard->thread == thread && guard->begin <= at && at < guard->end) siglongjmp(guard->back, 1);
    int is_fault = info->si_code > 0 && info->si_code != BUS_MCEERR_AO; /* of an instruction, which is repeated */
    if (before.sa_handler == SIG_DFL || (before.sa_handler == SIG_IGN && is_fault)) {
        signal(number, SIG_DFL);
        if (!is_fault) raise(number);
    } else if (before.sa_handler != SIG_IGN) {
        if (before.sa_flags & (int)SA_RESETHAND) signal(number, SIG_DFL);
        if (before.sa_flags & SA_SIGINFO)
            before.sa_sigaction(number, info, context);
        else
            before.sa_handler(number);
    }
}

/* Return whether SIGBUS comes to `on_bus_error`, in this thread. Where it is blocked, it ends the process. */
static int is_guarded(void) {
    enum { NEVER, BEGUN, DONE };
    static atomic_int installed;
    struct sigaction now;
    sigset_t blocked;
    int expected = NEVER;
    if (pthread_sigmask(SIG_SETMASK, NULL, &blocked) || sigismember(&blocked, SIGBUS)) return 0;
    if (atomic_compare_exchange_strong(&installed, &expected, BEGUN)) {
        if (sigaction(SIGBUS, NULL, &before)) return 0;
        struct sigaction ours = before; /* it is called with the signals blocked that it wants blocked */
        ours.sa_sigaction = on_bus_error;
        ours.sa_flags = (before.sa_flags & ~(int)SA_RESETHAND) | SA_SIGINFO | SA_ONSTACK;
        if (sigaction(SIGBUS, &ours, &before)) return 0;
        atomic_store(&installed, DONE);
    }
    if (atomic_load(&installed) != DONE || sigaction(SIGBUS, NULL, &now)) return 0;
    return (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error;
}

/* Return a guard for this thread, or NULL if all are taken. */
static struct guard *enter(const uint8_t *memory, uint64_t bytes) {
    int thread = this_thread();
    for (struct guard *guard = guards; guard < guards + sizeof guards / sizeof *guards; guard++) {
        int free = 0;
        if (!atomic_compare_exchange_strong(&guard->thread, &free, thread)) continue;
        guard->begin = (uintptr_t)memory, guard->end = guard->begin + bytes;
        return guard;
    }
    return NULL;
}

/* Returns 0 if the thread was taken back by the handler. Nothing here changes after `sigsetjmp`, and the caller's frame
 * is not the one that it returns to twice. */
static __attribute__((noinline)) int use_guarded(struct guard *guard, use_bytes *use, void *context, const uint8_t *data,
                                                 uint64_t start, uint64_t bytes, int *result) {
    if (sigsetjmp(guard->back, 1)) return 0;
    *result = use(context, data, start, bytes);
    return 1;
}

/* ------------------------------------------------------------ the map ---------------------------------------------- */

/* Return whether a file is on a disk of this machine or in its memory. Elsewhere pages may go while they are used. */
static int is_local(int fd) {
    struct statfs about;
    if (fstatfs(fd, &about)) return 0;
    switch ((uint32_t)about.f_type) {
    case 0xef53:     /* ext4 */
    case 0x58465342: /* XFS */
    case 0x9123683e: /* btrfs */
    case 0x01021994: /* tmpfs, and memory without a name */
        return 1;
    }
    return 0;
}

/* Return whether the page cache has all of it, as far as the kernel says; Linux 6.5 is the first that does. */
static int is_cached(int fd, uint64_t start, uint64_t bytes) {
    struct {
        uint64_t offset, bytes;
    } range = {start, bytes};
    struct {
        uint64_t cached, dirty, written_back, evicted, recently_evicted;
    } found;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (syscall(CACHESTAT, fd, &range, &found, 0)) return 0;
    return found.cached >= (start + bytes - 1) / page - start / page + 1;
}

int ckpt_use_mapped(int fd, uint64_t start, uint64_t end, use_bytes *use, void *context, int *result) {
    struct stat about;
    if (end < start + LEAST_BYTES || fstat(fd, &about) || (uint64_t)about.st_size < end) return 0;
    if (!is_local(fd) || !is_cached(fd, start, end - start) || !is_guarded()) return 0;
    uint64_t first = start / HUGE_BYTES * HUGE_BYTES, bytes = (end - first + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    uint8_t *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)first);
    if (memory == MAP_FAILED) return 0;
    struct guard *guard = enter(memory, bytes);
    int done = guard && use_guarded(guard, use, context, memory + (start - first), start, end - start, result);
    if (guard) guard->thread = 0;
    munmap(memory, bytes);
    return done;
}
#else
int ckpt_use_mapped(int fd, uint64_t start, uint64_t end, use_bytes *use, void *context, int *result) {
    (void)fd, (void)start, (void)end, (void)use, (void)context, (void)result;
    return 0;
}
#endif
