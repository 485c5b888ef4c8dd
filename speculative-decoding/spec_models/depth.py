"""A shape too deep for this memory, told from a part of it: a pass is its layers times one layer, and the rest.

What is linear in depth (seconds, weights, bytes) is measured at N and at 2N layers and carried on to all of them. The
models of N and 2N layers share their tensors, so the memory is that of 2N.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from spec_common import UserError

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from spec_models.cut import cut_config, language_layers
from spec_models.linear import twin


class Depth(NamedTuple):
    """`part` layers and twice as many are measured, of `whole`."""

    part: int
    whole: int

    def carried(self, at_part: float, at_twice: float) -> float:
        """What the whole would give, on the straight line through the two."""
        return at_part + (self.whole - self.part) / self.part * (at_twice - at_part)

    @property
    def words(self) -> str:
        return f"carried on from {self.part} and {2 * self.part} layers to {self.whole}"


def at_depth(config, layers: int):
    """A config of the first `layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    cut_config(text, list(range(layers)), text.num_hidden_layers)
    return config


def parameters_at(config, layers: int, trust: bool) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(at_depth(config, layers), trust_remote_code=trust).num_parameters()


def depth_of(config, part: int, name: str, flag: str, trust: bool = False) -> Depth:
    """How deep the shape is. Raises UserError where 2N layers are all of it, or its layers are not alike."""
    depth = Depth(part, config.get_text_config(decoder=True).num_hidden_layers)
    if 2 * part >= depth.whole:
        raise UserError(
            f"--layers {part}: {flag} {name} has {depth.whole} layers, so measure it whole: leave --layers out, or give fewer than {depth.whole / 2:g}"
        )
    counts = [parameters_at(config, layers, trust) for layers in (part, 2 * part, depth.whole)]
    if round(depth.carried(*counts[:2])) != counts[2]:
        raise UserError(
            f"--layers {part}: the layers of {flag} {name} are not alike, so {part} and {2 * part} of them do not tell the rest; give another number, or leave it out"
        )
    return depth


def first_layers(model, count: int):
    """The model of the first `count` layers of `model`, plain or fused, which shares all of it."""
    one = twin(model)
    name = "layers" if hasattr(model, "layers") else language_layers(model)[0]
    parent, _, last = name.rpartition(".")
    setattr(one.get_submodule(parent), last, nn.ModuleList(one.get_submodule(name)[:count]))
    return one
