"""A draft that reads, beside each token, what the target thought just before it (EAGLE, Li et al. 2024, arXiv 2401.15077).

A few layers of the target's kind. Row i reads token i and, through one matrix, the target's final normed state at token
i - 1, its feature; it says what the feature at token i will be, and the target's own head turns that into a guess. Where the
target has not been yet it reads its own last state instead. Trained on such steps too (EAGLE-3's training-time test, arXiv
2503.01840, section 3.2), it holds up further ahead.

EAGLE joins token and feature by one matrix over both, in front of one layer. Here the feature is added to the token's
embedding: with the matrix at zero these layers are an ordinary draft, and a trained one can be begun from (`grow`).
Embedding and head are the target's own and never stored; the file is one of spec_models/files.py with the kind "eagle".
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from spec_loop import forward_options, new_cache
from spec_models.cut import cut_layers
from spec_models.files import FORMAT, config_of, fingerprint, read_for, trained_states, write_tensors

KIND = "eagle"


class Eagle(nn.Module):
    """Called, cached and rolled back as a model is; `features` (1, n, hidden) go with its tokens (1, n).

    `body`: a causal model of its layers with the target's embedding and head, in any form of pass.
    """

    reads_states = True  # of the target, which a tree's levels and a batch's rows do not hand out here

    def __init__(self, body):
        super().__init__()
        size = body.config.hidden_size
        self.body, self.config, self.eps = body, body.config, body.config.rms_norm_eps
        self.join, self.norm_feature = nn.Linear(size, size, bias=False), nn.Parameter(torch.ones(size))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm_feature.dtype

    @property
    def device(self) -> torch.device:
        return self.norm_feature.device

    def get_input_embeddings(self) -> nn.Module:
        return self.body.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.body.get_output_embeddings()

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.body.set_output_embeddings(head)

    def num_parameters(self) -> int:
        return sum(one.numel() for one in self.parameters())

    def new_cache(self):
        return new_cache(self.body)

    def joined(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the first layer reads, (rows, n, hidden). A feature of zeros adds nothing."""
        known = self.get_input_embeddings()(tokens)
        return known + self.join(F.rms_norm(features.to(known), known.shape[-1:], self.norm_feature.to(known), self.eps))

    def forward(self, input_ids, past_key_values=None, features=None, logits_to_keep=0, use_cache=True, **geometry):
        """Logits and states as the body gives them. Without `features` those of nothing known: what a pass costs is the same."""
        if features is None:
            features = torch.zeros(*input_ids.shape, self.config.hidden_size, dtype=self.dtype, device=self.device)
        geometry["cache" if "cache" in forward_options(type(self.body)) else "past_key_values"] = past_key_values
        x = self.joined(input_ids, features)
        return self.body(inputs_embeds=x, logits_to_keep=logits_to_keep, use_cache=use_cache, **geometry)

    def unrolled(self, ids: torch.Tensor, features: torch.Tensor, depths: int) -> list[torch.Tensor]:
        """For training: the states (rows, width, hidden) at each depth over texts `ids` (rows, width) with the target's
        `features` (rows, width, hidden). Row i speaks of the feature at token i.

        Depth 0 reads the target's features. At depth d a row reads what row i - 1 said at depth d - 1, and sees what a chain of
        d further guesses sees: rows of depth 0 up to i - d, then one row of each further depth. Rows before d are of no use.
        """
        (_, n), given, cache, found = ids.shape, F.pad(features[:, :-1], (0, 0, 1, 0)), DynamicCache(), []
        place = torch.arange(n)
        behind = place[:, None] - place[None]  # how far a key's row lies behind the query's
        for depth in range(depths):
            own = torch.cat([torch.zeros(n, depth * n, dtype=torch.bool), torch.eye(n, dtype=torch.bool)], dim=1)
            seen = torch.cat([behind >= depth, *(behind == depth - one for one in range(1, depth + 1))], dim=1) | own
            x = self.joined(ids, given)
            mask = torch.zeros(1, 1, *seen.shape, dtype=x.dtype).masked_fill_(~seen, torch.finfo(x.dtype).min)
            states = self.body.model(
                inputs_embeds=x, cache=cache, attention_mask=mask, position_ids=place[None], use_cache=True
            ).last_hidden_state
            found.append(states)
            given = F.pad(states[:, :-1], (0, 0, 1, 0))
        return found


def new_eagle(target, layers: list[int]) -> Eagle:
    """An untrained one for `target`, a Llama: it begins as the target's `layers`, features left out at first; embedding and
    head are frozen."""
    body = copy.deepcopy(cut_layers(target, layers)).float()
    for shared in (body.get_input_embeddings(), body.get_output_embeddings()):
        shared.weight.requires_grad_(False)
    eagle = Eagle(body)
    nn.init.zeros_(eagle.join.weight)
    return eagle


def save_eagle(path, eagle: Eagle, target, card: dict) -> None:
    """Write what was trained (its body in transformers' own form), with what rebuilding needs in the metadata."""
    about = {"format": FORMAT, "kind": KIND, "config": config_of(eagle, len(eagle.body.model.layers)), "target": fingerprint(target), "card": card}
    write_tensors(path, trained_states(eagle), about)


def build_eagle(path, target) -> Eagle:
    """The draft in memory, sharing the values of the target's embedding and head. Raises ValueError."""
    states, metadata = read_for(target, path, KIND)
    eagle = Eagle(LlamaForCausalLM(LlamaConfig(**metadata["config"])))
    states["body.model.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().float()
    states["body.lm_head.weight"] = target.get_output_embeddings().weight.detach().float()
    missing, unexpected = eagle.load_state_dict(states, strict=False)
    if missing or unexpected:
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    return eagle.eval()
