"""Tasks of the race, the evaluator that measures all trainers, and a run of one trainer.

Each run has a separate process. Its clock stops while the driver evaluates the weights.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measure import resident
from benchmarks.trainers.loop import make_run, make_trainer
from grpo_fast.data import Example
from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.examples.capitals import exact, write_data
from grpo_fast.rewards import build_rewards, score
from grpo_fast.rollout import build_engine, encode_prompts, prompt_texts
from grpo_fast.train.collect import PromptQueue
from grpo_fast.train.config import RunConfig, load_recipe
from grpo_fast.train.loop import make_step
from grpo_fast.train.policy import load_policy

TRAINERS = ("grpo_fast", "FastGRPOTrainer", "TRL")
# grpo_fast with the settings that take the least memory. It runs only if `--trainers` names it.
RECOMPUTING = "grpo_fast-recomputing"
LESS_MEMORY = ("model.gradient_checkpointing=true", "tokens_per_microbatch=512")
ROWS = (1, 2, 4, 8, 16)  # rows per forward pass that are tried for TRL
SHOTS = 18  # worked examples of the task `examples`
BATCH = 64  # answers that the evaluator samples at a time


# ------------------------------------------------------------------------------ tasks, evaluation
class Task(NamedTuple):
    """Data and sizes of a task. The other settings are those of the recipe `capitals`.

    Attributes:
        write: function that writes `train.jsonl` and `test.jsonl` to a folder.
        prompts: prompts of a step.
        group: completions of a prompt.
        length: maximum number of tokens of a completion.
        lr: learning rate, which is constant.
        steps: steps of a run.
        every: steps between evaluations.
        questions: held-out questions of an evaluation.
        words: further settings of the run.
    """

    write: Callable[[Path], None]
    prompts: int
    group: int
    length: int
    lr: float
    steps: int
    every: int
    questions: int
    words: tuple[str, ...] = ()

    def config(self, model: str, data: Path, seed: int, trainer: str = "grpo_fast") -> RunConfig:
        """Return the configuration of a run of our trainer, which the other trainers follow."""
        sizes = (
            f"model.path={model}", f"data.path={data}", f"seed={seed}", f"steps={self.steps}",
            f"rollout.prompts_per_step={self.prompts}", f"rollout.group_size={self.group}",
            f"rollout.max_new_tokens={self.length}", f"optim.lr={self.lr}",
            f"eval.every={self.every}", "tokens_per_microbatch=1024",
        )  # fmt: skip
        more = LESS_MEMORY if trainer == RECOMPUTING else ()
        return load_recipe("capitals", [*sizes, *self.words, *more])

    def settings(self) -> dict[str, Any]:
        """Return the settings of the task as they are stored."""
        return {**self._asdict(), "write": None, "words": list(self.words)}


def write_examples(folder: Path) -> None:
    """Write the data of `capitals`, with SHOTS training questions as worked examples."""
    write_data(folder)
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    train, test = ([json.loads(line) for line in file.open(encoding="utf-8")] for file in files)
    shots = [{"role": "assistant", "content": row["answer"]} for row in train[:SHOTS]]
    pairs = zip((row["prompt"][-1] for row in train), shots, strict=False)
    worked = [message for pair in pairs for message in pair]
    for file, rows in zip(files, (train[SHOTS:], test), strict=True):
        for row in rows:
            row["prompt"][-1:-1] = worked
        text = "".join(json.dumps(row) + "\n" for row in rows)
        file.write_text(text, encoding="utf-8")


TASKS = {
    "capitals": Task(
        write_data, prompts=8, group=8, length=10, lr=2e-5, steps=20, every=4, questions=180
    ),
    "examples": Task(
        write_examples, prompts=4, group=8, length=10, lr=6e-5, steps=6, every=2, questions=180
    ),
}  # fmt: skip


def read_examples(config: RunConfig, tokenizer: Any) -> Splits:
    """Return the prompts of a run. Training prompts have the order of the run's seed."""
    return Splits(config.data, config.seed).for_tokenizer(tokenizer)


