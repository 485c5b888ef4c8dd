"""A captured model computes what the fused one computes, from fixed addresses alone: every test runs the code as it is
on a CPU, and again captured by a graph that records operators with their tensors and replays those, as CUDA's does."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json

from spec_common import UserError

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spec_batch
import spec_decode
import spec_precondition
import tiny
from spec_harness import variants
from spec_loop import LOOPS, forward, keep_slots, new_cache
from spec_methods.rows import check_rows
from spec_methods.trees import TreeDrafter
from spec_models import graph as graphs
from spec_models.checks import Loaded, check_blocks, context_limit
from spec_models.fused import FIRST_ROOM, FusedLlama
from spec_models.graph import MOST, WARM_UP, GraphLlama
from spec_models.linear import pass_weights
from spec_models.pairs import set_passes

LENGTH = 600
TEXT = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(5))
LONG = {"max_position_embeddings": 1024}
MODELS = {
    "llama": lambda: tiny.llama(**LONG),
    "one key head": lambda: tiny.llama(num_key_value_heads=1, **LONG),
    "biases": lambda: tiny.llama(attention_bias=True, mlp_bias=True, **LONG),
    "qwen2, tied": lambda: tiny.qwen2(tie_word_embeddings=True, **LONG),
}


# ------------------------------------------------------------------------------------------------------- a graph to see


class Tape(TorchDispatchMode):
    """Writes down every operator with the very tensors that went in and came out."""

    def __init__(self, calls: list):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def place(one) -> int | None:
    return one.untyped_storage().data_ptr() if isinstance(one, torch.Tensor) else None


class FakeGraph:
    """Replays its operators on those tensors, whatever the host has come to think since."""

    made: list[FakeGraph] = []

    def __init__(self):
        self.calls, self.replays = [], 0
        FakeGraph.made.append(self)

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, old in self.calls:
            for mine, new in zip(tree_leaves(old), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(mine, torch.Tensor) and mine.data_ptr() != new.data_ptr():
                    mine.copy_(new)

    def spoil(self) -> None:
        """A capture computes nothing: what came out of it is rubbish until the first replay."""
        for _, args, kwargs, out in self.calls:
            given = {place(one) for one in tree_leaves((args, kwargs))}
            for one in tree_leaves(out):
                if isinstance(one, torch.Tensor) and one.is_floating_point() and place(one) not in given:
                    one.fill_(torch.nan)


@contextlib.contextmanager
def fake_capture(graph: FakeGraph):
    with Tape(graph.calls):
        yield
    graph.spoil()


class FakeStream:
    def wait_stream(self, other) -> None:
        pass


@pytest.fixture
def fake_cuda(monkeypatch):
    """Captures on a CPU. Gives the graphs made."""
    monkeypatch.setattr(graphs, "captures", lambda device: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda one: contextlib.nullcontext())
    monkeypatch.setattr(FakeGraph, "made", [])
    return FakeGraph.made


@pytest.fixture(params=["as it is", "captured"])
def form(request):
    return request.param == "captured" and request.getfixturevalue("fake_cuda")


@functools.cache
@torch.no_grad()
def made(name: str):
    """The plain model, its fused form, and the plain logits of all of TEXT; biases and norms that hide nothing."""
    model = MODELS[name]()
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model, FusedLlama(model).eval(), model(TEXT, use_cache=False).logits[0]


def captured_form(name: str = "llama") -> GraphLlama:
    return GraphLlama(made(name)[1]).eval()


def assert_near(rows: torch.Tensor, whole: torch.Tensor) -> None:
    assert rows.shape == whole.shape and rows.dtype == whole.dtype
    assert (rows - whole).abs().max() <= 1e-3 * whole.std()


# ----------------------------------------------------------------------------------------------------------- the logits


@pytest.mark.parametrize("name", MODELS)
def test_prefill_steps_and_blocks_give_the_fused_and_the_plain_logits_past_every_room(name, form):
    """The room grows by a step, in a block, and in a prefill; long prefills run as they are, short ones captured."""
    _, fused, whole = made(name)
    model = captured_form(name)
    splits = ((40, 41, 42, 50, 255, 256, 257, 258, 300, 511, 514, LENGTH), (1, 250, 262, 268), (LENGTH,), (MOST, 65))
    for ends in splits:
        cache, other, start = new_cache(model), new_cache(fused), 0
        for end in ends:
            rows = tiny.fed(model, TEXT[:, :end], cache, end - start)[0]
            assert_near(rows, whole[start:end])
            assert_near(rows, tiny.fed(fused, TEXT[:, :end], other, end - start)[0])
            start = end
            assert cache.get_seq_length() == end


def test_wrong_guesses_taken_back_leave_no_trace_and_rows_are_the_last_ones(form):
    _, _, whole = made("qwen2, tied")
    model = captured_form("qwen2, tied")
    cache, length = new_cache(model), 0
    steps = [(30, 1, 5), (1, 1, 7), (4, 3, 1), (4, 4, 0), (80, 2, 70), (3, 0, 9), (140, 1, 4), (4, 2, 4)]
    for count, keep, wrong in steps:
        length += count
        rows = tiny.fed(model, TEXT[:, :length], cache, keep)[0]
        assert_near(rows, whole[length - (keep or count) : length])
        if wrong:
            tiny.fed(model, torch.cat([TEXT[:, :length], 63 - TEXT[:, :wrong]], dim=1), cache, 1)
        keep_slots(cache, length)
        assert cache.get_seq_length() == length


TREE = (-1, 0, 0, 1, 1, 2, 4, 4)
PATHS = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6], [0, 1, 4, 7])
NODES = torch.tensor([[9, 4, 51, 33, 8, 20, 61, 2]])


def tree_pass(model, length: int, additive: bool = False, before: int = 0):
    """A cache of `length` tokens and the tree behind them, and the logits of every node. `before`: tokens of other
    passes, the last as large as the tree's, that were taken back."""
    cache = new_cache(model)
    tiny.fed(model, TEXT[:, :length], cache, 1)
    for more in (before - len(TREE), before) if before else ():
        tiny.fed(model, TEXT[:, : length + more], cache, len(TREE))
    keep_slots(cache, length)
    mask = torch.zeros(1, 1, len(TREE), length + len(TREE), dtype=torch.bool)
    mask[..., :length] = True
    for node, path in enumerate(PATHS):
        mask[0, 0, node, [length + one for one in path]] = True
    if additive:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    positions = torch.tensor([[length + len(path) - 1 for path in PATHS]])
    return cache, forward(model, NODES, cache, len(TREE), position_ids=positions, attention_mask=mask).logits[0]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("length", "before"), [(5, 20), (FIRST_ROOM - 3, 0)])
