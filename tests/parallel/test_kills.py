"""A run of four ranks that is killed, any rank at any moment, and started again is bit for bit the run that never was.

Five kills here; fifty by `python -m pytest -m slow tests/parallel/test_kills.py`.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch

from support.ranks import model_arguments, start_ranks, steps, tensors_of
from tileflash.train.checkpoint import checkpoints

pytestmark = pytest.mark.xdist_group("ranks")

RANKS = 4
LAYOUT = ("--data-parallel", 2, "--tensor-parallel", 2, "--zero-stage", 1)
STEPS_PER_KILL = 12  # about the most that a rank lives to see

# One rank dies at the so-manieth thing that is done to a file of the output: mostly amid a save, else at the log or the start.
AT_A_FILE = """
import os, signal, sys
if os.environ["RANK"] == "{rank}":
    events, left = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"), [{number}]
    def count(event, arguments):
        if event in events and {output!r} in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
"""


# One rank dies so many seconds after it has begun so many steps.
AFTER_STEPS = """
import os, signal, threading
from tileflash.train import parallel_trainer
original, left = parallel_trainer.ParallelTrainer._compute, [{steps}]
def compute(self, *arguments):
    left[0] -= 1
    if left[0] == 0 and self.ranks.rank == {rank}:
        threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return original(self, *arguments)
parallel_trainer.ParallelTrainer._compute = compute
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kills_of_any_rank_change_no_bit(tokens: Path, tmp_path: Path, kills: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when it fails
    choose = random.Random(seed)
    broken, last = tmp_path / "broken", STEPS_PER_KILL * kills
    given = model_arguments(
        tokens, *LAYOUT, "--num-iteration", last, "--save-every", 2, "--keep", 2, "--shuffle", "--total-batch-size", 128
    )
    settings = [*given, "--batch-size", 4, "--learning-rate", 0.005, "--warmup-iterations", 10]
    for rank in start_ranks(RANKS, [*settings, "--output", tmp_path / "whole"], tmp_path):
        assert rank.end(600)[0] == 0
    deaths = [0] * RANKS
    amid_saves = 0
    resumed = [*settings, "--output", broken, "--resume"]
    while sum(deaths) < kills:
        victim, moment = choose.randrange(RANKS), choose.random()
        script = ""
        if moment < 0.5:
            number = choose.randint(1, 60 if victim == 0 else 20)
            script = AT_A_FILE.format(rank=victim, number=number, output=str(broken))
        elif moment < 0.8:
            script = AFTER_STEPS.format(rank=victim, steps=choose.randint(1, 8), seconds=choose.uniform(0.0, 0.1))
        # Only those that have not met yet wait so long for one that was killed.
        ranks = start_ranks(RANKS, [*resumed, "--rank-timeout", 20], tmp_path, script)
        if not script:  # while they start and meet
            time.sleep(choose.uniform(0.0, 1.0))
            ranks[victim].kill()
        status = ranks[victim].end(60)[0]
        others = [rank.end(60) for number, rank in enumerate(ranks) if number != victim]
        assert checkpoints(broken)[-1][0] < last if checkpoints(broken) else True, "it came to its end before all kills"
        assert status == -signal.SIGKILL
        deaths[victim] += 1
        # The first rank says so, and tidies up, if it lives.
        amid_saves += bool(list(broken.glob(".tmp-*"))) or any("was not written" in told for _, told, _ in others)
        for other, _, error in others:
            assert other == 1, error
            assert "another rank has ended or has not answered" in error
    for rank in start_ranks(RANKS, resumed, tmp_path):
        status, _, error = rank.end(600)
        assert status == 0, error
    print(f"deaths of ranks {deaths}, {amid_saves} of them amid a save")
    numbers = [
        [tuple(event[name] for name in ("step", "train_loss", "learning_rate", "gradient_norm")) for event in events]
        for events in (steps(tmp_path / run / "log.jsonl") for run in ("whole", "broken"))
    ]
    assert [step for step, *_ in numbers[0]] == list(range(1, last + 1))
    assert numbers[0] == numbers[1]
    expected, found = (tensors_of(tmp_path / run, step=last) for run in ("whole", "broken"))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert not list(broken.glob(".tmp-*"))
