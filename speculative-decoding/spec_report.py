"""Puts the committed results into the README and the drafts' card: what stands between markers comes from results/*.json.

Claim: no figure on those pages was typed; each is what a committed result file says.

    python spec_report.py            # rewrite both
    python spec_report.py --check    # exit 1 if they are not what the results say
"""

from __future__ import annotations

import json
import re
import statistics

from spec_common import HERE, UserError

from spec_adaptive import by_text
from spec_adaptive import table as adaptive_table
from spec_batch import tables as batch_tables
from spec_bench import USUAL_K, sweep_table, workload_table
from spec_cli import Help, Parser, command
from spec_decode import against_transformers
from spec_drafts import table as draft_table
from spec_drafts import verdict as draft_verdict
from spec_harness.tables import fixed, markdown_table
from spec_lookup import table as lookup_table
from spec_precondition import NEARLY_FREE, cost_table
from spec_sampling import table as sampling_table

RESULTS = HERE / "results"  # the committed ones
README, CARD = HERE.parent / "README.md", HERE / "drafts" / "MODEL_CARD.md"


def load(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise UserError(f"{RESULTS.name}/{name}.json is not there; run {name}.py first")
    return json.loads(path.read_text(encoding="utf-8"))


def machine(bench: dict, drafts: dict) -> str:
    """Where and from which commit the committed results come."""
    where, config = bench["environment"], bench["config"]
    packages = ", ".join(f"{name} {where['packages'][name]}" for name in ("torch", "transformers"))
    return (
        f"{config['target']['name']} with {config['draft']['name']}, {where['cpu_model']}, {where['threads']} threads, "
        f"{where['memory_bytes'] / 2**30:.0f} GiB, {where['dtype']} arithmetic with `--cpu-linear {config['target']['cpu_linear']}`, greedy, "
        f"{config['n_tokens']} tokens, {config['repeats']} turns of every arm; Python {where['python']}, {packages}; "
        f"commit {where['git_commit'][:12]}, {bench['created_at'][:10]}. Load average before: {where['load_average_1m']:.2f}."
    )


def passes(cost: dict) -> str:
    """What stands between a pass and its floor, from the measured parts."""
    rows, summary = {row["tokens"]: row for row in cost["rows"]}, cost["summary"]
    one, eight = rows[1], rows[8]
    return (
        f"This machine reads {summary['read_bytes_per_s'] / 1e9:.0f} GB/s and multiplies {summary['operations_per_s'] / 1e9:.0f} GFLOP/s, so checking could be free "
        f"up to n* = {summary['ridge_tokens']:.1f} tokens. A pass over one token takes {one['pass_ms']:.1f} ms: {one['floor_ms']:.1f} ms are the floor, "
        f"{one['linears_ms'] - one['floor_ms']:.1f} ms more are what the linear layers lose to it (many small products), and {one['pass_ms'] - one['linears_ms']:.1f} ms are "
        f"everything else: dispatch of eager layers, attention, norms, the cache. Over eight tokens it is {eight['floor_ms']:.1f}, {eight['linears_ms'] - eight['floor_ms']:.1f} "
        f"and {eight['pass_ms'] - eight['linears_ms']:.1f} of {eight['pass_ms']:.1f} ms."
    )


def not_pay(bench: dict, drafts: dict) -> str:
    """Every measured cell and draft that is not faster than the target alone, by name."""
    slow = [
        f"{row['workload']} at k = {row['k']}: {row['speedup']:.2f}x"
        for row in bench["rows"]
        if row.get("part") in ("k", "workload") and row["speedup"] < 1
    ]
    slow += [
        f"draft {row['draft']} at k = {drafts['config']['k']}: {row['speedup']:.2f}x"
        for row in drafts["summary"]["drafts"]
        if row["speedup"] < 1
    ]
    if not slow:
        return "Every cell measured here was faster than the target alone."
    summary, costs = bench["summary"], next(row for row in bench["rows"] if row.get("part") == "costs")
    why = (
        f"On {bench['config']['workload']} alpha is about {summary['alpha_median']:.2f}, so no k writes more than {summary['ceiling_tokens_per_pass']:.1f} tokens a pass, "
        f"while every further guess costs another {costs['c']:.2f} of one and makes checking dearer. Slower than the target alone were:"
    )
    return "\n".join([why, "", *(f"- {line}" for line in dict.fromkeys(slow))])


def figures() -> dict[str, str]:
    """The text of every marker."""
    one_pass, cost, decode, bench, drafts = (
        load(f"spec_{name}") for name in ("one_pass", "precondition", "decode", "bench", "drafts")
    )
    v = {row["tokens"]: row["v"] for row in cost["rows"]}
    row, best = decode["rows"][0], bench["summary"]
    cells = {part: [row for row in bench["rows"] if row.get("part") == part] for part in ("k", "workload")}
    usual = [row for row in cells["workload"] if row["k"] == USUAL_K]
    low, high = min(usual, key=lambda row: row["speedup"]), max(usual, key=lambda row: row["speedup"])
    ranked = sorted(drafts["summary"]["drafts"], key=lambda row: -row["speedup"])
    return {
        "one_pass": f"it holds: largest difference {one_pass['summary']['largest_difference_alone']:.4f} in a logit, rounding",
        "precondition": f"V(4) = {v[4]:.2f}, V(8) = {v[8]:.2f}; nearly free (V <= {NEARLY_FREE}) up to {cost['summary']['nearly_free_up_to']} tokens",
        "decode": f"{row['emitted']} tokens in {row['target_passes']} passes, {row['speedup']:.2f}x at k = {row['k']}, token for token the same",
        "bench": f"on open prose best k = {best['best_k']} at {best['best_speedup']:.2f}x; at k = {USUAL_K} from {low['speedup']:.2f}x ({low['workload']}) to "
        f"{high['speedup']:.2f}x ({high['workload']}); predictions off by {best['prediction_error_median_abs']:.3f} in the median over k",
        "drafts": "; ".join(f"{draft['draft']} {draft['speedup']:.2f}x (alpha {draft['alpha'] or 0:.2f}, c {draft['c']:.2f})" for draft in ranked),
        "machine": machine(bench, drafts), "costs": cost_table(cost["rows"], False), "passes": passes(cost),
        "sweep": sweep_table(cells["k"], False), "workloads": workload_table(cells["workload"], False),
        "draft_table": draft_table(drafts["summary"]["drafts"], False), "bigger": draft_verdict(drafts["summary"]["drafts"]), "versus": against_transformers(row), "not_pay": not_pay(bench, drafts),
    }  # fmt: skip


def share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def acceptance(drafts: dict) -> str:
    """alpha of every draft on every workload and, over all of them, by place in the block: of the guesses judged there,
    the share that was right."""
    rows = [row for row in drafts["rows"] if row.get("part") == "draft" and not row["error"]]
    texts, places = list(dict.fromkeys(row["workload"] for row in rows)), range(drafts["config"]["k"])
    shown = []
    for name in dict.fromkeys(row["draft"] for row in rows):
        mine = {row["workload"]: row for row in rows if row["draft"] == name}
        rounds = [
            pair for row in mine.values() for pair in zip(row["accepted_lengths"], row["proposed_lengths"], strict=True)
        ]
        judged = [[kept > place for kept, guessed in rounds if kept >= place and guessed > place] for place in places]
        alphas = {text: row["alpha"] for text, row in mine.items()}
        shown.append(
            {
                "draft": name,
                "mean": statistics.fmean(alphas.values()),
                **alphas,
                **{f"p{i}": share(sum(one), len(one)) for i, one in enumerate(judged)},
            }
        )
    columns = [("draft", "draft", str), *((text, text, fixed(2)) for text in texts), ("mean", "mean", fixed(2))]
    return markdown_table(shown, columns + [(f"p{i}", f"guess {i + 1}", str) for i in places])


def named(where: dict) -> str:
    return ", ".join(f"{text} {speedup:.2f}x" for text, speedup in where.items()) or "nowhere here"


def beyond() -> dict[str, str]:
    """The text of the markers of what goes beyond the essay."""
    sampling, lookup, adaptive, batch = (load(f"spec_{name}") for name in ("sampling", "lookup", "adaptive", "batch"))
    warm, where, arms = sampling["summary"]["temperatures"], lookup["summary"]["where"], adaptive["summary"]["arms"]
    texts = [text for text in dict.fromkeys(row["text"] for row in arms) if text != "all"]
    found = {(row["arm"], row["text"]): row["speedup"] for row in arms}
    best = max(
        (arm for arm, text in found if text == "all" and arm.startswith("k = ")), key=lambda arm: found[arm, "all"]
    )
    fixed_best = {
        text: max(speedup for (arm, name), speedup in found.items() if name == text and arm.startswith("k = "))
        for text in texts
    }
    behind = {text: found["cost", text] for text in texts if found["cost", text] < fixed_best[text]}
    rows = [row for row in batch["rows"] if row.get("part") == "batch"]
    lost = [f"{row['batch']} ({row['speedup']:.2f}x)" for row in rows if row["speedup"] < 1]
    slow = [f"temperature {row['temperature']:g} ({row['speedup']:.2f}x)" for row in warm if row["speedup"] < 1]
    return {
        "m_sampling": ", ".join(f"{row['speedup']:.2f}x at {row['temperature']:g}" for row in warm) + f" ({sampling['config']['workload']}, k = {sampling['config']['k']})",
        "l_sampling": ", ".join(slow) or "no temperature measured",
        "m_lookup": named(where["lookup"]["pays"]), "l_lookup": named(where["lookup"]["loses"]),
        "m_hybrid": named(where["hybrid"]["pays"]), "l_hybrid": named(where["hybrid"]["loses"]),
        "m_adaptive": f"cost {found['cost', 'all']:.2f}x over all five texts, the best fixed k ({best}) {found[best, 'all']:.2f}x",
        "l_adaptive": "behind the best fixed k of a text on " + named(behind) if behind else "nowhere behind the best fixed k of a text",
        "m_batch": ", ".join(f"{row['speedup']:.2f}x at {row['batch']}" for row in rows), "l_batch": f"batches of {', '.join(lost)}" if lost else "no batch measured",
        "sampling_table": sampling_table(warm), "lookup_table": lookup_table([row for row in lookup["rows"] if row.get("part") == "look-up"]),
        "adaptive_table": adaptive_table(arms, "all"), "adaptive_texts": by_text(arms, texts), "batch_table": batch_tables(rows),
    }  # fmt: skip


def card_figures() -> dict[str, str]:
    """The text of every marker of the drafts' card, acceptance_<dtype>, from the run in that dtype."""
    dtypes = re.findall(r"<!-- acceptance_(\w+) -->", CARD.read_text(encoding="utf-8"))
    return {
        f"acceptance_{dtype}": acceptance(load("spec_drafts" if dtype == "float32" else f"spec_drafts_{dtype}"))
        for dtype in dtypes
    }


def filled(text: str, values: dict[str, str]) -> str:
    """A page with every marker's text replaced. Raises UserError for a marker that is not there."""
    for name, value in values.items():
        pattern = re.compile(rf"(<!-- {name} -->)(\n?).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise UserError(f"the page has no marker <!-- {name} -->")
        text = pattern.sub(lambda match, value=value: match[1] + match[2] + value + match[2] + match[3], text)
    return text


@command
def main(argv=None) -> int:
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument("--check", action="store_true", help="only say whether they are what the results say")
    args = parser.parse_args(argv)
    stale = []
    for page, values in ((README, figures() | beyond()), (CARD, card_figures())):
        text = page.read_text(encoding="utf-8")
        new = filled(text, values)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    print(
        f"{' and '.join(stale)}: {'not what the results say; run spec_report.py' if args.check else 'rewritten'}"
        if stale
        else "as the results say"
    )
    return int(args.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
