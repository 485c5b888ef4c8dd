"""Linear layers packed once: near the plain ones, blind to the rows beside them, and chosen only where they can run."""

from __future__ import annotations

import argparse
import json
import math
import os

from spec_common import UserError

import pytest
import torch
import transformers as T
from torch import nn

import spec_decode
import tiny
from spec_models import linear as cpu_linear
from spec_models.checks import Loaded, check_blocks
from spec_models.linear import (
    KINDS,
    MOST_ROWS,
    HalfLinear,
    choose,
    drawn_layer,
    emulation_factors,
    independent_rows,
    pack,
    pass_weights,
    rows_alone,
    trial_ms,
    works,
)
from spec_models.load import SHARE_KEY_HEADS, linear_kind, load

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
HERE = [kind for kind in KINDS if works(kind)]
SERVED = [(kind, dtype) for kind in KINDS for dtype in (F32, BF16) if works(kind, dtype)]
pytestmark = pytest.mark.skipif(not HERE, reason="this build of torch packs no linear layers")
needs_bfloat16 = pytest.mark.skipif(not works("packed", BF16), reason="a processor without bfloat16 instructions")


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
    assert not any(tiny.speculated(target, target).rejected)


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


# ------------------------------------------------------------------------------------------ what half precision can hold

half_only = pytest.mark.skipif("half" not in HERE, reason="no half-precision kernels here")


@half_only
def test_a_weight_past_half_precisions_range_stays_plain_and_is_named():
    """Cut to 65504 it would be another model."""
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 1e5
    assert pack([model], "half") == ["model.layers.1.mlp.up_proj"]
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, KINDS["half"])


@half_only
@pytest.mark.parametrize("power", [18, 22, 26, 30])
@pytest.mark.parametrize("channels", [slice(None), slice(3, 5)], ids=["all", "two channels"])
def test_weights_too_small_for_half_precision_stay_plain_and_the_text_stays_the_same(channels, power):
    """The last norm times a power of two, the head divided by it: the same function in float32, vanished weights in half."""
    model = tiny.llama()
    expected = tiny.greedy(model, tiny.PROMPT, 20)
    with torch.no_grad():
        model.model.norm.weight[channels] *= 2.0**power
        model.lm_head.weight[:, channels] *= 2.0**-power
    assert tiny.greedy(model, tiny.PROMPT, 20) == expected
    assert pack([model], "half") == ["lm_head"]
    assert tiny.greedy(model, tiny.PROMPT, 20) == expected


@half_only
def test_the_embedded_targets_weights_are_all_held(embedded_target):
    model = load(embedded_target, "--target", CPU, F32).model
    assert pack([model], "half") == []


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(kind, value):
    """Packed to half precision, NaN becomes -65504: finite logits of another model."""
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[1, 2] = value
    with pytest.raises(
        UserError, match=r"model\.layers\.0\.self_attn\.o_proj\.weight holds values that are not finite"
    ):
        pack([model], kind)


@pytest.mark.parametrize("kind", ["auto", "plain"])
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_a_damaged_checkpoint_is_one_line_with_the_tensors_name(pair, disk, kind, tensor, capsys):
    model = tiny.llama()
    with torch.no_grad():
        model.get_parameter(tensor).fill_(float("nan"))
    folder = tiny.save(model, disk / f"damaged {kind} {tensor}")
    argv = [*pair, "--target", folder, "--prompt", "w1 w5", "--cpu-linear", kind]
    assert spec_decode.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --target damaged") and tensor in line and "not finite" in line


@pytest.mark.parametrize("kind", HERE)
def test_a_packing_that_computes_something_else_is_found_on_one_row(kind, monkeypatch):
    class Off(KINDS[kind]):
        def forward(self, x):
            return super().forward(x) * 1.02

    monkeypatch.setitem(KINDS, kind, Off)
    model = tiny.llama()
    assert len(pack([model], kind)) == sum(type(module) is nn.Linear for module in model.modules()) > 0


# ------------------------------------------------------------------------------------------------- code that reads weights


@pytest.mark.parametrize(("kind", "dtype"), SERVED)
def test_a_packed_layer_still_has_its_weight_and_bias(kind, dtype):
    plain = layer().to(dtype)
    one = KINDS[kind](plain)
    held = plain.weight.half().float() if kind == "half" else plain.weight
    assert torch.equal(one.weight, held) and torch.equal(one.bias, plain.bias)
    assert KINDS[kind](layer(bias=False).to(dtype)).bias is None


