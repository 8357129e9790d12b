#!/usr/bin/env bash
# Every figure of grpo_fast/train/README.md that a CPU can make, on two cores in about 15 minutes.
#
#   benchmarks/experiments.sh [FOLDER]     runs go to FOLDER (runs/experiments), what is finished is
#                                          not run again; pictures and tables to benchmarks/results/
#   GSM8K=path/to/gsm8k benchmarks/experiments.sh    the one on GSM8K, too, 20 minutes more
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-runs/experiments}
results=benchmarks/results/experiments
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1  # two lanes, a core each

compare() {  # name of the figure, then the words of compare.py
    local name=$1
    shift
    "$python" -m benchmarks.experiments.compare "$@" log.progress=false log.save_model=false -o "$runs/$name" \
        > "$runs/$name.log" 2>&1 || { tail -5 "$runs/$name.log"; return 1; }
    keep "$name"
}

keep() {  # copy the picture and the table of a comparison
    cp "$runs/$1/compare.png" "$results/$1.png"
    cp "$runs/$1/table.md" "$results/$1.md"
    echo "$results/$1.png"
}

mkdir -p "$runs" "$results"
(
    compare grpo-ppo sort,ppo-sort --seeds 2
    "$python" -m benchmarks.experiments.lecture -o "$runs/lecture" > "$runs/lecture.log"
    keep lecture
) &
lane=$!
compare baselines variance advantages=rewards,baseline,centered,rloo --seeds 3
compare importance variance inner_iterations=4 loss.loss_type=reinforce,unclipped,grpo \
    optim.lr=3e-3 steps=80 --seeds 3
truncated=(rollout.top_p=0.9 rollout.top_k=50 rollout.replay_support=auto,off reference.kind=frozen
    log.completions_every=0 --seeds 3)
compare support-sort sort "${truncated[@]}" steps=200 eval.every=25
if [[ -n ${GSM8K:-} ]]; then
    compare support-gsm8k gsm8k-tiny "${truncated[@]}" "data.path=$GSM8K" \
        eval.every=10
fi
wait "$lane"
