"""Confinement of the processes that run an answer and its tests.

The kernel's seccomp filter allows the system calls of a computation alone: no sockets, no
processes or threads, no signals to others, and files are opened for reading only. Landlock, where
the kernel has it, leaves the interpreter's libraries as the only files. Limits bound memory and
processor time.
"""

import ctypes
import json
import os
import resource
import struct
import sys

# System call → its number on (x86-64, arm64).
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124),
    "mremap": (25, 216), "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172),
    "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "getrandom": (318, 278), "statx": (332, 291), "faccessat2": (439, 439),
}  # fmt: skip
OLDER = (4, 6, 7, 21, 23, 89)  # stat, lstat, poll, access, select, readlink: x86-64 alone has them
OPENAT = (257, 56)
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_…, column above
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # DENY: the call fails with EPERM
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF
NUMBER, MACHINE, FLAGS = 0, 4, 32  # offsets in struct seccomp_data; FLAGS: openat's third argument
NO_NEW_PRIVS, SET_SECCOMP, FILTER, SET_DUMPABLE = 38, 22, 2, 4
# Landlock: system calls, one number on all machines; rights by version: 13, then REFER, TRUNCATE,
# and from the fifth on IOCTL_DEV.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RIGHTS = (13, 14, 15, 15, 16)
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/dev/null", "/dev/urandom",
)  # fmt: skip
READY = b"ready\n"  # a process is confined: the clock begins
HELD = b"held\n"  # one more test holds
LIBC = ctypes.CDLL(None, use_errno=True)


def machine() -> "tuple[int, int]":
    """This machine's number in the kernel and its column in CALLS. Raises OSError for others."""
    name = os.uname().machine
    if sys.platform != "linux" or name not in MACHINES:
        raise OSError(
            f"expected Linux on x86-64 or arm64 for its sandbox, got {sys.platform} on {name}"
        )
    return MACHINES[name]


def confine(memory: int, seconds: int) -> None:
    """Give up everything that a computation does not need, for good.

    Args:
        memory: bytes for this process.
        seconds: of processor time.

    Raises:
        OSError: the kernel refuses.
    """
    os.chdir("/")
    limit(memory, seconds)
    hide_memory()
    _prctl(NO_NEW_PRIVS, 1)
    restrict_files()
    filter_calls()


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and environment."""
    _prctl(SET_DUMPABLE, 0)


def limit(memory: int, seconds: int) -> None:
    """Bound memory and processor time; no file grows, no core, no other process."""
    for kind, most in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has, 0 for none."""
    return max(0, LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict_files() -> None:
    """Leave the interpreter's libraries as the only files that can be opened; needs Landlock."""
    version = landlock_version()
    if not version:
        return
    rights = RIGHTS[min(version, len(RIGHTS)) - 1]
    handled = struct.pack("Q", (1 << rights) - 1)
    ruleset = _checked(LIBC.syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    for path in (*LIBRARIES, os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib")):
        try:
            folder = os.open(path, os.O_PATH)
        except OSError:  # another distribution's
            continue
        access = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
        rule = struct.pack("=Qi", access, folder)
        _checked(LIBC.syscall(ADD_RULE, ruleset, 1, rule, 0))
        os.close(folder)
    _checked(LIBC.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def filter_calls() -> None:
    """Give up every system call that is not listed above."""
    arch, column = machine()
    step = struct.Struct("HBBI").pack
    program = [step(LOAD, 0, 0, MACHINE), step(EQUAL, 1, 0, arch), step(RETURN, 0, 0, KILL)]
    program += [step(LOAD, 0, 0, NUMBER)]
    for number in [pair[column] for pair in CALLS.values()] + [*OLDER] * (column == 0):
        program += [step(EQUAL, 0, 1, number), step(RETURN, 0, 0, ALLOW)]
    program += [step(EQUAL, 1, 0, OPENAT[column]), step(RETURN, 0, 0, DENY)]
    program += [step(LOAD, 0, 0, FLAGS), step(ANY_BIT, 0, 1, WRITES)]
    program += [step(RETURN, 0, 0, DENY), step(RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(program))
    listed = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _prctl(SET_SECCOMP, FILTER, listed)


def _prctl(*arguments) -> None:
    _checked(LIBC.prctl(*arguments, *[0] * (5 - len(arguments))))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"the kernel refuses the sandbox: {os.strerror(error)}")
    return result


def request(descriptor: int) -> dict:
    """Return what `code_tests.py` asks this process for."""
    with open(descriptor, "rb") as stream:
        return json.loads(stream.read())


def take_standard_streams() -> "tuple[int, int]":
    """Return copies of stdin and stdout, which lead nowhere from here on, as stderr does."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    os.close(null)
    return source, sink
