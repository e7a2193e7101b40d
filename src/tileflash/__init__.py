"""tileflash: exact, fast attention for PyTorch in pure Python, and a trainer that shows what it gains.

from tileflash import attention
out = attention(q, k, v, causal=True)    # q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D]
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileflash.attention.api import attention, attention_varlen, explain

__all__ = ["__version__", "attention", "attention_varlen", "explain"]
__version__ = "0.1.0"

# Loaded when they are first asked for, so that `tileflash --help` need not load PyTorch and `tileflash doctor` runs where
# PyTorch cannot be loaded.
_PUBLIC = dict.fromkeys(("attention", "attention_varlen", "explain"), "tileflash.attention.api")


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """`attention` is the function to users, and the name of the package that it comes from.

    When the package is imported, the import system sets this module's attribute to it. That is passed over, for the name
    belongs to the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
