"""Cached teacher outputs as training batches: rows of like length, none that holds a reported text."""

import random

import torch
from safetensors.torch import load_file

from draft_training.guard import runs


class Shards:
    """All rows of the cached teacher outputs, served in batches of like length that hold about `budget` tokens.

    A row that shares a run with `reported` is left out: nothing that a figure is reported on is learnt by heart.
    `prompt_share`: the share of a prompt's positions that is learnt from, drawn anew each time; a continued one always
    is.
    """

    def __init__(self, folder, prompt_share, reported=frozenset()):
        self.folder, self.prompt_share, self.reported = folder, prompt_share, reported
        self.parts, self.seen, self.index, self.tokens, self.left_out = [], set(), [], 0, 0
        self.refresh()

    def refresh(self):
        """Take in the shards that have appeared since: generation may go on beside training."""
        for path in sorted(set(self.folder.glob("*.safetensors")) - self.seen):
            part, offset = load_file(path), 0
            for row, length in enumerate(part["lengths"].tolist()):
                if self.reported.isdisjoint(runs(part["ids"][offset : offset + length].tolist())):
                    self.index.append((len(self.parts), offset, length, int(part["prompt_lengths"][row])))
                    self.tokens += length
                else:
                    self.left_out += 1
                offset += length
            self.parts.append(part)
            self.seen.add(path)

    def epoch(self, seed, budget):
        """Lists of rows: shuffled, sorted by length inside large pools (little padding), then batches shuffled
        again."""
        rng, rows = random.Random(seed), list(self.index)
        rng.shuffle(rows)
        batches = []
        for first in range(0, len(rows), 1024):
            batch = []
            for row in sorted(rows[first : first + 1024], key=lambda row: row[2]):
                if batch and row[2] * (len(batch) + 1) > budget:
                    batches.append(batch)
                    batch = []
                batch.append(row)
            batches.append(batch)
        rng.shuffle(batches)
        return batches

    def tensors(self, batch, generator=None):
        """ids (rows, width), and flat over the positions that are learnt from: place, teacher hidden, teacher ids."""
        width = max(length for _, _, length, _ in batch)
        ids, place, hidden, top = torch.zeros(len(batch), width, dtype=torch.long), [], [], []
        for at, (number, offset, length, prompt) in enumerate(batch):
            part, span = self.parts[number], slice(offset, offset + length)
            ids[at, :length] = part["ids"][span].long()
            drawn = torch.rand(length, generator=generator) < self.prompt_share
            learnt = (drawn | (torch.arange(length) >= prompt - 1)).nonzero()[:, 0]
            place.append(at * width + learnt)
            hidden.append(part["hidden"][span][learnt])
            top.append(part["top"][span][learnt])
        return ids, torch.cat(place), torch.cat(hidden).float(), torch.cat(top).long()

    def features(self, batch, width):
        """The teacher's hidden states of all positions, (rows, width, hidden) in float32; zeros behind a text."""
        found = torch.zeros(len(batch), width, self.parts[batch[0][0]]["hidden"].shape[1])
        for at, (number, offset, length, _) in enumerate(batch):
            found[at, :length] = self.parts[number]["hidden"][offset : offset + length].float()
        return found
