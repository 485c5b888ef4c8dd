"""Where the constants of the `cost` policy come from, and every k policy on one ruler without a clock.

The draft is asked at every place of the target's own texts; then each policy is replayed on what it would have guessed, and its
rounds are weighed at costs that a result file holds. Fitted on the requests of a file; looked at, never fitted, on the
five workloads and on the requests of another file.

    python -m spec_harness.fit_policy --prompt-file requests.jsonl --check-file others.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

from spec_common import HERE, UserError, tell

import numpy as np

from spec_cli import at_least, command, make_parser, reachable
from spec_harness.arms import draft_model, run_baseline
from spec_harness.compare import read_document
from spec_harness.costs import costs_at
from spec_harness.options import add_task_options, make_task, open_run
from spec_harness.prompts import read_prompts
from spec_harness.replay import Recording, cheapest_way, on_one_ruler, record, replay
from spec_harness.tables import fixed, markdown_table, progress
from spec_harness.theory import measured_v
from spec_methods.policy import LOOP_OVERHEAD, POLICIES, FixedK, make_policy
from workloads import WORKLOADS

FIT, CHECK = "fitted on", "looked at"
PLACES = 5  # of a block that have a constant of their own in the fit; the last stands for all behind it
ROUNDS = 30  # of Newton's method
TRIED = {"step": (0.05, 0.1, 0.2, 0.3, 0.5), "forget": (0.9, 0.95, 0.98, 1.0)}  # of `cost`, one at a time, beside its own


def spread(prompts: list, count: int) -> list:
    """`count` of them, or all, at even distances: files are sorted by kind."""
    return prompts[:: max(1, len(prompts) // count)][:count]


def judged_guesses(recordings: list[Recording]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-odds of its probability, place in the block (up to the last that counts) and whether it was right, of every guess
    that a round begun anywhere would have judged."""
    found = [(confidence, min(i, PLACES - 1), i < right)
             for one in recordings for right, seen in zip(*one, strict=True) for i, confidence in enumerate(seen[: right + 1])]  # fmt: skip
    sure, places, hits = (np.array(column) for column in zip(*found, strict=True))
    sure = np.clip(sure, 0.001, 0.999)
    return np.log(sure / (1 - sure)), places, hits.astype(float)


def fitted(recordings: list[Recording]) -> dict:
    """The logistic regression of right guesses: the slope of their log-odds, and a constant for each place. Ridge of 0.1."""
    odds, places, hits = judged_guesses(recordings)
    inputs = np.concatenate([odds[:, None], np.eye(PLACES)[places]], axis=1)
    weights = np.zeros(PLACES + 1)
    for _ in range(ROUNDS):
        chance = 1 / (1 + np.exp(-inputs @ weights))
        curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + 0.1 * np.eye(PLACES + 1)
        weights += np.linalg.solve(curve, inputs.T @ (hits - chance) - 0.1 * weights)
    return {"slope": weights[0], "places": weights[1:].tolist(), "guesses": len(hits)}


def speed_of(policy, rows: list[dict], costs: list[dict]) -> dict[str, float]:
    """The speedup of a policy that goes from text to text, by text and over `all` (time over time), at the costs of each
    text's context (of the nearest measured one where it lies outside)."""
    found, tokens, spent = {}, 0, 0.0
    for row in rows:
        counted = replay(Recording(row["right"], row["confidences"]), policy)
        found[row["text"]] = on_one_ruler(counted, near_costs(costs, row["context"]))
        tokens, spent = tokens + counted["emitted"], spent + counted["emitted"] / found[row["text"]]
    return {**found, "all": tokens / spent}


def near_costs(costs: list[dict], context: int) -> dict:
    ends = sorted(row["context"] for row in costs)
    return costs_at(costs, min(max(context, ends[0]), ends[-1]))


def oracle_speed(rows: list[dict], k: int, costs: list[dict]) -> float:
    spent = [len(row["right"]) / cheapest_way(row["right"], k, near_costs(costs, row["context"])) for row in rows]
    return sum(len(row["right"]) for row in rows) / sum(spent)


