"""Linear layers packed once: near the plain ones, blind to the rows beside them, and chosen only where they can run."""

from __future__ import annotations

import pytest
import torch
import transformers as T
from torch import nn

import tiny
from spec_models import linear as cpu_linear
from spec_models.linear import KINDS, choose, pack, pass_weights, works

CPU, F32 = torch.device("cpu"), torch.float32
HERE = [kind for kind in KINDS if works(kind)]
pytestmark = pytest.mark.skipif(not HERE, reason="this build of torch packs no linear layers")


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 48, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", HERE)
def test_a_packed_layer_is_close_to_the_plain_one(kind, bias):
    plain, rows = layer(bias), torch.randn(5, 96)
    allowed = {"half": 5e-3, "packed": 1e-5}[kind]
    with torch.inference_mode():
        for shape in ((5, 96), (1, 5, 96)):
            packed = KINDS[kind](plain)(rows.reshape(shape))
            assert torch.allclose(packed, plain(rows.reshape(shape)), atol=allowed)


@pytest.mark.parametrize("kind", HERE)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind):
    """Else a block of k+1 rows would part from single rows by more than rounding, and near-ties would be everywhere."""
    packed, rows = KINDS[kind](layer()), torch.randn(8, 96)
    with torch.inference_mode():
        block = packed(rows)
        loud = packed(torch.cat([rows[:1], 1000 * rows[1:]]))
        single = torch.cat([packed(row[None]) for row in rows])
    assert torch.allclose(block, single, atol=1e-5)
    assert torch.allclose(block[:1], loud[:1], atol=1e-5)


@pytest.mark.parametrize("kind", HERE)
def test_every_linear_layer_is_replaced_and_the_text_stays_exact(kind):
    target, draft = tiny.llama(), tiny.near(tiny.llama())
    pack([target, draft], kind)
    assert not [module for model in (target, draft) for module in model.modules() if type(module) is nn.Linear]
    expected = tiny.greedy(target, tiny.PROMPT, 30)
    for loop in ("lean", "essay"):
        assert tiny.speculated(target, draft, loop=loop).tokens == expected
    assert tiny.speculated(target, target).rejections == 0


@pytest.mark.parametrize("kind", HERE)
def test_a_head_that_two_models_share_is_packed_once(kind):
    target, draft = tiny.llama(), tiny.llama(1)
    draft.set_output_embeddings(target.get_output_embeddings())
    pack([target, draft], kind)
    assert isinstance(target.lm_head, KINDS[kind])
    assert target.lm_head is draft.lm_head
    assert target.model.layers[0].mlp.up_proj is not draft.model.layers[0].mlp.up_proj


def test_plain_changes_nothing():
    model = tiny.llama()
    before = [type(module) for module in model.modules()]
    pack([model], "plain")
    assert [type(module) for module in model.modules()] == before


@pytest.mark.skipif("half" not in HERE, reason="no half-precision kernels here")
def test_a_weight_past_half_precisions_range_stays_plain():
    """Cut to 65504 it would be another model."""
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 1e5
    pack([model], "half")
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, KINDS["half"])


# ------------------------------------------------------------------------------------------------------------- choosing


def test_auto_takes_the_first_kind_that_works(monkeypatch):
    for there, chosen in ((["half", "packed"], "half"), (["packed"], "packed"), ([], "plain")):
        monkeypatch.setattr(cpu_linear, "works", lambda kind, there=there: kind in there)
        assert choose("auto", CPU, F32) == chosen
        assert choose("plain", CPU, F32) == "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_asked_for_by_name_is_refused_where_it_cannot_be_had(kind, monkeypatch):
    monkeypatch.setattr(cpu_linear, "works", lambda kind: False)
    with pytest.raises(ValueError, match=f"--cpu-linear {kind}: this build"):
        choose(kind, CPU, F32)
    for device, dtype in ((CPU, torch.bfloat16), (torch.device("cuda"), F32)):
        with pytest.raises(ValueError, match=f"--cpu-linear {kind}: needs --device cpu --dtype float32"):
            choose(kind, device, dtype)


@pytest.mark.parametrize(("device", "dtype"), [(CPU, torch.bfloat16), (torch.device("cuda"), torch.float16)])
def test_auto_leaves_layers_plain_elsewhere(device, dtype):
    assert choose("auto", device, dtype) == "plain"


def test_a_kind_that_gives_wrong_numbers_does_not_work(monkeypatch):
    class Wrong(nn.Module):
        def __init__(self, linear):
            super().__init__()

        def forward(self, x):
            return x.new_zeros(*x.shape[:-1], 16)

    monkeypatch.setitem(KINDS, "wrong", Wrong)
    assert not works("wrong")


# -------------------------------------------------------------------------------------------------------- what is read


def linear_weights(model) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def others(model) -> int:
    """Norms: read, not multiplied."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)


def test_a_pass_reads_everything_but_the_look_up_table():
    model = tiny.llama()
    weights, read = pass_weights(model)
    assert weights == linear_weights(model)
    assert read == 4 * (linear_weights(model) + others(model))
    half = tiny.llama(dtype=torch.bfloat16)
    assert pass_weights(half) == (weights, read / 2)


@pytest.mark.parametrize(("kind", "size"), [("half", 2), ("packed", 4)])
def test_packed_weights_are_counted_at_their_own_size(kind, size):
    if kind not in HERE:
        pytest.skip(f"no {kind} kernels here")
    model = tiny.llama()
    linear, norms = linear_weights(model), others(model)
    pack([model], kind)
    assert pass_weights(model) == (linear, size * linear + 4 * norms)


def test_a_tied_table_counts_once_as_the_head():
    model = tiny.llama(tie_word_embeddings=True)
    assert pass_weights(model)[0] == linear_weights(model)


def test_of_a_mixtures_experts_a_token_reads_those_it_takes():
    model = tiny.build(T.MixtralConfig(**tiny.BASE, num_local_experts=4, num_experts_per_tok=1))
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
    assert experts > 0
    rest = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.get_input_embeddings().weight.numel()
    assert pass_weights(model)[0] == pytest.approx(rest + experts / 4)
