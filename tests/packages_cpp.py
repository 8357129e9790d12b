"""Script that checks the C++ kernels of an installed wheel on a machine without a compiler.

`tests/packages.sh` runs this script outside the checkout, so that Python imports the installed
package and not the sources.
"""

import os
import sys
from pathlib import Path

sys.path = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]

import torch  # noqa: E402

import grpo_fast  # noqa: E402
from grpo_fast.kernels.cpu import loader  # noqa: E402


def loss_and_gradients(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4096, 32, generator=generator).mul(0.3).to(dtype).requires_grad_()
    ids = torch.randint(4096, (64,), generator=generator)
    lengths = torch.tensor([0, 20, 64], dtype=torch.int32)
    output = grpo_fast.linear_grpo_loss(
        hidden, weight, ids, torch.tensor([1.0, -0.5]), grpo_fast.LossConfig(), cu_seqlens=lengths,
        backend=backend,
    )  # fmt: skip
    output.loss.backward()
    return [output.logps, hidden.grad, weight.grad]


chosen = os.environ["GRPO_FAST_CPU"]
if chosen != "native" and not loader._INSTRUCTION_SETS[chosen][1] <= set(loader.cpu_flags()):
    print(f"{chosen}: this CPU cannot run it")
    sys.exit()
assert loader.compiler() is None, loader.compiler()
for source in sorted((loader.source_folder() / "api").glob("*.cpp")):
    assert loader.unavailable(source.stem) is None, loader.unavailable(source.stem)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    pairs = zip(loss_and_gradients("cpu", dtype), loss_and_gradients("torch", dtype), strict=True)
    for ours, expected in pairs:
        error = (ours - expected).norm() / expected.norm()
        assert error < tolerance, (dtype, error)
name = loader.shipped_library("rows", chosen).parent.name
print(f"torch {torch.__version__}, {chosen}: libraries for {name} agree with torch")
