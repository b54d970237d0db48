"""Where completions end: token ids while they are drawn, strings in what was drawn."""

from typing import NamedTuple

from twinkle_jax.data.sampling_types import SamplingParams
from twinkle_jax.data.template import Template


class Stops(NamedTuple):
    """Tokens at which a row ends at once, and strings at which it is cut."""

    tokens: list[int]
    strings: list[str]


def read_stops(params: SamplingParams, template: Template | None) -> Stops:
    """Add what the parameters say to the tokens at which the tokenizer ends a sequence."""
    tokens = [] if template is None else list(template.tokenizer.stop_token_ids)
    stop = params.stop
    given: list[str | int] = [stop] if isinstance(stop, str) else list(stop or ())
    strings = []
    for item in given:
        if not isinstance(item, str):
            tokens.append(item)
            continue
        if template is None:
            raise ValueError(f"stop must be token ids where there is no tokenizer, got {item!r}")
        special = template.tokenizer.backend.token_to_id(item)
        if special is not None:
            tokens.append(int(special))
        else:
            ids = template.tokenizer.encode(item)
            if item not in template.tokenizer.decode(ids):
                raise ValueError(f"stop must be text that the tokenizer can write, got {item!r}")
        strings.append(item)
    return Stops(list(dict.fromkeys(tokens)), strings)


def cut(tokens: list[int], strings: list[str], template: Template) -> tuple[int, str]:
    """Find how many tokens it takes to write a stop string, and the text before it.

    Returns all tokens and all text where no string occurs.
    """
    tokenizer = template.tokenizer

    def found(count: int) -> int | None:
        text = tokenizer.decode(tokens[:count])
        places = [text.find(string) for string in strings]
        return min((place for place in places if place >= 0), default=None)

    if found(len(tokens)) is None:
        return len(tokens), tokenizer.decode(tokens)
    low, high = 0, len(tokens)  # low tokens do not hold a string, high ones do
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if found(middle) is None else (low, middle)
    return high, tokenizer.decode(tokens[:high])[: found(high)]