def test_every_node_of_a_tree_gets_its_paths_logits_and_a_chain_after_it_its_own(length, before, additive, form):
    plain, _, whole = made("llama")
    model = captured_form()
    for _ in range(2):  # the second time replayed
        cache, rows = tree_pass(model, length, additive, before)
        for node, path in enumerate(PATHS):
            with torch.inference_mode():
                alone = plain(torch.cat([TEXT[:, :length], NODES[:, path]], dim=1), use_cache=False).logits[0, -1]
            assert_near(rows[node], alone)
        keep_slots(cache, length)
        assert_near(tiny.fed(model, TEXT[:, : length + 8], cache, 8)[0], whole[length : length + 8])


@pytest.mark.parametrize("path", [[0, 2, 5], [0, 1, 4, 7], [0, 1], []], ids=str)
def test_a_path_kept_by_gather_goes_on_as_if_nothing_else_had_been_there(path, form):
    plain, _, _ = made("one key head")
    cache, _ = tree_pass(model := captured_form("one key head"), 20)
    where = cache.store.data_ptr()
    cache.keep(20, [20 + node for node in path])
    assert cache.get_seq_length() == 20 + len(path) and cache.store.data_ptr() == where == cache.stage.store.data_ptr()
    ids = torch.cat([TEXT[:, :20], NODES[:, path], TEXT[:, 300:304]], dim=1)
    with torch.inference_mode():
        assert_near(tiny.fed(model, ids, cache, 4)[0], plain(ids, use_cache=False).logits[0, -4:])


