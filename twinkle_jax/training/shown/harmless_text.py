"""Text that a model wrote, so that a terminal shows it and does nothing else with it."""

import unicodedata

# Controls, such as ESC, which terminals obey; format characters, which turn the reading direction
# or hide text; halves of characters, which cannot be written; and two kinds of line break.
_ACTIVE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def harmless(text: str, *, encoding: str = "utf-8") -> str:
    r"""Write control and format characters as their code points, but for line breaks and tabs.

    Args:
        text: of anyone.
        encoding: of the terminal; characters that it has not are escaped.

    Returns:
        The text that can be shown.

    Example:
        >>> harmless("red: \x1b[31m")
        'red: <U+001B>[31m'
    """
    shown = "".join(_show(character) for character in text.replace("\r\n", "\n"))
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str, *, limit: int = 400, encoding: str = "utf-8") -> str:
    r"""Make text harmless, shorten it, and show its line breaks as arrows.

    Args:
        text: of anyone.
        limit: the most characters of it that are shown; of longer text the middle is left out.
        encoding: of the terminal; characters that it has not are escaped.

    Returns:
        One line.

    Example:
        >>> one_line("one\ntwo three four", limit=9)
        'one↵tw … our'
    """
    if len(text) > limit:
        tail = limit // 3
        text = f"{text[: limit - tail]} … {text[len(text) - tail :]}"
    text = text.replace("\r\n", "\n").replace("\n", "↵").replace("\t", " ")
    return harmless(text, encoding=encoding)


def _show(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _ACTIVE:
        return character
    return f"<U+{ord(character):04X}>"
