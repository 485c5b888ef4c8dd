"""Result files: what a strict reader takes, whole at every moment, resumable only with the same settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

from spec_common import UserError

import numpy as np
import pytest
import torch

import spec_decode
from spec_cli import command
from spec_harness import machine
from spec_harness import results as result_files
from spec_harness.machine import environment
from spec_harness.results import MAY_DIFFER, SCHEMA_VERSION, ResultFile, plain, settings, shown_command, write_json

WHERE = {"device": "cpu", "threads": 1, "load_average_1m": 0.5}


def strict(path: Path) -> dict:
    """The document, read by a reader that refuses NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} in {path.name}")

    return json.loads(path.read_text(), parse_constant=refuse)


def open_file(path: Path, resume=None, where=WHERE, **config) -> ResultFile:
    return ResultFile(path, "experiment", {"k": 5, **config}, dict(where), resume)


def kept(path: Path) -> list[Path]:
    return sorted((path.parent / "old").glob("*.json"))


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (-float("inf"), None),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1.0, np.nan]), [1.0, None]),
        (torch.tensor(2), 2),
        (torch.tensor([0.5, float("inf")]), [0.5, None]),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (frozenset([3, 1]), [1, 3]),
        ({1: (2, float("nan"))}, {"1": [2, None]}),
        (True, True),
        (None, None),
    ],
)
def test_every_kind_of_value_becomes_strict_json(value, expected, results):
    write_json(results, {"value": value})
    assert strict(results)["value"] == expected
    assert type(plain(value)) is type(expected)


# ----------------------------------------------------------------------------------------------------------- atomic


class Killed(BaseException):
    pass


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file(results, monkeypatch):
    write_json(results, {"rows": [1]})

    def half(document, file, **options):
        file.write('{"rows": [1, ')
        raise Killed

    monkeypatch.setattr(result_files.json, "dump", half)
    with pytest.raises(Killed):
        write_json(results, {"rows": [1, 2]})
    assert strict(results) == {"rows": [1]}
    assert os.listdir(results.parent) == [results.name], "no half-written file stays behind"


def test_the_new_file_is_whole_before_it_takes_the_name(results, monkeypatch):
    write_json(results, {"rows": [1]})
    seen = []
    replace = os.replace
    monkeypatch.setattr(
        result_files.os,
        "replace",
        lambda new, old: (seen.append((strict(Path(new)), strict(Path(old)))), replace(new, old)),
    )
    write_json(results, {"rows": [1, 2]})
    assert seen == [({"rows": [1, 2]}, {"rows": [1]})]


def test_the_folder_is_made_if_it_is_not_there(tmp_path):
    write_json(tmp_path / "a" / "b.json", {})
    assert strict(tmp_path / "a" / "b.json") == {}


# ------------------------------------------------------------------------------------------------------------- a sweep


def test_a_file_holds_every_row_as_soon_as_it_is_added(results):
    with open_file(results) as file:
        assert strict(results)["status"] == "running"
        for k in range(3):
            file.add({"k": k, "speedup": np.float32(1.5), "error": None})
            assert [row["k"] for row in strict(results)["rows"]] == list(range(k + 1))
        file.finish({"best": torch.tensor(2)})
    document = strict(results)
    assert (document["status"], document["summary"], document["schema_version"]) == (
        "complete",
        {"best": 2},
        SCHEMA_VERSION,
    )
    assert list(document) == [
        "schema_version",
        "experiment",
        "status",
        "created_at",
        "command",
        "environment",
        "config",
        "measured_sha256",
        "rows",
        "summary",
    ]


def test_ctrl_c_before_the_first_row_says_so(results, capsys):
    with pytest.raises(KeyboardInterrupt), open_file(results):
        raise KeyboardInterrupt
    assert "nothing was measured yet" in capsys.readouterr().err


