"""Every script, from the shell's point of view: help from any folder, a run on a tiny pair, what it prints and writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from spec_common import HERE

import pytest

import spec_bench
import spec_decode
import spec_drafts
import spec_one_pass
import spec_plot
import spec_precondition
import tiny
from clock_world import Price, World
from spec_harness import costs
from spec_harness.drawing import THEMES
from spec_harness.tables import shown_rounds
from spec_loop import ModelDrafter, forward, new_cache
from spec_models import embedded
from workloads import WORKLOADS

SCRIPTS = sorted(path for path in Path(HERE).glob("*.py") if "def main(" in path.read_text())
CHILD = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """The device's limits are measured on megabytes, not on gigabytes."""
    monkeypatch.setattr(costs, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(costs, "SQUARE", {"cpu": 64})


def strict(path: Path) -> dict:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))


def finished(path: Path, experiment: str) -> dict:
    """The document of a run that went well, as a strict reader sees it."""
    document = strict(path)
    assert (document["experiment"], document["status"]) == (experiment, "complete")
    assert document["rows"] and document["summary"]
    assert str(path.parent) not in path.read_text(), "no folder of this machine in the file"
    return document


# ------------------------------------------------------------------------------------------------------------------ help

HELP = """
import io, runpy, sys, contextlib
for script in sys.argv[1:]:
    folder = script.rsplit("/", 1)[0]
    said, code = io.StringIO(), None
    sys.path.insert(0, folder)
    sys.argv = [script, "--help"]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        code = left.code
    assert sys.path.pop(0) == folder, "sys.path was edited"
    print("\\x1e", script.rsplit("/", 1)[1], code, said.getvalue(), sep="\\n", flush=True)
"""


