"""`python -m tests.doctor.combinations`: how many of two or three planted causes are named."""

from collections import Counter
from itertools import combinations

import torch

from grpo_fast.doctor import causes
from tests.doctor.faulty import FaultyEngine, bos_twice, found_by, policy_with_bos
from tests.doctor.test_plants import one_late, repeated

policy, earlier = policy_with_bos(), policy_with_bos(seed=1)
FAULTS = {
    causes.RAW: {"raw": True},
    causes.TEMPERATURE: {"temperature": 0.9},
    causes.TRUNCATION: {"top_p": 0.8},
    causes.TOKENS: {"read": bos_twice(policy)},
    causes.PADDING: {"pad": "left"},
    causes.HEAD: {"head": torch.bfloat16},
    causes.STALE: {"keeps": earlier},
    causes.PENALTY: {"edit": repeated},
    causes.SHIFTED: {"report_as": one_late},
}


def verdict(planted: tuple[str, ...]) -> str:
    fields = {name: value for cause in planted for name, value in FAULTS[cause].items()}
    _, names = found_by(policy, FaultyEngine(**fields), previous=earlier)
    if {*names} == {*planted}:
        return "in full"
    return "wrong" if {*names} - {*planted} else "in part" if names else "not found"


if __name__ == "__main__":
    cases = [*combinations(FAULTS, 2), *list(combinations(FAULTS, 3))[::6]]
    verdicts = Counter[str]()
    for planted in cases:
        said = verdict(planted)
        verdicts[said] += 1
        print(f"{said:10} {', '.join(planted)}", flush=True)
    print(len(cases), dict(verdicts))