@pytest.mark.parametrize(("percent", "said"), [(4.0, False), (60.0, True)])
def test_a_machine_that_others_use_is_remarked_on(pair, capsys, monkeypatch, results, percent, said):
    monkeypatch.setattr("psutil.cpu_percent", lambda interval=None: percent)
    spec_decode.main(pair)
    assert ("the machine is busy" in capsys.readouterr().err) == said
    assert json.loads(results.read_text())["environment"]["cpu_busy"] == percent / 100


def test_ctrl_c_leaves_a_valid_file_marked_interrupted(results, capsys):
    @command
    def main(argv=None):
        with open_file(results) as file:
            file.add({"k": 1, "error": None})
            raise KeyboardInterrupt

    assert main() == 130
    document = strict(results)
    assert (document["status"], len(document["rows"])) == ("interrupted", 1)
    assert "--resume" in capsys.readouterr().err


def test_an_error_marks_the_file_failed_and_keeps_the_rows(results):
    with pytest.raises(ZeroDivisionError), open_file(results) as file:
        file.add({"k": 1, "error": None})
        1 / 0  # noqa: B018
    assert (strict(results)["status"], len(strict(results)["rows"])) == ("failed", 1)


def test_a_failed_cell_marks_the_run_failed(results):
    with open_file(results) as file:
        file.add({"k": 1, "speedup": None, "error": "out of memory"})
        file.finish({})
    assert strict(results)["status"] == "failed"
    assert strict(results)["rows"][0]["speedup"] is None


# -------------------------------------------------------------------------------------------------------------- resume


def half_done(results, **config) -> None:
    with pytest.raises(KeyboardInterrupt), open_file(results, **config) as file:
        file.add({"k": 1, "speedup": 1.5, "error": None})
        file.add({"k": 2, "speedup": None, "error": "out of memory"})
        raise KeyboardInterrupt


@pytest.mark.parametrize("resume", ["strict", "auto"])
def test_resuming_with_the_same_settings_goes_on_and_tries_failed_cells_again(results, resume):
    half_done(results)
    began = strict(results)["created_at"]
    with open_file(results, resume) as file:
        assert file.find(k=1)["speedup"] == 1.5
        assert file.find(k=2) is None
        file.add({"k": 2, "speedup": 1.2, "error": None})
        file.finish({})
    document = strict(results)
    assert [row["speedup"] for row in document["rows"]] == [1.5, 1.2]
    assert (document["status"], document["created_at"]) == ("complete", began)


def test_the_load_of_the_machine_does_not_stop_a_resumption(results):
    half_done(results)
    assert open_file(results, "strict", {**WHERE, "load_average_1m": 9.0}).find(k=1)


@pytest.mark.parametrize(
    ("where", "config", "named"),
    [
        (WHERE, {"k": 6}, "k: 5 there, 6 here"),
        (WHERE, {"prompt": "x"}, "prompt: None there, x here"),
        ({**WHERE, "threads": 2}, {}, "threads: 1 there, 2 here"),
    ],
)
def test_resuming_with_other_settings_is_refused_by_name_and_nothing_is_lost(results, where, config, named):
    half_done(results)
    before = strict(results)
    with pytest.raises(UserError, match=f"--resume: results.json was made with other settings .{named}"):
        open_file(results, "strict", where, **config)
    assert strict(results) == before


def test_resume_auto_starts_afresh_where_settings_differ_and_keeps_the_earlier_file(results):
    half_done(results)
    assert open_file(results, "auto", k=6).rows == []
    (old,) = kept(results)
    assert len(strict(old)["rows"]) == 2


def test_without_resume_the_earlier_file_is_kept(results, capsys):
    half_done(results)
    assert open_file(results).rows == []
    (old,) = kept(results)
    assert len(strict(old)["rows"]) == 2
    assert f"old/{old.name}" in capsys.readouterr().err


