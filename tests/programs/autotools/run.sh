# A library, a program and their tests by autoconf, automake and libtool: configure, make, check, install, distcheck. Prints TAP.
set -u
t() { name=$1; shift; if "$@" >log.txt 2>&1; then echo "ok - $name"; else echo "not ok - $name"; tail -8 log.txt | sed 's/^/# /'; fi; }
here=$(cd "$(dirname "$0")" && pwd)
t "ls lists a directory" ls -d .
ls -d . >/dev/null 2>&1 || { mkdir -p "$here/bin" && cp "$here/ls.py" "$here/bin/ls" && PATH=$here/bin:$PATH; }
rm -rf /workspace/c; mkdir -p /workspace/c/m4; cd /workspace/c || exit 9
cat >configure.ac <<'A'
AC_INIT([deep], [1.2], [nobody@example.org])
AC_CONFIG_MACRO_DIRS([m4])
AM_INIT_AUTOMAKE([foreign subdir-objects])
LT_INIT
AC_PROG_CC
AC_SEARCH_LIBS([pthread_create], [pthread])
AC_SEARCH_LIBS([sem_open], [pthread rt])
AC_CHECK_HEADERS([sys/epoll.h sys/inotify.h sys/mman.h mqueue.h])
AC_CHECK_FUNCS([mmap fork vfork memfd_create getrandom copy_file_range])
AC_FUNC_FORK
AC_FUNC_MMAP
AC_CONFIG_HEADERS([config.h])
AC_CONFIG_FILES([Makefile])
AC_OUTPUT
A
cat >Makefile.am <<'A'
ACLOCAL_AMFLAGS = -I m4
lib_LTLIBRARIES = libdeep.la
libdeep_la_SOURCES = deep.c deep.h
include_HEADERS = deep.h
bin_PROGRAMS = deeper
deeper_SOURCES = main.c
deeper_LDADD = libdeep.la
check_PROGRAMS = threads shared semaphore mapped signals
threads_SOURCES = threads.c
shared_SOURCES = shared.c
semaphore_SOURCES = semaphore.c
mapped_SOURCES = mapped.c
signals_SOURCES = signals.c
TESTS = $(check_PROGRAMS)
A
cat >deep.h <<'A'
int deep(int);
A
cat >deep.c <<'A'
#include "deep.h"
int deep(int n) { return n < 2 ? n : deep(n - 1) + deep(n - 2); }
A
cat >main.c <<'A'
#include <stdio.h>
#include "deep.h"
int main(void) { printf("%d\n", deep(20)); return 0; }
A
cat >threads.c <<'A'
#include <pthread.h>
static long sum; static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *work(void *arg) { for (int i = 0; i < 10000; i++) { pthread_mutex_lock(&lock); sum++; pthread_mutex_unlock(&lock); } return arg; }
int main(void) { pthread_t t[16]; for (int i = 0; i < 16; i++) if (pthread_create(&t[i], 0, work, 0)) return 1; for (int i = 0; i < 16; i++) pthread_join(t[i], 0); return sum != 160000; }
A
cat >shared.c <<'A'
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) { int fd = shm_open("/deep", O_CREAT | O_RDWR, 0600); if (fd < 0 || ftruncate(fd, 4096)) return 1; char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return 2; if (!fork()) { strcpy(p, "child"); _exit(0); } wait(0); shm_unlink("/deep"); return strcmp(p, "child"); }
A
cat >semaphore.c <<'A'
#include <fcntl.h>
#include <semaphore.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) { sem_t *s = sem_open("/deep", O_CREAT, 0600, 0); if (s == SEM_FAILED) return 1; if (!fork()) { sem_post(s); _exit(0); } sem_wait(s); wait(0); return sem_unlink("/deep"); }
A
cat >mapped.c <<'A'
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void) { unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3}; void *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); if (p == MAP_FAILED) return 1;
#ifdef __x86_64__
  memcpy(p, code, sizeof code); if (mprotect(p, 4096, PROT_READ | PROT_EXEC)) return 2; if (((int (*)(void))p)() != 42) return 3;
#endif
  int fd = memfd_create("x", 0); return fd < 0 || ftruncate(fd, 8192); }
A
cat >signals.c <<'A'
#include <signal.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile sig_atomic_t seen; static void on(int n) { (void)n; seen++; }
int main(void) { struct sigaction a = {.sa_handler = on}; sigaction(SIGALRM, &a, 0); struct itimerval v = {{0, 10000}, {0, 10000}}; setitimer(ITIMER_REAL, &v, 0); while (seen < 5) pause();
  timer_t t; struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM}; return timer_create(CLOCK_MONOTONIC, &e, &t); }
A
t autoreconf autoreconf -i
t configure ./configure --prefix=/workspace/c/installed
for name in MMAP FORK MEMFD_CREATE GETRANDOM SYS_EPOLL_H SYS_INOTIFY_H; do t "configure finds $name" grep -q "define HAVE_$name 1" config.h; done
t make make -j2
t "make check" make check
for name in threads shared semaphore mapped signals; do t "test $name" grep -q "exit status: 0" "$name.log"; done
t "make install" make install
t "the program runs with its library" sh -c '[ "$(./installed/bin/deeper)" = 6765 ]'
t "make distcheck" make distcheck
