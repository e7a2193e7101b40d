"""Operators of a training step that move less memory than the chains of small ones they stand for: docs/operators.md."""