@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), (2,), ()], ids=str)
def test_hidden_states_are_those_of_transformers_where_asked_for_and_stay_the_callers(wanted, form):
    plain, _, _ = made("llama")
    model = captured_form()
    with torch.inference_mode():
        theirs = plain(TEXT[:, :28], use_cache=False, output_hidden_states=True).hidden_states
        cache = new_cache(model)
        model(TEXT[:, :12], cache)
        first, _ = (model(TEXT[:, a : a + 8], cache, logits_to_keep=2, output_hidden_states=wanted) for a in (12, 20))
    assert first.logits.shape[1] == 2
    if not wanted:
        assert first.hidden_states is None
        return
    assert len(first.hidden_states) == 3
    for index, (mine, whole) in enumerate(zip(first.hidden_states, theirs, strict=True)):
        assert mine is None if index not in wanted else assert_near(mine, whole[:, 12:20]) is None


# ------------------------------------------------------------------------------------------------- captures and replays


def test_one_capture_for_each_size_and_a_replay_for_every_pass(fake_cuda):
    _, _, whole = made("llama")
    cache, seen = new_cache(model := captured_form()), []
    tiny.fed(model, TEXT[:, :100], cache, 1)
    assert not fake_cuda, "a long prefill is not captured"
    ends = (101, 105, 106, 110, 111, 115)
    for start, end in zip((100, *ends), ends, strict=False):
        seen.append((start, end, tiny.fed(model, TEXT[:, :end], cache, end - start)[0]))
    for start, end, rows in seen:  # looked at last: no later replay may have written over them
        assert_near(rows, whole[start:end])
    assert [one.replays for one in fake_cuda] == [3, 3]
    keep_slots(cache, 111)
    tiny.fed(model, TEXT[:, :115], cache, 1)
    forward(model, TEXT[:, 115:116], cache, taps=(1,))
    assert [one.replays for one in fake_cuda] == [3, 3, 1, 1], "other rows of logits and other states are other graphs"


def test_a_capture_follows_passes_that_warm_up_on_the_same_inputs(fake_cuda, monkeypatch):
    passes = []
    real = graphs.static_pass
    monkeypatch.setattr(graphs, "static_pass", lambda *args: passes.append(args[1].ids[:3].tolist()) or real(*args))
    forward(captured_form(), TEXT[:, :3], cache := new_cache(captured_form()))
    assert passes == [TEXT[0, :3].tolist()] * (WARM_UP + 1) and cache.get_seq_length() == 3


def test_a_larger_room_drops_the_graphs_and_each_is_captured_anew(fake_cuda):
    _, _, whole = made("llama")
    cache = new_cache(model := captured_form())
    tiny.fed(model, TEXT[:, :250], cache, 1)
    for end in range(251, FIRST_ROOM + 4):
        assert_near(tiny.fed(model, TEXT[:, :end], cache)[0], whole[end - 1 : end])
    assert [one.replays for one in fake_cuda] == [6, 3] and len(cache.stage.graphs) == 1


def test_a_text_that_is_done_leaves_its_graphs_to_the_next_and_nothing_of_itself(form):
    _, _, whole = made("llama")
    model = captured_form()
    tiny.fed(model, TEXT[:, :3], cache := new_cache(model))
    with torch.inference_mode():
        cache.store.fill_(torch.nan)
    where = cache.store.data_ptr()
    del cache
    gc.collect()
    cache = new_cache(model)
    assert cache.get_seq_length() == 0 and cache.store.data_ptr() == where
    assert_near(tiny.fed(model, TEXT[:, :3], cache)[0], whole[2:3])
    if form:
        assert [one.replays for one in form] == [2]


def test_two_living_texts_and_two_models_know_nothing_of_each_other(form):
    """The first text alone outgrows its room, and with it the table of turns that its model's other text began with."""
    models = [one := captured_form(), one, captured_form("qwen2, tied")]
    texts, plain = (TEXT, 63 - TEXT, TEXT), (made("llama")[0], made("llama")[0], made("qwen2, tied")[0])
    with torch.inference_mode():
        wholes = [model(ids, use_cache=False).logits[0] for model, ids in zip(plain, texts, strict=True)]
    caches = [new_cache(model) for model in models]
    for ends in ((5, 3, 9), (6, 4, 10), (9, 7, 13), (560, 8, 14), (561, 11, 15), (564, 12, 18)):
        for model, ids, cache, whole, end in zip(models, texts, caches, wholes, ends, strict=True):
            start = cache.get_seq_length()
            assert_near(tiny.fed(model, ids[:, :end], cache, end - start)[0], whole[start:end])
    assert len({cache.store.data_ptr() for cache in caches}) == 3


