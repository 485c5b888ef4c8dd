"""What the queries of one pass see of the cache: as one block, or each row by the product that it would make alone.

Queries come as (rows x n, kv heads, group, head size), `group` of them to a key head; keys and values as (rows, kv heads,
slots or more, head size). Results are (rows x n, heads x head size).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

STEP = 32  # rows that attend alone look over a multiple of so many slots, the rest masked: blocks then share one shape


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of True and False (seen, not seen) as 0 and minus infinity; one of those is left as it is."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """A mask of either kind as True (seen) and False."""
    return mask if mask.dtype == torch.bool else mask == 0


class Block:
    """All rows in one product: a row's result may depend, in its last bits, on how many stand beside it."""

    def __init__(self, rows: int, n: int, cached: int, mask, group: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.n, self.end, self.mask = rows, n, cached + n, None
        if mask is None and n > 1:
            mask = torch.ones(1, 1, n, self.end, dtype=torch.bool, device=device).tril(cached)
        if mask is not None:  # the queries of one key head are rows of the product too
            self.mask = additive(mask, dtype).repeat_interleave(group, dim=2)

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        _, kv, group, size = query.shape
        query = query.view(self.rows, self.n, kv, group, size).transpose(1, 2).reshape(self.rows, kv, -1, size)
        keys, values = keys[:, :, : self.end], values[:, :, : self.end]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, scale=scale)
        return out.reshape(self.rows, kv, self.n, -1).transpose(1, 2).reshape(self.rows * self.n, -1)


class Rows:
    """One row of tokens, each a batch entry of its own: shapes depend on how much it sees, never on its neighbours.

    A row looks over its slots, rounded up to a multiple of STEP; rows of a block that round to different lengths take
    two products. In a tree a row's own path is gathered first, so that it sees what a chain of those tokens would see.
    """

    rows = 1

    def __init__(self, n: int, cached: int, mask, dtype: torch.dtype, device: torch.device):
        lengths, paths = [cached + 1 + row for row in range(n)], None
        if mask is not None:
            lengths, paths = visible_paths(mask[0, 0])
        by_width: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            by_width.setdefault(-(-length // STEP) * STEP, []).append(row)
        order = [row for members in by_width.values() for row in members]
        self.back = None if order == sorted(order) else torch.tensor(order, device=device).argsort()
        self.groups = []
        for width, members in by_width.items():
            hidden = (
                torch.arange(width, device=device)
                >= torch.tensor([lengths[row] for row in members], device=device)[:, None]
            )
            slots = None if paths is None else F.pad(paths[members, :width], (0, max(0, width - paths.shape[1])))
            whole = members == list(range(members[0], members[-1] + 1))
            place = slice(members[0], members[-1] + 1) if whole else torch.tensor(members, device=device)
            self.groups.append((place, len(members), width, slots, additive(~hidden[:, None, None], dtype)))

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        parts = []
        for place, count, width, slots, mask in self.groups:
            if slots is None:
                seen = [store[:, :, :width].expand(count, -1, -1, -1) for store in (keys, values)]
            else:
                seen = [store[0][:, slots].transpose(0, 1) for store in (keys, values)]
            parts.append(F.scaled_dot_product_attention(query[place], *seen, attn_mask=mask, scale=scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if self.back is None else out[self.back]).reshape(len(out), -1)


def visible_paths(mask: torch.Tensor) -> tuple[list[int], torch.Tensor | None]:
    """Of a mask (n, slots): how many slots each row sees, and which, in order, (n, slots); None where every row sees the
    first ones, as in a chain."""
    seen = visible(mask)
    counts = seen.sum(1)
    if torch.equal(seen, torch.arange(seen.shape[1], device=seen.device) < counts[:, None]):
        return counts.tolist(), None
    return counts.tolist(), seen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
