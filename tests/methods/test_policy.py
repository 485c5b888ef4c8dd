"""k policies: what they ask for, what they learn, and that none of them can change a text."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spec_adaptive
import tiny
from spec_adaptive import oracle_speedup, right_guesses
from spec_harness.cells import run_speculative
from spec_harness.theory import best_k, interpolated
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
        k = policy.ahead(confident)
        made = 0
        while made < k:
            made += 1
            if confident and policy.reads_confidence and policy.enough(confidence):
                break
        asked.append(made)
        policy.learn(made, outcome(made))
    return asked


def test_the_schedule_goes_up_by_two_and_down_by_one():
    policy = Schedule(8)
    assert feed(policy, 3, lambda k: k) == [5, 7, 8]
    assert feed(policy, 9, lambda k: 0) == [8, 7, 6, 5, 4, 3, 2, 1, 1]
    assert Schedule(3).ahead(True) == 3


def test_a_round_without_guesses_teaches_nothing():
    for name in POLICIES:
        policy = make_policy(name, 4, 0.1, FREE)
        before = vars(policy).copy()
        policy.learn(0, 0)
        assert vars(policy) == before


def test_confidence_ends_a_block_after_the_first_doubtful_guess():
    policy = Confidence(6, 0.4)
    assert not policy.enough(0.4) and policy.enough(0.39)
    assert feed(policy, 2, lambda k: 0, confident=True, confidence=0.3) == [1, 1]
    assert feed(policy, 2, lambda k: 0, confident=True, confidence=0.9) == [6, 6]


def test_cost_asks_for_no_guess_where_none_can_pay_but_looks_again_now_and_then():
    asked = feed(Cost(8, 0.2, DEAR), 3 * PROBE_EVERY, lambda k: 0)
    assert set(asked) == {0, 1} and asked.count(1) == 3


def test_cost_comes_back_when_guesses_begin_to_be_right():
    policy = Cost(8, 0.05, interpolated({1: 1.0, 9: 1.4}))
    assert feed(policy, 60, lambda k: 0)[-1] <= 1
    assert feed(policy, 80, lambda k: k)[-1] == 8


@pytest.mark.parametrize(("alpha", "c"), [(0.9, 0.05), (0.5, 0.1), (0.7, 0.3)])
def test_cost_without_confidences_comes_to_the_k_of_the_formula(alpha, c):
    """Fed rounds that keep the mean of a geometric law, it settles at what theory.best_k gives for that alpha."""
    v = interpolated({1: 1.0, 2: 1.06, 4: 1.12, 8: 1.31, 16: 1.9})
    policy = Cost(8, c, v)
    policy.right, policy.judged = alpha * 1e6, 1e6
    wanted, _ = best_k(alpha, c, v, 8)
    assert policy.ahead(False) == wanted
    assert policy.ahead(True) == (8 if wanted else 0), "with confidences, `enough` ends the block"


def test_cost_drafts_on_behind_a_sure_guess_and_stops_behind_a_doubtful_one():
    v = interpolated({1: 1.0, 2: 1.06, 4: 1.12, 8: 1.31, 16: 1.9})
    sure, doubtful = (feed(Cost(8, 0.1, v), 1, lambda k: k, True, confidence)[0] for confidence in (0.99, 0.05))
    assert sure == 8 and doubtful == 1


def test_cost_learns_that_a_text_is_easier_than_the_draft_thinks():
    v = interpolated({1: 1.0, 8: 1.3})
    policy = Cost(8, 0.1, v)
    first = policy.acceptance(0.3, 0)
    feed(policy, 10, lambda k: k, True, 0.3)
    assert policy.acceptance(0.3, 0) > first + 0.2
    feed(policy, 30, lambda k: 0, True, 0.3)
    assert policy.acceptance(0.3, 0) < first


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_cost_never_leaves_its_bounds(rounds):
    policy = Cost(6, 0.1, FREE)
    for confidence, right in rounds:
        made = feed(policy, 1, lambda k, right=right: k if right else 0, True, confidence)[0]
        assert 0 <= made <= 6 and 0 < policy.acceptance(confidence, 9) < 1


@given(
    draft=st.sampled_from(sorted(DRAFTS)),
    name=st.sampled_from(POLICIES),
    k=st.integers(0, 8),
    n=st.integers(1, 40),
    c=st.floats(0, 1),
)
def test_no_policy_changes_the_text(draft, name, k, n, c):
    policy = lambda task: make_policy(name, max(k, 1), c, FREE)  # noqa: E731
    task = replace(tiny.task(TARGET, DRAFTS[draft], n=n, k=max(k, 1)), policy=policy)
    (done, _), _ = run_speculative(task)
    assert done.tokens == tiny.greedy(TARGET, tiny.PROMPT, n)
    assert max(map(len, done.proposals)) <= max(k, 1)


def test_the_oracle_knows_where_the_draft_is_right():
    """Against the loop itself: at every round of a run, that many of its guesses were kept, as far as it looked."""
    task = tiny.task(TARGET, DRAFTS["near"], n=30, k=4)
    (done, _), _ = run_speculative(task)
    runs, place = right_guesses(task, done.tokens), 0
    for guesses, kept, emitted in zip(done.proposals, done.accepted, done.emitted, strict=True):
        assert min(runs[place], len(guesses)) == kept
        place += emitted


@pytest.mark.parametrize(("ours", "theirs"), [(176, 160), (160, 176)])
def test_the_oracle_takes_padded_tables(ours, theirs):
    """Ids that the draft cannot read silence it; ids that the target lacks it never says."""
    task = tiny.task(tiny.qwen2(vocab_size=ours), tiny.qwen2(seed=1, vocab_size=theirs), n=40, k=4)
    (done, _), _ = run_speculative(task)
    runs, place = right_guesses(task, done.tokens), 0
    for guesses, kept, emitted in zip(done.proposals, done.accepted, done.emitted, strict=True):
        assert min(runs[place], len(guesses)) == kept
        assert guesses or not runs[place] or place + 1 == len(done.tokens)
        place += emitted


def test_the_oracle_is_no_worse_than_any_fixed_k():
    costs = {"v": {"1": 1.0, "2": 1.05, "9": 1.4}, "c": 0.1}
    v = interpolated({1: 1.0, 2: 1.05, 9: 1.4})
    for draft in DRAFTS.values():
        task = tiny.task(TARGET, draft, n=40)
        (plain, _), _ = run_speculative(replace(task, k=1))
        ideal = oracle_speedup(right_guesses(task, plain.tokens), 8, costs)
        for k in range(9):
            (done, _), _ = run_speculative(replace(task, k=k, policy=lambda _, k=k: FixedK(k)))
            spent = done.draft_passes * 0.1 + sum(v(len(g) + 1) + LOOP_OVERHEAD for g in done.proposals)
            assert 40 / spent <= ideal + 1e-9


def test_the_oracle_keeps_no_guess_that_is_wrong():
    wrong = tiny.task(TARGET, DRAFTS["wrong"], n=20)
    (plain, _), _ = run_speculative(wrong)
    assert oracle_speedup(
        right_guesses(wrong, plain.tokens), 8, {"v": {"1": 1.0, "9": 1.4}, "c": 0.1}
    ) == pytest.approx(1 / (1 + LOOP_OVERHEAD))


def test_the_loop_asks_the_policy_after_every_guess():
    for threshold, longest in ((1.1, 1), (0.0, 4)):
        task = replace(
            tiny.task(TARGET, TARGET, n=20, k=4), policy=lambda _, threshold=threshold: Confidence(4, threshold)
        )
        (done, _), _ = run_speculative(task)
        assert max(map(len, done.proposals)) == longest


def test_guesses_behind_a_wrong_one_were_never_judged():
    policy = Cost(8, 0.1, FREE)
    right, judged = policy.right, policy.judged
    policy.learn(8, 2)
    assert policy.right == pytest.approx(FORGET * right + 2) and policy.judged == pytest.approx(FORGET * judged + 3)


@pytest.fixture
def small(target_folder, draft_folder, results, monkeypatch):
    monkeypatch.setattr(spec_adaptive, "WORKLOADS", {"one": "w1 w5 w9", "two": "w2 w2 w3"})
    pair = ["--target", target_folder, "--draft", draft_folder, "--results", str(results)]
    return [*pair, "--n-tokens", "12", "--ks", "1,3", "-k", "4", "--repeats", "3", "--warmup", "0", "--threads", "1"]


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
    results.write_text(json.dumps({**document, "rows": document["rows"][:kept], "status": "running", "summary": {}}))
    assert spec_adaptive.main([*small, "--resume"]) == 0
    rows = json.loads(results.read_text())["rows"]
    assert sorted(map(str, whole)) == sorted(
        str((row["part"], row.get("arm"), row.get("text"), row.get("turn"))) for row in rows
    )
    assert "too few turns" in capsys.readouterr().out


def test_a_text_that_is_not_the_targets_own_fails_the_run(small, monkeypatch, capsys):
    real = spec_adaptive.run_speculative

    def spoiled(task, *rest):
        (done, prefill_s), decode_s = real(task, *rest)
        done.tokens[-1] ^= 1
        return (done, prefill_s), decode_s

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
