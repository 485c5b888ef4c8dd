"""A head of the frequent ids alone, and the form in which a draft runs: guesses are mapped back, the text is the target's own."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

from spec_common import UserError

import pytest
import torch
import transformers as T
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import spec_decode
import spec_drafts
import tiny
from draft_training.data import shard_of
from draft_training.prompts import OPENINGS, SHORTEST, as_ids
from draft_training.train import grow, trainable
from spec_harness.reference import reference_arms
from spec_loop import LOOPS
from spec_models import vocab
from spec_models.checks import Loaded
from spec_models.cut import cut_layers
from spec_models.files import build_draft, save_draft
from spec_models.fused import FusedLlama
from spec_models.linear import twin as twin_of
from spec_models.pairs import cut_draft, in_form, run_fused, set_passes, with_cut_head
from spec_models.vocab import CutHead, count_text, cut_head, frequent_ids

TARGET = tiny.llama()
DRAFTS = {"near": tiny.near(TARGET, 0.03), "tied": tiny.llama(seed=2, tie_word_embeddings=True), "gpt2": tiny.gpt2()}
EVERY = list(range(64))
TIED = tiny.llama(seed=3, num_hidden_layers=4, tie_word_embeddings=True)


def loaded(model, tokenizer=None, name="tiny", **about) -> Loaded:
    return Loaded(model, tokenizer or tiny.words(), name, "--draft", about)


def options(text_file=None, pass_form="auto", vs_transformers=False) -> argparse.Namespace:
    return argparse.Namespace(draft_vocab_text=text_file, pass_form=pass_form, vs_transformers=vs_transformers)


def cut(draft, kept, fused: bool = False, rows: int = 64):
    """The draft with a head of those ids: plain, or fused."""
    twin = copy.deepcopy(draft)
    cut_head(twin, list(kept), len(kept), rows)
    return FusedLlama(twin).eval() if fused else twin


@pytest.fixture
def text_file(tmp_path) -> Path:
    """w9 three times, w2 and w5 twice, w1 once: ids 13, 6, 9, 5."""
    path = tmp_path / "text.txt"
    path.write_text("w9 w5 w2\nw9 w1\n\nw2 w5 w9\n")
    return path


# -------------------------------------------------------------------------------------------------------- the cut head


@given(kept=st.sets(st.integers(0, 63), min_size=1), bias=st.booleans())
def test_the_rows_of_a_cut_head_are_the_whole_heads_rows_at_those_ids(kept, bias):
    head, ids = nn.Linear(32, 64, bias=bias), torch.tensor(sorted(kept))
    hidden = torch.randn(2, 3, 32)
    assert torch.allclose(CutHead(head, ids)(hidden), head(hidden)[..., ids], atol=1e-5)


forms = st.sampled_from(
    [(name, fused) for name in sorted(DRAFTS) for fused in (False, True) if not (fused and name == "gpt2")]
)


@settings(max_examples=25)
@given(
    form=forms,
    k=st.integers(1, 6),
    loop=st.sampled_from(LOOPS),
    kept=st.sets(st.integers(0, 63), min_size=1) | st.just(EVERY),
)
def test_every_guess_is_the_best_of_the_kept_ids_and_the_text_is_exact(form, k, loop, kept):
    name, fused = form
    done = tiny.speculated(TARGET, cut(DRAFTS[name], kept, fused), n=20, k=k, loop=loop)
    assert done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 20))
    assert kept != EVERY or done == tiny.speculated(TARGET, DRAFTS[name], n=20, k=k, loop=loop)
    text, written, kept = list(tiny.PROMPT), 0, torch.tensor(sorted(kept))
    for guesses, count in zip(done.proposals, done.emitted, strict=True):
        with torch.inference_mode():
            rows = DRAFTS[name](torch.tensor([text + guesses])).logits[0, len(text) - 1 :][: len(guesses), kept]
        assert guesses == kept[rows.argmax(-1)].tolist()
        text += done.tokens[written : written + count]
        written += count


def test_an_id_that_one_of_the_tables_lacks_is_never_kept():
    """Padded tables: what the target cannot read is no guess, and what the draft has no row for cannot be one. Such ids do
    not use up the number asked for."""
    wide, narrow = tiny.llama(vocab_size=176), tiny.llama(vocab_size=160)
    ids = [170, 9, 160, 159, 3, *range(176)]
    for model, target_rows in ((wide, 160), (narrow, 176)):
        model = copy.deepcopy(model)
        cut_head(model, ids, 3, target_rows)
        assert model.get_output_embeddings().kept.tolist() == [3, 9, 159]
    twin = with_cut_head(loaded(narrow), Loaded(wide, None, "wide", "--draft"), 10**6, None)
    assert twin.model.get_output_embeddings().kept.tolist() == list(range(160)), "random weights need no tokenizer"


def test_a_head_that_is_no_linear_layer_is_refused():
    with pytest.raises(UserError, match="--draft-vocab: .*cannot be cut"):
        cut(cut(tiny.llama(), EVERY), EVERY)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["near", "tied", "cut:1"])
def test_the_draft_keeps_its_whole_head_and_so_does_the_target(name, fused, text_file):
    target = loaded(tiny.llama(seed=2, tie_word_embeddings=True))
    draft = cut_draft(target, name) if name == "cut:1" else loaded(copy.deepcopy(DRAFTS[name]))
    heads, ids = [one.model.get_output_embeddings() for one in (target, draft)], torch.tensor([tiny.PROMPT])
    before = [one.model(ids).logits for one in (target, draft)]
    args = options(text_file, pass_form="fused" if fused else "plain")
    twin = in_form(args, target, draft, 5)
    set_passes(args, [twin])
    assert isinstance(twin.model.get_output_embeddings(), CutHead) and twin.model is not draft.model
    assert isinstance(twin.model, FusedLlama) == fused
    assert [one.model.get_output_embeddings() for one in (target, draft)] == heads
    assert all(torch.equal(one.model(ids).logits, logits) for one, logits in zip((target, draft), before, strict=True))
    assert twin.model.get_input_embeddings().weight.data_ptr() == draft.model.get_input_embeddings().weight.data_ptr()


def test_ids_are_counted_from_a_text_and_equal_counts_stand_in_order(text_file):
    rest = [token for token in range(64) if token not in (13, 6, 9, 5)]
    assert frequent_ids(tiny.words(), text_file) == [13, 6, 9, 5, *rest]
    text_file.write_bytes(b"\xef\xbb\xbfw9 w9\n")
    assert frequent_ids(tiny.words(), text_file)[:2] == [13, 0], "a byte order mark is no word"


@given(lines=st.lists(st.lists(st.integers(0, 59), max_size=6), max_size=8), piece=st.integers(1, 30))
def test_a_text_read_in_pieces_counts_as_one_read_whole(lines, piece):
    whole = [word for line in lines for word in line]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "BYTES_AT_A_TIME", piece)
        counts = count_text(tiny.words(), "\n".join(" ".join(f"w{word}" for word in line) for line in lines))
    assert counts == {word + 4: whole.count(word) for word in whole}


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\x00w"])
def test_a_text_that_cannot_be_counted_is_refused_by_the_name_of_its_flag(content, tmp_path):
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"--draft-vocab-text t\.txt: ."):
        frequent_ids(tiny.words(), path)


def test_the_shipped_list_serves_its_own_vocabulary_and_no_other(embedded_target):
    tokenizer = T.AutoTokenizer.from_pretrained(embedded_target)
    ids = frequent_ids(tokenizer, None)
    assert sorted(ids) == list(range(len(tokenizer))) and ids != sorted(ids)
    seen = json.loads(vocab.SHIPPED_LIST.read_text())["ids"]
    assert ids[: len(seen)] == seen
    assert {tokenizer(word)["input_ids"][0] for word in ("\n", ".", " the", " return")} <= set(ids[:500])
    with pytest.raises(UserError, match="--draft-vocab: .*another tokenizer; give --draft-vocab-text FILE") as refusal:
        frequent_ids(tiny.words(), None)
    assert "\n" not in str(refusal.value)


def test_every_opening_is_known_for_one_by_its_length(embedded_target):
    """draft_training.data.py starts short prompts otherwise, and tells them by SHORTEST alone."""
    tokenizer = T.AutoTokenizer.from_pretrained(embedded_target)
    lengths = {text: len(as_ids(tokenizer, text, False)) for texts in OPENINGS.values() for text in texts}
    assert not {text: length for text, length in lengths.items() if not 1 <= length < SHORTEST}


def test_the_list_is_counted_from_what_the_target_wrote_and_not_from_the_prompts(target_folder, tmp_path, capsys):
    for number, (prompt, written) in enumerate([([7, 7, 7, 7], [5, 9, 9]), ([8], [9, 5, 4])]):
        ids = torch.tensor(prompt + written, dtype=torch.int32)
        rows = [(ids, torch.zeros(len(ids), 4), torch.zeros(len(ids), 16, dtype=torch.int32))]
        save_file(shard_of(rows, [len(prompt)], [0]), tmp_path / f"shard-{number}.safetensors")
    argv = ["--target", target_folder, "--data", str(tmp_path), "--out", str(tmp_path / "ids.json")]
    assert vocab.main(argv) == 0
    document = json.loads((tmp_path / "ids.json").read_text())
    assert (document["ids"], document["tokens_counted"]) == ([9, 5, 4], 6)
    hashes = [vocab.vocabulary_hash(tiny.words(reverse)) for reverse in (False, True)]
    assert document["vocabulary_sha256"] == hashes[0] != hashes[1]
    assert "3 ids of 6 tokens" in capsys.readouterr().out
    assert vocab.main([*argv[:3], str(tmp_path / "none"), *argv[4:]]) == 2
    assert "error: --data" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- the form of a draft


def test_a_draft_brings_its_own_size_of_head_unless_another_is_asked_for(text_file):
    draft, target = loaded(copy.deepcopy(DRAFTS["near"]), draft_vocab=3), loaded(TARGET)
    made = {size: in_form(options(text_file), target, draft, size) for size in (None, 0, 2, 10**6)}
    kept = {
        size: getattr(one.model.get_output_embeddings(), "kept", torch.tensor([])).tolist()
        for size, one in made.items()
    }
    assert kept == {None: [6, 9, 13], 0: [], 2: [6, 13], 10**6: EVERY}
    assert [one.about["draft_vocab"] for one in made.values()] == [3, 0, 2, len(EVERY)]
    assert all(one.plain is None for one in made.values()) and draft.about == {"draft_vocab": 3}


def test_a_pair_is_fused_of_itself_where_both_can_be_and_never_where_plain_is_asked_for():
    """One form for both models, or a cost of one says nothing of the other."""
    near, other = loaded(DRAFTS["near"]), loaded(DRAFTS["gpt2"], name="gpt2")
    target = loaded(tiny.llama())
    assert [run_fused("auto", pair) for pair in ([target, near], [target, other], [other, near], [target])] == [
        True,
        False,
        False,
        True,
    ]
    assert not run_fused("plain", [target, near])
    with pytest.raises(UserError, match="--pass fused: gpt2 is no Llama"):
        run_fused("fused", [target, near, other])


def test_a_model_that_drafts_for_itself_is_fused_once():
    target = loaded(tiny.llama())
    draft, original = loaded(target.model), target.model
    set_passes(options(vs_transformers=True), [target, draft])
    assert isinstance(target.model, FusedLlama) and target.model is draft.model
    assert target.plain is draft.plain is original and target.about["pass"] == draft.about["pass"] == "fused"


def test_assisted_generation_is_given_the_whole_plain_draft(text_file):
    draft, target = loaded(copy.deepcopy(DRAFTS["near"])), tiny.llama()
    args = options(text_file, vs_transformers=True)
    one = in_form(args, loaded(target), draft, 4)
    set_passes(args, [one])
    assert one.plain is draft.model and one.model.get_output_embeddings().kept.tolist() == [5, 6, 9, 13]
    assistants, write = [], target.generate
    target.generate = lambda *args, assistant_model=None, **more: (
        assistants.append(assistant_model) or write(*args, **more, assistant_model=assistant_model)
    )
    arms = reference_arms(tiny.task(target, n=20), loaded(target), one, 4)
    assert all(arm().done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 20)) for arm in arms.values())
    assert {"generate", "assisted"} < set(arms) and set(assistants) == {None, draft.model}


def test_every_form_writes_the_same_text_from_the_shell(pair, results, text_file):
    rows, cut_to = {}, ["--draft-vocab", "6", "--draft-vocab-text", str(text_file), "--vs-transformers"]
    for form in ("plain", "fused"):
        for more in ([], cut_to):
            argv = [
                *pair,
                "--prompt",
                "w1 w5 w9",
                "--n-tokens",
                "16",
                "-k",
                "4",
                "--cpu-linear",
                "plain",
                "--pass",
                form,
                *more,
            ]
            assert spec_decode.main(argv) == 0
            document = json.loads(results.read_text())
            row, about = document["rows"][-1], document["config"]["draft"]
            assert document["config"]["target"]["pass"] == form
            assert row["exact"] and row["tokens"] == tiny.greedy(TARGET, [5, 9, 13], 16)
            assert (about["pass"], about["draft_vocab"]) == (form, 6 if more else 0)
            assert bool(more) == ("assisted_s" in row)
            rows[form, bool(more)] = row["proposals"]
    assert rows["plain", False] == rows["fused", False] != rows["plain", True] == rows["fused", True]
    assert {token for guesses in rows["fused", True] for token in guesses} <= {13, 6, 9, 5, 0, 1}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--self-draft", "--draft-vocab", "8"], "--draft-vocab: a model that drafts for itself"),
        (["--draft-vocab", "8"], "--draft-vocab: the list of frequent ids that ships belongs to another tokenizer"),
        (["--draft-vocab", "-1"], "--draft-vocab"),
        (["--draft-vocab", "8", "--draft-vocab-text", "/no/such/t.txt"], "--draft-vocab-text t.txt: No such file"),
        (["--draft", "GPT2", "--pass", "fused"], "--pass fused: another kind is no Llama"),
    ],
)
def test_a_form_that_cannot_be_had_is_one_line_and_exit_code_2(more, words, pair, disk, capsys):
    more = [tiny.save(DRAFTS["gpt2"], disk / "another kind") if word == "GPT2" else word for word in more]
    try:
        code = spec_decode.main([*pair, "--prompt", "w1 w5", *more])
    except SystemExit as left:
        code = left.code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and line.startswith("error: ") and words in line


def test_drafts_show_a_cut_head_beside_the_whole_one(pair, draft_folder, results, text_file):
    argv = [
        *pair[:4],
        *pair[6:],
        "--drafts",
        draft_folder,
        "cut:0",
        "-k",
        "3",
        "--draft-vocab",
        "7",
        "--draft-vocab-text",
        str(text_file),
    ]
    assert spec_drafts.main(argv) == 0
    document = json.loads(results.read_text())
    rows = {row["draft"]: row for row in document["summary"]["drafts"]}
    assert list(rows) == ["draft, whole head", "draft, head 7", "cut:0, whole head", "cut:0, head 7"]
    weights = {row["draft"]: row["weights_per_pass"] for row in document["rows"] if row["part"] == "costs"}
    assert weights["draft, whole head"] - weights["draft, head 7"] == (64 - 7) * 32


def test_a_run_does_not_go_on_with_another_head_of_the_same_size(pair, results, text_file, capsys):
    argv = [*pair, "--prompt", "w1 w5 w9", "--draft-vocab", "4", "--draft-vocab-text", str(text_file)]
    assert spec_decode.main(argv) == 0
    assert spec_decode.main([*argv, "--resume"]) == 0
    text_file.write_text("w20 w21 w22 w23")
    assert spec_decode.main([*argv, "--resume"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_head_inside_another_module_is_cut_for_the_twin_alone():
    config = T.RobertaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        is_decoder=True,
        initializer_range=0.4,
    )
    model = tiny.build(config)
    head, ids = model.get_output_embeddings(), torch.tensor([tiny.PROMPT])
    with torch.inference_mode():
        before = model(ids).logits
        twin = twin_of(model)
        cut_head(twin, [9, 5], 2, 64)
        assert model.get_output_embeddings() is head and torch.equal(model(ids).logits, before)
        assert twin(ids).logits.shape[-1] == 2


def test_a_head_larger_than_the_vocabulary_is_reported_as_what_it_is(pair, results, text_file):
    assert (
        spec_decode.main([*pair, "--prompt", "w1 w5", "--draft-vocab", "1000000", "--draft-vocab-text", str(text_file)])
        == 0
    )
    assert json.loads(results.read_text())["config"]["draft"]["draft_vocab"] == 64


@pytest.mark.parametrize("layers", [[0, 3], [0, 1, 3], [0, 1, 2, 3]])
def test_a_grown_draft_begins_with_the_logits_of_the_smaller_one(layers, tmp_path):
    small = tiny.near(trainable(TIED, [0, 3]))
    for norm in (small.model.norm, small.model.layers[1].input_layernorm):  # ones until they are trained
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    save_draft(tmp_path / "small.safetensors", small, TIED, [0, 3], {})
    grown, ids = trainable(TIED, layers), torch.tensor([tiny.PROMPT * 3])
    grow(grown, layers, tmp_path / "small.safetensors")
    with torch.inference_mode():
        assert torch.allclose(
            grown(ids).logits, build_draft(tmp_path / "small.safetensors", TIED)(ids).logits, atol=1e-5
        )
        assert not torch.allclose(grown(ids).logits, trainable(TIED, layers)(ids).logits, atol=1e-2)


def test_a_cut_draft_shares_the_targets_tensors_and_training_never_changes_them():
    own = {parameter.data_ptr() for parameter in TIED.parameters()}
    assert {parameter.data_ptr() for parameter in cut_layers(TIED, [0, 3]).parameters()} <= own
    before, draft, ids = copy.deepcopy(TIED.state_dict()), trainable(TIED, [0, 3]), torch.tensor([tiny.PROMPT])
    assert not {parameter.data_ptr() for parameter in draft.parameters()} & own
    draft(ids, labels=ids).loss.backward()
    torch.optim.SGD(draft.parameters(), lr=1.0).step()
    assert all(torch.equal(value, before[key]) for key, value in TIED.state_dict().items())
    assert not torch.equal(draft.model.norm.weight, TIED.model.norm.weight)
    assert torch.equal(draft.model.embed_tokens.weight, TIED.model.embed_tokens.weight), (
        "the head is the target's own: frozen"
    )


def test_a_joined_list_keeps_the_earlier_one_at_every_size():
    assert vocab.joined([5, 6, 7, 8], [8, 9, 5, 4]) == [5, 6, 7, 8, 9, 4]
