"""Heads that read the target's last state and guess several tokens ahead at once (Medusa, Cai et al. 2024, arXiv 2401.10774).

Head j turns the final normed state at a token, which the target's own head makes the next token of, into one for the token
j places further: x + SiLU(W_j x + b_j), then the target's head. No head knows what another guesses, nor what the target
wrote in between. Published heads own a matrix over the vocabulary each; here all share the target's (as in the published
code's second version), so that the blocks are one product and the guesses another.

Embedding and head are the target's own and never stored; the file is one of spec_models/files.py with the kind "medusa".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from spec_models.files import FORMAT, fingerprint, read_for, trained_states, write_tensors

MEDUSA = "medusa"


class Medusa(nn.Module):
    """`heads` of them for a `target`. `ranks`: of each head the share of held-out tokens that was its guess of each rank, the
    best first; none where it was never judged."""

    def __init__(self, target, heads: int):
        super().__init__()
        self.config, self.heads, self.ranks = target.config.get_text_config(), heads, []
        size = self.config.hidden_size
        self.blocks = nn.Linear(size, heads * size)
        nn.init.zeros_(self.blocks.weight)  # every head begins as what the target says next
        nn.init.zeros_(self.blocks.bias)
        embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings()
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.detach().float())
        self.lm_head = nn.Linear(size, len(head.weight), head.bias is not None)
        self.lm_head.load_state_dict({name: values.detach().float() for name, values in head.named_parameters()})
        self.lm_head.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def num_parameters(self) -> int:
        return sum(one.numel() for one in self.parameters())

    def states(self, features: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to (..., heads, hidden), in what the target's head reads."""
        return features[..., None, :] + F.silu(self.blocks(features)).unflatten(-1, (self.heads, -1))

    def head_states(self, features: torch.Tensor, head: int) -> torch.Tensor:
        """The same of one head, from 0: (..., hidden)."""
        size, weight, bias = self.config.hidden_size, self.blocks.weight, self.blocks.bias
        own = slice(head * size, (head + 1) * size)
        return features + F.silu(F.linear(features, weight[own], bias[own]))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(n, hidden) final normed states of the target to (n, heads, rows of the head) logits."""
        return self.lm_head(self.states(features.to(self.dtype)).flatten(0, 1)).unflatten(0, (-1, self.heads))


def save_medusa(path, medusa: Medusa, target, card: dict) -> None:
    """Write what was trained, with what rebuilding needs and the tree is chosen from in the metadata."""
    about = {"format": FORMAT, "kind": MEDUSA, "heads": medusa.heads, "ranks": medusa.ranks}
    write_tensors(path, trained_states(medusa), {**about, "target": fingerprint(target), "card": card})


def build_medusa(path, target) -> Medusa:
    """The heads in memory, with the values of the target's embedding and head. Raises ValueError."""
    states, metadata = read_for(target, path, MEDUSA)
    medusa = Medusa(target, metadata["heads"])
    wanted = {name: tensor.shape for name, tensor in trained_states(medusa).items()}
    if (found := {name: tensor.shape for name, tensor in states.items()}) != wanted:
        raise ValueError(f"{path}: has {found}, the target needs {wanted}")
    medusa.load_state_dict(states, strict=False)
    medusa.ranks = metadata["ranks"]
    return medusa.eval()
