"""Starting a compiled kernel: which of Triton's functions is called, and with what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflash.kernels import compat


class CudaLauncher:
    """The attributes that Triton 3.6's launcher of this name has."""

    def __init__(self, launch: Any, **changed: Any) -> None:
        self.launch = launch
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False
        vars(self).update(changed)


class HIPLauncher(CudaLauncher):
    pass


def _compiled(run: Any) -> Any:
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


def _wrapped(launcher: Any) -> Any:
    return lambda *arguments: launcher(*arguments)


BARE = ("function", False, False, None, None, "metadata", None, None, None)
WHOLE = ("function", "metadata", None, None, None)


@pytest.mark.parametrize("version", ["3.6.0", "3.6.1+git"])
@pytest.mark.parametrize("wrap", [lambda launch: launch, _wrapped], ids=["no descriptors", "descriptors"])
def test_the_c_function_of_triton_3_6_is_started_itself(
    monkeypatch: pytest.MonkeyPatch, version: str, wrap: Any
) -> None:
    monkeypatch.setattr(compat.triton, "__version__", version)
    assert compat.start_of(_compiled(CudaLauncher(wrap(print)))) == (print, BARE)


@pytest.mark.parametrize(
    ("version", "launcher"),
    [
        ("3.7.1", CudaLauncher(print)),
        ("3.5.0", CudaLauncher(print)),
        ("3.6.0", HIPLauncher(print)),
        ("3.6.0", CudaLauncher(print, global_scratch_size=128)),
        ("3.6.0", CudaLauncher(print, profile_scratch_size=128)),
        ("3.6.0", CudaLauncher(print, launch_cooperative_grid=True)),
        ("3.6.0", CudaLauncher(print, launch_pdl=True)),
        ("3.6.0", CudaLauncher(lambda *arguments: None)),
    ],
    ids=["newer", "older", "AMD", "scratch", "profile scratch", "cooperative", "dependent launch", "unknown wrapper"],
)
def test_every_other_launcher_is_called_whole(monkeypatch: pytest.MonkeyPatch, version: str, launcher: Any) -> None:
    monkeypatch.setattr(compat.triton, "__version__", version)
    assert compat.start_of(_compiled(launcher)) == (launcher, WHOLE)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_a_second_call_starts_what_the_first_compiled_with_its_own_addresses(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Function:  # of C: an object without __code__
        def __call__(self, *arguments: Any) -> None:
            calls.append(arguments)

    class Launcher(CudaLauncher):
        def __call__(self, *arguments: Any) -> None:
            calls.append(arguments)

    Launcher.__name__ = "CudaLauncher"
    compiled = _compiled(Launcher(Function()))
    first_calls = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **options: first_calls.append((grid, len(arguments), options)) or compiled

    monkeypatch.setattr(compat.triton, "__version__", version)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    prepared = compat.PreparedLaunch(Kernel(), 5, (1, 2), num_warps=4, num_stages=3, max_registers=168)
    memory = torch.zeros(64)
    aligned = memory[(-memory.data_ptr() // 4) % 4 :]
    off = aligned[1:]
    prepared((aligned, aligned), 0, ((aligned, 3), ()))
    assert first_calls == [((5,), 6, {"num_warps": 4, "num_stages": 3, "maxnreg": 168})]
    assert not calls
    prepared((aligned[4:], aligned), 0, ((aligned, 3), ()))
    expected = BARE if version == "3.6.0" else WHOLE
    addresses = (aligned[4:].data_ptr(), aligned.data_ptr())
    assert calls[0][:-4] == (5, 1, 1, 77, *expected, *addresses)
    assert calls[0][-3:] == ((), 1, 2)
    # Another alignment is another variant, whichever tensor it is of, those in tuples included.
    for first, second, third in [(off, aligned, aligned), (aligned, off, aligned), (aligned, aligned, off)]:
        before = len(first_calls)
        for _ in range(2):
            prepared((first, second), 0, ((third, 3), ()))
        assert len(first_calls) == before + 1
    assert len(calls) == 4
