"""Whether the Triton that is installed can compile the Hopper kernels."""

from __future__ import annotations

import torch
import triton

# Every shipped configuration is compiled with these, and counted, in the tests.
_TESTED = ("3.6.", "3.7.")


def why_not() -> str | None:
    """A sentence that says why the kernels cannot be had with this Triton, or None.

    With versions that are not tested one kernel of each direction is compiled on trial: a few seconds, once on a machine.
    """
    version = triton.__version__
    try:
        import tileflash.kernels.hopper.attention  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Gluon in Triton {version} is not the one its kernels are written in ({error})"
    if version.startswith(_TESTED):
        return None
    from tileflash.kernels.hopper.launch import backward_call, forward_call
    from tileflash.kernels.hopper.offline import compile_offline

    try:
        compile_offline(forward_call(64, torch.bfloat16, "high"))
        compile_offline(backward_call(64, torch.bfloat16, "high", grouped=False))
    except Exception as error:  # whatever a compiler throws
        return f"its kernels do not compile with Triton {version}: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    """The first line of what an error came from: a compiler wraps the reason in a place for each call on the way."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
