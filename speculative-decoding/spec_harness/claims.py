"""The short figures of the README's tables, each from a result file: what was found, where it pays, where it does not."""

from __future__ import annotations

from spec_common import judge_speed

from spec_harness.advice import NEARLY_FREE
from spec_harness.tables import speed_words


def part(document: dict, name: str) -> list[dict]:
    """The rows of one part of a result file that could be measured."""
    return [row for row in document["rows"] if row.get("part") == name and not row.get("error")]


def named(where: dict, empty: str = "nowhere here") -> str:
    return ", ".join(f"{text} {speedup:.2f}x" for text, speedup in where.items()) or empty


def by_verdict(rows: list[dict], name, kind: str) -> str:
    found = {name(row): row["speedup"] for row in rows if not row.get("error") and judge_speed(row) == kind}
    return named(found, "none")


def both_forms(cost: dict) -> dict[str, str]:
    """V(8) and a pass over one token of each form of pass, measured in the same turns: what dispatch costs."""
    forms: dict[str, dict] = {}
    for one in cost["summary"].get("compared", {}).get("forms of pass") or []:
        forms.setdefault(one["variant"], {})[one["tokens"]] = one
    return {name: f"V(8) = {rows[8]['v']:.2f} at {rows[1]['pass_ms']:.1f} ms a pass" for name, rows in forms.items()}


def essay_claims(all_of: dict, usual_k: int) -> dict[str, str]:
    """The short figures of the README's first table; the texts are told at `usual_k`."""
    found = {}
    if one_pass := all_of.get("one_pass"):
        found["one_pass"] = f"largest difference {one_pass['summary']['largest_difference_alone']:.4f} in a logit, rounding"
    if cost := all_of.get("precondition"):
        v, free = {one["tokens"]: one["v"] for one in cost["rows"]}, cost["summary"]["nearly_free_up_to"]
        found["precondition"] = f"V(4) = {v[4]:.2f}, V(8) = {v[8]:.2f}; nearly free (V <= {NEARLY_FREE}) up to {free} tokens"
        found["precondition"] += "".join(f"; {form}: {words}" for form, words in both_forms(cost).items())
    for name, key in (("decode", "decode"), ("decode_tree", "tree")):
        if name in all_of:
            row, nodes = part(all_of[name], "decode")[0], all_of[name]["config"]["tree"]
            exact = "token for token the same" if row["exact"] else "near-ties excused"
            found[key] = (f"{row['workload']}, k = {row['k']}{f', up to {nodes} nodes' if nodes else ''}: {row['emitted']} tokens in "
                          f"{row['target_passes']} passes, {speed_words(row)}; {exact}")  # fmt: skip
    if bench := all_of.get("bench"):
        usual = [one for one in part(bench, "workload") if one["k"] == usual_k]
        low, high = (pick(usual, key=lambda one: one["speedup"]) for pick in (min, max))
        best = bench["summary"]
        found["bench"] = (f"best k on {bench['config']['workload']} {best['best_k']}; at k = {usual_k} from {low['speedup']:.2f}x ({low['workload']}) to "
                          f"{high['speedup']:.2f}x ({high['workload']}); costs account for it to {best['prediction_error_median']:+.3f} in the median")  # fmt: skip
    if drafts := all_of.get("drafts"):
        ranked = sorted((one for one in drafts["summary"]["drafts"] if not one["error"]), key=lambda one: -one["speedup"])
        found["drafts"] = "; ".join(f"{one['draft']} {one['speedup']:.2f}x (alpha {one['alpha'] or 0:.2f}, c {one['c']:.2f})" for one in ranked)
    return found


def short_of_fixed(arms: list[dict], close: float) -> str:
    """The texts on which `cost` has less than the share `close` of the speed of the best fixed k of that text."""
    found = {}
    for text in dict.fromkeys(one["text"] for one in arms if one["text"] != "all"):
        speeds = {one["arm"]: one["speedup"] for one in arms if one["text"] == text}
        found[text] = speeds["cost"] / max(speed for arm, speed in speeds.items() if arm.startswith("k = "))
    short = ", ".join(text for text, share in found.items() if share < close)
    allowed = f"{100 * (1 - close):.0f} %"
    return f"more than {allowed} below the best fixed k of {short}" if short else f"within {allowed} of the best fixed k on every text"


def further_claims(all_of: dict, close: float) -> dict[str, str]:
    """The short figures of the README's second table: where a method is faster than the target alone, and where slower."""
    found = {}
    if "sampling" in all_of:
        warm = all_of["sampling"]["summary"]["temperatures"]
        temperature = lambda one: f"temperature {one['temperature']:g}"  # noqa: E731
        found |= {"m_sampling": by_verdict(warm, temperature, "faster"), "l_sampling": by_verdict(warm, temperature, "slower")}
    if "lookup" in all_of:
        where = all_of["lookup"]["summary"]["where"]
        for name in ("lookup", "hybrid"):
            found |= {f"m_{name}": named(where[name]["faster"]), f"l_{name}": named(where[name]["slower"])}
    if "adaptive" in all_of:
        total = {one["arm"]: one for one in all_of["adaptive"]["summary"]["arms"] if one["text"] == "all"}
        first = max((arm for arm in total if arm.startswith("k = ")), key=lambda arm: total[arm]["speedup"])
        found["m_adaptive"] = (f"over all texts: cost {total['cost']['speedup']:.2f}x, confidence {total['confidence']['speedup']:.2f}x, "
                               f"the best fixed k ({first}) {total[first]['speedup']:.2f}x; cost is {short_of_fixed(all_of['adaptive']['summary']['arms'], close)}")  # fmt: skip
    if "batch" in all_of:
        rows, size = part(all_of["batch"], "batch"), lambda one: f"a batch of {one['batch']}"
        found |= {"m_batch": by_verdict(rows, size, "faster"), "l_batch": by_verdict(rows, size, "slower")}
    if "overlap" in all_of:
        rows = [{"method": name, **one} for name, one in all_of["overlap"]["summary"]["methods"].items() if name != "chain"]
        found |= {f"{kind}_overlap": by_verdict(rows, lambda one: one["method"], said) for kind, said in (("m", "faster"), ("l", "slower"))}
    if "heads" in all_of:
        rows = all_of["heads"]["summary"]["methods"]
        found |= {f"{kind}_heads": by_verdict(rows, lambda one: one["method"], said) for kind, said in (("m", "faster"), ("l", "slower"))}
    return found
