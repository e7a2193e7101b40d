"""Without a GPU the Triton kernels run in Triton's interpreter; GPU tests are skipped with the reason shown."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when a kernel is defined, so it must be set before tileflash.kernels is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a GPU, whatever asks for the `device` fixture is a GPU test too; without one, GPU tests are skipped."""
    skip = pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False")
    for item in items:
        if torch.cuda.is_available():
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
        elif "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def device() -> str:
    """The GPU where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and torch.empty_like give NaN, so that an element nobody wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))
