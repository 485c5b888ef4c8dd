"""What guesses: a drafter reads the text so far, writes up to k guesses into it, and forgets what was rejected.

Three methods: `start` reads the prompt, `propose` guesses, `keep` is told what stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spec_pass import check_finite, forward, new_cache, rollback
from spec_rules import Greedy


@dataclass
class Proposal:
    """Guesses made: how many, in how many passes of a draft model; of each guess the law it was drawn from, over the
    target's ids ((vocabulary,), None for a certain one), and of each pass the best logit (1,)."""

    count: int = 0
    passes: int = 0
    laws: list = field(default_factory=list)
    tops: list = field(default_factory=list)


class ModelDrafter:
    """Guesses with a smaller model of the same tokenizer, one pass a guess.

    `read_last`: also feed the last guess, as the essay's loop does; otherwise the next round feeds what is missing.
    `vocabulary`: the target's rows; a padded draft may have more, and those ids are never proposed.
    """

    confident = True  # its guesses carry a probability, which a policy may look at

    def __init__(self, model, vocabulary: int, read_last: bool = False, rule=None):
        self.model, self.read_last, self.rule = model, read_last, rule or Greedy()
        self.kept = getattr(model.get_output_embeddings(), "kept", None)  # a cut head's rows speak of these ids
        self.vocabulary = vocabulary if self.kept is None else None
        self.target_rows = vocabulary
        self.rows = model.get_input_embeddings().weight.shape[0]

    def start(self, ids: torch.Tensor, length: int) -> None:
        """Read all but the last of `ids[:, :length]`."""
        self.cache = new_cache(self.model)
        self.blind = bool((ids[:, :length] >= self.rows).any())
        if length > 1 and not self.blind:
            forward(self.model, ids[:, : length - 1], self.cache, 1)

    def propose(self, ids: torch.Tensor, length: int, k: int, watch, policy) -> Proposal:
        """Write up to k guesses into `ids` from `length` on; fewer where the policy has enough."""
        made = Proposal()
        while made.count < k and not self.blind:
            logits = forward(self.model, ids[:, : length + made.count], self.cache, 1)[:, -1]
            watch("draft")
            token, top, law = self.rule.choose(logits, self.vocabulary)
            ids[:, length + made.count] = token if self.kept is None else self.kept[token]
            made.count += 1
            made.laws.append(self.over_target(law))
            made.tops.append(top)
            watch("pick")
            if policy.reads_confidence and policy.enough(float(logits[0].float().softmax(-1)[token])):
                break
        made.passes = made.count
        if self.read_last and made.count:
            forward(self.model, ids[:, : length + made.count], self.cache, 1)
            watch("draft")
            made.passes += 1
        return made

    def over_target(self, law: torch.Tensor | None) -> torch.Tensor | None:
        """A law over the draft's rows as one over the target's ids, (vocabulary,): what the draft cannot say has 0."""
        if law is None or (self.kept is None and len(law) == self.target_rows):
            return law
        whole = law.new_zeros(self.target_rows)
        whole[slice(len(law)) if self.kept is None else self.kept] = law
        return whole

    def keep(self, length: int, written: list[int]) -> None:
        """Forget what was rejected: `length` tokens stand, of which `written` are new.

        An id past the draft's table (tables of one family are padded differently) can never be read: from then on
        the draft stays silent, and the target goes on alone.
        """
        rollback(self.cache, length - 1)
        self.blind = self.blind or max(written) >= self.rows

    def check(self, made: Proposal) -> None:
        """Raises DecodingError where a pass gave logits that are not finite. Once a round: looking waits for the device."""
        check_finite(self.model, torch.cat(made.tops).tolist() if made.tops else [])
