/* The limit that a load is measured against: K threads pread the same bytes into fresh, huge-page-advised memory.
 *
 *     limit THREADS BYTES FILE...            prints the seconds from before the memory is mapped to the last byte read
 *     limit --shared THREADS BYTES FILE...   the same into shared memory that was touched before the clock starts
 *
 * The files are read in order, in pieces of 8 MiB, and again from the first one until BYTES are read. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 8 << 20 };

struct piece { int fd; off_t offset; size_t size; char *target; };

static struct piece *pieces;
static size_t num_pieces;
static atomic_size_t next_piece;

static void die(const char *what) { perror(what); exit(1); }

static void *reader(void *unused)
{
    for (size_t i; (i = atomic_fetch_add(&next_piece, 1)) < num_pieces;) {
        struct piece p = pieces[i];
        while (p.size) {
            ssize_t got = pread(p.fd, p.target, p.size, p.offset);
            if (got <= 0) die("pread");
            p.target += got, p.offset += got, p.size -= (size_t)got;
        }
    }
    return unused;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *fresh(size_t bytes, int sharing)
{
    const size_t huge = 2 << 20;
    char *memory = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) die("mmap");
    madvise(memory, bytes + huge, MADV_HUGEPAGE);
    return memory + (huge - (uintptr_t)memory % huge) % huge;
}

int main(int argc, char **argv)
{
    int shared = argc > 1 && !strcmp(argv[1], "--shared");
    argc -= shared, argv += shared;
    if (argc < 4) return 2;
    size_t threads = strtoul(argv[1], NULL, 10), bytes = strtoul(argv[2], NULL, 10);
    int num_files = argc - 3;
    struct { int fd; off_t size; } files[num_files];
    for (int f = 0; f < num_files; f++) {
        struct stat status;
        files[f].fd = open(argv[f + 3], O_RDONLY);
        if (files[f].fd < 0 || fstat(files[f].fd, &status)) die(argv[f + 3]);
        files[f].size = status.st_size;
    }
    size_t room = bytes / PIECE + (size_t)argc;
    pieces = calloc(room, sizeof *pieces);
    for (size_t planned = 0, before = 1; planned < bytes && planned != before;) {
        before = planned;
        for (int f = 0; f < num_files && planned < bytes; f++)
            for (off_t at = 0; at < files[f].size && planned < bytes;) {
                size_t size = (size_t)(files[f].size - at);
                if (size > PIECE) size = PIECE;
                if (size > bytes - planned) size = bytes - planned;
                if (num_pieces == room) pieces = realloc(pieces, (room *= 2) * sizeof *pieces);
                if (!pieces) die("memory");
                pieces[num_pieces++] = (struct piece){files[f].fd, at, size, (char *)planned};
                at += (off_t)size, planned += size;
            }
    }
    char *memory = fresh(bytes, shared ? MAP_SHARED : MAP_PRIVATE);
    for (size_t i = 0; i < bytes; i += 4096) memory[i] = 1; /* a virtual machine's host may have taken free pages back */
    if (!shared) munmap(memory, bytes);
    double begin = now();
    if (!shared) memory = fresh(bytes, MAP_PRIVATE);
    for (size_t i = 0; i < num_pieces; i++) pieces[i].target = memory + (uintptr_t)pieces[i].target;
    pthread_t *team = calloc(threads, sizeof *team);
    for (size_t i = 0; i < threads; i++)
        if (pthread_create(&team[i], NULL, reader, NULL)) die("pthread_create");
    for (size_t i = 0; i < threads; i++) pthread_join(team[i], NULL);
    printf("%.9f\n", now() - begin);
    return 0;
}
