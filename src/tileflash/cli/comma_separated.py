"""Options that take several values at once, with commas between them."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of a comma-separated option."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a comma-separated option; ValueError names the option."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise ValueError(f"`{option}` was {text!r}; it must be whole numbers separated by commas") from None
