"""A model of some of another's layers, each still what it was there.

The layers are copied as they stand, not built again from a config: what a layer became by its place (no rotary
positions, a scale by its number, dense where the others are mixtures) stays with it. All tensors are the original's
own.
"""

from __future__ import annotations

import copy

from spec_common import UserError, first_line, is_out_of_memory

import torch
from torch import nn

from spec_models.checks import Loaded, context_limit, vocabulary_rows

# What a kept layer adds must be what it added in the target: the same work on the same numbers, so all but equal.
LAYER_TOLERANCE = {torch.float32: 1e-3}
ROW = 8  # tokens on which that is looked at: enough for positions and masks to matter


def language_layers(model) -> tuple[str, nn.ModuleList]:
    """The name and the list of the layers that write text, inside whatever else the model holds. Raises ValueError."""
    decoder = model.get_decoder()
    lists = [part for part in decoder.modules() if isinstance(part, nn.ModuleList)]
    if not lists:
        raise ValueError("no list of layers in it")
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    layers = next((part for part in lists if len(part) == count), lists[0])
    return next(name for name, part in model.named_modules() if part is layers), layers


def cut_config(config, wanted: list[int], count: int) -> None:
    """Make a config, in place, that of the `wanted` of `count` layers, its settings by layer included."""
    setattr(config, "decoder_layers" if hasattr(config, "decoder_layers") else "num_hidden_layers", len(wanted))
    for name, value in list(vars(config).items()):
        if ("layer" in name or "moe" in name) and isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, [value[layer] for layer in wanted])


def cut_layers(model, wanted: list[int]):
    """A model of the `wanted` layers of `model`, in that order, sharing its tensors. Raises ValueError, IndexError."""
    name, layers = language_layers(model)
    # Linear layers are shared whole, so that they are packed once for both models.
    shared = [*model.parameters(), *model.buffers(), *(part for part in model.modules() if type(part) is nn.Linear)]
    memo = {id(part): part for part in shared}
    draft = copy.deepcopy(model, dict(memo))
    config = draft.config.get_text_config(decoder=True)
    mine = draft.get_submodule(name)
    same = {**memo, **{id(part.config): part.config for part in draft.modules() if hasattr(part, "config")}}
    kept = [
        mine[old] if old not in wanted[:new] else copy.deepcopy(mine[old], dict(same)) for new, old in enumerate(wanted)
    ]
    for new, layer in enumerate(kept):
        for part in layer.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.layer_idx = new  # its place in a cache
    parent, _, last = name.rpartition(".")
    setattr(draft.get_submodule(parent), last, nn.ModuleList(kept))
    cut_config(config, wanted, len(layers))
    return draft


def cut_model(target: Loaded, wanted: list[int], name: str):
    """`cut_layers`, checked: every kept layer computes what it computed in the target. Raises UserError in one line."""
    try:
        layers = language_layers(target.model)[1]
        if max(wanted) >= len(layers):
            raise UserError(f"--draft {name}: the target has layers 0 to {len(layers) - 1}")
        if any(tensor.is_meta for tensor in target.model.parameters()):
            raise UserError(
                f"--draft {name}: the target's layers are not all in memory; choose a smaller target or another draft"
            )
        draft = cut_layers(target.model, wanted)
        wrong = changed_layer(target.model, draft, wanted)
    except UserError:
        raise
    except Exception as error:  # a model's own code may fail in any way when layers are missing
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"--draft {name}: this architecture cannot be cut ({first_line(error)}); choose another draft"
        ) from error
    if wrong is not None:
        raise UserError(
            f"--draft {name}: this architecture cannot be cut: layer {wrong} computes something else outside of its place; choose another draft"
        )
    return draft


@torch.inference_mode()
def changed_layer(target, draft, wanted: list[int]) -> int | None:
    """The first of the `wanted` layers that gives something else in `draft` than in `target` on the same input, or
    None."""
    length = min(ROW, context_limit(target) or ROW)
    ids = torch.arange(3, 3 + length, device=target.device).remainder(vocabulary_rows(target))[None]
    given = run_layers(target, ids, {})
    found = run_layers(draft, ids, {new: given[old][0] for new, old in enumerate(wanted)})
    for new, old in enumerate(wanted):
        (before, after), (_, mine) = given[old], found[new]
        added = (after - before).float()
        allowed = LAYER_TOLERANCE.get(target.dtype, 0.02) * added.std()
        if not (mine - after).float().abs().max() <= allowed:
            return old
    return None


def run_layers(
    model, ids: torch.Tensor, inputs: dict[int, torch.Tensor]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """What went into each layer and came out of it in one pass; a layer named in `inputs` is given that instead."""
    seen, hooks = {}, []

    def before(number, args, kwargs):
        place = args if args else kwargs
        key = 0 if args else "hidden_states"
        hidden = inputs.get(number, place[key])
        seen[number] = (hidden, None)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, key: hidden})

    def after(number, output):
        seen[number] = (seen[number][0], output[0] if isinstance(output, tuple) else output)

    for number, layer in enumerate(language_layers(model)[1]):
        hooks.append(
            layer.register_forward_pre_hook(lambda _, args, kwargs, n=number: before(n, args, kwargs), with_kwargs=True)
        )
        hooks.append(layer.register_forward_hook(lambda _, args, output, n=number: after(n, output)))
    try:
        model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
