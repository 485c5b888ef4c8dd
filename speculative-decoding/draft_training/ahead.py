"""What Medusa's heads are taught and judged on: the target's own states further on, from its state at one place."""

import torch

RANKS = 8  # guesses of a head that are looked at: a lower rank is hardly ever worth a place in a tree


def medusa_states(medusa, shards, batch, generator):
    """What the loss compares: the state that head j makes at a place, and the teacher's j places on (rows, hidden); the
    teacher's best ids there. Every head has its rows, the first head's first."""
    ids, place, hidden, top = shards.tensors(batch, generator)
    features, width = shards.features(batch, ids.shape[1]).flatten(0, 1), ids.shape[1]
    mine, theirs, best = [], [], []
    with torch.autocast("cpu", torch.bfloat16):
        for head in range(medusa.heads):
            far = place % width > head  # the place that it is said from lies in the same text
            mine.append(medusa.head_states(features[place[far] - head - 1], head))
            theirs.append(hidden[far])
            best.append(top[far])
    return torch.cat(mine), torch.cat(theirs), torch.cat(best)


@torch.inference_mode()
def right_ranks(medusa, row):
    """(heads, tokens, RANKS) of a held-out row with its features: whether a head's guess of a rank was the target's token,
    each head speaking from its own distance."""
    wanted, found = torch.tensor(row["continuation"]), []
    last = len(row["prompt"]) - 1 + torch.arange(len(wanted))  # the state that the target's own head says a token from
    for head in range(medusa.heads):
        states = medusa.head_states(row["features"][0, (last - head - 1).clamp(min=0)], head)
        said = medusa.get_output_embeddings()(states).topk(RANKS).indices
        found.append((said == wanted[:, None]) & (last > head)[:, None])
    return torch.stack(found)


def rank_shares(medusa, rows):
    """Share of the target's greedy tokens that each head's guess of each rank was, (heads, RANKS) as lists."""
    return torch.cat([right_ranks(medusa, row) for row in rows], dim=1).float().mean(1).tolist()


def medusa_agreement(medusa, rows):
    """Share of the target's greedy tokens that are the first head's choice, by kind; over all kinds each head's choice, and
    what is among its best three."""
    found = [right_ranks(medusa, row) for row in rows]
    kinds = {row["kind"]: [] for row in rows}
    for one, row in zip(found, rows, strict=True):
        kinds[row["kind"]].append(one[0, :, 0])
    table = {kind: torch.cat(right).float().mean().item() for kind, right in kinds.items()}
    shares = torch.cat(found, dim=1).float().mean(1)
    table |= {f"head {head + 1}": share[0].item() for head, share in enumerate(shares)}
    return table | {f"head {head + 1}, best 3": share[:3].sum().item() for head, share in enumerate(shares)}