def test_no_earlier_file_is_ever_lost_however_quickly_they_follow_each_other(results):
    for _ in range(3):
        half_done(results)
    open_file(results)
    assert len(kept(results)) == 3


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[1, 2]", "3", "null", '{"rows": 3}', '{"rows": [], "config": {}}', "\x00\xff"]
)
def test_a_file_that_is_no_result_file_is_moved_aside_not_read(results, content):
    results.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="--resume"):
        open_file(results, "strict")
    assert results.read_bytes() == content.encode("latin-1")
    assert open_file(results).rows == []
    (old,) = kept(results)
    assert old.read_bytes() == content.encode("latin-1")


def test_two_unreadable_files_are_both_kept(results):
    for text in ("one", "two"):
        results.write_text(text)
        open_file(results)
        results.unlink()
    assert sorted(path.read_text() for path in kept(results)) == ["one", "two"]


def test_a_folder_in_the_place_of_the_file_is_refused_and_stays(tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "work.txt").write_text("mine")
    with pytest.raises(UserError, match="--results"):
        open_file(folder)
    assert (folder / "work.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--results .*file/results.json"):
        open_file(tmp_path / "file" / "results.json")


# --------------------------------------------------------------------------------------------------------- what is told


def test_no_folder_of_this_machine_is_in_the_file(monkeypatch):
    home = str(Path.home() / "models" / "mine")
    monkeypatch.setattr(sys, "argv", ["/opt/x/spec_bench.py", "--target", home, f"--draft={home}", "-k", "5"])
    assert shown_command() == "python spec_bench.py --target mine --draft=mine -k 5"
    monkeypatch.setattr(sys, "argv", [str(machine.HERE / "spec_harness" / "rounding.py"), "--dtype", "float16"])
    assert shown_command() == "python -m spec_harness.rounding --dtype float16"
    args = types.SimpleNamespace(
        target=home, prompt_file=Path(home), results=Path(home), resume="strict", k=5, drafts=[home, "cut:0"]
    )
    assert str(Path.home()) not in json.dumps(settings(args))
    assert {"target": "mine", "prompt_file": "mine", "k": 5}.items() <= settings(args).items()


def test_folders_above_and_at_home_are_no_names_either():
    args = types.SimpleNamespace(target="../mine", draft="~/models/small", prompt="~ is a tilde", k=5)
    assert settings(args) == {"target": "mine", "draft": "small", "prompt": "~ is a tilde", "k": 5}


