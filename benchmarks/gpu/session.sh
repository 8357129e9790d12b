#!/usr/bin/env bash
# One session on a machine with an NVIDIA GPU: tests, compute-sanitizer, benchmarks, tuning.
# Nothing is installed.
#
#   benchmarks/gpu_session.sh                    all parts that are not done yet, in under ten minutes
#   benchmarks/gpu_session.sh --part sanitize    one part (may be given several times);
#                                                --again repeats a finished one
#   benchmarks/gpu_session.sh --dry              start every part far enough to know that it would
#                                                run; needs no GPU
#
# Results: ${OUT:-benchmarks/results}/gpu_session.json (also the marks of finished parts) and
# gpu_session.log. A gpu_session.json in benchmarks/results/ counts, too: put it there and the next
# call goes on where it ended. Peers are optional: wheels in wheels/ (or .whl/) are unpacked beside
# the checkout's path, never installed.
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
if ((${#wheels[@]})); then
    site=$(mktemp -d) || exit 2
    trap 'rm -rf "$site"' EXIT
    for wheel in "${wheels[@]}"; do
        "$python" -m zipfile -e "$wheel" "$site" || echo "gpu_session: $wheel does not unpack" >&2
    done
    path+=":$site"
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"

# A kernel must not run in the interpreter by accident.
unset TRITON_INTERPRET

"$python" -m benchmarks.gpu.session "$@"
