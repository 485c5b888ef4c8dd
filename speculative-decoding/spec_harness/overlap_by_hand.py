"""What overlap would give at costs given by hand: no model, no timing."""

from __future__ import annotations

import argparse

from spec_cli import at_least, fraction
from spec_harness.overlapping import balanced_g, compare_schemes
from spec_harness.tables import fixed, markdown_table
from spec_harness.theory import interpolated


def cost_curve(text: str) -> dict[int, float]:
    """A type for argparse: V(n) as n:V with commas between, such as 1:1,8:1.2."""
    try:
        found = {int(n): float(v) for n, v in (part.split(":") for part in text.split(","))}
    except ValueError:
        found = {}
    if not found or min(found) < 1 or not all(0 < v < 1e6 for v in found.values()):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no list of n:V, such as 1:1,8:1.2")
    return found


def cost(text: str) -> float:
    """A type for argparse: a number of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a number of 0 or more")
    return number


def add_hand_options(parser, most: int) -> None:
    """The costs; `most`: the largest k and g looked at unless said."""
    hand = parser.add_argument_group("costs given by hand (all in target passes over one token)")
    hand.add_argument("--simulate", action="store_true", help="load nothing; say what these costs come to")
    hand.add_argument("--c", type=cost, default=0.1, help="a draft pass")
    hand.add_argument("--v", type=cost_curve, default={1: 1.0}, metavar="N:V,N:V", help="target passes over n tokens")
    hand.add_argument("--alpha", type=fraction, default=0.8, help="chance that a judged guess is accepted")
    hand.add_argument("--devices", type=at_least(1, 2), default=2, help="that draft and target run on")
    hand.add_argument("--hit", type=fraction, default=0.8, help="of ssd: share of outcomes foreseen")
    hand.add_argument("--widest", type=cost, default=1.0, help="of ssd: a draft pass over all answers, in passes over one token")  # fmt: skip
    hand.add_argument("--wait", type=cost, default=0.0, help="handing over, a round")
    hand.add_argument("--most", type=at_least(1, 256), default=most, help="the largest k and g looked at")


def simulate(args) -> str:
    """What costs given by hand come to: each scheme at its best size, on one device and on the devices asked for."""
    rows, v = [], interpolated(args.v)
    for devices in dict.fromkeys((1, args.devices)):
        for one in compare_schemes(args.alpha, args.c, v, args.most, args.hit, args.widest, devices, args.wait):
            if devices == 1 or one.scheme != "taking turns":
                rows.append({"devices": devices, **one._asdict()})
    columns = [
        ("scheme", "scheme", str), ("devices", "devices", str), ("size", "best k or g", str), ("speedup", "speedup", fixed(2, "x")),
    ]  # fmt: skip
    turns, best = rows[0]["speedup"], max(rows, key=lambda row: row["speedup"])
    balance = balanced_g(args.c, v, args.most)
    where = f"{best['devices']} device{'s' if best['devices'] > 1 else ''}"
    return (
        f"{markdown_table(rows, columns)}\n\n{best['scheme']} on {where} is best, {best['speedup'] / turns:.2f} times taking turns; "
        f"both sides take as long at g = {balance}. Worked out from costs given by hand, nothing was measured."
    )
