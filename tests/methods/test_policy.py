"""k policies: what they ask for, what they learn, and that none of them can change a text."""

from __future__ import annotations

import argparse
import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_adaptive
import tiny
from clock_world import Price, World
from spec_adaptive import Requests, run_requests
from spec_counts import Decoded
from spec_decode import Mismatch, counts
from spec_harness.arms import Method, Run, draft_model, run_speculative
from spec_harness.replay import cheapest_way, on_one_ruler, record
from spec_harness.theory import best_k, even_costs, interpolated, measured_v
from spec_methods.policy import (
    FORGET,
    LOOP_OVERHEAD,
    POLICIES,
    PROBE_EVERY,
    Confidence,
    Cost,
    FixedK,
    Schedule,
    make_policy,
)

TARGET = tiny.llama()
DRAFTS = {"itself": TARGET, "near": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}
FREE = interpolated({1: 1.0, 16: 1.0})  # checking costs nothing
DEAR = interpolated({1: 1.0, 2: 2.0, 3: 3.0})  # a token more costs a pass more: no guess can pay


def feed(policy, rounds, outcome, confident=False, confidence=0.5):
    """What a policy asked for over some rounds; `outcome(asked)` is how many guesses were right."""
    asked = []
    for _ in range(rounds):
        budget = policy.budget(confident)
        assert confident or budget.enough is None, "no confidence will be there to look at"
        made = 0
        while made < budget.depth:
            made += 1
            if budget.enough and budget.enough(confidence):
                break
        asked.append(made)
        policy.learn(made, outcome(made))
    return asked


def test_the_schedule_goes_up_by_two_and_down_by_one():
    policy = Schedule(8)
    assert feed(policy, 3, lambda k: k) == [5, 7, 8]
    assert feed(policy, 9, lambda k: 0) == [8, 7, 6, 5, 4, 3, 2, 1, 1]
    assert Schedule(3).budget(True) == (3, None)


def test_a_round_without_guesses_teaches_nothing():
    for name in POLICIES:
        policy = make_policy(name, 4, [0.1], FREE)
        before = vars(policy).copy()
        policy.learn(0, 0)
        assert vars(policy) == before


def test_confidence_ends_a_block_after_the_first_doubtful_guess():
    policy = Confidence(6, 0.4)
    assert not policy.enough(0.4) and policy.enough(0.39)
    assert feed(policy, 2, lambda k: 0, confident=True, confidence=0.3) == [1, 1]
    assert feed(policy, 2, lambda k: 0, confident=True, confidence=0.9) == [6, 6]


def test_cost_asks_for_no_guess_where_none_can_pay_but_looks_again_now_and_then():
    asked = feed(Cost(8, [0.2], DEAR), 3 * PROBE_EVERY, lambda k: 0)
    assert set(asked) == {0, 1} and asked.count(1) == 3


def test_cost_comes_back_when_guesses_begin_to_be_right():
    policy = Cost(8, [0.05], interpolated({1: 1.0, 9: 1.4}))
    assert feed(policy, 60, lambda k: 0)[-1] <= 1
    assert feed(policy, 80, lambda k: k)[-1] == 8


@pytest.mark.parametrize(("alpha", "c"), [(0.9, 0.05), (0.5, 0.1), (0.7, 0.3)])
def test_cost_without_confidences_comes_to_the_k_of_the_formula(alpha, c):
    """Fed rounds that keep the mean of a geometric law, it settles at what theory.best_k gives for that alpha."""
    costs = even_costs(c, {1: 1.0, 2: 1.06, 4: 1.12, 8: 1.31, 16: 1.9})
    policy = Cost(8, [c], measured_v(costs))
    policy.right, policy.judged = alpha * 1e6, 1e6
    wanted, _ = best_k(alpha, costs, 8)
    assert policy.budget(False) == (wanted, None)
    with_confidences = policy.budget(True)
    assert with_confidences.depth == (8 if wanted else 0), "with confidences, `enough` ends the block"
    assert bool(with_confidences.enough) == bool(wanted)


