"""Linear layers on a CPU, packed once for both models and every arm.

A plain `nn.Linear` repacks its weight on every call with more than one row, which hides the very discount that
speculative decoding spends. `half` keeps the weights in half precision and computes in float32 (FBGEMM): half the
bytes per pass, and a row's result does not depend on the rows beside it. `packed` keeps float32 (oneDNN).
"""

from __future__ import annotations

import os

import torch
from torch import nn

HALF_MAX = torch.finfo(torch.float16).max


class HalfLinear(nn.Module):
    """x (..., in) float32 -> (..., out) float32, from weights held as float16. FBGEMM's fp16 kernels."""

    bytes_per_weight = 2

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), linear.bias)
        self.multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.packed)


class PackedLinear(nn.Module):
    """x (..., in) float32 -> (..., out) float32, the float32 weight reordered once for oneDNN."""

    bytes_per_weight = 4

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.bias = linear.bias
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.packed, self.bias, "none", [], "")


KINDS = {"half": HalfLinear, "packed": PackedLinear}


def works(kind: str) -> bool:
    """Whether this build of torch can pack and run a small layer of that kind to a right result."""
    linear = nn.Linear(32, 16)
    rows = torch.randn(3, 32)
    try:
        with torch.inference_mode():
            return torch.allclose(KINDS[kind](linear)(rows), linear(rows), atol=0.01)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def choose(asked: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kind that `--cpu-linear` means here. Packing is for float32 on a CPU; elsewhere layers stay plain.

    Raises ValueError with the reason where a kind asked for by name cannot be had.
    """
    if device.type != "cpu" or dtype != torch.float32:
        if asked in KINDS:
            raise ValueError(f"--cpu-linear {asked}: needs --device cpu --dtype float32; leave it at auto")
        return "plain"
    if asked == "auto":
        return next((kind for kind in KINDS if works(kind)), "plain")
    if asked in KINDS and not works(asked):
        raise ValueError(f"--cpu-linear {asked}: this build of torch cannot run it; choose auto or plain")
    return asked


def pack(models: list[nn.Module], kind: str) -> None:
    """Replace every nn.Linear of the models, in place. A layer that two models share is packed once.

    Weights beyond half precision's range (65504) would be cut by `half`: such a layer stays plain.
    """
    if kind == "plain":
        return
    # Attention over several rows and a mask otherwise copies all keys and values once per group of heads.
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    done: dict[int, nn.Module] = {}
    for model in models:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is not nn.Linear:
                    continue
                if kind == "half" and child.weight.abs().max() > HALF_MAX:
                    continue
                if id(child) not in done:
                    done[id(child)] = KINDS[kind](child)
                setattr(parent, name, done[id(child)])


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or plain, in order."""
    return [module for module in model.modules() if isinstance(module, (nn.Linear, *KINDS.values()))]


def pass_weights(model: nn.Module) -> tuple[float, float]:
    """(weights, bytes) that a pass over one token multiplies with and reads: all but the look-up tables.

    A table tied to the head counts, as the head. Of a mixture's experts, those that one token takes.
    """
    layers = [module for module in model.modules() if isinstance(module, tuple(KINDS.values()))]
    weights = float(sum(layer.in_features * layer.out_features for layer in layers))
    read = float(sum(layer.in_features * layer.out_features * layer.bytes_per_weight for layer in layers))
    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(head)}
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    for parameter in model.parameters():
        if id(parameter) not in tables:
            size = parameter.numel() * (share if parameter.dim() == 3 else 1)
            weights += size if parameter.dim() >= 2 else 0
            read += size * parameter.element_size()
    return weights, read