class Evaluator:
    """Greedy accuracy on held-out questions, measured in the process of the driver.

    The evaluator computes the tokens that all prompts share once, and samples with transformers.

    Args:
        path: folder of the model.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def load(self, weights: Path) -> None:
        """Load the weights that a trainer has written, by the names of its parameters."""
        stored = load_file(weights)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(stored[name])

    @torch.inference_mode()
    def answers(self, examples: Sequence[Example], length: int) -> list[str]:
        """Return the greedy completion of each prompt, with at most `length` tokens."""
        from transformers import DynamicCache

        ids = encode_prompts(self.tokenizer, [example.prompt for example in examples])
        shared = min(len(os.path.commonprefix(ids)), min(map(len, ids)) - 1)  # type: ignore[type-var]
        prefix = DynamicCache(config=self.model.config)
        if shared:
            self.model(torch.tensor([ids[0][:shared]]), past_key_values=prefix, logits_to_keep=1)
        # Prompts of one length need no padding.
        places = defaultdict(list)
        for place, row in enumerate(ids):
            places[len(row)].append(place)
        texts = [""] * len(ids)
        for size, same in places.items():
            for start in range(0, len(same), BATCH):
                chosen = same[start : start + BATCH]
                cache = copy.deepcopy(prefix)
                if shared:
                    cache.batch_repeat_interleave(len(chosen))
                rows = torch.tensor([ids[place] for place in chosen])
                done = self.model.generate(
                    rows, attention_mask=torch.ones_like(rows), past_key_values=cache,
                    do_sample=False, max_new_tokens=length,
                    pad_token_id=self.tokenizer.pad_token_id,
                    eos_token_id=self.tokenizer.eos_token_id,
                )  # fmt: skip
                said = self.tokenizer.batch_decode(done[:, size:], skip_special_tokens=True)
                for place, text in zip(chosen, said, strict=True):
                    texts[place] = text
        return texts

    def accuracy(self, examples: Sequence[Example], length: int) -> float:
        """Return the share of the questions that are answered exactly."""
        said = self.answers(examples, length)
        right = exact(said, [str(example.answer) for example in examples])
        return sum(right) / len(right)


# ----------------------------------------------------------------------- the process of a trainer
class Job(NamedTuple):
    """The work of one process.

    Attributes:
        trainer: one of TRAINERS, or RECOMPUTING.
        config: configuration of the run.
        threads: number of threads.
        rows: rows of TRL's forward pass.
        weights: file for the weights that the driver evaluates.
    """

    trainer: str
    config: RunConfig
    threads: int
    rows: int
    weights: Path


class Watch:
    """Clock of a run. It stops while the driver evaluates the weights.

    Args:
        pipe: the connection to the driver.
        job: the job of this process.
        model: the model that is trained.
    """

    def __init__(self, pipe: Any, job: Job, model: torch.nn.Module) -> None:
        self.pipe = pipe
        self.job = job
        self.model = model
        self.spent = [0.0, 0.0]  # seconds of the processor, and of the wall clock
        self.peak = 0

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.begun = time.process_time(), time.perf_counter()

    def after(self, step: int) -> None:
        """Record a step. If an evaluation is due, send the weights and wait for the driver."""
        if step % self.job.config.eval.every and step != self.job.config.steps:
            return
        now = time.process_time(), time.perf_counter()
        self.spent = [x + b - a for x, a, b in zip(self.spent, self.begun, now, strict=True)]
        self.peak = max(self.peak, resident("VmHWM"))
        save_file(dict(self.model.named_parameters()), self.job.weights)
        cpu, wall = self.spent
        self.pipe.send({"step": step, "cpu": cpu, "wall": wall, "peak": self.peak})
        self.pipe.recv()
        self.start()


def work(pipe: Any, job: Job) -> None:
    """Run a job, and send the time and the memory at each evaluation to the driver."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.config.seed)
    logging.disable(logging.WARNING)
    (run_ours if job.trainer in ("grpo_fast", RECOMPUTING) else run_trl)(pipe, job)


