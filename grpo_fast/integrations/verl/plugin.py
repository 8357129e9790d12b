"""Plugin that verl's workers import.

To use it, set the environment variable
`VERL_USE_EXTERNAL_MODULES=grpo_fast.integrations.verl.plugin`. The import adds our losses to verl's
registry as `fast_<name>`. With `GRPO_FAST_VERL_HEAD=1`, our kernels also compute the LM head of
models that verl prepares with `use_fused_kernels=True`.
"""

from __future__ import annotations

import os

from grpo_fast.integrations.verl import register
from grpo_fast.integrations.verl.head import use_fast_head

losses = register()
head = use_fast_head() if os.environ.get("GRPO_FAST_VERL_HEAD") == "1" else None