def test_a_graph_reads_nothing_that_may_go_away_while_it_lives(fake_cuda):
    """A graph keeps no tensor alive. All that it reads from outside must be the weights' or its stage's."""
    model = GraphLlama(FusedLlama(tiny.llama(**LONG)).eval()).eval()
    forward(model, TEXT[:, :2], first := new_cache(model))
    forward(model, TEXT, new_cache(model))  # the model's table of turns is replaced
    forward(model, TEXT[:, 2:5], first)
    stage = tree_leaves([value for name, value in vars(first.stage).items() if name != "graphs"])
    held = {place(one) for one in (*model.parameters(), *stage, None)}
    assert len(fake_cuda) == 2 and place(model.fused.turns[0]) not in held
    for graph in fake_cuda:
        made_inside, read = set(), set()
        for _, args, kwargs, out in graph.calls:
            read |= {place(one) for one in tree_leaves((args, kwargs))} - made_inside
            made_inside |= {place(one) for one in tree_leaves(out)} - read
        assert read <= held


def test_a_capture_that_fails_is_one_line_and_memory_that_ran_out_stays_what_it_is(fake_cuda, monkeypatch):
    cache = new_cache(model := captured_form())

    @contextlib.contextmanager
    def broken(graph):
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with pytest.raises(UserError, match=r"--pass graph: a pass over 2 tokens cannot be captured \(operation failed"):
        forward(model, TEXT[:, :2], cache)
    real, calls = graphs.static_pass, []
    late = lambda *args: calls.append(1) or (real(*args) if len(calls) <= WARM_UP else fail_with(error))  # noqa: E731
    monkeypatch.setattr(graphs, "static_pass", late)
    for words, kind in (("not permitted\nwhen capturing", UserError), ("out of memory", torch.OutOfMemoryError)):
        error = RuntimeError(words) if kind is UserError else kind(words)
        calls.clear()
        with pytest.raises(kind, match=words.split("\n")[0]) as raised:
            forward(model, TEXT[:, :2], cache)
        assert "\n" not in str(raised.value)
    assert cache.get_seq_length() == 0 and not cache.stage.graphs


def fail_with(error):
    raise error


# ------------------------------------------------------------------------------------------------------------- the loop

TARGET = tiny.llama()
DRAFTS = {"near": tiny.near(TARGET, 0.03), "far": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}


def graphed(model) -> GraphLlama:
    return GraphLlama(FusedLlama(model).eval()).eval()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_speculative_text_is_the_targets_own_and_counts_as_the_plain_pair(draft, loop, form):
    target, drafter = graphed(TARGET), graphed(DRAFTS[draft])
    for k, n in ((0, 9), (1, 20), (3, 30), (6, 30)):
        done = tiny.speculated(target, drafter, n=n, k=k, loop=loop)
        assert done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 30)[:n]) == tiny.plainly(target, n=n).tokens
        assert done == tiny.speculated(TARGET, DRAFTS[draft], n=n, k=k, loop=loop)


def test_a_target_that_drafts_for_itself_is_accepted_every_time_past_its_first_room(form):
    model = graphed(TARGET)
    done = tiny.speculated(model, model, n=300, k=7)
    assert not any(done.rejected) and done.tokens == tiny.plainly(FusedLlama(TARGET).eval(), n=300).tokens


def test_a_tree_of_guesses_writes_the_targets_own_text(form):
    target = graphed(TARGET)
    drafter = TreeDrafter(graphed(DRAFTS["near"]), 64, nodes=6)
    done = tiny.speculated(target, drafter.model, n=30, k=4, drafter=drafter)
    assert done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 30))
    assert any(len(guesses) > 4 for guesses in done.proposals)


# ----------------------------------------------------------------------------------------------------- from the options


