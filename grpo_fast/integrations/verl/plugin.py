"""Plugin that verl's workers import.

Set `VERL_USE_EXTERNAL_MODULES=grpo_fast.integrations.verl.plugin`. The import registers our losses
as `fast_<name>` in this process. With `GRPO_FAST_VERL_HEAD=1`, our kernels also compute the LM head
of models with verl's `use_fused_kernels`.
"""

from __future__ import annotations

import os

from grpo_fast.integrations.verl import register
from grpo_fast.integrations.verl.head import use_fast_head_everywhere

losses = register()
head = use_fast_head_everywhere() if os.environ.get("GRPO_FAST_VERL_HEAD") == "1" else None