def test_cost_drafts_on_behind_a_sure_guess_and_stops_behind_a_doubtful_one():
    v = interpolated({1: 1.0, 2: 1.06, 4: 1.12, 8: 1.31, 16: 1.9})
    sure, doubtful = (feed(Cost(8, [0.1], v), 1, lambda k: k, True, confidence)[0] for confidence in (0.99, 0.05))
    assert sure == 8 and doubtful == 1


def test_cost_weighs_a_block_by_what_time_brings_elsewhere():
    """By hand: guesses are free of cost but for one long pass, alpha 1/2, so the best fixed k is 1 at 1.5 tokens in 1.2 passes
    (rate 1.25). Behind a guess that is all but sure a second, worth 1/2 in 0.3, is made; behind a hopeless one none."""
    policy = Cost(2, [0.0], interpolated({1: 1.0, 2: 1.2, 3: 1.5}))
    policy.right, policy.judged = 5e8, 1e9
    assert policy.budget(True).depth == 2 and policy.rate == pytest.approx(1.25)
    assert not policy.enough(1.0), "0.998 / 2 = 0.499 > 1.25 * 0.3"
    policy.budget(True)
    policy.offset = -3.0
    assert policy.enough(0.5), "0.11 / 2 = 0.05 < 1.25 * 0.3"
    policy.budget(True)
    policy.offset = 0.1
    assert not policy.enough(0.6) and policy.acceptance(0.6) > 0.75, "0.80 / 2 = 0.40 > 0.375"
    policy.budget(True)
    assert policy.enough(0.5) and policy.acceptance(0.5) < 0.75, "0.73 / 2 = 0.366 < 0.375"


def test_cost_learns_that_a_text_is_easier_than_the_draft_thinks():
    v = interpolated({1: 1.0, 8: 1.3})
    policy = Cost(8, [0.1], v)
    first = policy.acceptance(0.3)
    feed(policy, 10, lambda k: k, True, 0.3)
    assert policy.acceptance(0.3) > first + 0.2
    feed(policy, 30, lambda k: 0, True, 0.3)
    assert policy.acceptance(0.3) < first


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_cost_never_leaves_its_bounds(rounds):
    policy = Cost(6, [0.1], FREE)
    for confidence, right in rounds:
        made = feed(policy, 1, lambda k, right=right: k if right else 0, True, confidence)[0]
        assert 0 <= made <= 6 and 0 < policy.acceptance(confidence) < 1


@given(
    draft=st.sampled_from(sorted(DRAFTS)),
    name=st.sampled_from(POLICIES),
    k=st.integers(0, 8),
    n=st.integers(1, 40),
    c=st.floats(0, 1),
)
def test_no_policy_changes_the_text(draft, name, k, n, c):
    policy = make_policy(name, max(k, 1), [c], FREE)
    done = tiny.speculated(TARGET, DRAFTS[draft], n=n, policy=policy)
    assert done.tokens == tiny.greedy(TARGET, tiny.PROMPT, n)
    assert policy.most == max(k, 1) and max(map(len, done.proposals)) <= max(k, 1)


def judged_as_foreseen(target, draft, n: int, k: int):
    """Against the loop itself: at every round of a run, that many of its guesses were kept, as far as it looked."""
    task = tiny.task(target, n=n)
    method = draft_model(task, draft, k)
    done = run_speculative(task, method).done
    runs, place = record(task, method.drafter, done.tokens, k).right, 0
    for guesses, kept, emitted in zip(done.proposals, done.accepted, done.emitted, strict=True):
        assert min(runs[place], len(guesses)) == kept
        yield guesses, runs[place], place
        place += emitted
    assert place == len(done.tokens)


def test_the_oracle_knows_where_the_draft_is_right():
    assert any(guesses for guesses, _, _ in judged_as_foreseen(TARGET, DRAFTS["near"], 30, 4))


@pytest.mark.parametrize(("ours", "theirs"), [(176, 160), (160, 176)])
def test_the_oracle_takes_padded_tables(ours, theirs):
    """Ids that the draft cannot read silence it; ids that the target lacks it never says."""
    models = tiny.qwen2(vocab_size=ours), tiny.qwen2(seed=1, vocab_size=theirs)
    for guesses, right, place in judged_as_foreseen(*models, 40, 4):
        assert guesses or not right or place + 1 == 40