def test_it_passes_the_same_checks_and_counts_as_the_plain_model(form):
    plain, fused, _ = made("llama")
    model = captured_form()
    check_blocks(Loaded(model, None, "t", "--target"))
    check_rows(Loaded(model, None, "t", "--target"))
    assert context_limit(model) == context_limit(plain) and pass_weights(model) == pass_weights(plain)
    assert (model.dtype, model.device) == (plain.dtype, plain.device)
    assert model.get_input_embeddings() is fused.get_input_embeddings()
    assert model.get_output_embeddings() is fused.get_output_embeddings()
    with pytest.raises(ValueError, match="one row, not 2"):
        forward(model, TEXT[:, :3].repeat(2, 1), new_cache(model))


def test_pass_graph_is_one_form_for_both_and_says_that_a_cpu_captures_nothing(capsys):
    args = argparse.Namespace(pass_form="graph", draft_vocab_text=None)
    target, draft = (Loaded(tiny.llama(), None, name, "--target") for name in "td")
    same = Loaded(target.model, None, "same", "--draft")
    set_passes(args, [target, draft, same])
    assert all(isinstance(one.model, GraphLlama) and one.about["pass"] == "graph" for one in (target, draft))
    assert same.model is target.model is not draft.model
    assert "--pass graph: nothing is captured on cpu" in capsys.readouterr().err
    with pytest.raises(UserError, match="--pass graph: g is no Llama"):
        set_passes(args, [Loaded(tiny.llama(), None, "t", "--target"), Loaded(tiny.gpt2(), None, "g", "--draft")])


def test_the_text_from_the_shell_is_the_one_of_the_other_forms(pair, results):
    rows = {}
    for form in ("fused", "graph"):
        argv = [*pair, "--prompt", "w1 w5 w9", "--n-tokens", "16", "-k", "4", "--cpu-linear", "plain", "--pass", form]
        assert spec_decode.main([*argv, "--vs-transformers"]) == 0
        document = json.loads(results.read_text())
        rows[form] = document["rows"][-1]
        assert {document["config"][one]["pass"] for one in ("target", "draft")} == {form} and rows[form]["exact"]
    assert rows["fused"]["tokens"] == rows["graph"]["tokens"] == tiny.greedy(tiny.llama(), [5, 9, 13], 16)
    assert rows["fused"]["proposals"] == rows["graph"]["proposals"]


def test_a_batch_is_refused_since_its_passes_are_not_captured(pair, capsys):
    assert spec_batch.main([*pair, "--pass", "graph"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --pass graph: ")


@torch.inference_mode()
def test_forms_of_pass_side_by_side_have_the_captured_one_where_there_is_one(fake_cuda, monkeypatch):
    monkeypatch.setattr(variants, "captures", lambda device: True)
    models = variants.in_each_pass(Loaded(tiny.llama(), None, "t", "--model"), "plain")
    assert list(models) == ["plain", "fused", "graph"] and models["graph"].fused is models["fused"]
    rows = variants.measure_variants(models, TEXT, 20, [1, 3], 2, 1)
    assert "graph, ms" in variants.table(rows) and [one.replays for one in fake_cuda[-2:]] == [3, 3]


def test_launch_overhead_is_the_median_difference_within_turns():
    rows = [
        {"variant": name, "tokens": n, "seconds": [0.001 * (base + n + turn) for turn in (0, 50, 3)]}
        for name, base in (("plain", 90), ("fused", 30), ("graph", 10))
        for n in (1, 4, 8)
    ]
    rows[-1]["seconds"][1] = 0.0  # one turn that was disturbed
    one, eight = "20.00 of 34.00 ms in a pass over 1 token", "20.00 of 41.00 ms in a pass over 8 tokens"
    assert variants.launch_line(rows) == f"launch overhead (fused minus graph): {one}, {eight}."
    assert "nothing is captured" in variants.launch_line(rows[:6])


def test_the_precondition_says_that_nothing_is_captured_on_a_cpu(target_folder, results, capsys):
    argv = ["--device", "cpu", "--model", target_folder, "--context", "8", "--tokens", "1,3", "--results", str(results)]
    assert spec_precondition.main([*argv, "--repeats", "1", "--compare-passes", "--pass", "graph"]) == 0
    said = capsys.readouterr()
    assert "launch overhead: nothing is captured on this device" in said.out and "graph, ms" not in said.out
    assert "nothing is captured on cpu" in said.err
