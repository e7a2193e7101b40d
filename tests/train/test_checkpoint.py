"""Checkpoints: every bit comes back, damage is seen and told, a failed save harms nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tileflash.train import checkpoint as checkpoint_module
from tileflash.train.checkpoint import (
    checkpoints,
    find_checkpoint,
    find_fault,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from tileflash.train.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(37, 11, generator=generator),
        "optimizer.step": torch.tensor(float(seed)),
        "random.cpu": torch.randint(256, (100,), generator=generator, dtype=torch.uint8),
    }


def save(output: Path, step: int, keep: int = 9) -> Path:
    return save_checkpoint(output, step, tensors(step), {"note": step / 3}, keep)


def test_every_bit_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path.name == "checkpoint_step_000007"
    into = {name: torch.zeros_like(value) for name, value in tensors().items()}
    state = load_checkpoint(path, into)
    assert (state["step"], state["note"]) == (7, 7 / 3)
    assert all(torch.equal(into[name], value) for name, value in tensors(7).items())
    assert find_fault(path) is None


def test_the_oldest_are_removed_and_nothing_else_is_left(tmp_path: Path) -> None:
    for step in (2, 9, 10, 100, 1000):  # by number, not by name
        save(tmp_path, step, keep=3)
    assert [step for step, _ in checkpoints(tmp_path)] == [10, 100, 1000]
    assert all(path.name.startswith("checkpoint_step_") for path in tmp_path.iterdir())


def damage_truncate(path: Path) -> None:
    file = path / "tensors" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


def damage_flip(path: Path) -> None:
    file = path / "tensors" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "manifest cut off": lambda path: os.truncate(path / "manifest.json", 40),
    "manifest of another form": lambda path: (path / "manifest.json").write_text(
        '{"format": 1, "files": {"state.json": 3}}'
    ),
    "file missing": lambda path: (path / "state.json").unlink(),
    "truncated": damage_truncate,
    "one bit": damage_flip,
    "state edited": lambda path: (path / "state.json").write_text((path / "state.json").read_text().replace("7", "8")),
    "other format": lambda path: (path / "manifest.json").write_text(json.dumps({"format": 99, "files": {}})),
    "empty directory": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_told_and_the_one_before_used(tmp_path: Path, damage) -> None:
    earlier, later = save(tmp_path, 5), save(tmp_path, 7)
    damage(later)
    told: list[str] = []
    assert find_checkpoint(tmp_path, told.append) == earlier
    assert len(told) == 1
    assert later.name in told[0]
    with pytest.raises(CheckpointError, match=r"000007 is not a complete checkpoint: .+"):
        find_checkpoint(later, told.append)
    damage(earlier)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        find_checkpoint(tmp_path, told.append)


def test_finding(tmp_path: Path) -> None:
    told: list[str] = []
    assert find_checkpoint(tmp_path / "nowhere", told.append) is None
    path = save(tmp_path, 3)
    (tmp_path / "checkpoint_step_9_notes").mkdir()
    assert find_checkpoint(tmp_path, told.append) == path == find_checkpoint(path, told.append)
    assert told == []


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    shutil.copytree(path, tmp_path / ".tmp-checkpoint_step_000004")
    shutil.copytree(path, tmp_path / ".tmp-deleted-checkpoint_step_000001")
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def break_tensors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "save", full_disk)  # deep in torch.distributed.checkpoint, which wraps the error in its own


def break_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_module, "_write_json", full_disk)


def break_rename(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_module.os, "rename", full_disk)


@pytest.mark.parametrize("break_it", [break_tensors, break_state, break_rename])
def test_a_full_disk_is_told_and_what_was_there_is_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it
) -> None:
    earlier = save(tmp_path, 5)
    with monkeypatch.context() as patch:
        break_it(patch)
        with pytest.raises(CheckpointError, match=r"step 7 .*No space left on device.* untouched; it needs 0\.00 GB"):
            save(tmp_path, 7, keep=1)
    assert list(tmp_path.iterdir()) == [earlier]
    assert find_fault(earlier) is None
    assert find_checkpoint(tmp_path, print) == earlier
    assert find_fault(save(tmp_path, 7)) is None  # room again


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_real_enospc_has_the_message_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = Path.open

    def open_full(path: Path, mode: str = "r", *rest, **more):
        return real_open(Path("/dev/full") if path.name == "state.json" else path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_dressed_up_as_the_disks(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, tensors(), {"note": object()}, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_amid_a_save_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("second Ctrl-C")

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt, match="second"):
        save(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["name", "shape"])
def test_what_is_not_in_it_is_told(tmp_path: Path, wrong: str) -> None:
    path = save(tmp_path, 7)
    into = {"model.other": torch.zeros(2)} if wrong == "name" else {"model.weight": torch.zeros(5, 5)}
    with pytest.raises(CheckpointError, match=r"000007 cannot be read: .*model\.(other|weight)"):
        load_checkpoint(path, into)