def test_the_oracle_is_no_worse_than_any_fixed_k():
    """On the one ruler that both are laid on."""
    costs = {"v": {"1": 1.0, "2": 1.05, "9": 1.4}, "c": 0.1, "c_places": [0.1], "c2": 0.1}
    v = interpolated({1: 1.0, 2: 1.05, 9: 1.4})
    for draft in DRAFTS.values():
        task = tiny.task(TARGET, n=40)
        method = draft_model(task, draft, 1)
        ideal = cheapest_way(record(task, method.drafter, run_speculative(task, method).done.tokens, 8).right, 8, costs)
        for k in range(9):
            done = run_speculative(task, draft_model(task, draft, k)).done
            spent = done.draft_passes * 0.1 + sum(v(len(g) + 1) + LOOP_OVERHEAD for g in done.proposals)
            assert on_one_ruler(counts(done, k), costs) == pytest.approx(40 * (1 + LOOP_OVERHEAD) / spent)
            assert 40 * (1 + LOOP_OVERHEAD) / spent <= ideal + 1e-9


def test_a_block_costs_its_draft_passes_each_by_its_place():
    """A target pass over m + 1 tokens, m draft passes: 0.35 the first, 0.1 all behind it; a round without guesses drafts nothing."""
    policy = Cost(3, [0.35, 0.1], interpolated({1: 1.0, 3: 1.5}), 0.02)
    assert policy.passes == pytest.approx([1.02, 0.35 + 1.25 + 0.02, 0.45 + 1.5 + 0.02, 0.55 + 1.75 + 0.02])
    assert Cost(2, [], interpolated({1: 1.0})).passes == [1.0, 1.0, 1.0], "where no model drafts"
    policy.step, policy.confidences = 0.0, [0.5]
    policy.learn(1, 0)
    assert policy.offset == 0.0, "a policy's own constants, not the module's"
    policy.begin()
    del policy.step
    assert vars(make_policy("cost", 3, [0.35, 0.1], interpolated({1: 1.0, 3: 1.5}), 0.4, 0.02)) == vars(policy)


def test_the_oracle_keeps_no_guess_that_is_wrong():
    """Nothing is left but plain steps, which are what plain decoding takes."""
    task = tiny.task(TARGET, n=20)
    method = draft_model(task, DRAFTS["wrong"], 3)
    runs = record(task, method.drafter, run_speculative(task, method).done.tokens, 3).right
    assert cheapest_way(
        runs, 8, {"v": {"1": 1.0, "9": 1.4}, "c": 0.1, "c_places": [0.1], "c2": 0.1}
    ) == pytest.approx(1)


def test_the_loop_asks_the_policy_after_every_guess():
    for threshold, longest in ((1.1, 1), (0.0, 4)):
        done = tiny.speculated(TARGET, TARGET, n=20, policy=Confidence(4, threshold))
        assert max(map(len, done.proposals)) == longest


# ----------------------------------------------------------------------------------------------------- from text to text


def taught(name: str):
    """A policy after some rounds in which nothing was right."""
    policy = make_policy(name, 8, [0.1], interpolated({1: 1.0, 9: 1.4}), LOOP_OVERHEAD)
    feed(policy, 20, lambda k: 0, True, 0.6)
    return policy


def known(policy) -> dict:
    return {
        name: value for name, value in vars(policy).items() if name not in ("confidences", "reach", "tokens", "rate")
    }


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_begun_again_is_a_fresh_one(name):
    policy = taught(name)
    policy.begin()
    assert vars(policy) == vars(make_policy(name, 8, [0.1], interpolated({1: 1.0, 9: 1.4}), LOOP_OVERHEAD))


