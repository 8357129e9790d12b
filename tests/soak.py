"""Soak test (`make soak`) that kills a tiny training run many times and resumes it.

The final weights and metrics must be bitwise equal to the results of an uninterrupted run.

    python -m tests.soak --steps 1000 --saves 11 --rollouts 6 --moments 10 --seed 0 --ranks 1

Each kill is a SIGKILL signal to a child process. The signal arrives while a random file of a
checkpoint is saved, at a random token of a rollout, or at a random time. In a run with several
ranks, one rank is killed, and the other ranks must then exit, too.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_fast.errors import RankError
from grpo_fast.rollout.own import decode
from grpo_fast.train import checkpoint, loop
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.report import report
from tests.rank_server import free_port
from tests.train.runs import config_of, result, run

OPTIONS = ["log.completions_every=0", "eval.every=100", "checkpoint.every=5", "checkpoint.keep=2",
           "inner_iterations=2", "minibatches=2", "shuffle=completions", "reference.kind=synced",
           "reference.sync_every=7", "loss.beta=0.05", "rollout.dynamic={rounds: 1}",
           "rollout.group_size=2", "data.digits=3", "rollout.max_new_tokens=4",
           "tokens_per_microbatch=200"]  # fmt: skip
LEFT_ALONE = 3  # exit status of a rank when another rank was killed
EVERY, FILES, PASSES = 5, 8, 4  # steps between saves, files per save, passes per rollout


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # wait until the signal arrives


def arm_call(rng: random.Random, owner: Any, name: str, most: int) -> None:
    """Make this process kill itself at one of the next `most` calls of a function."""
    left, own = rng.randint(1, most), getattr(owner, name)

    def counting(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        die() if left == 0 else own(*arguments)

    setattr(owner, name, counting)


def arm_save(rng: random.Random, steps: float, _: float) -> None:
    """Make this process kill itself while it saves a checkpoint in the next `steps` steps.

    The kill occurs before a random file of a checkpoint is flushed to disk.
    """
    arm_call(rng, checkpoint, "sync", FILES * max(1, round(steps / EVERY)))


def arm_rollout(rng: random.Random, steps: float, _: float) -> None:
    """Make this process kill itself at a random token of a rollout of the next `steps` steps."""
    arm_call(rng, decode.SupportRecorder, "add", round(PASSES * steps))


def arm_moment(rng: random.Random, steps: float, seconds: float) -> None:
    """Make this process kill itself at a random time during the next `steps` steps.

    One training step takes about `seconds` seconds.
    """
    timer = threading.Timer(rng.uniform(0.3, 0.3 + seconds * steps), die)
    timer.daemon = True
    timer.start()


def attempt(
    folder: Path, options: list[str], arm: Callable[[], None], ranks: int = 1, victim: int = 0
) -> bool:
    """Start or resume the training run in `ranks` child processes, and wait for them to exit.

    Args:
        folder: The output folder of the run.
        options: Overrides of the configuration.
        arm: Function that the child process of rank `victim` calls first. It schedules the kill.
        ranks: Number of child processes.
        victim: Rank of the child process that may be killed.

    Returns:
        True if the child process of rank `victim` was killed.
    """
    port, children = free_port(), []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                if ranks > 1:
                    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks),
                                   "MASTER_ADDR": "localhost", "MASTER_PORT": port}  # fmt: skip
                if rank == victim:
                    arm()
                loop.train(config_of(folder, *options, "resume=auto"))
                os._exit(0)
            except RankError as error:
                print(error, file=sys.stderr)
                os._exit(LEFT_ALONE)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    was_killed = ends[victim] == -signal.SIGKILL
    expected = {-signal.SIGKILL, LEFT_ALONE} if was_killed else {0}
    if not set(ends) <= expected:
        sys.exit(f"soak: an attempt failed with statuses {ends}")
    return was_killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("steps", 1000), ("saves", 11), ("rollouts", 6), ("moments", 10)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    report.plot_runs = lambda *_: None  # type: ignore[assignment]
    rng, began = random.Random(asked.seed), time.monotonic()
    options, ranks = [*OPTIONS, f"steps={asked.steps}"], asked.ranks
    options += ["distributed=ddp", "distributed_timeout=60"] if ranks > 1 else []
    kinds = [(arm_save, asked.saves), (arm_rollout, asked.rollouts), (arm_moment, asked.moments)]
    kills = [arm for arm, count in kinds for _ in range(count)]
    rng.shuffle(kills)
    with tempfile.TemporaryDirectory() as root:
        whole, killed = Path(root) / "whole", Path(root) / "killed"
        torch.set_num_threads(1)
        run(
            Path(root) / "imports", *OPTIONS, "steps=1"
        )  # import all modules before forking, so that the children need not
        attempt(whole, options, lambda: None, ranks)
        seconds = (time.monotonic() - began) / asked.steps
        print(f"uninterrupted: {time.monotonic() - began:.0f} s", flush=True)
        most = 1.5 * asked.steps / (len(kills) + 2)  # largest number of steps until the next kill
        unfinished = 0
        for number, arm in enumerate(kills, 1):
            key = rng.random()
            victim = 0 if arm is arm_save else rng.randrange(ranks)  # only rank 0 saves
            if not attempt(
                killed, options, lambda a=arm, k=key: a(random.Random(k), most, seconds), ranks,
                victim,
            ):  # fmt: skip
                sys.exit(f"soak: the run ended before kill {number} of {len(kills)}: more --steps")
            unfinished += arm is arm_save and any(killed.glob("checkpoints/*.unfinished"))
            saved = checkpoints_in(killed)
            assert all(checkpoint.read_state(path) for path in saved), "a damaged checkpoint"
            at = saved[0].name if saved else "no checkpoint"
            print(f"kill {number}: {arm.__name__[4:]}, {at}", flush=True)
        if attempt(killed, options, lambda: None, ranks):
            sys.exit("soak: another process killed the run")
        expected, found = result(whole), result(killed)
        different = [name for name in expected if found.get(name) != expected[name]]
        same = not different and found.keys() == expected.keys()
    print(
        f"{asked.steps} steps, {len(kills)} kills ({unfinished} left a checkpoint unfinished): "
        + ("weights and metrics identical" if same else f"DIFFERENT: {different[:5]}")
        + f", {time.monotonic() - began:.0f} s"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
