#!/usr/bin/env bash
# A session on a machine with an NVIDIA GPU. Nothing is installed.
#
#   benchmarks/gpu_session.sh --commit HASH      the next visit that is not done. Visit 1: smoke test,
#                                                bars, tests, the long step (300 s). Visit 2: smoke
#                                                test, tests that failed before, peers, profile,
#                                                attention, the other steps (330 s)
#   benchmarks/gpu_session.sh --visit 2          this visit
#   benchmarks/gpu_session.sh --part memcheck    one part (may be repeated); --again repeats a
#                                                finished one
#   benchmarks/gpu_session.sh --dry              start every part far enough to know that it would
#                                                run, without the packages that such a machine lacks
#                                                (lacking.py); needs no GPU
#
# The first line of the output is the plan with its seconds. Every visit begins with a smoke test and
# ends there if it fails (--force goes on). RISKS.md says what may go wrong and where to look.
# Results: ${OUT:-benchmarks/results}/gpu_session.json (also the status of each part),
# gpu_session.log and gpu_tests.json. Put these files into benchmarks/results/ before the next visit,
# which then skips finished parts and repeats failed tests. `python -m benchmarks.gpu.report` renders
# them. A tree that travels without .git has no commit, so pass --commit.
# Peers are optional. benchmarks/gpu/wheels.sh fills wheels/. The wheels are unpacked into a folder of
# PYTHONPATH.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

python=${PYTHON:-python3}
if ! command -v "$python" > /dev/null; then
    echo "gpu_session: $python is not on the PATH; set PYTHON" >&2
    exit 2
fi

path=$PWD
shopt -s nullglob
wheels=(wheels/*.whl)
pieces=(wheels/*/*.whl.00)
if ((${#wheels[@]} + ${#pieces[@]})); then
    site=$(mktemp -d) || exit 2
    trap 'rm -rf "$site"' EXIT
    for first in "${pieces[@]}"; do
        name=$(basename "${first%.00}")
        cat wheels/*/"$name".?? > "$site/$name"
        wheels+=("$site/$name")
    done
    for wheel in "${wheels[@]}"; do
        "$python" -m zipfile -e "$wheel" "$site" || echo "gpu_session: $wheel does not unpack" >&2
    done
    path+=":$site"
    # The CuTe-DSL has its modules in a subfolder, which an installation would put on the path.
    for folder in "$site"/*/dsl_packages; do path+=":$folder"; done
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"

# No kernel may run in Triton's interpreter by accident.
unset TRITON_INTERPRET

"$python" -m benchmarks.gpu.session "$@"
