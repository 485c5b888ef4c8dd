"""Linear layers on a CPU, packed once for both models and every arm.

A plain `nn.Linear` repacks its weight on every call with more than one row, which hides the very discount that
speculative decoding spends. `half` keeps the weights in half precision and computes in float32 (FBGEMM): half the
bytes per pass, and a row's result does not depend on the rows beside it. `packed` keeps the dtype (oneDNN): float32,
and on a processor with AMX or AVX512-BF16 bfloat16, where 16 rows cost little more than one.
"""

from __future__ import annotations

import copy
import functools
import statistics

from spec_common import UserError, dtype_name, timed

import torch
from torch import nn

TRIAL_SHAPE, TRIAL_ROWS, TRIAL_TURNS = (
    (1024, 4096),
    (1, 8),
    7,
)  # (in, out); the rows of a plain pass and of a verify pass
CLEARLY_FASTER = 0.67  # of the first kind's time: a trial beside a busy process must not choose otherwise than a quiet one
# What configs call the number of experts that a token takes.
EXPERTS_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
MOST_ROWS = 32  # rows of a block that are looked at for independence
# What rounding may change of an output, as a share of the sum of |x| |w| behind it: twice the unit of the coarsest step.
ROUNDING = {torch.float32: 2**-16, torch.float16: 2**-9, torch.bfloat16: 2**-7}


class HalfLinear(nn.Module):
    """x (..., in) float32 -> (..., out) float32, from weights held as float16. FBGEMM's fp16 kernels."""

    bytes_per_weight = 2
    dtypes = (torch.float32,)

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), linear.bias)
        self.multiply = torch.ops.quantized.linear_dynamic_fp16.default

    @property
    def weight(self) -> torch.Tensor:
        """(out, in) float32, unpacked afresh: for code that reads a weight itself."""
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]

    @property
    def bias(self) -> torch.Tensor | None:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.packed)

    def with_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.packed) + bias


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out), all in the weight's dtype, the weight reordered once for oneDNN."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.bias = linear.bias
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def bytes_per_weight(self) -> int:
        return self.packed.dtype.itemsize

    @property
    def weight(self) -> torch.Tensor:
        """(out, in), unpacked afresh: for code that reads a weight itself."""
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.packed, self.bias, "none", [], "")

    def with_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """As forward, with another bias, added before the result is rounded to its dtype."""
        return self.multiply(x, self.packed, bias, "none", [], "")


KINDS = {"half": HalfLinear, "packed": PackedLinear}


# ------------------------------------------------------------------------------------------------------------- choosing


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values, the same each time, from a generator of their own: sampling draws from torch's."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def drawn_layer(inside: int, outside: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(inside, outside, bias=False, device="meta")
    layer.weight = nn.Parameter(drawn(outside, inside, dtype=dtype) / inside**0.5, requires_grad=False)
    return layer


def close(one: nn.Module, linear: nn.Linear, coarsest: torch.dtype) -> bool:
    """Whether a packed layer gives the plain one's output on one row, to within rounding."""
    row = drawn(1, linear.in_features, dtype=linear.weight.dtype)
    size = nn.functional.linear(row.abs(), linear.weight.detach().abs()).float()
    return bool(((one(row) - linear(row)).float().abs() <= ROUNDING[coarsest] * size + 1e-30).all())


