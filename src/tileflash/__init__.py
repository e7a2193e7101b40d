"""tileflash: exact, fast attention for PyTorch in pure Python, and a trainer that shows what it gains."""

__version__ = "0.1.0"
