"""One pass for k guesses: a draft that has learnt what to say where it is shown a mask instead of a token (PARD, arXiv 2504.18583).

An ordinary draft reads its own guess before it makes the next one: k guesses, k passes. This one reads the tokens that are
known and k - 1 times a learned mask vector, and its last k rows are the k guesses; the mask rows are then forgotten. Masks come
after every real token, so the first guess is exactly the ordinary draft's.

Training sees many such passes over one text at once. A row is (anchor, depth): the last real token that it knows and how many masks
stand after that; it speaks of the token at anchor + depth + 1. Depth 0 is the ordinary draft.
"""

import torch

KEPT = 0.7  # share of the anchors of one depth that go one deeper in training: deep rows are many and learn slowly
LEAST = 0.2  # and the share that every depth has


@torch.inference_mode()
def guess(draft, mask, ids, k, cache):
    """Logits (k, vocabulary) of the k tokens after `ids`, the known tokens that `cache` lacks; `mask` (hidden size).

    Afterwards the cache holds the known tokens and no mask."""
    known = draft.get_input_embeddings()(torch.tensor([ids]))
    rows = torch.cat([known, mask.to(known).expand(1, k - 1, -1)], dim=1)
    logits = draft(inputs_embeds=rows, past_key_values=cache, logits_to_keep=k).logits[0]
    if k > 1:
        cache.crop(1 - k)
    return logits


def thinned(places, lengths, depths, generator=None):
    """(anchors, depths) of the rows below depth 0, each (texts, rows); anchor -1 fills up. `places` (texts, width) says where
    an anchor may stand. A share max(KEPT ** depth, LEAST) goes on to each depth, and whatever is at one depth is at all before it, since
    a row sees the masks above it. Without a generator nothing is left out."""
    drawn = torch.rand(places.shape, generator=generator) if generator else torch.zeros(places.shape)
    rows = []
    for text, length in enumerate(lengths):
        parts = []
        for depth in range(1, depths):
            share = max(KEPT**depth, LEAST)
            anchors = (places[text, : max(0, length - depth)] & (drawn[text, : max(0, length - depth)] < share)).nonzero()[:, 0]
            parts.append(torch.stack([anchors, torch.full_like(anchors, depth)]))
        rows.append(torch.cat(parts, dim=1) if parts else torch.zeros(2, 0, dtype=torch.long))
    width = max(row.shape[1] for row in rows)
    filled = [torch.cat([row, torch.tensor([[-1], [0]]).expand(2, width - row.shape[1])], dim=1) for row in rows]
    return torch.stack([row[0] for row in filled]), torch.stack([row[1] for row in filled])


def may_see(anchors, depths):
    """(texts, 1, rows, rows), true where a row may look: at real tokens up to its anchor, and at its own masks up to itself."""
    query, key = anchors[:, :, None], anchors[:, None, :]
    real = (depths[:, None, :] == 0) & (key <= query) & (key >= 0)
    own = (key == query) & (depths[:, None, :] <= depths[:, :, None])
    return (real | own)[:, None]


def rows_of(draft, mask, ids, anchors, depths):
    """Final normed states (texts, width + rows, hidden) of depth 0 at every token of `ids` (texts, width), then of the deeper rows.

    A row of anchor -1 fills up: it sees its own kind alone, and nobody sees it."""
    known = draft.get_input_embeddings()(ids)
    places = torch.arange(ids.shape[1]).expand(len(ids), -1)
    anchor, depth = torch.cat([places, anchors], dim=1), torch.cat([torch.zeros_like(places), depths], dim=1)
    masks = mask.to(known).expand(len(ids), anchors.shape[1], -1)
    seen = may_see(anchor, depth)
    return draft.model(
        inputs_embeds=torch.cat([known, masks], dim=1),
        attention_mask=torch.zeros(seen.shape, dtype=known.dtype).masked_fill_(~seen, torch.finfo(known.dtype).min),
        position_ids=(anchor + depth).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
