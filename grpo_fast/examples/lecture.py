"""Experiment of the CS336 lecture on policy gradients: a model learns to sort three numbers.

    python -m grpo_fast.examples.lecture [--loss reinforce] [--advantages normalized]

The model has 650 parameters and starts from random weights. A step samples ten responses to each of
three prompts, and makes ten Adam updates. The loss includes the exact KL to a reference model.
Every ten steps, a copy of the model becomes the new reference.
"""

from __future__ import annotations

import torch
import typer
from torch import Tensor, nn

from grpo_fast import DivergenceTerm, LossConfig, TeacherHead, group_advantages, linear_grpo_loss

PROMPTS = torch.tensor([[1, 0, 2], [3, 2, 4], [1, 2, 3]])
SYMBOLS, LENGTH, GROUP, UPDATES = 5, 3, 10, 10
WIDTH = 10
LEARNING_RATE = 0.03
EPSILON = 0.01  # clip range of the ratio
BETA = 0.01  # weight of the exact KL to the reference


class LectureModel(nn.Module):
    """Model of the lecture, in which the tokens of a response do not depend on each other.

    A prompt x becomes the vector v = Σ_i E[x_i]·A_i, where E is the embedding and A_i is a matrix
    for position i. Token j of the response has the logits E·(v·B_j), where B_j is a matrix for
    position j.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.3 * torch.randn(SYMBOLS, WIDTH))
        self.encode = nn.Parameter(torch.randn(LENGTH, WIDTH, WIDTH) / WIDTH**0.5)
        self.decode = nn.Parameter(torch.randn(LENGTH, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, prompts: Tensor) -> Tensor:
        """Return hidden states of shape (B, LENGTH, H) for prompts of shape (B, LENGTH)."""
        vector = torch.einsum("bph,phk->bk", self.embedding[prompts], self.encode)
        return torch.einsum("bh,jhk->bjk", vector, self.decode)


def rewards_of(prompts: Tensor, responses: Tensor) -> Tensor:
    """Return a reward from 0 to 2 for each response.

    The reward is the sum of two fractions. The first is the fraction of the prompt's three numbers
    that the response contains. As in the lecture, a number that the prompt contains twice counts
    twice, even if the response contains it only once. The second is the fraction of neighbours in
    the response that are in ascending order.
    """
    included = (prompts[:, :, None] == responses[:, None]).any(-1).sum(1)
    ordered = (responses[:, 1:] >= responses[:, :-1]).sum(1)
    return included / LENGTH + ordered / (LENGTH - 1)


@torch.no_grad()
def sample(model: LectureModel, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Sample `count` responses to each prompt.

    Returns:
        Prompts, responses, and log-probabilities of the responses, each (3·count, LENGTH).
    """
    prompts = PROMPTS.repeat_interleave(count, 0)
    logp = (model(prompts) @ model.embedding.t()).log_softmax(-1)
    drawn = torch.multinomial(logp.exp().flatten(0, 1), 1, generator=generator)
    responses = drawn.reshape(-1, LENGTH)
    return prompts, responses, logp.gather(-1, responses[..., None])[..., 0]


def evaluate(model: LectureModel) -> dict[str, float]:
    """Sample 32 responses to each prompt, and return the accuracy and the mean reward.

    The seed is the same in all calls.
    """
    prompts, responses, _ = sample(model, 32, torch.Generator().manual_seed(1))
    is_right = (responses == prompts.sort(-1).values).all(-1)
    reward = rewards_of(prompts, responses)
    accuracy = float(is_right.float().mean())
    return {"eval_accuracy_strict": accuracy, "eval_reward": float(reward.mean())}


def train(
    loss: str = "grpo", advantages: str = "centered", *, steps: int = 100, seed: int = 0
) -> list[dict[str, float]]:
    """Train a model from random weights.

    Args:
        loss: Loss type of `LossConfig`, for example reinforce, unclipped or grpo.
        advantages: Mode of `group_advantages`, for example rewards, centered, normalized or max.
        steps: Number of steps, with ten updates each.
        seed: Seed of weights and sampling.

    Returns:
        One dictionary of metrics for each step. Step 0 is the evaluation before training.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LectureModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    config = LossConfig(loss, epsilon_low=EPSILON, aggregation="token_mean_global")
    rows = [{"step": 0, **evaluate(model)}]
    for step in range(1, steps + 1):
        # 1. Sample responses and compute their rewards.
        prompts, responses, old_logps = sample(model, GROUP, generator)
        rewards = rewards_of(prompts, responses)
        advantage = group_advantages(rewards, advantages, group_size=GROUP)
        # 2. Copy the weights of the model to the reference every ten steps.
        if step % 10 == 1:
            reference = [model(PROMPTS).detach(), model.embedding.detach().clone()]
        teacher = TeacherHead(reference[0].repeat_interleave(GROUP, 0), reference[1])
        term = DivergenceTerm(teacher, coef=BETA)
        # 3. Make ten updates on the same responses.
        seen: list[dict[str, Tensor]] = []
        for _ in range(UPDATES):
            output = linear_grpo_loss(
                model(prompts), model.embedding, responses, advantage, config, old_logps=old_logps,
                divergence=term, backend="torch",
            )  # fmt: skip
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            seen.append({"loss": output.loss.detach(), **output.metrics})
        means = {name: float(sum(each[name] for each in seen)) / UPDATES for name in seen[0]}
        means["kl"] = means.pop("divergence")
        judged = evaluate(model) if step % 10 == 0 else {}
        rows.append({"step": step, "reward": float(rewards.mean()), **means, **judged})
    return rows


def main(loss: str = "grpo", advantages: str = "centered", steps: int = 100, seed: int = 1) -> None:
    """Train a model, and print the accuracy every ten steps.

    --loss is for example reinforce, unclipped or grpo. --advantages is for example rewards,
    centered, normalized or max.
    """
    rows = train(loss, advantages, steps=steps, seed=seed)
    print(f"step   0: {rows[0]['eval_accuracy_strict']:6.1%} right")
    for row in rows[10::10]:
        print(f"step {row['step']:3}: {row['eval_accuracy_strict']:6.1%} right, "
              f"reward {row['reward']:.3f}, KL {row['kl']:.4f}, "
              f"clipped {row.get('clip_ratio/region_mean', 0.0):.2f}")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
