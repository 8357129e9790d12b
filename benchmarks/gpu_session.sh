#!/usr/bin/env bash
# One session on a machine with an NVIDIA GPU: parity tests, compute-sanitizer, benchmarks. Nothing is installed.
#
#   benchmarks/gpu_session.sh                       all parts that have not passed yet
#   benchmarks/gpu_session.sh --part sanitize       one of tests, attention, sanitize, bench-loss, passed or not
#   OUT=/some/folder benchmarks/gpu_session.sh      where logs, JSON and the marks of finished parts go
#
# Resumable: a part that passed leaves OUT/<part>.done and is passed over by the next call without --part.
# Peers are optional: wheels in .whl/ are put on the path as they are; one that is not there is listed as missing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
parts=(tests attention sanitize bench-loss)
only=""

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

while (($#)); do
    case $1 in
        --part) only=${2:?--part needs a name: ${parts[*]}}; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
    esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)

path=$PWD
for wheel in .whl/*.whl; do
    [[ -e $wheel ]] && path+=":$PWD/$wheel"
done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"

# A kernel must not be taken for a GPU's by accident.
unset TRITON_INTERPRET

describe() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader &&
        "$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
}

run_tests() {
    "$python" -m pytest -p no:cacheprovider -m gpu tests
}

# Attention kernels against the dense reference (each FlashAttention that is installed; torch's own needs no package),
# then shared prompts against plain packing.
run_attention() {
    "$python" -m pytest -p no:cacheprovider -rP tests/test_gpu_attention.py &&
        "$python" benchmarks/bench_attention.py --device cuda --json "$out/attention-gpu.json"
}

# Small shapes: the sanitizer slows kernels down a hundredfold. Without torch's caching allocator each tensor is an
# allocation of its own, so that an access past its end is seen.
run_sanitize() {
    local tool status=0
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on the PATH"; return 1; }
    for tool in memcheck racecheck synccheck; do
        echo "== $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
            "$python" benchmarks/bench_linear_loss.py --device cuda --shapes 64,64,512 --dtypes bf16 fp32 \
            --providers grpo_fast --rounds 1 --budget 0.001 --out "$out/sanitize-$tool.json" || status=1
    done
    return "$status"
}

run_bench_loss() {
    "$python" benchmarks/bench_linear_loss.py --device cuda --out "$out/linear_loss-gpu.json"
}

run_part() {
    describe || { echo "no NVIDIA GPU, or no torch with triton for $python"; return 1; }
    case $1 in
        tests) run_tests ;;
        attention) run_attention ;;
        sanitize) run_sanitize ;;
        bench-loss) run_bench_loss ;;
    esac
}

if [[ -n $only && " ${parts[*]} " != *" $only "* ]]; then
    echo "unknown part: $only; there are: ${parts[*]}" >&2
    exit 2
fi
failed=0
for part in "${parts[@]}"; do
    [[ -n $only && $only != "$part" ]] && continue
    [[ -z $only && -e $out/$part.done ]] && { echo "== $part: done before ($out/$part.done)"; continue; }
    echo "== $part (log: $out/$part.log)"
    if run_part "$part" 2>&1 | tee "$out/$part.log"; then
        date -u +%FT%TZ > "$out/$part.done"
    else
        echo "== $part FAILED"
        rm -f "$out/$part.done"
        failed=1
    fi
done
exit "$failed"