def run_ours(pipe: Any, job: Job) -> None:
    config = job.config
    policy = load_policy(config.model)
    train = read_examples(config, policy.tokenizer).train
    with build_engine(policy, config.rollout) as engine:
        run = make_run(config, policy, engine, train)
        watch = Watch(pipe, job, policy.model)
        watch.start()
        for number in range(1, config.steps + 1):
            make_step(number, run)
            watch.after(number)


def run_trl(pipe: Any, job: Job) -> None:
    from transformers import TrainerCallback

    trainer = trl_trainer(job)
    watch = Watch(pipe, job, trainer.model)

    class Evaluations(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watch.after(state.global_step)

    trainer.add_callback(Evaluations())
    watch.start()
    trainer.train()


def trl_trainer(job: Job) -> Any:
    """Build a trainer of TRL with the model, prompts, rewards and settings of our run.

    The prompts of all steps are in the data set, in the order of our run, because TRL shuffles in a
    different order.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from grpo_fast.integrations.trl import FastGRPOTrainer

    # 1. Ask for the prompts as text, and check that TRL gets the same tokens as our run.
    config = job.config
    sizes = config.rollout
    path = str(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    queue = PromptQueue(read_examples(config, tokenizer).train)
    examples = [queue.example(i) for i in queue.take(sizes.prompts_per_step * config.steps)]
    prompts = [example.prompt for example in examples]
    asker: Any = SimpleNamespace(tokenizer=tokenizer, template_kwargs={})
    texts = prompt_texts(asker, prompts)
    fits = encode_prompts(tokenizer, prompts) == tokenizer(texts)["input_ids"]
    require(fits, "prompts", "the same tokens for all trainers", "different tokens")
    # 2. Give TRL the rewards of our run as one function.
    rewards = build_rewards(config.rewards)
    asked = dict(zip(texts, examples, strict=True))

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        given = [asked[prompt] for prompt in prompts]
        return score(rewards, given, completions).total.tolist()

    # 3. Build the trainer.
    total = sizes.prompts_per_step * sizes.group_size
    cls, rows = (GRPOTrainer, job.rows) if job.trainer == "TRL" else (FastGRPOTrainer, total)
    require(total % rows == 0, "rows", f"a divisor of {total} completions", rows)
    return make_trainer(
        cls, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer, texts,
        reward, "cpu", num_generations=sizes.group_size, per_device_train_batch_size=rows,
        gradient_accumulation_steps=total // rows, max_steps=config.steps, seed=config.seed,
        max_completion_length=sizes.max_new_tokens, temperature=sizes.temperature,
        learning_rate=config.optim.lr, lr_scheduler_type="constant",
        weight_decay=config.optim.weight_decay, max_grad_norm=config.optim.max_grad_norm,
        loss_type=config.loss.loss_type, beta=0.0, scale_rewards="none", shuffle_dataset=False,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip


def sweep(pipe: Any, job: Job) -> None:
    """Send the CPU seconds per row of TRL's update, for each number of rows in ROWS.

    The rows have the length of the run's first prompt, and random tokens.
    """
    torch.set_num_threads(job.threads)
    logging.disable(logging.WARNING)
    trainer = trl_trainer(job._replace(trainer="TRL", rows=1))
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    config = job.config
    prompt = len(trainer.processing_class(trainer.train_dataset[0]["prompt"])["input_ids"])
    total = config.rollout.prompts_per_step * config.rollout.group_size
    seconds = {}
    for rows in (1, *(n for n in ROWS if total % n == 0)):  # the first call warms up
        shape = rows, config.rollout.max_new_tokens
        prompts = torch.randint(2, model.config.vocab_size, (rows, prompt))
        batch = {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": torch.randint(2, model.config.vocab_size, shape),
            "completion_mask": torch.ones(shape, dtype=torch.int64),
            "advantages": torch.randn(rows),
            "num_items_in_batch": torch.tensor(rows * shape[1]),
        }
        trainer._prepare_inputs = lambda _, batch=batch: batch
        begun = time.process_time()
        trainer.training_step(model, batch, None)
        seconds[rows] = (time.process_time() - begun) / rows
    pipe.send(seconds)
