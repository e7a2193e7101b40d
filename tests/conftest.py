"""Without a GPU the Triton kernels run in Triton's interpreter; GPU tests are skipped with the reason shown."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when a kernel is defined, so it must be set before tileflash.kernels is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a GPU, whatever asks for the `device` fixture is a GPU test too; without one, GPU tests are skipped."""
    skip = pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False")
    slow = pytest.mark.skip(reason="takes minutes: python -m pytest -m slow runs it")
    for item in items:
        if "slow" in item.keywords and "slow" not in config.getoption("markexpr"):
            item.add_marker(slow)
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
def poisoned_memory() -> Iterator[None]:
    """torch.empty, empty_like and empty_strided give NaN, so that an element nobody wrote shows."""
    from tileflash.fuzz.judge import poisoned_memory as poisoned  # not above: the variable must be set before

    with poisoned():
        yield