@functools.cache
def works(kind: str, dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of torch and this processor can pack and run a small layer of that kind to a right result."""
    if dtype not in KINDS[kind].dtypes:
        return False
    linear = drawn_layer(32, 16, dtype)
    try:
        with torch.inference_mode():
            return close(KINDS[kind](linear), linear, torch.float16 if kind == "half" else dtype)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@functools.cache
@torch.inference_mode()
def trial_ms(dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of one layer over one row and over eight, by kind, each the least of a few turns in rotation: what a busy neighbour adds
    says nothing of a kind."""
    linear = drawn_layer(*TRIAL_SHAPE, dtype)
    layers = {kind: KINDS[kind](linear) for kind in KINDS if works(kind, dtype)} | {"plain": linear}
    blocks = [drawn(n, TRIAL_SHAPE[0], dtype=dtype) for n in TRIAL_ROWS]
    cpu, seconds = torch.device("cpu"), {kind: [] for kind in layers}
    for _ in range(1 + TRIAL_TURNS):
        for kind, layer in layers.items():
            seconds[kind].append(timed(lambda layer=layer: [layer(block) for block in blocks], cpu)[1])
    return {kind: round(1000 * min(times[1:]), 3) for kind, times in seconds.items()}


def fastest(ms: dict[str, float]) -> str:
    """The first kind, unless a later one is clearly faster: noise must not choose another kind in every run."""
    chosen, *rest = ms
    for kind in rest:
        chosen = kind if ms[kind] < CLEARLY_FASTER * ms[chosen] else chosen
    return chosen


def choose(asked: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kind that `--cpu-linear` means here: on a CPU what a short trial finds fastest of the kinds that serve the
    dtype; elsewhere layers stay plain. Raises ValueError with the reason where a kind asked for by name cannot be had.
    """
    if asked in KINDS and (device.type != "cpu" or dtype not in KINDS[asked].dtypes):
        served = " or ".join(map(dtype_name, KINDS[asked].dtypes))
        raise ValueError(f"--cpu-linear {asked}: needs --device cpu --dtype {served}; leave it at auto")
    if asked in KINDS and not works(asked, dtype):
        raise ValueError(
            f"--cpu-linear {asked}: this build of torch or this processor cannot run it in {dtype_name(dtype)}; "
            "choose auto or plain"
        )
    if asked != "auto" or device.type != "cpu" or not any(works(kind, dtype) for kind in KINDS):
        return asked if asked in KINDS else "plain"
    return fastest(trial_ms(dtype))


@torch.inference_mode()
def emulation_factors(device: torch.device, dtype: torch.dtype) -> dict[int, float] | None:
    """How many times as long as in float32 a linear layer takes on this CPU over 8 rows (a block) and 64 (a prompt), where
    it has no instructions for the dtype; None where it has. The layer is small: no emulation may hold up a run."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16) or works("packed", dtype):
        return None
    best: dict[tuple, float] = {}
    for rows in (8, 64):
        for one in (dtype, torch.float32):
            layer, block = drawn_layer(512, 512, one), drawn(rows, 512, dtype=one)
            best[rows, one] = min(timed(lambda layer=layer, block=block: layer(block), device)[1] for _ in range(3))
    return {rows: best[rows, dtype] / best[rows, torch.float32] for rows in (8, 64)}


# -------------------------------------------------------------------------------------------------------------- packing


def held_in_half(weight: torch.Tensor) -> bool:
    """Whether half precision holds a weight (out, in): no row and no column loses more than rounding does (2^-12 of its
    norm, four times that allowed). Values past 65504 become infinite; those under 6e-5 lose digits, then vanish."""
    weight = weight.detach().float()
    error = weight.half().float() - weight
    return all(bool((error.norm(dim=dim) <= 2**-10 * weight.norm(dim=dim)).all()) for dim in (0, 1))


def packed(linear: nn.Linear, kind: str) -> nn.Module:
    """The layer packed, or itself where that kind does not compute what it computes (one row is tried)."""
    if kind == "half" and not held_in_half(linear.weight):
        return linear
    one = KINDS[kind](linear)
    return one if close(one, linear, torch.float16 if kind == "half" else linear.weight.dtype) else linear


@torch.inference_mode()
def pack(models: list[nn.Module], kind: str, done: dict[int, nn.Module] | None = None) -> list[str]:
    """Replace every nn.Linear of the models, in place. A layer that two models share is packed once (`done` carries
    that over several calls: {id of the plain layer: (it, packed)}). Returns the names of the layers left plain.

    Raises UserError for a weight that is not finite: packing cuts NaN to a number, and the text would be another model's.
    """
    left, done = [], {} if done is None else done
    if kind == "plain":
        return left
    for model in models:
        for path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                if type(child) is not nn.Linear:
                    continue
                whole = f"{path}.{name}".lstrip(".")
                if not is_finite(child.weight):
                    raise UserError(
                        f"{whole}.weight holds values that are not finite: the checkpoint is damaged, fetch it anew"
                    )
                if id(child) not in done:
                    done[id(child)] = (child, packed(child, kind))  # the plain one too, or its id could be given anew
                setattr(parent, name, done[id(child)][1])
                left += [whole] if done[id(child)][1] is child else []
    return left


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, read once: both reach the least or the largest value."""
    return tensor.numel() == 0 or tensor.is_meta or bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first floating-point parameter that holds a NaN or an infinity."""
    floats = ((name, one) for name, one in model.named_parameters() if one.is_floating_point())
    return next((name for name, one in floats if not is_finite(one)), None)


def twin(model: nn.Module) -> nn.Module:
    """A shallow copy that shares every tensor and every leaf module: what is replaced in the twin stays in the original."""
    if not model._modules:
        return model
    one = copy.copy(model)
    one._modules = {name: child and twin(child) for name, child in model._modules.items()}
    return one


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or plain, in order."""
    return [module for module in model.modules() if isinstance(module, (nn.Linear, *KINDS.values()))]


# --------------------------------------------------------------------------------------------------- what rows depend on


def rows_alone(layer: nn.Module) -> int:
    """Up to how many rows a block may have for each to come out bit for bit as alone, in a layer of that kind and shape:
    the same row many times over, with a bias that leaves of the result what rounding left (half precision would hide
    another order of adding up in all but a few results). 1: not even two."""
    dtype, most = layer.packed.dtype if isinstance(layer, PackedLinear) else torch.float32, MOST_ROWS
    tries = max(1, min(8, 2**14 // layer.out_features))  # few outputs tell less
    for row in drawn(tries, layer.in_features, dtype=dtype).split(1):
        bias = -layer.with_bias(row, torch.zeros(layer.out_features, dtype=dtype))[0]
        alone, rows = layer.with_bias(row, bias), row.repeat(most, 1)
        same = (torch.equal(layer.with_bias(rows[:n], bias), alone.expand(n, -1)) for n in range(2, most + 1))
        most = next((n for n, equal in enumerate(same, start=1) if not equal), most)
    return most


@torch.inference_mode()
def independent_rows(model: nn.Module) -> int:
    """Up to how many rows a pass may have for no linear layer to look at a row's neighbours, found by trying one layer
    of each shape on this processor; 0 where a layer is plain or tells its rows apart at two."""
    layers = {(type(one), one.in_features, one.out_features): one for one in linear_layers(model)}
    if not layers or any(type(one) not in KINDS.values() for one in layers.values()):
        return 0
    most = min(rows_alone(one) for one in layers.values())
    return most if most > 1 else 0


# --------------------------------------------------------------------------------------------------------- what is read


def experts_taken(model: nn.Module) -> float | None:
    """How many of a mixture's experts a token takes, the mean over the layers where they differ; None where no config says."""
    config = model.config.get_text_config()
    places = [config, getattr(config, "ffn_config", None)]
    named = (getattr(place, name, None) for place in places for name in EXPERTS_TAKEN)
    found = next((value for value in named if value), None)
    return statistics.mean(found) if isinstance(found, (list, tuple)) else found


def pass_weights(model: nn.Module, tokens: float = 1) -> tuple[float, float]:
    """(weights that each token is multiplied with, bytes that a pass over `tokens` tokens reads): all but the look-up tables.

    A table tied to the head counts, as the head. Of a mixture's E experts a token multiplies with the k that it takes; a
    pass reads those that any of its tokens takes, E (1 - (1 - k/E)^tokens) where tokens choose evenly and on their own.
    """
    layers = [module for module in model.modules() if isinstance(module, tuple(KINDS.values()))]
    weights = float(sum(layer.in_features * layer.out_features for layer in layers))
    read = float(sum(layer.in_features * layer.out_features * layer.bytes_per_weight for layer in layers))
    head = model.get_output_embeddings()
    kept = set() if isinstance(head, tuple(KINDS.values())) else {id(getattr(head, "weight", None))}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - kept
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv1d)}
    taken = experts_taken(model)
    for parameter in model.parameters():
        if id(parameter) not in tables:
            experts = parameter.dim() == 3 and id(parameter) not in kernels and taken is not None  # (experts, ., .)
            share = min(1.0, taken / parameter.shape[0]) if experts else 1.0
            weights += parameter.numel() * share if parameter.dim() >= 2 else 0
            read += parameter.numel() * (1 - (1 - share) ** tokens) * parameter.element_size()
    return weights, read
