"""How long OpenMP's threads spin is set before torch is loaded, which reads it once; the user's own word stands."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import spec_common

import pytest

SCRIPTS = sorted(path for path in spec_common.HERE.glob("*.py") if "def main(" in path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_imports_spec_common_before_anything_that_could_load_torch(path: Path):
    body = ast.parse(path.read_text()).body
    names = [
        one.module if isinstance(one, ast.ImportFrom) else one.names[0].name
        for one in body
        if "Import" in type(one).__name__
    ]
    first = next(name for name in names if name.split(".")[0] not in sys.stdlib_module_names)
    assert first == "spec_common"


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's OpenMP on Linux")
@pytest.mark.parametrize(
    ("own", "seen"),
    [({}, "'20000'"), ({"GOMP_SPINCOUNT": "7"}, "'7'"), ({"OMP_WAIT_POLICY": "passive"}, "'0'")],
    ids=["nothing", "a count", "a policy"],
)
def test_openmp_sees_the_count_when_a_script_loads_torch(own, seen):
    there = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "spec_one_pass.py", "--help"],
        cwd=spec_common.HERE,
        env={**there, **own, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert line.split("=")[1].strip() == seen and done.returncode == 0
