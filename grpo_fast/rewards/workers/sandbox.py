"""Sandbox for the two processes that run the code of a completion and its tests.

A seccomp filter allows only the system calls that a computation needs. It forbids sockets, new
processes and threads, signals to other processes, and writing to files. If the kernel has Landlock,
a process can open only the libraries of the interpreter and of the system. Resource limits bound
memory and processor time.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys

# Allowed system calls, each with its numbers on x86-64 and on arm64. Calls that ignore or block a
# signal are not allowed, because a signal kills the process at its time limit.
CALLS = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, brk 12 214,
munmap 11 215, pread64 17 67, readv 19 65, writev 20 66, sched_yield 24 124, mremap 25 216,
exit 60 93, madvise 28 233, nanosleep 35 101, getpid 39 172, uname 63 160, getcwd 79 17,
gettimeofday 96 169, getrusage 98 165, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, getppid 110 173, sigaltstack 131 132, gettid 186 178,
futex 202 98, sched_getaffinity 204 123, getdents64 217 61, clock_gettime 228 113,
clock_nanosleep 230 115, exit_group 231 94, ppoll 271 73, newfstatat 262 79, readlinkat 267 78,
faccessat 269 48, pselect6 270 72, getrandom 318 278, statx 332 291, faccessat2 439 439"""
# System calls that only x86-64 has: stat, lstat, poll, access, select and readlink.
ONLY_X86 = (4, 6, 7, 21, 23, 89)
OPENAT = (257, 56)
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_…, column of CALLS
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # DENY: the call fails with EPERM
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
NUMBER, MACHINE, FLAGS = 0, 4, 32  # offsets in seccomp_data; FLAGS is openat's third argument
NO_NEW_PRIVS, SET_SECCOMP, FILTER, SET_DUMPABLE = 38, 22, 2, 4  # constants of prctl
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock, same numbers on all machines
RIGHTS = (1 << 13) - 1  # Landlock's access rights; the filter refuses what its version 1 lacks
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/dev/null", "/dev/urandom", os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"),
)  # fmt: skip
HELD = "held"  # a judge writes this line for each passed test
LIBC = ctypes.CDLL(None, use_errno=True)


def confine(request):
    """Confine this process for the rest of its life.

    If the kernel refuses the sandbox, write the reason to standard error and end the process. After
    success, standard error goes to /dev/null.

    Args:
        request: a dict with "memory" (in bytes), "seconds" (limit of processor time and of elapsed
            time), "output" (number of bytes that the process may write to a file) and "paths" (of
            folders that the process may read).
    """
    errors = take(2)
    sys.set_int_max_str_digits(0)  # a time limit bounds the cost of reading long numbers
    try:
        os.chdir("/")
        limit(request)
        hide_memory()
        _prctl(NO_NEW_PRIVS, 1)
        if has_landlock():
            restrict_files(request["paths"])
        filter_calls()
    except OSError as error:
        os.write(errors, str(error).encode())
        os._exit(1)
    os.close(errors)


def limit(request):
    """Limit the memory, output and time of this process, and forbid new processes."""
    for kind, most in (
        (resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CPU, int(request["seconds"]) + 1),
        (resource.RLIMIT_FSIZE, request["output"]), (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))
    # Reset SIGALRM, which ends this process at its time limit. The parent may have blocked it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])


def hide_memory():
    """Hide the memory and environment of this process from other processes of the same user."""
    _prctl(SET_DUMPABLE, 0)


def has_landlock():
    return LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1) > 0


def restrict_files(paths):
    """Allow this process to open only the given folders, and the libraries of the interpreter."""
    handled = struct.pack("Q", RIGHTS)
    ruleset = _checked(LIBC.syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    # A distribution has only some of the folders.
    for path in filter(os.path.exists, (*LIBRARIES, *paths)):
        folder = os.open(path, os.O_PATH)
        access = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
        _checked(LIBC.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", access, folder), 0))
        os.close(folder)
    _checked(LIBC.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def filter_calls():
    """Make the kernel reject system calls that are not in CALLS, and opening files for writing."""
    name = os.uname().machine
    if sys.platform != "linux" or name not in MACHINES:
        expected = "expected Linux on x86-64 or arm64 for its sandbox"
        raise OSError(f"{expected}, got {sys.platform} on {name}")
    arch, column = MACHINES[name]
    allowed = [int(call.split()[1 + column]) for call in CALLS.split(",")]
    if name == "x86_64":
        allowed += ONLY_X86
    # An instruction is (operation, steps to skip if true, steps to skip if false, operand).
    # 1. Kill a process that makes system calls of a different architecture, such as 32-bit calls,
    # because the same number means a different call there.
    program = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL)]
    # 2. Allow the listed system calls.
    program += [(LOAD, 0, 0, NUMBER)]
    for number in allowed:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    # 3. Deny all other system calls except openat. Deny openat if any of its flags allows writing.
    program += [(EQUAL, 1, 0, OPENAT[column]), (RETURN, 0, 0, DENY)]
    program += [(LOAD, 0, 0, FLAGS), (ANY_BIT, 0, 1, WRITES)]
    program += [(RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    packed = b"".join(struct.pack("HBBI", *step) for step in program)
    code = ctypes.create_string_buffer(packed)
    # The C struct sock_fprog has 6 bytes of padding between the length and the address.
    _prctl(SET_SECCOMP, FILTER, struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))


def _prctl(*arguments):
    _checked(LIBC.prctl(*arguments, *[0] * (5 - len(arguments))))


def _checked(result):
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"the kernel refuses the sandbox: {os.strerror(error)}")
    return result


def request(descriptor):
    """Read the JSON request from a file descriptor and close the descriptor."""
    with open(int(descriptor), "rb") as stream:
        return json.load(stream)


def take(descriptor):
    """Return a copy of a standard stream, and redirect the original to /dev/null."""
    copy = os.dup(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)
    return copy
