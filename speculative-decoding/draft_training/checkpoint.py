"""A run that can be stopped: its state on disk, the time it has taken, the signals that end it."""

import os
import signal
import time

import torch


def save_state(path, draft, optimizer, progress):
    """Checkpoint of what trains, written beside and moved into place."""
    states = {
        name: tensor
        for name, tensor in draft.state_dict().items()
        if "embed_tokens" not in name and "lm_head" not in name
    }
    partial = path.with_suffix(".part")
    torch.save({"states": states, "optimizer": optimizer.state_dict(), "progress": progress}, partial)
    os.replace(partial, path)


def load_state(path, draft, optimizer):
    saved = torch.load(path, weights_only=True)
    draft.load_state_dict(saved["states"], strict=False)
    optimizer.load_state_dict(saved["optimizer"])
    return saved["progress"]


class Clock:
    """Seconds spent on training, by the wall and of this process's CPU, those of earlier runs included."""

    def __init__(self, progress):
        self.wall, self.cpu = progress["wall_s"] - time.monotonic(), progress["cpu_s"] - time.process_time()

    def now(self):
        return {"wall_s": self.wall + time.monotonic(), "cpu_s": self.cpu + time.process_time()}


class Stop:
    """Ctrl-C or a polite kill ends the run after the step in hand, with a checkpoint."""

    asked = False

    def __enter__(self):
        self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, *_):
        self.asked = True
