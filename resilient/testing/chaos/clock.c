/* Moves the time of day of the processes that preload it, and of no other: by as many nanoseconds
   as the file of RESILIENT_CHAOS_CLOCK holds (eight bytes), from one call to the next. Every other
   clock is left alone, and whoever waits until a time of day waits as long as before.

   libfaketime 0.9.10 is of no use here: under it time.sleep of Python 3.11 and later fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
/* No machine has been up for so long: what is above is a time of day, what is below is not. */
#define EPOCH 1000000000LL

static const volatile int64_t *moved;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RESILIENT_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *there = mmap(0, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (there != MAP_FAILED) moved = there;
}

static int is_of_the_day(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

static void add(struct timespec *time, int64_t nanoseconds) {
    int64_t sum = time->tv_nsec + nanoseconds % SECOND;
    time->tv_sec += nanoseconds / SECOND + (sum >= SECOND) - (sum < 0);
    time->tv_nsec = sum + SECOND * ((sum < 0) - (sum >= SECOND));
}

static struct timespec truly(const struct timespec *until) {
    struct timespec time = *until;
    if (moved && time.tv_sec > EPOCH) add(&time, -*moved);
    return time;
}

static void *real(const char *name, const char *version) {
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : 0;
    return found ? found : dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = real("clock_gettime", 0);
    int code = next ? next(clock, time) : (int)syscall(SYS_clock_gettime, clock, time);
    if (!code && moved && is_of_the_day(clock)) add(time, *moved);
    return code;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *there) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (there) *there = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *time, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, time) ? base : 0;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    /* Without a version the one of a condition of another size may be found. */
    if (!next) next = real("pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec time = truly(until);
    return next(condition, mutex, &time);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           clockid_t clock, const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!next) next = real("pthread_cond_clockwait", 0);
    struct timespec time = truly(until);
    return next(condition, mutex, clock, &time);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*next)(pthread_mutex_t *, const struct timespec *);
    if (!next) next = real("pthread_mutex_timedlock", 0);
    struct timespec time = truly(until);
    return next(mutex, &time);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = real("sem_timedwait", 0);
    struct timespec time = truly(until);
    return next(semaphore, &time);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock,
                  const struct timespec *restrict until) {
    static int (*next)(sem_t *, clockid_t, const struct timespec *);
    if (!next) next = real("sem_clockwait", 0);
    struct timespec time = truly(until);
    return next(semaphore, clock, &time);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted,
                    struct timespec *left) {
    static int (*next)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!next) next = real("clock_nanosleep", 0);
    struct timespec time = *wanted;
    if (flags & TIMER_ABSTIME && is_of_the_day(clock)) time = truly(wanted);
    return next(clock, flags, &time, left);
}
