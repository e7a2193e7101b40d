"""English text that ships with Python itself, so that the demo downloads nothing."""

from __future__ import annotations


def demo_topics() -> list[str]:
    """The help topics of Python's documentation (`pydoc_data.topics`) in alphabetical order.

    About 80 documents, 465,000 characters in Python 3.11. The wording differs between versions of Python, so losses on
    it compare only within one version.
    """
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def demo_corpus() -> str:
    """All demo topics joined by blank lines, as one text."""
    return "\n\n".join(topic.strip("\n") for topic in demo_topics()) + "\n"