@pytest.fixture(scope="session")
def helps(tmp_path_factory) -> dict[str, str]:
    """What --help of every script says, in a process of its own, called from another folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    argv = [sys.executable, "-c", HELP, *map(str, SCRIPTS)]
    done = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, timeout=300, env={**CHILD, "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "help writes nothing"
    parts = [part.strip().split("\n", 2) for part in done.stdout.split("\x1e")[1:]]
    assert all(code == "0" for _, code, _ in parts)
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_help_shows_the_claim_a_command_and_every_default(script, helps):
    text = helps[script]
    assert f"python {script}" in text
    if script.startswith("spec_"):
        assert "Claim: " in text
        assert "results" in text
    if "make_parser(" in (HERE / script).read_text():
        for option in (
            "--device",
            "--dtype",
            "--threads",
            "--repeats",
            "--warmup",
            "--trust-remote-code",
            "--cpu-linear",
        ):
            assert option in text
        assert "(default: auto)" in text and "(default: False)" in text


def test_every_script_has_a_main_that_takes_arguments():
    names = {path.stem for path in SCRIPTS}
    assert {
        "spec_one_pass",
        "spec_precondition",
        "spec_decode",
        "spec_bench",
        "spec_drafts",
        "spec_plot",
    } <= names


# -------------------------------------------------------------------------------------------------------------- one pass


def one_pass(model: str, results, *more: str) -> int:
    text = ["--text", "w1 w5 w9 w13 w2 w7"]
    return spec_one_pass.main(["--device", "cpu", "--model", model, "--results", str(results), *text, *more])


def test_one_pass_gives_the_prediction_of_every_prefix(target_folder, results, capsys):
    assert one_pass(target_folder, results, "--truncate", "3") == 0
    rows = finished(results, "spec_one_pass")["rows"]
    target, ids = tiny.llama(), [5, 9, 13, 17, 6, 11]
    assert [row["prediction_id"] for row in rows] == [tiny.greedy(target, ids[: i + 1], 1)[0] for i in range(6)]
    assert all(row["alone_same"] for row in rows)
    assert [row.get("truncated_same") for row in rows] == [True] * 3 + [None] * 3
    said = capsys.readouterr().out
    assert "the nesting holds" in said and "6 predictions, one pass" in said


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_in_half_precision_is_not_taken_for_looking_ahead(dtype, target_folder, results):
    assert one_pass(target_folder, results, "--dtype", dtype) == 0


def test_a_model_that_looks_ahead_fails_at_the_position_where_it_does(disk, results, capsys):
    import transformers as T

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "initializer_range": 0.4,
    }
    folder = tiny.save(tiny.build(T.BertConfig(vocab_size=64, **sizes)), disk / "looks ahead")
    assert one_pass(folder, results) == 1
    assert "does NOT hold, first at position 0" in capsys.readouterr().out
    summary = strict(results)["summary"]
    assert (summary["nesting_holds"], summary["first_broken_position"]) == (False, 0)


def test_a_truncation_longer_than_the_text_is_refused(target_folder, results, capsys):
    assert one_pass(target_folder, results, "--truncate", "6") == 2
    assert "--truncate 6: the text has 6 tokens" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- precondition


def precondition(results, *more: str) -> int:
    return spec_precondition.main(
        ["--device", "cpu", "--results", str(results), "--repeats", "2", "--warmup", "0", "--context", "16", *more]
    )


def test_the_precondition_measures_what_a_pass_costs(target_folder, draft_folder, results, capsys):
    assert precondition(results, "--model", target_folder, "--draft", draft_folder, "--tokens", "2,4,8") == 0
    document = finished(results, "spec_precondition")
    rows, summary = document["rows"], document["summary"]
    assert [row["tokens"] for row in rows] == [1, 2, 4, 8], "one token is always there: everything is told against it"
    assert rows[0]["v"] == 1.0 and all(len(row["seconds"]) == 2 for row in rows)
    assert summary["c"] > 0 and summary["ridge_tokens"] > 0 and summary["advice"]["c_used"] == summary["c"]
    said = capsys.readouterr().out
    assert "V(n)" in said and "one draft pass" in said and "measured" in said


def test_each_pass_is_timed_at_the_same_context(target_folder, results, monkeypatch):
    """A forward grows its cache: without a rollback the third repeat would run at a longer context than the first."""
    starts = []
    timed = costs.timed
    caches = []
    warm = costs.warm_cache

    def noted(*args):
        caches.append(warm(*args))
        return caches[-1]

    monkeypatch.setattr(costs, "warm_cache", noted)
    monkeypatch.setattr(
        costs, "timed", lambda work, device: starts.append([c.get_seq_length() for c in caches]) or timed(work, device)
    )
    assert precondition(results, "--model", target_folder, "--tokens", "1,2,8", "--repeats", "3") == 0
    passes = [lengths for lengths in starts if lengths]
    assert len(passes) >= 9 and all(lengths == [16] for lengths in passes)


def test_a_shape_can_be_judged_without_its_weights(target_folder, results):
    assert precondition(results, "--model", target_folder, "--random-weights", "--tokens", "1,2") == 0
    assert finished(results, "spec_precondition")["config"]["target"]["weights"] == "random"


def test_a_cut_draft_serves_the_precondition_too(target_folder, results):
    assert precondition(results, "--model", target_folder, "--draft", "cut:0", "--tokens", "1,2") == 0


def test_a_draft_is_timed_within_the_context_it_has(disk, results, capsys):
    """16 in the cache, one token at a time, a table of 22 positions: never an index error."""
    for positions, code in ((22, 0), (21, 2)):  # a round's draft passes read six tokens at most
        short = tiny.save(tiny.gpt2(n_positions=positions), disk / f"positions {positions}")
        assert precondition(results, "--model", short, "--draft", short, "--tokens", "1,2") == code
    assert "limit of 21" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- decode


def test_decoding_prints_the_table_and_keeps_every_count(pair, results, capsys):
    assert spec_decode.main([*pair, "--prompt", "w1 w5 w9", "-k", "3"]) == 0
    *_, row = finished(results, "spec_decode")["rows"]
    assert row["tokens"] == tiny.greedy(tiny.llama(), [5, 9, 13], 8)
    assert row["exact"] is True and row["accepted"] + row["discarded"] == row["proposed"]
    said = capsys.readouterr().out
    for words in ("tokens per second", "speedup", "target passes", "discarded", "token for token", "results in"):
        assert words in said


@pytest.mark.parametrize("loop", ["lean", "essay"])
def test_a_self_draft_run_checks_that_everything_was_accepted(loop, pair, results, capsys):
    argv = [*pair, "--self-draft", "--vs-transformers", "--prompt", "w1 w5 w9", "-k", "3", "--loop", loop]
    assert spec_decode.main(argv) == 0
    *_, row = finished(results, "spec_decode")["rows"]
    assert row["alpha"] == 1.0 and row["target_passes"] == 2
    assert row["acceptance_rate"] == 1.0, "eight tokens are two whole rounds of four"
    assert len(row["generate_s"]) == len(row["assisted_s"]) == 1
    assert "theirs / ours" in capsys.readouterr().out


def test_a_self_draft_that_is_not_always_accepted_fails_the_run(pair, monkeypatch, capsys):
    """A draft whose cache has a hole writes exact text all the same: only acceptance tells."""
    def wrong_prompt(self, state):
        self.cache, self.blind = new_cache(self.model), False
        forward(self.model, state.ids.roll(1, 1)[:, : state.length - 1], self.cache)

    monkeypatch.setattr(ModelDrafter, "start", wrong_prompt)
    assert spec_decode.main([*pair, "--self-draft", "--prompt", "w1 w5 w9"]) == 1
    assert "a model drafting for itself" in capsys.readouterr().out


def test_a_text_that_is_not_the_targets_own_fails_the_run_and_says_where(pair, results, monkeypatch, capsys):
    run_speculative = spec_decode.run_speculative

    def spoiled(*args, **options):
        run = run_speculative(*args, **options)
        run.done.tokens[4] = (run.done.tokens[4] + 1) % 64
        return run

    monkeypatch.setattr(spec_decode, "run_speculative", spoiled)
    assert spec_decode.main([*pair, "--prompt", "w1 w5 w9"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said and "token 4" in said
    document = strict(results)
    *_, row = document["rows"]
    assert (
        document["status"] == "failed"
        and row["exact"] is False
        and row["speedup"] is None
        and row["mismatch"]["index"] == 4
    )


@pytest.mark.parametrize(("k", "n"), [("0", "6"), ("3", "1"), ("0", "1"), ("50", "4")])
def test_the_smallest_sizes_leave_nulls_not_nans(k, n, pair, results):
    assert spec_decode.main([*pair, "--n-tokens", n, "-k", k, "--prompt", "w7"]) == 0
    *_, row = finished(results, "spec_decode")["rows"]
    assert row["emitted"] == int(n)
    if k == "0" or n == "1":
        assert row["acceptance_rate"] is None and row["alpha"] is None


def test_a_run_stops_at_the_end_token_only_when_asked(pair, disk, results):
    model = tiny.llama()
    text = tiny.greedy(model, [5, 9, 13], 8)
    model.generation_config.eos_token_id = text[3]
    folder = tiny.save(model, disk / "with an end")
    for more, length in ((["--stop-at-eos"], 4), ([], 8)):
        assert spec_decode.main([*pair, "--target", folder, "--prompt", "w1 w5 w9", *more]) == 0
        assert strict(results)["rows"][-1]["tokens"] == text[:length]


def test_the_text_can_be_shown_round_by_round(pair, capsys):
    assert spec_decode.main([*pair, "--prompt", "w1 w5 w9", "-k", "3", "--show"]) == 0
    said = capsys.readouterr().out
    shown = [line for line in said.splitlines() if line.strip()[:1].isdigit() and "target '" in line]
    assert shown and "\033[" not in said, "no colour where nobody sees it"


def test_rounds_show_what_was_kept_corrected_and_thrown_away():
    row = {"tokens": [5, 6, 7, 8], "proposals": [[5, 9], [7, 8]], "paths": [[0], [0, 1]], "emitted_lengths": [2, 2]}
    first, second = shown_rounds(tiny.words(), row, colour=False).splitlines()
    assert first.split(None, 1)[1] == "accepted 'w1'   target ' w2'   discarded ' w5'"
    assert second.split(None, 1)[1] == "accepted ' w3 w4'"
    assert "\033[32m" in shown_rounds(tiny.words(), row, colour=True)


def test_prompts_from_a_file_are_a_row_each_and_resume_finds_them(pair, results, tmp_path, monkeypatch):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('"w1 w2"\n{"text": "w3"}\n{"turns": ["w4", "w5"]}\n')
    argv = [*pair, "--prompt-file", str(prompts), "--limit", "2"]
    assert spec_decode.main(argv) == 0
    rows = finished(results, "spec_decode")["rows"]
    assert [row["workload"] for row in rows if row["part"] == "decode"] == ["p.jsonl:1", "p.jsonl:2"]
    monkeypatch.setattr(spec_decode, "measure", lambda *a, **b: pytest.fail("measured again"))
    assert spec_decode.main([*argv, "--resume"]) == 0
    assert finished(results, "spec_decode")["rows"] == rows


def test_overridden_settings_of_the_checkpoint_are_listed(pair, disk, results):
    model = tiny.llama()
    model.generation_config.repetition_penalty = 1.3
    folder = tiny.save(model, disk / "with a penalty")
    assert spec_decode.main([*pair, "--target", folder, "--prompt", "w1 w5", "--vs-transformers"]) == 0
    document = finished(results, "spec_decode")
    assert document["config"]["generation_config_overridden"] == {"repetition_penalty": 1.3}
    assert document["rows"][-1]["tokens"] == tiny.greedy(tiny.llama(), [5, 9], 8)


def test_a_padded_pair_runs_from_the_shell(pair, disk, results):
    wide = tiny.llama(seed=1, vocab_size=176)
    expected = tiny.greedy(wide, [5, 9], 40)
    assert max(expected) >= 160, "the target must write an id that the draft cannot read"
    target = tiny.save(wide, disk / "wide")
    draft = tiny.save(tiny.llama(vocab_size=160), disk / "narrow")
    assert (
        spec_decode.main(
            [*pair, "--target", target, "--draft", draft, "--prompt", "w1 w5", "--n-tokens", "40", "--vs-transformers"]
        )
        == 0
    )
    assert finished(results, "spec_decode")["rows"][-1]["tokens"] == expected


# --------------------------------------------------------------------------------------------------- bench, drafts, plots


def bench(pair, *more: str) -> int:
    return spec_bench.main([*pair, "--ks", "1,3", "--workloads", "code", "repetitive", *more])


def test_the_bench_sweeps_k_and_workloads_and_predicts_before_it_measures(pair, results, capsys):
    assert bench(pair) == 0
    document = finished(results, "spec_bench")
    rows, summary = document["rows"], document["summary"]
    low, high, *cells = rows
    for one in (low, high):
        assert one["part"] == "costs" and set(one["v"]) == {"1", "2", "4"} and one["v"]["1"] == 1.0
    assert low["context"] < high["context"], "the shortest text and the longest"
    assert [row["k"] for row in cells if row["part"] == "k"] == [1, 3]
    ks = {row["k"] for row in cells if row["part"] == "workload"}
    assert ks == {summary["best_k"], spec_bench.USUAL_K}
    for row in cells:
        assert row["exact"] is True and row["speedup_low"] is None, "one pair has no interval"
        assert row["prediction_error"] == pytest.approx(row["predicted_costs"] - row["speedup"])
    best = max((row for row in cells if row["part"] == "k"), key=lambda row: row["speedup"])
    assert summary["best_k"] == best["k"], "ranked by time, not by acceptance"
    assert summary["best_speedup"] is None, "no text of the workload sweep is the k sweep's: nothing to quote"
    said = capsys.readouterr().out
    assert "guessing further ahead" in said and "the text alone" in said and "the same code against itself" in said


def test_the_best_k_is_the_fastest_not_the_most_accepted():
    """Acceptance falls with k by arithmetic alone; a cell that failed has no speedup to rank."""
    rows = [
        {"k": k, "speedup": speedup, "acceptance_rate": rate}
        for k, speedup, rate in ((1, 1.1, 0.9), (4, 1.4, 0.6), (8, None, 0.95))
    ]
    assert spec_bench.best_of(rows)["k"] == 4
    assert spec_bench.best_of(rows[2:]) is None


def test_where_no_k_pays_the_bench_says_so(pair, target_folder, capsys, monkeypatch):
    """A draft as big as its target that is always wrong: every pass takes a tick, so it takes more than twice as many."""
    World(monkeypatch).price_all(Price(1))
    wrong = Path(target_folder).parent / "wrong"
    if not wrong.exists():
        tiny.save(tiny.always_wrong(tiny.llama()), wrong)
    plain = ["--cpu-linear", "plain", "--pass", "plain"]
    more = ["--n-tokens", "12", "--repeats", "6", "--workloads", "open prose", *plain]
    assert bench([*pair, "--draft", str(wrong)], *more) == 0
    said = capsys.readouterr().out
    assert "do not speculate on open prose with this pair: the best k for open prose: 1" in said
    assert f"{12 / 23:.2f}x ({12 / 23:.2f} to {12 / 23:.2f}, 6 pairs), slower than the target alone" in said


def test_costs_are_measured_within_the_context_the_models_have(pair, disk, results):
    """The text just fits 64 positions; the block of 17 after its middle would not."""
    short = tiny.save(tiny.gpt2(n_positions=64), disk / "sixty-four")
    prompt = len(tiny.words()(WORKLOADS["open prose"])["input_ids"])
    n = str(64 - prompt)
    assert (
        spec_bench.main(
            [*pair, "--target", short, "--draft", short, "--n-tokens", n, "--ks", "1,40", "--workloads", "open prose"]
        )
        == 0
    )


def test_drafts_are_compared_on_one_target(pair, target_folder, draft_folder, results, capsys):
    argv = pair[:2] + pair[2:4] + pair[6:]
    assert spec_drafts.main([*argv, "--drafts", draft_folder, "cut:0", "-k", "3"]) == 0
    document = finished(results, "spec_drafts")
    near, cut = document["summary"]["drafts"]
    assert (near["draft"], cut["draft"]) == ("draft", "cut:0")
    assert near["parameters"] > cut["parameters"]
    for row in (near, cut):
        assert row["accepted"] + row["discarded"] == row["proposed"]
        assert row["alpha_exceeds_c"] == (row["alpha"] > row["c"])
    said = capsys.readouterr().out
    assert "alpha > c" in said and "took the least time" in said


def test_paths_in_a_list_of_drafts_stay_out_of_the_file(pair, draft_folder, results):
    assert spec_drafts.main([*pair[:4], *pair[6:], "--drafts", draft_folder, "cut:1", "-k", "1"]) == 0
    assert str(Path(draft_folder).parent) not in results.read_text()


def test_charts_are_drawn_light_and_dark_from_the_files(pair, target_folder, tmp_path, capsys):
    out = tmp_path / "charts"
    assert spec_plot.main(["--results", str(tmp_path)]) == 2
    assert "run spec_bench.py" in capsys.readouterr().err
    assert bench([*pair, "--results", str(tmp_path / "spec_bench.json")]) == 0
    assert precondition(tmp_path / "spec_precondition.json", "--model", target_folder, "--tokens", "1,2,4") == 0
    assert spec_plot.main(["--results", str(tmp_path), "--out", str(out)]) == 0
    drawn = sorted(path.name for path in out.iterdir())
    named = [name for name, (script, _) in spec_plot.CHARTS.items() if script in ("spec_bench", "spec_precondition")]
    assert drawn == sorted(f"{chart}_{theme}.png" for chart in named for theme in THEMES)
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in out.iterdir())


@pytest.mark.parametrize("content", ["{", "[1]", "3", "{}", '{"rows": [1]}', '{"rows": [], "summary": {}}'])
def test_a_file_that_is_no_result_is_named_or_skipped_not_a_traceback(content, tmp_path, capsys):
    (tmp_path / "spec_bench.json").write_text(content)
    assert spec_plot.main(["--results", str(tmp_path)]) == 2
    assert "spec_bench" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--results", "{folder}"], ["--compare", "{folder}/spec_bench.json", "{folder}/spec_bench.json"]])
def test_no_chart_is_drawn_of_rows_that_were_edited(pair, flags, tmp_path, capsys):
    path = tmp_path / "spec_bench.json"
    assert bench([*pair, "--results", str(path)]) == 0
    document = strict(path)
    document["rows"][-1]["speedup"] = 9.9
    path.write_text(json.dumps(document))
    assert spec_plot.main([flag.format(folder=tmp_path) for flag in flags]) == 2
    assert "spec_bench.json: it was edited" in capsys.readouterr().err


def test_a_chart_of_an_interrupted_run_shows_what_there_is(pair, tmp_path):
    assert bench([*pair, "--results", str(tmp_path / "spec_bench.json")]) == 0
    document = strict(tmp_path / "spec_bench.json")
    document.update(
        status="interrupted", summary={}, rows=[row for row in document["rows"] if row["part"] != "workload"]
    )
    document["rows"].append({**document["rows"][-1], "k": 9, "speedup": None, "error": "out of memory"})
    (tmp_path / "spec_bench.json").write_text(json.dumps(tiny.signed(document)))
    assert spec_plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "k_sweep_light.png",
        "k_sweep_dark.png",
        "time_light.png",
        "time_dark.png",
    }


def test_a_cost_curve_without_its_summary_is_not_drawn_and_that_is_said(target_folder, tmp_path, capsys):
    path = tmp_path / "spec_precondition.json"
    assert precondition(path, "--model", target_folder, "--tokens", "1,2") == 0
    path.write_text(json.dumps(tiny.signed({**strict(path), "status": "interrupted", "summary": {}})))
    assert spec_plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: --results") and not list((tmp_path / "out").glob("*.png"))


def test_the_embedded_target_can_be_fetched_ahead(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(embedded, "ensure_target", lambda: tmp_path)
    assert embedded.main([]) == 0
    assert str(tmp_path) in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- workloads


def test_there_are_five_workloads_and_none_ends_in_a_space():
    assert list(WORKLOADS) == ["code", "repetitive", "open prose", "factual list", "structured"]
    assert all(text.strip() and not text.endswith(" ") for text in WORKLOADS.values())


# ------------------------------------------------------------------------------------------- a sweep that is interrupted


def start_bench(argv: list[str]):
    return subprocess.Popen(
        [sys.executable, str(HERE / "spec_bench.py"), *argv],
        env=CHILD,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job has it ignored
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(process, results: Path, rows: int) -> None:
    """Until the file holds that many rows; the process must not end before."""
    for _ in range(6000):
        if results.exists() and len(strict(results)["rows"]) >= rows:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    pytest.fail("the sweep makes no progress")


def test_a_sweep_survives_ctrl_c_and_a_kill_and_finishes_on_resumption(pair, results, capsys):
    """Ctrl-C after two rows, a kill after two more, then the rest: every cell is there once, none is measured twice."""
    argv = [*pair, "--n-tokens", "48", "--repeats", "3", "--ks", "1,2,3,4,5,6,7,8", "--workloads", "code"]
    first = start_bench(argv)
    wait_for_rows(first, results, 2)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 130 and "--resume" in said and "Traceback" not in said
    interrupted = strict(results)
    assert interrupted["status"] == "interrupted" and len(interrupted["rows"]) >= 2

    second = start_bench([*argv, "--resume"])
    wait_for_rows(second, results, len(interrupted["rows"]) + 2)
    second.kill()
    second.communicate(timeout=120)
    killed = strict(results)
    assert killed["status"] == "running"
    assert killed["rows"][: len(interrupted["rows"])] == interrupted["rows"]

    assert spec_bench.main([*argv, "--resume"]) == 0
    rows = finished(results, "spec_bench")["rows"]
    assert rows[: len(killed["rows"])] == killed["rows"]
    assert [row["k"] for row in rows if row["part"] == "k"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not (results.parent / "old").exists()


def draft_row(name, parameters, alpha, c, speedup):
    return {"draft": name, "parameters": parameters, "alpha": alpha, "c": c, "speedup": speedup, "speedup_low": speedup - 0.01,
            "speedup_high": speedup + 0.01, "aa_low": 0.99, "aa_high": 1.01, "pairs": 6, "error": None,
            "alpha_exceeds_c": alpha > c}  # fmt: skip


def test_the_verdict_on_drafts_says_why_the_larger_one_loses():
    small, agreeing = draft_row("small", 10e6, 0.7, 0.1, 1.5), draft_row("large", 20e6, 0.8, 0.3, 1.2)
    said = spec_drafts.verdict([agreeing, small])
    assert "small took the least time: 1.50x (1.49 to 1.51, 6 pairs), faster than the target alone." in said
    assert (
        "large agrees more (alpha 0.80 against 0.70) and is slower all the same: its pass costs c = 0.30 against 0.10."
        in said
    )
    assert "is larger" not in said, "said once"
    said = spec_drafts.verdict([draft_row("large", 20e6, 0.6, 0.3, 1.2), small])
    assert (
        "large is larger (20.0 M against 10.0 M parameters) and loses: 1.20x, alpha 0.60 against 0.70, c 0.30 against 0.10."
        in said
    )
    assert "do not speculate here" in spec_drafts.verdict([draft_row("slow", 1e6, 0.1, 0.3, 0.8)])
    assert "alpha 0.10 does not exceed c 0.30" in spec_drafts.verdict([draft_row("slow", 1e6, 0.1, 0.3, 0.8)])
