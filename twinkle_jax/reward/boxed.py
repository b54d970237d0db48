r"""Answers in boxes, `\boxed{42}`, braces within them included."""

_BOX = "\\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Find what stands in the last box of a text.

    Args:
        text: any text.

    Returns:
        The content without spaces around it; None without a box, or where the last one is open.

    Example:
        >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i].strip()
    return None


def nesting(text: str) -> int:
    """Count how deep brackets of any kind are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