@pytest.mark.parametrize("name", ["heuristic", "cost"])
def test_a_policy_forgets_between_texts_unless_it_is_to_go_on(name):
    """The second of two texts counts as it does alone; where it goes on, as what was learnt from the first has it."""
    task = tiny.task(TARGET, n=40)
    wrong, right = DRAFTS["wrong"], DRAFTS["itself"]
    policy = taught(name)

    def second(go_on: bool):
        run_speculative(task, Method(draft_model(task, wrong, 8).drafter, policy))
        left = copy.copy(policy)
        done = run_speculative(task, Method(draft_model(task, right, 8).drafter, policy), go_on=go_on).done
        return done, left

    alone = run_speculative(task, Method(draft_model(task, right, 8).drafter, taught(name))).done
    forgot, _ = second(go_on=False)
    assert forgot == alone, "what came before, in the test or in the first text, is forgotten"
    went_on, left = second(go_on=True)
    assert len(went_on.rounds) > len(alone.rounds), "it looks less far at first"
    assert went_on.tokens == alone.tokens
    # The same rounds again, from what the first text left behind.
    again = run_speculative(task, Method(draft_model(task, right, 8).drafter, left), go_on=True).done
    assert again == went_on and known(left) == known(policy)


def test_requests_written_one_after_the_other_teach_one_policy_and_a_new_arm_begins_anew():
    tasks = {name: tiny.task(TARGET, prompt, 30) for name, prompt in (("one", tiny.PROMPT), ("two", (7, 8, 9)))}
    drafter = draft_model(tasks["one"], DRAFTS["itself"], 8).drafter
    method = Method(drafter, Schedule(8))
    first = run_requests(tasks, method)
    assert [len(run.done.proposals[0]) for run in first.runs.values()] == [5, 8]
    again = run_requests(tasks, method)
    assert [run.done for run in again.runs.values()] == [run.done for run in first.runs.values()]
    apart = [run_speculative(task, method).done for task in tasks.values()]
    assert [len(done.proposals[0]) for done in apart] == [5, 5]


def test_guesses_behind_a_wrong_one_were_never_judged():
    policy = Cost(8, [0.1], FREE)
    right, judged = policy.right, policy.judged
    policy.learn(8, 2)
    assert policy.right == pytest.approx(FORGET * right + 2) and policy.judged == pytest.approx(FORGET * judged + 3)


@pytest.fixture
def small(target_folder, draft_folder, results, monkeypatch):
    monkeypatch.setattr("spec_harness.options.WORKLOADS", {"one": "w1 w5 w9", "two": "w2 w2 w3"})
    pair = ["--target", target_folder, "--draft", draft_folder, "--results", str(results)]
    return [*pair, "--n-tokens", "12", "--ks", "1,3", "-k", "4", "--repeats", "6", "--warmup", "0", "--threads", "1"]


def test_the_script_compares_every_policy_and_goes_on_where_it_was(small, results, capsys):
    assert spec_adaptive.main(small) == 0
    document = json.loads(results.read_text())
    arms = {(row["arm"], row["text"]) for row in document["summary"]["arms"]}
    every = {"k = 1", "k = 3", *POLICIES[1:], "alone again (A/A)"}
    assert arms == {(arm, text) for arm in every for text in ("all", "one", "two")}
    out = capsys.readouterr().out
    assert "the claim" in out and all(arm in out for arm in every)
    assert spec_adaptive.main([*small, "--resume"]) == 0
    assert json.loads(results.read_text())["rows"] == document["rows"], "nothing is measured twice"


@pytest.mark.parametrize("kept", [0, 1, 2, 4, 9])
def test_a_sweep_that_was_killed_anywhere_is_finished(small, results, kept, capsys):
    small[small.index("--repeats") + 1] = "1"
    assert spec_adaptive.main(small) == 0
    document = json.loads(results.read_text())
    whole = [(row["part"], row.get("arm"), row.get("text"), row.get("turn")) for row in document["rows"]]
    tiny.killed_at(results, document["rows"][:kept])
    assert spec_adaptive.main([*small, "--resume"]) == 0
    rows = json.loads(results.read_text())["rows"]
    assert sorted(map(str, whole)) == sorted(
        str((row["part"], row.get("arm"), row.get("text"), row.get("turn"))) for row in rows
    )
    assert "too few turns" in capsys.readouterr().out


