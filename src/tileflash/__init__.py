"""tileflash: exact, fast attention for PyTorch in pure Python, and a trainer that shows what it gains.

from tileflash import attention
out = attention(q, k, v, causal=True)    # q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D]
"""

from tileflash.attention.api import attention, attention_varlen, explain

__all__ = ["__version__", "attention", "attention_varlen", "explain"]
__version__ = "0.1.0"
