#!/usr/bin/env bash
# A session on a machine with an NVIDIA GPU: three calls of nine and a half minutes. Nothing is
# installed.
#
#   benchmarks/gpu_session.sh                    the next call that is not done: 1 ours beside the
#                                                limits, 2 peers, steps and tests, 3 the rest
#   benchmarks/gpu_session.sh --call 2           this one
#   benchmarks/gpu_session.sh --part memcheck    one part (may be given several times);
#                                                --again repeats a finished one
#   benchmarks/gpu_session.sh --dry              start every part far enough to know that it would
#                                                run, without the packages that such a machine lacks
#                                                (lacking.py); needs no GPU
#
# Every call begins with a smoke test and ends there when it fails (--force goes on).
# Results: ${OUT:-benchmarks/results}/gpu_session.json (also the marks of finished parts) and
# gpu_session.log. A gpu_session.json in benchmarks/results/ counts, too: put it there and the next
# call goes on where it ended; `python -m benchmarks.gpu.report` renders it. Peers are optional:
# wheels in wheels/ (or .whl/), which benchmarks/gpu/wheels.sh fills, are unpacked beside the
# checkout's path, never installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

python=${PYTHON:-python3}
if ! command -v "$python" > /dev/null; then
    echo "gpu_session: $python is not on the PATH; set PYTHON" >&2
    exit 2
fi

path=$PWD
shopt -s nullglob
wheels=(wheels/*.whl .whl/*.whl)
pieces=(wheels/*.whl.00 .whl/*.whl.00)
if ((${#wheels[@]} + ${#pieces[@]})); then
    site=$(mktemp -d) || exit 2
    trap 'rm -rf "$site"' EXIT
    for first in "${pieces[@]}"; do
        cat "${first%.00}".?? > "$site/$(basename "${first%.00}")"
        wheels+=("$site/$(basename "${first%.00}")")
    done
    for wheel in "${wheels[@]}"; do
        "$python" -m zipfile -e "$wheel" "$site" || echo "gpu_session: $wheel does not unpack" >&2
    done
    path+=":$site"
    # The CuTe-DSL keeps its modules in a folder below, which an installation puts on the path.
    for folder in "$site"/*/dsl_packages; do path+=":$folder"; done
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"

# A kernel must not run in the interpreter by accident.
unset TRITON_INTERPRET

"$python" -m benchmarks.gpu.session "$@"