def test_a_text_that_is_not_the_targets_own_fails_the_run(small, monkeypatch, capsys):
    real = spec_adaptive.run_speculative

    def spoiled(*given, **more):
        run = real(*given, **more)
        run.done.tokens[-1] ^= 1
        return run

    monkeypatch.setattr(spec_adaptive, "run_speculative", spoiled)
    assert spec_adaptive.main(small) == 1
    assert "not the target's own text" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--loop", "essay"], ["--ks", "0"], ["-k", "0"], ["--confidence", "1.5"], ["--confidence", "nan"]]
)
def test_bad_input_is_one_line(small, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        spec_adaptive.main([*small, *wrong])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# ------------------------------------------------------------------------------------------------ what cannot be seen in texts


def test_what_a_policy_is_told_of_a_guess_is_the_drafts_own_probability():
    """Of the very token that was guessed, after the very text: from passes that know no cache."""
    told, done = [], None
    policy = Confidence(4)
    policy.enough = lambda confidence: told.append(confidence)
    draft = DRAFTS["near"]
    done, text = tiny.speculated(TARGET, draft, n=20, policy=policy), list(tiny.PROMPT)
    expected = []
    for guesses, emitted in zip(done.proposals, done.emitted, strict=True):
        for i, guess in enumerate(guesses):
            logits = draft(torch.tensor([[*text, *guesses[:i]]]), use_cache=False).logits[0, -1]
            expected.append(float(logits.softmax(-1)[guess]))
        text += done.tokens[len(text) - len(tiny.PROMPT) :][:emitted]
    assert told == pytest.approx(expected, abs=1e-4) and min(told) < 0.9 and len(set(told)) > 5


def test_a_policy_learns_what_was_accepted_of_what_was_proposed():
    heard = []
    policy = FixedK(3)
    policy.learn = lambda proposed, accepted: heard.append((proposed, accepted))
    done = tiny.speculated(TARGET, DRAFTS["near"], n=30, policy=policy)
    assert heard == list(zip(map(len, done.proposals), done.accepted, strict=True))
    assert any(proposed > accepted for proposed, accepted in heard)


def test_a_guess_is_reached_only_through_those_before_it():
    """The chance that a third guess counts is the product of all three, and the block's tokens are their sum."""
    policy = Cost(8, [0.1], FREE)
    policy.budget(True)
    a, b, c = map(policy.acceptance, (0.9, 0.6, 0.3))
    for confidence in (0.9, 0.6, 0.3):
        policy.enough(confidence)
    assert policy.reach == pytest.approx(a * b * c) and policy.tokens == pytest.approx(1 + a + a * b + a * b * c)


# ---------------------------------------------------------------------------------------------------- what the script claims


TASKS = {"one": tiny.task(TARGET, n=8), "two": tiny.task(TARGET, (7, 8, 9), 8)}
ARGS = argparse.Namespace(allow_near_ties=False, warmup=0)
COSTS = [
    {"context": 8, "v": {1: 1.0, 9: 1.4}, "c": 0.1, "c_places": [0.1], "c2": 0.1, "target_pass_s": 1.0}
]


def every_arm() -> dict:
    return {
        name: Method(draft_model(TASKS["one"], DRAFTS["itself"], 8).drafter, make_policy(name, 8, [0.1], FREE))
        for name in POLICIES[:3]
    }


def spoilt(monkeypatch, name: str, call: int) -> None:
    """The run of that number gets its last token wrong, whoever runs it."""
    calls, real = [], getattr(spec_adaptive, name)

    def run(*given, **more):
        found = real(*given, **more)
        calls.append(1)
        if len(calls) == call:
            found.done.tokens[-1] ^= 1
        return found

    monkeypatch.setattr(spec_adaptive, name, run)


@pytest.mark.parametrize(("name", "calls"), [("run_speculative", 6), ("run_baseline", 4)])
def test_every_text_of_every_arm_of_a_turn_is_checked(name, calls, monkeypatch):
    expected = {text: tiny.plainly(TARGET, task.prompt[0].tolist(), 8).tokens for text, task in TASKS.items()}
    assert spec_adaptive.turn_row(TASKS, expected, every_arm(), 0, 0, ARGS)["near_ties"] == []
    for call in range(1, calls + 1):
        with monkeypatch.context() as once, pytest.raises(Mismatch):
            spoilt(once, name, call)
            spec_adaptive.turn_row(TASKS, expected, every_arm(), 0, 0, ARGS)


def test_the_order_of_the_arms_changes_from_turn_to_turn(monkeypatch):
    orders, arms = [], every_arm()
    monkeypatch.setattr(spec_adaptive, "check_exact", lambda *_: [])
    monkeypatch.setattr(
        spec_adaptive,
        "run_requests",
        lambda tasks, method: (orders[-1].append(method), Requests({"one": Run(Decoded(), 0.0, 1.0)}))[1],
    )
    for turn in range(12):
        orders.append([])
        spec_adaptive.turn_row({"one": TASKS["one"]}, {"one": []}, arms, turn, 0, ARGS)
    places = [[order.index(method) for order in orders] for method in arms.values()]
    assert all(len(set(mine)) >= 4 for mine in places), "no arm keeps its place"
    assert orders[1::2] == [order[::-1] for order in orders[::2]]


@pytest.mark.parametrize("call", [1, 2])
def test_every_counted_text_is_checked(call, monkeypatch):
    plain = run_requests(TASKS, None, watched=True)
    spoilt(monkeypatch, "run_speculative", call)
    with pytest.raises(Mismatch):
        spec_adaptive.counted_rows(TASKS, plain, "heuristic", every_arm()["heuristic"], COSTS, ARGS)


def test_the_counted_run_begins_with_a_policy_that_has_learnt_nothing():
    plain, method = run_requests(TASKS, None, watched=True), every_arm()["heuristic"]
    run_requests(TASKS, method)
    rows = spec_adaptive.counted_rows(TASKS, plain, "heuristic", method, COSTS, ARGS)
    assert [row["proposed_lengths"][0] for row in rows] == [5, 7], "what the first text taught, and no other"


def test_no_arm_of_a_turn_looks_at_the_clock_on_its_way(monkeypatch):
    world = World(monkeypatch)
    world.reading = 1.0
    target, draft = tiny.llama(num_hidden_layers=1), tiny.llama(num_hidden_layers=1)
    tasks = {"one": tiny.task(world.priced(target, Price(64)), n=8)}
    methods = {"k = 3": Method(draft_model(tasks["one"], world.priced(draft, Price(8)), 3).drafter, FixedK(3))}
    seconds = spec_adaptive.turn_row(tasks, {"one": tiny.plainly(target, n=8).tokens}, methods, 0, 0, ARGS)["seconds"]
    assert seconds == {
        spec_adaptive.PLAIN: {"one": 8 * 64 + 1},
        "k = 3": {"one": 6 * 8 + 2 * 64 + 1},
        spec_adaptive.AGAIN: {"one": 8 * 64 + 1},
    }


@pytest.mark.parametrize(("share", "holds"), [(0.98, True), (0.975, True), (0.965, False), (0.9, False)])
def test_the_claim_holds_within_three_hundredths_of_the_best_fixed_k_on_every_text(share, holds):
    speeds = {"k = 1": 1.2, "k = 3": 1.5, "cost": 1.5 * share}
    turn = {spec_adaptive.PLAIN: {"one": 1.0}, spec_adaptive.AGAIN: {"one": 1.0}} | {
        arm: {"one": 1 / speed} for arm, speed in speeds.items()
    }
    rows = [{"arm": arm, "text": text, "speedup": speed, "speedup_low": speed, "speedup_high": speed, "aa_low": 1.0, "aa_high": 1.0, "pairs": 6}
            for arm, speed in speeds.items() for text in ("all", "one")]  # fmt: skip
    said = spec_adaptive.verdict([turn] * 6, rows, ["one"], 0)
    assert f"cost {1.5 * share:.2f}x" in said and "of the best fixed (k = 3)" in said
    assert ("the claim holds" in said) == holds and ("the claim does not hold on one" in said) != holds
