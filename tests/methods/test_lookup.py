"""Guesses copied from the text: always what a plain search of the whole text finds, whatever the model then makes of them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_lookup
import tiny
from spec_counts import Work
from spec_decode import counts
from spec_harness.arms import Method, draft_model, run_speculative
from spec_harness.reference import RoundLengths, prompt_lookup_rounds, run_prompt_lookup
from spec_harness.theory import interpolated
from spec_loop import LOOPS, Budget, DecodingError, State, forward
from spec_methods.lookup import MATCHES, HybridDrafter, LookupDrafter
from spec_methods.policy import FixedK
from workloads import GROUNDED, WORKLOADS

TARGET = tiny.llama()
# A vocabulary of 8 ids: texts of random tokens then repeat themselves, and look-ups hit and miss.
FEW = tiny.llama(vocab_size=8)
DRAFTS = {"itself": FEW, "near": tiny.near(FEW), "wrong": tiny.always_wrong(FEW)}
CASES = [
    (7,),
    (1, 2, 3, 1, 2),
    (5,) * 10,
    tuple(range(3, 19)),
]  # the hard cases: shorter than the n-gram, its own tail, one id, all different

# --------------------------------------------------------------------------------------- what is guessed, without a model


def rescan(text: list[int], k: int, largest: int, smallest: int, match: str) -> list[int]:
    """Every place looked at, nothing remembered: the guess as the two rules define it."""
    for n in range(largest, smallest - 1, -1):
        follow = [text[i + n :][:k] for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :]]
        if follow and match == "first":
            return follow[0]
        if follow:
            longest = max(map(len, follow))
            return [tokens for tokens in follow if len(tokens) == longest][-1]
    return []


def standing(text: list[int], new: list[int] = ()) -> State:
    """A text with room behind it, of which `new` was written last."""
    return State(torch.tensor([text + [-1] * 12]), len(text), None, new=list(new))


def proposed(drafter, text: list[int], k: int) -> list[int]:
    state = standing(text)
    before = state.ids.clone()
    made = drafter.propose(state, Budget(k))
    assert torch.equal(state.ids, before) and state.length == len(text), "guesses have a buffer of their own"
    assert made.tokens.shape == (len(made),) and made.tokens.dtype == state.ids.dtype
    assert (drafter.work, made.laws, made.finite) == (Work(0, 0), [None] * len(made), [])
    return made.tokens.tolist()


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(
    prompt=tokens, blocks=st.lists(tokens, max_size=8), k=st.integers(0, 6), sizes=sizes, match=st.sampled_from(MATCHES)
)
def test_the_guess_is_what_a_search_of_the_whole_text_finds_after_every_round(prompt, blocks, k, sizes, match):
    smallest, largest = sizes
    drafter, text = LookupDrafter(largest, smallest, match), list(prompt)
    drafter.start(standing(prompt))
    for block in [*blocks, []]:
        assert proposed(drafter, text, k) == rescan(text, k, largest, smallest, match)
        text += block
        if block:
            drafter.keep(standing(text, block), [], ())


@pytest.mark.parametrize(
    ("text", "match", "expected"),
    [
        ([7], "first", []),
        ([1, 2, 3, 1, 2], "first", [3, 1, 2]),
        ([1, 2, 3, 1, 2], "latest", [3, 1, 2]),
        ([5] * 10, "first", [5, 5, 5, 5]),
        ([5] * 10, "latest", [5, 5, 5, 5]),
        ([5, 5], "first", [5]),
        (list(range(10)), "first", []),
        ([1, 2, 3, 9, 9, 1, 2, 4, 9, 9, 1, 2], "first", [3, 9, 9, 1]),
        ([1, 2, 3, 9, 9, 1, 2, 4, 9, 9, 1, 2], "latest", [4, 9, 9, 1]),
        (
            [2, 8, 8, 8, 8, 1, 2, 9, 8, 8, 8, 1, 2],
            "first",
            [9, 8, 8, 8],
        ),  # two tokens that match beat one that came before
    ],
)
def test_the_hard_cases_of_a_search(text, match, expected):
    drafter = LookupDrafter(2, 1, match)
    drafter.start(standing(text))
    assert proposed(drafter, text, 4) == expected


def test_a_smallest_n_gram_keeps_chance_matches_out():
    text = [1, 2, 3, 4, 1]
    for smallest, expected in ((1, [2, 3]), (2, [])):
        drafter = LookupDrafter(3, smallest)
        drafter.start(standing(text))
        assert proposed(drafter, text, 2) == expected


def test_a_round_costs_what_is_new_not_the_whole_text():
    """As many index entries are made in a late round as in an early one, and a look-up reads none but its own."""

    class Noted(dict):
        writes = reads = 0

        def setdefault(self, *entry):
            self.writes += 1
            return super().setdefault(*entry)

        def get(self, *entry):
            self.reads += 1
            return super().get(*entry)

    drafter, text = LookupDrafter(3, 1), [1, 2, 3, 4, 5]
    drafter.start(standing(text))
    drafter.places = noted = Noted(drafter.places)
    for i in range(200):
        noted.writes = noted.reads = 0
        text += [i % 7, i % 5]
        drafter.keep(standing(text, text[-2:]), [], ())
        proposed(drafter, text, 4)
        assert noted.writes == 6 and noted.reads <= 3


# ---------------------------------------------------------------------------------------------------- in the loop, alone


def look_up(target, prompt, n: int, k: int, smallest: int = 1, largest: int = 3, match: str = "first", **options):
    method = Method(LookupDrafter(largest, smallest, match), FixedK(k))
    return run_speculative(tiny.task(target, prompt, n, **options), method).done


cells = {
    "k": st.integers(0, 8),
    "n": st.integers(0, 24),
    "sizes": sizes,
    "match": st.sampled_from(MATCHES),
    "loop": st.sampled_from(LOOPS),
}


@given(prompt=st.lists(st.integers(0, 7), min_size=1, max_size=20).map(tuple), **cells)
def test_the_text_is_greedys_own_for_any_tokens_and_no_draft_pass_is_taken(prompt, k, n, sizes, match, loop):
    done = look_up(FEW, prompt, n, k, *sizes, match, loop=loop)
    assert done.tokens == list(tiny.greedy_once(FEW, prompt, 24)[:n])
    assert done.draft_passes == 0
    assert sum(done.emitted) == n and done.target_passes == len(done.proposals)
    if loop == "lean":
        assert n == sum(done.accepted) + done.target_passes
    text, end = list(prompt), len(prompt) + n
    for guesses, written in zip(done.proposals, done.emitted, strict=True):
        ahead = k if loop == "essay" else min(k, end - len(text) - 1)
        assert guesses == rescan(text, ahead, sizes[1], sizes[0], match)
        text += done.tokens[len(text) - len(prompt) :][:written]


@pytest.mark.parametrize("prompt", CASES)
@pytest.mark.parametrize("match", MATCHES)
def test_the_hard_prompts_give_forty_tokens_of_greedys_own(prompt, match):
    done = look_up(TARGET, prompt, 40, 4, smallest=2, largest=2, match=match)
    assert done.tokens == tiny.greedy(TARGET, prompt, 40)
    first = {(7,): [], (1, 2, 3, 1, 2): [3, 1, 2], (5,) * 10: [5] * 4}.get(prompt, [])
    assert done.proposals[0] == first


def test_where_nothing_matches_a_round_is_a_plain_step_and_nothing_is_counted():
    done = look_up(TARGET, (7,), 1, 4)
    row = counts(done, 4)
    assert (row["target_passes"], row["proposed"], row["draft_passes"]) == (1, 0, 0)
    assert row["acceptance_rate"] is None and row["alpha"] is None


# ------------------------------------------------------------------------------------------------------ with a draft model


def hybrid(
    target, draft, prompt, n: int, k: int, model_k: int = 3, largest: int = 3, smallest: int = 2, seen=None, **options
):
    """What the loop wrote, and of each round whether a look-up matched and how many passes the draft took."""
    rounds = [] if seen is None else seen

    class Noted(HybridDrafter):
        def propose(self, *given):
            before = self.lookup.matches
            work = self.work
            made = super().propose(*given)
            rounds.append((self.lookup.matches > before, self.work.since(work).passes, len(made)))
            return made

    task = tiny.task(target, prompt, n, **options)
    drafter = Noted(LookupDrafter(largest, smallest), draft_model(task, draft, model_k).drafter, model_k)
    return run_speculative(task, Method(drafter, FixedK(k))).done, rounds


@given(
    draft=st.sampled_from(sorted(DRAFTS)), k=st.integers(0, 6), model_k=st.integers(1, 4), n=st.integers(0, 24),
    loop=st.sampled_from(LOOPS), prompt=st.lists(st.integers(0, 7), min_size=1, max_size=12).map(tuple),
)  # fmt: skip
def test_the_hybrid_copies_where_something_matches_and_asks_the_draft_where_not(draft, k, model_k, n, loop, prompt):
    done, rounds = hybrid(FEW, DRAFTS[draft], prompt, n, k, model_k, loop=loop)
    assert done.tokens == list(tiny.greedy_once(FEW, prompt, 24)[:n])
    extra = 1 if loop == "essay" else 0
    for (matched, passes, count), accepted in zip(rounds, done.accepted, strict=True):
        assert passes == (0 if matched or not count else count + extra)
        assert matched or count <= model_k
        if draft == "itself" and not matched:
            assert accepted == count, "the cache of a model that drafts for itself is wrong"
    assert done.draft_passes == sum(passes for _, passes, _ in rounds)
    assert [one.draft_passes for one in done.rounds] == [passes for _, passes, _ in rounds]


def test_the_hybrid_met_both_kinds_of_rounds():
    """Or the test above says nothing."""
    _, rounds = hybrid(FEW, FEW, (1, 2, 3, 4), 60, 4)
    assert {matched for matched, _, _ in rounds} == {True, False}


def test_the_draft_reads_the_copied_tokens_once_when_it_is_next_asked(monkeypatch):
    """No token twice, none left out: every pass of the draft feeds what is new since its last."""
    draft, ends = tiny.near(FEW, 0), []

    def noted(model, tokens, cache, *more, **geometry):
        if model is draft:
            ends.append((cache.get_seq_length(), cache.get_seq_length() + tokens.shape[1]))
        return forward(model, tokens, cache, *more, **geometry)

    monkeypatch.setattr("spec_loop.forward", noted)
    done, rounds = hybrid(FEW, draft, (1, 2, 3, 4), 60, 4)
    assert any(end - start > 2 for start, end in ends[1:]), "never asked after a copy"
    length, passes, after = 4, iter(ends[1:]), 3
    for (matched, count, _), written in zip(rounds, done.emitted, strict=True):
        for i in range(count):
            assert next(passes) == (after, length + i)
            after = length + i
        length += written
        after = min(after, length - 1)
        assert matched == (count == 0) or length == 64
    assert next(passes, None) is None
    assert done.draft_tokens_read == sum(end - start for start, end in ends[1:])


def test_a_prompt_that_the_draft_cannot_read_leaves_the_look_up_to_itself():
    wide, narrow = tiny.llama(vocab_size=16), tiny.near(FEW)
    prompt = (12, 3, 12, 3, 12)
    done, rounds = hybrid(wide, narrow, prompt, 20, 4)
    assert done.tokens == tiny.greedy(wide, prompt, 20)
    assert done.draft_passes == 0 and rounds[0][0]


def test_logits_of_the_draft_that_are_not_finite_are_noticed():
    broken = tiny.llama(vocab_size=8)
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(DecodingError):
        hybrid(FEW, broken, (1, 2), 4, 3)


# ------------------------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("largest", [1, 2, 3])
@pytest.mark.parametrize("prompt", [*CASES[:3], (1, 2, 3, 4, 5, 6)])
def test_generates_own_look_up_writes_the_same_tokens_round_by_round(prompt, largest, k):
    prompt = tuple(token % 8 for token in prompt)
    task = tiny.task(FEW, prompt, 40)
    theirs = run_prompt_lookup(FEW, task, k, largest, RoundLengths()).done
    ours = look_up(FEW, prompt, 40, k, largest=largest)
    assert theirs.tokens == ours.tokens == tiny.greedy(FEW, prompt, 40)
    assert theirs.emitted == ours.emitted == prompt_lookup_rounds(FEW, task, k, largest)
    assert theirs.target_passes == ours.target_passes


def test_generates_own_look_up_stops_at_the_same_end_token():
    end = frozenset([tiny.greedy(FEW, (1, 2, 3), 30)[-1]])
    theirs = run_prompt_lookup(FEW, tiny.task(FEW, (1, 2, 3), 60, ends=end), 4, 3, RoundLengths()).done
    ours = look_up(FEW, (1, 2, 3), 60, 4, ends=end)
    assert theirs.tokens == ours.tokens and theirs.tokens[-1] in end
    assert theirs.emitted == ours.emitted


def test_a_model_that_generate_refuses_is_left_out_and_said(monkeypatch, capsys):
    def refuses(*_, **__):
        raise ValueError("not with this model\nmore")

    monkeypatch.setattr(FEW, "generate", refuses)
    assert prompt_lookup_rounds(FEW, tiny.task(FEW), 3, 3) is None
    assert "left out" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ the script


@pytest.fixture
def quick(pair, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setattr("spec_harness.costs.COST_REPEATS", 3)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('"w1 w2 w3 w1 w2 w3 w1"\n"w9 w8 w7 w6"\n')
    return [*pair, "--n-tokens", "24", "--prompt-file", str(prompts)]


def strict(path) -> dict:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))


def of_part(document: dict, part: str) -> list[dict]:
    return [row for row in document["rows"] if row["part"] == part]


def test_the_script_measures_every_method_on_every_text(quick, results, capsys):
    assert spec_lookup.main([*quick, "-k", "4", "--draft-k", "2", "--wide"]) == 0
    document = strict(results)
    assert (document["experiment"], document["status"]) == ("spec_lookup", "complete")
    costs, rows = of_part(document, "costs"), of_part(document, "look-up")
    assert len(costs) == 2, "at the shortest context and at the longest"
    assert all({"1", "2", "3", "5"} <= row["v"].keys() for row in costs) and document["rows"] == [*costs, *rows]
    assert [(row["text"], row["method"], row["k"]) for row in rows] == [
        (f"p.jsonl:{i}", method, k) for i in (1, 2) for method, k in (("lookup", 4), ("hybrid", 4), ("draft", 2))
    ]
    assert all(row["exact"] and row["tokens"] == tiny.greedy(tiny.llama(), ids, 24) for row, ids in zip(rows, [[5, 6, 7, 5, 6, 7, 5]] * 3 + [[13, 12, 11, 10]] * 3, strict=True))  # fmt: skip
    for row in rows:
        matched = sum(map(bool, row["proposed_lengths"])) / row["target_passes"]
        if row["method"] == "lookup":
            assert (row["draft_passes"], row["match_rate"]) == (0, matched)
            assert row["transformers_emitted_lengths"] == row["emitted_lengths"] and len(row["prompt_lookup_s"]) == 1
            assert row["look_up_s"] > 0
        else:
            assert "prompt_lookup_s" not in row and row["draft_passes"] > 0
            assert (row["match_rate"] is None) == (row["method"] == "draft")
            assert row["match_rate"] is None or row["match_rate"] < matched, "rounds of the draft are no matches"
    summary = document["summary"]
    assert (
        summary["rounds"]
        == summary["transformers_rounds"]
        == sum(row["target_passes"] for row in rows if row["method"] == "lookup")
    )
    said = capsys.readouterr().out
    for words in (
        "rounds with a match",
        "transformers' rounds",
        "token for token",
        "too few pairs",
        "one look-up costs",
        "results in",
    ):
        assert words in said


def test_copying_is_predicted_to_cost_its_checks_alone(quick, results):
    """c is 0 for a look-up, whatever the draft beside it costs."""
    assert spec_lookup.main([*quick, "--limit", "1", "--methods", "lookup", "draft"]) == 0
    costs, row, *_ = strict(results)["rows"]
    v = interpolated({int(n): cost for n, cost in costs["v"].items()})
    overhead = row["overhead_s"] / row["target_passes"] / costs["target_pass_s"]
    share = row["baseline_overhead_share"]
    spent = sum(v(length + 1) + overhead for length in row["proposed_lengths"])
    assert costs["c"] > 0
    assert row["predicted_costs"] == pytest.approx(24 * (1 + share / (1 - share)) / spent)


def test_look_up_alone_loads_no_draft_and_takes_any_target(quick, results, draft_folder, capsys):
    argv = [word for word in quick if word not in ("--draft", draft_folder)]
    assert spec_lookup.main([*argv, "--methods", "lookup"]) == 0
    document = strict(results)
    assert document["config"]["draft"] is None
    assert document["config"]["drafts"] == []
    assert [row["method"] for row in of_part(document, "look-up")] == ["lookup", "lookup"]
    assert all(row["c"] is None for row in of_part(document, "costs"))
    assert " + " not in capsys.readouterr().out.splitlines()[0], "the line that names the models names one"


def test_a_finished_run_is_taken_up_and_nothing_is_measured_again(quick, results, monkeypatch):
    argv = [*quick, "--limit", "1"]
    assert spec_lookup.main(argv) == 0
    rows = strict(results)["rows"]
    monkeypatch.setattr(spec_lookup, "measure_all", lambda *a, **b: pytest.fail("measured again"))
    monkeypatch.setattr(spec_lookup, "prompt_lookup_rounds", lambda *a, **b: pytest.fail("counted again"))
    assert spec_lookup.main([*argv, "--resume"]) == 0
    assert strict(results)["rows"] == rows


def test_a_row_is_written_whole_or_not_at_all_and_measured_on_resuming(quick, results, monkeypatch):
    """Its last figures come from runs of their own: a run killed before them leaves no row that lacks them."""
    argv = [*quick, "--methods", "lookup"]
    assert spec_lookup.main(argv) == 0
    whole = strict(results)
    tiny.killed_at(results, whole["rows"][:-1])
    for name in ("look_ups", "measure_all"):
        with monkeypatch.context() as killed:
            killed.setattr(spec_lookup, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            assert spec_lookup.main([*argv, "--resume"]) != 0
        assert strict(results)["rows"] == whole["rows"][:-1]
    assert spec_lookup.main([*argv, "--resume"]) == 0
    row, before = strict(results)["rows"][-1], whole["rows"][-1]
    assert row.keys() == before.keys()
    for name in ("match_rate", "transformers_rounds", "transformers_emitted_lengths", "tokens"):
        assert row[name] == before[name]
    assert row["look_up_s"] > 0 and len(row["prompt_lookup_s"]) == 1


def test_rounds_that_differ_from_transformers_by_the_same_rule_fail_the_run(quick, monkeypatch, results, capsys):
    monkeypatch.setattr(spec_lookup, "prompt_lookup_rounds", lambda *_: [23, 1])
    assert spec_lookup.main(quick) == 1
    assert "prompt look-up wrote [23, 1] tokens, ours" in capsys.readouterr().out
    assert strict(results)["status"] == "failed"
    assert spec_lookup.main([*quick, "--resume"]) == 1, (
        "a row that failed its check fails the run that takes it up as well"
    )


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [([], 1, "does NOT hold, --match latest"), (["--ngram-min", "2"], 0, "not the same rule")],
)
def test_more_rounds_than_transformers_are_a_failed_claim_where_the_rules_can_be_compared(
    more, code, words, quick, monkeypatch, capsys
):
    monkeypatch.setattr(spec_lookup, "prompt_lookup_rounds", lambda *_: [24])
    assert spec_lookup.main([*quick, "--methods", "lookup", "--match", "latest", *more]) == code
    assert words in capsys.readouterr().out


def row_of(text: str, speedup: float, low: float, high: float, method: str = "lookup", pairs: int = 6) -> dict:
    times = {f"{arm}_s": [1.0] * pairs for arm in ("baseline", "speculative", "baseline_again")}
    return {"text": text, "method": method, "error": None, "speedup": speedup, "speedup_low": low, "speedup_high": high, "aa_low": 0.95, "aa_high": 1.1,
            "near_ties": [], "prediction_error": 0.1, "target_passes": 9, "transformers_rounds": 9, "look_up_s": 2e-5, "target_pass_ms": 20.0, **times}  # fmt: skip


def test_the_verdict_names_where_it_pays_and_where_not():
    args = spec_lookup.parse_args(["--methods", "lookup", "hybrid"])
    rows = [
        row_of("copy", 3.0, 2.5, 3.5),
        row_of("prose", 0.9, 0.8, 0.95),
        row_of("list", 1.05, 1.01, 1.2),
        row_of("copy", 2.0, 1.9, 2.1, "hybrid"),
    ]
    said = spec_lookup.verdict(args, spec_lookup.summarise(rows))
    assert (
        "lookup: pays on copy (3.00x); do not use it on prose (0.90x); no difference beyond the noise on list (1.05x)."
        in said
    )
    assert "hybrid: pays on copy (2.00x)." in said
    assert "costs 0.0010 of a target pass" in said and "36 rounds, generate's prompt look-up 36." in said
    few = spec_lookup.verdict(args, spec_lookup.summarise([row_of("copy", 3.0, None, None, pairs=5)]))
    assert "too few pairs" in few and "pays on copy" not in few


def test_excused_ties_part_the_texts_so_their_rounds_are_not_compared():
    tie = {
        **row_of("copy", 2.0, 1.9, 2.1),
        "near_ties": [{}],
        "transformers_rounds": 2,
        "transformers_emitted_lengths": [9],
        "emitted_lengths": [1],
    }
    args = spec_lookup.parse_args([])
    spec_lookup.check_rounds(args, tie)
    summary = spec_lookup.summarise([tie])
    assert summary["rounds"] is None and not spec_lookup.more_rounds(args, summary)
    assert "1 near-ties excused" in spec_lookup.verdict(args, summary)


def test_a_run_of_which_nothing_could_be_measured_fails(quick, monkeypatch, results, capsys):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(spec_lookup, "measure_all", full)
    assert spec_lookup.main(quick) == 1
    assert "nothing could be measured" in capsys.readouterr().out and strict(results)["status"] == "failed"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ngram-max", "0"], ["--ngram-max", "1 or more"]),
        (["--ngram-min", "0"], ["--ngram-min", "1 or more"]),
        (["--ngram-min", "4"], ["--ngram-min 4: more than --ngram-max 3"]),
        (["-k", "0"], ["-k/--k", "1 or more"]),
        (["--draft-k", "0"], ["--draft-k", "1 or more"]),
        (["--methods", "guess"], ["--methods", "guess", "lookup", "hybrid", "draft"]),
        (["--match", "longest"], ["--match", "longest", "first", "latest"]),
        (["--workload", "poetry"], ["--workload poetry: unknown; choose all", *GROUNDED, *WORKLOADS]),
        (["--target", "somewhere/else"], ["--draft: missing", "--methods lookup"]),
        (["--methods", "lookup", "--k-policy", "confidence"], ["--k-policy confidence", "choose cost"]),
        (["--loop", "essay", "--k-policy", "cost"], ["--k-policy", "--loop essay"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(argv, words, capfd, monkeypatch):
    for module in ("spec_lookup", "spec_harness.options"):
        monkeypatch.setattr(f"{module}.load_pair", lambda *a, **b: pytest.fail("models were loaded first"))
    try:
        code = spec_lookup.main(argv)
    except SystemExit as left:
        code = left.code
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert code == 2 and line.startswith("error: ")
    for word in words:
        assert word in line


def test_the_grounded_prompts_hold_their_own_text_and_are_named_apart():
    assert not GROUNDED.keys() & WORKLOADS.keys()
    assert [name for name, _ in spec_lookup.texts_of(spec_lookup.parse_args([]))] == [*GROUNDED, *WORKLOADS]
    assert spec_lookup.texts_of(spec_lookup.parse_args(["--workload", "answer"])) == [("answer", GROUNDED["answer"])]
    assert all(len(text.split()) > 150 or "class Account" in text for text in GROUNDED.values())
    assert "cents" in GROUNDED["code edit"] and GROUNDED["code edit"].count("class Account") == 2


@pytest.mark.parametrize("policy", ["heuristic", "confidence", "cost"])
def test_a_k_policy_changes_the_rounds_and_never_the_text(policy, quick, results, capsys):
    assert spec_lookup.main([*quick, "--limit", "1", "--methods", "lookup", "hybrid", "--k-policy", policy]) == 0
    rows = of_part(strict(results), "look-up")
    assert [row["method"] for row in rows] == ["lookup", "hybrid"]
    assert all(row["exact"] and row["tokens"] == tiny.greedy(tiny.llama(), [5, 6, 7, 5, 6, 7, 5], 24) for row in rows)
    assert "not the same rule" in " ".join(capsys.readouterr().out.split())
