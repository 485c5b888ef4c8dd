"""Where a measurement is made: the machine, what runs on it, and the code that measures. No host, user or home folder."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

from spec_common import HERE, device_name, dtype_name

import torch

BUSY = 0.1  # share of the CPUs in use by others from which a measurement is worth a remark
LOOK_S = 0.3  # how long that is looked at
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
PACKAGES = ("torch", "transformers", "accelerate", "numpy")


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def code_hashes() -> dict[str, str]:
    """What measures: the sha256 (12 digits) of every file of this suite that the process has loaded, committed or not,
    by its path from the suite's folder. Read once; the suite imports its own files before it measures, none later."""
    loaded = {Path(module.__file__).resolve() for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    mine = sorted(path for path in loaded if HERE in path.parents and path.is_file())  # torch names some that are not
    return {path.relative_to(HERE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in mine}


def cpus_allowed() -> int | None:
    """The CPUs that this process may run on, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_quota() -> float | None:
    """The CPUs' worth of time that a container may use (cgroup v2's cpu.max); None without a limit."""
    try:
        words = CPU_MAX.read_text().split()
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    except (OSError, ValueError, IndexError):
        return None


def load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def environment(device: torch.device, dtype: torch.dtype, model=None) -> dict:
    """Where a measurement was made. No host name, user name or home folder."""
    import importlib.metadata

    import psutil

    # A copy that lies ignored inside another repository would be given that one's commit: the code must be tracked there.
    tracked = git("ls-files", "--error-unmatch", "spec_common.py") is not None
    changed = git("status", "--porcelain", "--", ".", ":!results") if tracked else None
    return {
        "git_commit": git("rev-parse", "HEAD") if tracked else None,
        "git_dirty": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": str(device),
        "device_name": device_name(device),
        "dtype": dtype_name(dtype),
        "threads": torch.get_num_threads(),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpus_allowed": cpus_allowed(),
        "cpu_quota": cpu_quota(),
        "code": code_hashes(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1m": load_average(),
        "cpu_busy": psutil.cpu_percent(LOOK_S) / 100,  # by others: this process waits meanwhile
    }
