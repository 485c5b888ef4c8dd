"""One pass for k guesses: a draft that has learnt what to say where it is shown a mask instead of a token (PARD, arXiv 2504.18583).

An ordinary draft reads its own guess before it makes the next one: k guesses, k passes. This one reads the tokens that are
known and k - 1 times a learned mask vector, and its last k rows are the k guesses; the mask rows are then forgotten. Masks come
after every real token, so the first guess is exactly the ordinary draft's.

Training sees many such passes over one text at once. A row is (anchor, depth): the last real token that it knows and how many masks
stand after that; it speaks of the token at anchor + depth + 1. Depth 0 is the ordinary draft.

    python -m draft_training.train --target FOLDER --data data --out draft-p --grow draft-s.safetensors --guesses 5
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
    logits = draft(inputs_embeds=rows, cache=cache, logits_to_keep=k).logits[0]
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
            span = slice(0, max(0, length - depth))
            anchors = (places[text, span] & (drawn[text, span] < share)).nonzero()[:, 0]
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


def add_mask(draft, states=None):
    """Give the draft a mask vector: the trained one of `states`, or what the embedding is on average, to begin from."""
    start = draft.get_input_embeddings().weight.detach().mean(dim=0) if states is None else states["mask"]
    draft.mask = torch.nn.Parameter(start.clone().float())


def chain_states(draft, shards, batch, guesses, generator):
    """What the loss compares at every depth: the draft's states and the teacher's (rows, hidden), the teacher's best ids (rows, 16).

    Deep rows stand in the continued part alone: that is where a draft guesses."""
    ids, place, hidden, top = shards.tensors(batch, generator)
    steps, lengths = torch.arange(ids.shape[1]), [length for _, _, length, _ in batch]
    places = torch.stack([(steps >= prompt - 1) & (steps < length) for _, _, length, prompt in batch])
    anchors, depths = thinned(places, lengths, guesses, generator)
    with torch.autocast("cpu", torch.bfloat16):
        states = rows_of(draft, draft.mask, ids, anchors, depths)
    shallow = states[:, : ids.shape[1]].flatten(0, 1)[place]
    deep = states[:, ids.shape[1] :][anchors >= 0]
    for (number, offset, _, _), anchor, depth in zip(batch, anchors, depths, strict=True):
        spoken = offset + (anchor + depth)[anchor >= 0]
        hidden = torch.cat([hidden, shards.parts[number]["hidden"][spoken].float()])
        top = torch.cat([top, shards.parts[number]["top"][spoken].long()])
    return torch.cat([shallow, deep]), hidden, top


def hits(draft, row, guesses):
    """right (tokens, guesses): whether guess i + 1 of the pass that begins before a continued token of `row` is the token i further
    on; false where the text ends sooner. One forward for all passes."""
    text, first, count = row["prompt"] + row["continuation"], len(row["prompt"]) - 1, len(row["continuation"])
    ids = torch.tensor([text[:-1]])
    anchors, depths = thinned(torch.arange(len(text) - 1)[None] >= first, [len(text) - 1], guesses)
    states = rows_of(draft, draft.mask, ids, anchors, depths)[0, first:]
    spoken = draft.get_output_embeddings()(states).argmax(-1)
    anchor = torch.cat([torch.arange(first, len(text) - 1), anchors[0]])
    depth = torch.cat([torch.zeros(count, dtype=torch.long), depths[0]])
    right = torch.zeros(count, guesses, dtype=torch.bool)
    right[anchor - first, depth] = spoken == torch.tensor(text)[anchor + depth + 1]
    return right


def walk(right, one_pass):
    """(accepted, judged) by place over the rounds of a text, `right` (tokens, guesses) as `hits` gives it. Without `one_pass` each
    guess has read the ones before it, as an ordinary draft's has."""
    (tokens, guesses), at = right.shape, 0
    accepted, judged = [0] * guesses, [0] * guesses
    while at < tokens:
        for place in range(min(guesses, tokens - at)):
            judged[place] += 1
            if not (right[at, place] if one_pass else right[at + place, 0]):
                break
            accepted[place] += 1
        else:
            place = min(guesses, tokens - at)
        at += place + 1
    return accepted, judged


@torch.inference_mode()
def by_place(draft, rows, guesses):
    """alpha over all rows with one pass a round and with a pass a guess, and its conditional rates by place with one pass."""
    found = [hits(draft, row, guesses) for row in rows]
    table = {}
    for name, one_pass in (("one pass", True), ("a pass a guess", False)):
        walks = [walk(right, one_pass) for right in found]
        accepted, judged = ([sum(column) for column in zip(*side, strict=True)] for side in zip(*walks, strict=True))
        table[name] = sum(accepted) / max(1, sum(judged))
        table |= {f"{name}, guess {at + 1}": accepted[at] / max(1, judged[at]) for at in range(guesses)}
    return table