def policies_of(k: int, costs: dict) -> dict:
    """Every fixed k, every policy, and `cost` with each of the constants tried, by name."""
    make = lambda name: make_policy(name, k, costs["c_places"], measured_v(costs), overhead=LOOP_OVERHEAD)  # noqa: E731
    found = {f"k = {n}": FixedK(n) for n in range(1, k + 1)} | {name: make(name) for name in POLICIES[1:]}
    for name, values in TRIED.items():
        for value in values:
            found[f"cost, {name} {value:g}"] = one = make("cost")
            setattr(one, name, value)
    return found


def compared_policies(sets: dict[str, list[dict]], k: int, costs: list[dict]) -> list[dict]:
    """A row for each fixed k, each policy, `cost` with other constants, and the oracle: the speedup on each set of texts."""
    table = []
    for arm, policy in policies_of(k, near_costs(costs, 0)).items():
        row = {"arm": arm}
        for name, rows in sets.items():
            policy.begin()
            found = speed_of(policy, rows, costs)
            row |= found if name == "workloads" else {name: found["all"]}
        table.append(row)
    return [*table, {"arm": "oracle", **{"all" if name == "workloads" else name: oracle_speed(rows, k, costs) for name, rows in sets.items()}}]  # fmt: skip


def read_costs(path: Path) -> list[dict]:
    """The rows of a result file that say what passes cost. Raises UserError."""
    rows = read_document(reachable(path, "--costs"), "--costs")["rows"]
    costs = [row for row in rows if row.get("part") == "costs"]
    if not costs or not all(isinstance(row.get("v"), dict) and row.get("c_places") for row in costs):
        raise UserError(f"--costs {path.name}: no row in it says what passes cost; name one of spec_bench.py")
    return costs


def record_texts(args, target, draft, sets: dict, file) -> dict[str, list[dict]]:
    """The recordings of every text, those that the file lacks made now. Requests of a file go through the chat template."""
    found = {}
    for name, prompts in sets.items():
        asked = argparse.Namespace(**{**vars(args), "chat": name != "workloads", "stop_at_eos": name != "workloads"})
        for text, prompt in progress(prompts, name):
            row = file.find(set=name, text=text)
            if row is None:
                task = make_task(asked, target, draft, prompt)
                tokens = run_baseline(task).done.tokens
                made = record(task, draft_model(task, draft.model, args.k).drafter, tokens, args.k)
                row = file.add({"set": name, "text": text, "context": task.context, **made._asdict(), "error": None})
            found.setdefault(name, []).append(row)
    return found


def parse_args(argv):
    parser = make_parser(__doc__, "fit_policy", resume=True)
    add_task_options(parser)
    parser.add_argument("--prompt-file", type=Path, required=True, help="the requests that the constants are fitted on")
    parser.add_argument("--check-file", type=Path, required=True, help="other requests, only looked at")
    parser.add_argument("--fit", type=at_least(1), default=96, help="requests of --prompt-file, at even distances")
    parser.add_argument("--check", type=at_least(1), default=40, help="requests of --check-file, at even distances")
    parser.add_argument("-k", "--k", type=at_least(1, 64), default=8, help="the most guesses a round")
    parser.add_argument("--costs", type=Path, default=HERE / "results" / "spec_bench.json", help="the result file whose costs are taken")  # fmt: skip
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    costs = read_costs(args.costs)
    files = ((FIT, args.prompt_file, "--prompt-file", args.fit), (CHECK, args.check_file, "--check-file", args.check))
    sets = {name: spread(read_prompts(reachable(path, flag), flag=flag), count) for name, path, flag, count in files}
    sets["workloads"] = list(WORKLOADS.items())
    with open_run(args, "fit_policy") as (file, target, (draft,)):
        recorded = record_texts(args, target, draft, sets, file)
        fit = fitted([Recording(row["right"], row["confidences"]) for row in recorded[FIT]])
        rows = compared_policies(recorded, args.k, costs)
        file.finish({"fit": fit, "policies": rows})
    columns = [("arm", "k policy", str), *((name, name, fixed(3, "x")) for name in (FIT, CHECK, "all", *WORKLOADS))]
    places = ", ".join(f"{constant:.2f}" for constant in fit["places"])
    tell(
        f"log-odds of a right guess: {fit['slope']:.2f} times the draft's own, and by place {places} ({fit['guesses']} guesses)\n\n{markdown_table(rows, columns)}"
    )
    tell(f"results in {args.results}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
