"""Run one answer's code and its tests where they can harm nothing: the child of `code_tests.py`.

The kernel's seccomp filter allows the system calls of a computation alone: no sockets, no processes
or threads, no signals to others, and files are opened for reading only. Limits bound memory and
processor time. Each test that holds is a line on stdout, which nothing else reaches.
"""

import ast
import ctypes
import json
import os
import platform
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
NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2


def machine() -> "tuple[int, int]":
    """This machine's number in the kernel and its column in CALLS. Raises OSError for others."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        came = f"{sys.platform} on {platform.machine()}"
        raise OSError(f"expected Linux on x86-64 or arm64 for its sandbox, got {came}")
    return MACHINES[platform.machine()]


def confine() -> None:
    """Give up every other system call, for good. Raises OSError where the kernel refuses."""
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
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((NO_NEW_PRIVS, 1, 0, 0, 0), (SET_SECCOMP, FILTER, listed, 0, 0)):
        if libc.prctl(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"the kernel refuses seccomp: {os.strerror(error)}")


def limit(memory: int, seconds: int) -> None:
    """Bytes of memory, seconds of processor time; no file grows, no core, no other process."""
    for kind, most in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))


def run(code: str, tests: str, mark: str, out: int) -> None:
    """Run the code, then the tests one by one; write a marked line for each that holds."""
    names = {"__name__": "answer", "__builtins__": __builtins__}
    line = f"{mark}\n".encode()
    os.write(out, line)  # the parent's clock begins
    exec(compile(code, "<answer>", "exec"), names)
    for statement in ast.parse(tests).body:
        part = ast.Module([statement], [])
        try:
            exec(compile(part, "<tests>", "exec"), names)
        except BaseException:  # sys.exit() is no way to pass, either
            continue
        if is_test(statement):
            os.write(out, line)


def is_test(statement: ast.stmt) -> bool:
    """An assert, or a call such as `check(f)`; other statements prepare."""
    return isinstance(statement, ast.Assert) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )


def main() -> None:
    with open(0, "rb", closefd=False) as stream:
        request = json.loads(stream.read())
    out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.chdir("/")
    # Before the filter, which lets no limit be set and no descriptor be copied.
    limit(request["memory"], request["seconds"])
    try:
        confine()
    except OSError as error:
        os.write(out, str(error).encode())
        return
    try:
        run(request["code"], request["tests"], request["mark"], out)
    finally:
        os._exit(0)  # no handlers of the answer's own


if __name__ == "__main__":
    main()
