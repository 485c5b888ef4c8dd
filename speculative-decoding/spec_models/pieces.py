"""A text in the pieces in which it was written, such that the pieces join to the text.

One character may be several tokens (an emoji is four bytes), and a piece may end in the middle of it: decoded alone,
both halves are replacement marks. A character belongs to the piece that completes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise


def pieces(tokenizer, tokens: Sequence[int], lengths: Sequence[int]) -> list[str]:
    """The text of `tokens` in parts of that many tokens; what is past their sum belongs to the last."""
    whole = tokenizer.decode(list(tokens))
    ends = [0]
    for count in list(accumulate(lengths))[:-1]:
        shared = os.path.commonprefix([whole, tokenizer.decode(list(tokens[:count]))])  # ends before a half character
        ends.append(max(ends[-1], len(shared)))
    return [whole[start:end] for start, end in pairwise([*ends, len(whole)])]


def next_piece(tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of `tokens` after those before them."""
    return pieces(tokenizer, [*before, *tokens], [len(before), len(tokens)])[1]