@pytest.mark.parametrize("kind", HERE)
def test_a_module_that_reads_its_layers_weight_gives_the_same_packed(kind):
    """As routers do that compute in another dtype."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = layer(bias=False)

        def forward(self, x):
            return nn.functional.linear(x.double(), self.gate.weight.double())

    router, rows = Router(), torch.randn(3, 96)
    expected = router(rows)
    pack([router], kind)
    assert isinstance(router.gate, KINDS[kind]) and torch.allclose(router(rows), expected, atol=5e-3)


# ------------------------------------------------------------------------------------------------------------ bfloat16


@needs_bfloat16
def test_packed_bfloat16_gives_the_plain_layers_output():
    plain, rows = layer().to(BF16), torch.randn(5, 96).to(BF16)
    with torch.inference_mode():
        assert torch.allclose(KINDS["packed"](plain)(rows).float(), plain(rows).float(), atol=0.05)


@needs_bfloat16
def test_packed_bfloat16_is_counted_at_two_bytes():
    model = tiny.llama(dtype=BF16)
    linear, norms = linear_weights(model), others(model)
    pack([model], "packed")
    assert pass_weights(model) == (linear, 2 * linear + 2 * norms)


def test_a_dtype_with_its_instructions_is_not_called_emulated(monkeypatch):
    assert emulation_factors(CPU, F32) is None and emulation_factors(torch.device("cuda"), BF16) is None
    monkeypatch.setattr(cpu_linear, "works", lambda kind, dtype: True)
    assert emulation_factors(CPU, BF16) is None
    monkeypatch.setattr(cpu_linear, "works", lambda kind, dtype: False)
    assert min(emulation_factors(CPU, BF16).values()) > 0


def test_an_emulated_dtype_is_said_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(cpu_linear, "works", lambda kind, dtype: False)
    monkeypatch.setattr(cpu_linear, "emulation_factors", lambda device, dtype: {8: 1.9, 64: 27.3})
    assert linear_kind(argparse.Namespace(cpu_linear="auto"), CPU, BF16) == "plain"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--dtype bfloat16: ") and "1.9 times as long as in float32 over 8 rows, 27.3 times" in line


# ----------------------------------------------------------------------------------------------- rows and their neighbours


@half_only
@pytest.mark.parametrize("shape", [(64, 64), (96, 48), (1536, 576)])
def test_half_weights_never_look_at_a_rows_neighbours(shape):
    assert rows_alone(KINDS["half"](drawn_layer(*shape, F32))) == MOST_ROWS


class Neighbours(HalfLinear):
    """From `first` rows on, a last bit of each depends on how many there are."""

    first = 0

    def with_bias(self, x, bias):
        out = super().with_bias(x, bias)
        return out + 2**-20 if len(x) >= self.first else out


@half_only
@pytest.mark.parametrize("first", [2, 3, 9, MOST_ROWS])
def test_a_layer_that_adds_up_otherwise_from_some_row_on_is_found(first, monkeypatch):
    monkeypatch.setitem(KINDS, "half", Neighbours)
    monkeypatch.setattr(Neighbours, "first", first)
    model = tiny.llama()
    pack([model], "half")
    assert rows_alone(model.lm_head) == first - 1
    assert independent_rows(model) == (first - 1 if first > 2 else 0)


def test_a_plain_layer_promises_nothing():
    model = tiny.llama()
    assert independent_rows(model) == 0
    if "half" in HERE:
        head, model.lm_head = model.lm_head, nn.Identity()
        pack([model], "half")
        assert independent_rows(model) == MOST_ROWS
        model.lm_head = head
        assert independent_rows(model) == 0


@needs_bfloat16
def test_what_rows_alone_promises_of_bfloat16_holds_for_other_values():
    for inside, outside in ((64, 64), (64, 128), (256, 192), (1536, 576)):
        one = KINDS["packed"](drawn_layer(inside, outside, BF16))
        most, rows = rows_alone(one), torch.randn(MOST_ROWS, inside).to(BF16)
        with torch.inference_mode():
            alone = torch.cat([one(row) for row in rows.split(1)])
            assert all(torch.equal(one(rows[:n]), alone[:n]) for n in range(2, most + 1))


def test_trying_layers_draws_nothing_from_torchs_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    works.cache_clear()
    works("packed")
    rows_alone(KINDS[HERE[0]](drawn_layer(64, 64, F32)))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------------- choosing


def test_auto_takes_the_first_kind_that_works_unless_another_is_clearly_faster(monkeypatch):
    for ms, chosen in (
        ({"half": 1.0, "packed": 1.0, "plain": 1.0}, "half"),
        ({"half": 1.0, "packed": 0.9, "plain": 0.85}, "half"),
        ({"half": 1.0, "packed": 0.5, "plain": 0.45}, "packed"),
        ({"packed": 1.0, "plain": 0.1}, "plain"),
        ({"plain": 1.0}, "plain"),
    ):
        monkeypatch.setattr(cpu_linear, "works", lambda kind, dtype, ms=ms: kind in ms)
        monkeypatch.setattr(cpu_linear, "trial_ms", lambda dtype, ms=ms: ms)
        assert choose("auto", CPU, F32) == chosen
        assert choose("plain", CPU, F32) == "plain"


def test_the_trial_times_every_kind_that_serves_the_dtype():
    assert list(trial_ms(F32)) == [*HERE, "plain"]
    assert all(ms > 0 for ms in trial_ms(F32).values())
    assert choose("auto", CPU, F32) in trial_ms(F32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_asked_for_by_name_is_refused_where_it_cannot_be_had(kind, monkeypatch):
    monkeypatch.setattr(cpu_linear, "works", lambda kind, dtype: False)
    with pytest.raises(ValueError, match=f"--cpu-linear {kind}: this build"):
        choose(kind, CPU, F32)
    with pytest.raises(ValueError, match=f"--cpu-linear {kind}: needs --device cpu --dtype float32"):
        choose(kind, torch.device("cuda"), F32)
    with pytest.raises(ValueError, match="--cpu-linear half: needs --device cpu --dtype float32"):
        choose("half", CPU, torch.bfloat16)


def test_auto_leaves_layers_plain_where_nothing_packs_them(monkeypatch):
    assert choose("auto", torch.device("cuda"), torch.float16) == "plain"
    monkeypatch.setattr(cpu_linear, "works", lambda kind, dtype: False)
    assert choose("auto", CPU, torch.bfloat16) == "plain"


def test_a_kind_that_gives_wrong_numbers_does_not_work(monkeypatch):
    class Wrong(nn.Module):
        dtypes = (F32,)

        def __init__(self, linear):
            super().__init__()

        def forward(self, x):
            return x.new_zeros(*x.shape[:-1], 16)

    monkeypatch.setitem(KINDS, "wrong", Wrong)
    assert not works("wrong") and not works("wrong", torch.bfloat16)


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


EXPERTS = {"intermediate_size": 32, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8}


def gemma4(taken: int):
    sizes = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}
    kinds = ["sliding_attention", "full_attention"]
    return tiny.build(T.Gemma4TextConfig(**{**tiny.BASE, **EXPERTS, **sizes, "tie_word_embeddings": True}, layer_types=kinds,
                                         enable_moe_block=True, top_k_experts=taken))  # fmt: skip


MIXTURES = {
    "mixtral": lambda: (tiny.build(T.MixtralConfig(**tiny.BASE, num_local_experts=8, num_experts_per_tok=2)), 1 / 4),
    "qwen3": lambda: (tiny.build(T.Qwen3MoeConfig(**{**tiny.BASE, **EXPERTS}, num_experts_per_tok=3)), 3 / 4),
    "hunyuan": lambda: (tiny.build(T.HunYuanMoEV1Config(**{**tiny.BASE, **EXPERTS}, moe_topk=[1, 2])), 3 / 8),
    "gemma4": lambda: (gemma4(2), 1 / 2),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_more_tokens_wake_more_of_a_mixtures_experts(name):
    """n tokens that choose k of E evenly wake E (1 - (1 - k/E)^n) of them; each still multiplies with k."""
    model, share = MIXTURES[name]()
    experts = sum(one.numel() for path, one in model.named_parameters() if "experts" in path and one.dim() == 3)
    assert experts > 0
    weights, read = pass_weights(model)
    for n in (1, 2, 7):
        more = pass_weights(model, n)
        assert more[0] == weights
        assert more[1] - read == pytest.approx(4 * experts * ((1 - share) - (1 - share) ** n))
    everything = pass_weights(model, math.inf)[1]
    assert everything - read == pytest.approx(4 * experts * (1 - share))


def test_a_dense_model_reads_the_same_for_any_block():
    model = tiny.llama()
    assert pass_weights(model, 16) == pass_weights(model) == pass_weights(model, math.inf)


# ------------------------------------------------------------------------------------------------- found before any timing


def test_a_head_quantised_alone_is_found_by_one_row_against_four():
    """Its scale comes from the whole block: a token's logits change with the guesses beside it."""
    model = tiny.llama()
    head = {"lm_head": torch.ao.quantization.default_dynamic_qconfig}
    with pytest.raises(UserError, match="--target t: a token's logits depend on the tokens beside it"):
        check_blocks(Loaded(torch.ao.quantization.quantize_dynamic(model, head), None, "t", "--target"))


def test_logits_that_are_all_equal_are_no_text():
    model = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(UserError, match="--target t: all logits are equal in float32"):
        check_blocks(Loaded(model, None, "t", "--target"))


def test_attention_of_transformers_is_set_alike_for_every_kind_and_recorded(pair, results, monkeypatch):
    for asked, on in ((None, True), ("0", False)):
        monkeypatch.delenv(SHARE_KEY_HEADS, raising=False)
        if asked is not None:
            monkeypatch.setenv(SHARE_KEY_HEADS, asked)
        for kind in ("plain", *HERE):
            assert spec_decode.main([*pair, "--prompt", "w1 w5", "--cpu-linear", kind, "--pass", "plain"]) == 0
            config = json.loads(results.read_text())["config"]
            assert config["target"]["shared_key_heads"] is config["draft"]["shared_key_heads"] is on
            assert os.environ[SHARE_KEY_HEADS] == str(int(on))


def test_packing_sets_nothing_in_the_environment(monkeypatch):
    monkeypatch.delenv(SHARE_KEY_HEADS, raising=False)
    pack([tiny.llama()], HERE[0])
    assert SHARE_KEY_HEADS not in os.environ
