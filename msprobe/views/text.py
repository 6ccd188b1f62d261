"""Text that is safe to show: names and messages from a trace, with everything that a terminal could obey made visible.

All views pass strings of a trace through `safe`. A trace holds what a script put there: prompts, file names, exception messages, with
line breaks, terminal escapes, direction overrides, or bytes that are no text. They are shown as escapes, and rich's markup is never
interpreted because the result is a `Text`, not a string.
"""

from __future__ import annotations

import unicodedata

from rich.text import Text

# What stays as it is although Python does not call it printable: the wide space of Chinese and Japanese text.
_HARMLESS = frozenset("\u3000")

# What msprobe itself draws with, and what stands for it where the output has no Unicode; one character for one, so that columns hold.
_ASCII = str.maketrans("▁▂▃▄▅▆▇█×·–µ…", "_.,-=+*#x--u.")


def safe(text: str) -> str:
    """Return the text with control characters, invisible ones and lone surrogates as backslash escapes, on one line."""
    return text if text.isprintable() else "".join(map(_shown, text))


def label(text: str, style: str = "") -> Text:
    """Return a piece of a trace as a renderable, safe and without markup."""
    return Text(safe(text), style=style)


def in_ascii(text: str) -> str:
    """Return a page with the signs that msprobe draws with replaced by ASCII ones; other characters stay."""
    return text.translate(_ASCII)


def shortened(text: str, cells: int) -> str:
    """Return the text with its middle left out, so that it fits; the end of a path tells more than its middle does."""
    if len(text) <= cells:
        return text
    tail = (cells - 2) * 2 // 3
    return f"{text[: cells - 2 - tail]}..{text[len(text) - tail :]}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def _shown(character: str) -> str:
    if character.isprintable() or character in _HARMLESS or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
