#!/usr/bin/env bash
# A session on a machine with an NVIDIA GPU. Nothing is installed.
#
#   benchmarks/gpu_session.sh --commit HASH      the next visit that is not done at this commit. Visit
#                                                1: smoke test, bars, peers at N = 1024, profile, two
#                                                steps, support, tests, row kernels (370 s). Visit 2:
#                                                smoke test, frozen heads, CuTe-DSL heads, hybrid
#                                                models, the longest sequences (170 s)
#   benchmarks/gpu_session.sh --visit 2          runs visit 2
#   benchmarks/gpu_session.sh --part memcheck    runs one part (may be given several times); --again
#                                                repeats a finished part
#   benchmarks/gpu_session.sh --dry              prints the schedule of both visits, and starts every
#                                                part far enough to know that it would run; hides the
#                                                packages that the GPU machine lacks (session.py);
#                                                needs no GPU
#
# The first line of the output is the plan with its seconds. Every visit begins with a smoke test and
# ends there if it fails. RISKS.md says what may go wrong and where to look.
# The folder ${OUT:-benchmarks/results} gets gpu_session.json (results and the status of each part),
# gpu_session.log and, with OUT, triton-cache.tgz (compiled kernels). Put these files into
# benchmarks/results/ before the next visit. That visit then skips the parts that are finished at its
# commit and compiles only changed kernels. If a fault was mended between the visits, the commit has
# changed, and the next call would repeat visit 1. Pass --visit 2 to skip it. Give the machine back
# at once after each visit: its idle time counts.
# `python -m benchmarks.gpu.report` renders the results. A tree that travels without .git has no
# commit, so pass --commit.
# Peers, and the parts that run our trainer, need packages that the machine lacks.
# benchmarks/gpu/wheels.sh fills wheels/ with pieces of one archive. Each piece is in a separate
# folder. Before visit 2, one call with the command `true` carries each piece but the last one. The
# call of a visit carries the last piece. This script joins the pieces, and unpacks the wheels into
# a folder of PYTHONPATH.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

python=${PYTHON:-python3}
if ! command -v "$python" > /dev/null; then
    echo "gpu_session: $python is not on the PATH; set PYTHON" >&2
    exit 2
fi
if ! "$python" -c 'from importlib.util import find_spec as f; exit(not (f("torch") and f("triton")))'; then
    echo "gpu_session: $python has no torch with triton; set PYTHON" >&2
    exit 2
fi

path=$PWD
shopt -s nullglob
pieces=(wheels/*/wheels.tar.*)
if ((${#pieces[@]})); then
    site=$(mktemp -d) || exit 2
    trap 'rm -rf "$site"' EXIT
    cat "${pieces[@]}" | tar -x -C "$site" || echo 'gpu_session: a piece of wheels/ is missing' >&2
    for wheel in "$site"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$site" || echo "gpu_session: $wheel does not unpack" >&2
    done
    path+=":$site"
    # The CuTe-DSL has its modules in a subfolder, which an installation would put on the path.
    for folder in "$site"/*/dsl_packages; do path+=":$folder"; done
else
    echo 'gpu_session: wheels/ is empty, so parts that need its packages fail on a GPU machine' >&2
    echo 'gpu_session: call benchmarks/gpu/wheels.sh first' >&2
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"

# No kernel may run in Triton's interpreter by accident.
unset TRITON_INTERPRET

# Triton's cache stores absolute paths, so the folder must be the same on every visit.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/grpo_fast_triton}
carried=benchmarks/results/triton-cache.tgz
if [ -f "$carried" ]; then
    mkdir -p "$TRITON_CACHE_DIR"
    tar -xzf "$carried" -C "$TRITON_CACHE_DIR" || echo "gpu_session: $carried does not unpack" >&2
fi

"$python" -m benchmarks.gpu.session "$@"
status=$?

# A launch needs only the cubin and its metadata. The intermediate code is ten times as large.
if [ -n "${OUT:-}" ] && [ -d "$TRITON_CACHE_DIR" ]; then
    tar -czf "$OUT/triton-cache.tgz" --exclude='*.source' --exclude='*.ttir' --exclude='*.ttgir' \
        --exclude='*.llir' --exclude='*.ptx' -C "$TRITON_CACHE_DIR" .
fi
exit "$status"