@pytest.mark.parametrize("tracked", [True, False])
def test_the_commit_is_that_of_the_repository_that_tracks_the_code(tracked, tmp_path, monkeypatch):
    """A copy that lies ignored inside another repository has no commit: it is not that repository's."""
    inside = tmp_path / "copy"
    inside.mkdir()
    (inside / "spec_common.py").write_text("")
    (tmp_path / ".gitignore").write_text("" if tracked else "copy/\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "HERE", inside)
    where = environment(torch.device("cpu"), torch.float32)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    assert (where["git_commit"], where["git_dirty"]) == ((commit, False) if tracked else (None, None))


def test_what_killed_runs_left_half_written_is_cleared_by_the_next(results):
    """Of this file alone: another file's may be in the making."""
    mine, other = results.with_name(f".{results.name}.41.part"), results.with_name(".another.json.41.part")
    for half in (mine, other):
        half.write_text('{"rows": [')
    open_file(results)
    assert (mine.exists(), other.exists()) == (False, True)


def test_the_environment_names_the_machine_and_no_person():
    where = environment(torch.device("cpu"), torch.float32)
    assert {
        "git_commit",
        "git_dirty",
        "python",
        "packages",
        "device_name",
        "dtype",
        "threads",
        "cpu_model",
        "memory_bytes",
    } <= set(where)
    assert (where["device"], where["dtype"], where["threads"]) == ("cpu", "float32", torch.get_num_threads())
    text = json.dumps(where, allow_nan=False)
    assert str(Path.home()) not in text


def test_the_environment_does_not_name_the_host(monkeypatch):
    """Whatever the machine is called: one called `linux` or `cpu` would be found in any file."""
    import platform
    import socket

    own = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((own.sysname, "the-host", *own[2:])))
    for module, name in ((platform, "node"), (socket, "gethostname"), (socket, "getfqdn")):
        monkeypatch.setattr(module, name, lambda: "the-host")
    platform._uname_cache = None
    assert "the-host" not in json.dumps(environment(torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("resume", ["strict", "auto", None])
def test_a_setting_that_is_null_here_and_absent_there_is_no_difference(tmp_path, resume):
    path = tmp_path / "one.json"
    with ResultFile(path, "x", {"target": {"name": "x"}}, {"packages": {"torch": "1"}}, None) as file:
        file.finish({})
    with ResultFile(path, "x", {"target": {"name": "x", "form": None}}, {"packages": {"torch": "1", "gguf": None}}, resume):
        pass


@pytest.mark.parametrize("change", [{"rows": [1]}, {"rows": [None]}, {"rows": 3}, {"config": []}, {"experiment": "other"}])
def test_an_edited_file_is_refused_in_one_line_not_with_a_traceback(tmp_path, change):
    path = tmp_path / "one.json"
    with ResultFile(path, "x", {}, {}, None) as file:
        file.finish({})
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match="--resume: one.json was made with other settings"):
        ResultFile(path, "x", {}, {}, "strict")


def test_a_file_without_its_date_was_edited_and_is_kept_aside(tmp_path):
    path = tmp_path / "one.json"
    with ResultFile(path, "x", {}, {}, None) as file:
        file.add({"k": 1})
        file.finish({})
    document = json.loads(path.read_text())
    del document["created_at"]
    path.write_text(json.dumps(document))
    with ResultFile(path, "x", {}, {}, "auto") as file:
        assert file.rows == [] and json.loads((tmp_path / "old" / "one-unreadable.json").read_text()) == document


def test_a_setting_that_differs_is_named_where_it_differs(tmp_path):
    path = tmp_path / "one.json"
    with ResultFile(path, "x", {"target": {"cpu_linear": "half", "trial_ms": 1}}, {"code_sha256": "a"}, None) as file:
        file.finish({})
    with pytest.raises(UserError, match="target.cpu_linear: half there, plain here"):
        ResultFile(path, "x", {"target": {"cpu_linear": "plain", "trial_ms": 2}}, {"code_sha256": "a"}, "strict")
    with pytest.raises(UserError, match="code_sha256: a there, b here"):
        ResultFile(path, "x", {"target": {"cpu_linear": "half", "trial_ms": 3}}, {"code_sha256": "b"}, "strict")


# ------------------------------------------------------------------------------------------------------ who measured what


def edited(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


EDITS = {
    "a figure": lambda one: one["rows"][0].update(speedup=2.5),
    "a row more": lambda one: one["rows"].append({"k": 3, "speedup": 9.0, "error": None}),
    "a row less": lambda one: one["rows"].pop(0),
    "the order": lambda one: one["rows"].reverse(),
    "the summary": lambda one: one.update(summary={"best": 3}),
    "what is unknown, made no number": lambda one: one["rows"][0].update(error=float("nan")),
    "whether it ended well": lambda one: one.update(status="complete"),
    "when": lambda one: one.update(created_at="2020-01-01T00:00:00+00:00"),
    "the command": lambda one: one.update(command="python x.py --other"),
    "the load": lambda one: one["environment"].update(load_average_1m=0.0),
    "the signature": lambda one: one.update(measured_sha256="0" * 64),
    "no signature": lambda one: one.pop("measured_sha256"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_rows_edited_by_hand_are_not_gone_on_with(edit, results):
    half_done(results)
    assert open_file(results, "strict").find(k=1), "as it was written it is"
    half_done(results)
    edited(results, EDITS[edit])
    with pytest.raises(UserError, match="--resume: results.json .*edited after it was measured"):
        open_file(results, "strict")
    assert open_file(results, "auto").rows == []


def test_a_signature_is_of_what_was_measured_and_not_of_how_it_is_written(results):
    """Another program may indent and order it as it likes, and a number is what it is: 1e-05 or 0.00001."""
    with open_file(results) as file:
        file.add({"k": 1, "speedup": np.float32(1e-5), "words": "é", "error": None, "v": {1: 1.0}, "nan": float("nan")})
        file.finish({"best": 1})
    document = strict(results)
    document["rows"] = [dict(reversed(row.items())) for row in document["rows"]]
    results.write_text(json.dumps(document, ensure_ascii=True).replace("1e-05", "0.00001"))
    assert open_file(results, "strict").find(k=1)["words"] == "é"


@pytest.mark.parametrize("name", sorted(set(environment(torch.device("cpu"), torch.float32)) - set(MAY_DIFFER)))
def test_no_run_goes_on_on_another_machine_or_by_other_code(name, results):
    """Another commit, processor, package or count of threads: each is refused by its name."""
    where = environment(torch.device("cpu"), torch.float32)
    with ResultFile(results, "experiment", {"k": 5}, where, None) as file:
        file.add({"k": 1, "error": None})
    other = {**where[name], "torch": "0.1"} if name == "packages" else "another"
    with pytest.raises(UserError, match=f"--resume: .*{name}"):
        ResultFile(results, "experiment", {"k": 5}, {**where, name: other}, "strict")


def test_the_packages_that_measure_are_in_the_file():
    found = environment(torch.device("cpu"), torch.float32)["packages"]
    assert set(found) == {"torch", "transformers", "accelerate", "numpy"} and all(found.values())
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__


def test_every_option_is_a_setting_but_where_things_go():
    import spec_bench

    args = spec_bench.parse_args([])
    assert set(vars(args)) - set(settings(args)) == {"results", "resume", "revision", "draft_revision", "wide"}


def test_a_run_goes_on_beside_a_file_that_it_alone_has_loaded(tmp_path):
    """A file that only one of the runs loaded was called by none that both did, or that one would be of another state."""
    path = tmp_path / "results.json"
    with ResultFile(path, "x", {}, {"code": {"spec_loop.py": "a", "spec_plot.py": "p"}}, None) as file:
        file.add({"k": 1, "error": None})
    with ResultFile(path, "x", {}, {"code": {"spec_loop.py": "a", "spec_new.py": "n"}}, "strict") as file:
        assert len(file.rows) == 1
    with pytest.raises(UserError, match="code.spec_loop.py: a there, b here"):
        ResultFile(path, "x", {}, {"code": {"spec_loop.py": "b"}}, "strict")


def test_the_code_that_measures_is_what_is_loaded_committed_or_not(tmp_path, monkeypatch):
    """A file in use that is edited is other code; one that no measurement runs through is not there."""
    for name in ("used", "folder/used_too", "unused"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
        if not name.startswith("un"):
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__file__=str(path)))
    monkeypatch.setattr(machine, "HERE", tmp_path)
    code_hashes = machine.code_hashes.__wrapped__
    before = code_hashes()
    assert list(before) == ["folder/used_too.py", "used.py"]
    (tmp_path / "unused.py").write_text("x = 2\n")
    assert code_hashes() == before
    (tmp_path / "folder" / "used_too.py").write_text("x = 2\n")
    assert [name for name, state in code_hashes().items() if state != before[name]] == ["folder/used_too.py"]


def test_a_measurement_names_the_files_it_runs_through():
    """From the shell: the loop, the harness and the script itself, and no page that only shows results."""
    seen = "import sys, spec_decode; from spec_harness import machine; print(*machine.code_hashes())"
    done = subprocess.run([sys.executable, "-c", seen], cwd=machine.HERE, capture_output=True, text=True, check=True)
    files = set(done.stdout.split())
    assert {"spec_decode.py", "spec_loop.py", "spec_common.py", "spec_harness/cells.py", "spec_models/fused.py"} <= files
    assert not {"spec_report.py", "spec_plot.py", "spec_batch.py", "spec_harness/charts.py"} & files
