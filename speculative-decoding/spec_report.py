"""Puts the committed results into README.md, RESULTS.md and the drafts' card: what stands between markers comes from them.

Claim: no figure on those pages was typed; each is what a result file says, and the code that measured it is named.

    python spec_report.py            # rewrite the pages from results/
    python spec_report.py --check    # exit 1 if they are not what the results say
"""

from __future__ import annotations

import re
from pathlib import Path

from spec_common import HERE, UserError, judge_speed, tell

from spec_adaptive import CLOSE, by_text
from spec_adaptive import table as adaptive_table
from spec_batch import tables as batch_tables
from spec_bench import USUAL_K, sweep_table, workload_table
from spec_bench import verdict as bench_verdict
from spec_cli import Help, Parser, command
from spec_drafts import table as draft_table
from spec_drafts import verdict as draft_verdict
from spec_harness.claims import essay_claims, further_claims, part
from spec_harness.compare import read_document
from spec_harness.rounding import COLUMNS as ROUNDING
from spec_harness.tables import against_transformers, fixed, markdown_table, speed_words, turns_of, what_it_does
from spec_harness.variants import table as variants_table
from spec_heads import table as heads_table
from spec_heads import verdict as heads_verdict
from spec_lookup import table as lookup_table
from spec_overlap import table as overlap_table
from spec_overlap import verdict as overlap_verdict
from spec_precondition import cost_table
from spec_sampling import block_table
from spec_sampling import table as sampling_table

ROOT = HERE.parent
PAGES = {"readme": ROOT / "README.md", "results": ROOT / "RESULTS.md", "card": HERE / "drafts" / "MODEL_CARD.md"}
NAMES = ("one_pass", "precondition", "precondition_bfloat16", "decode", "decode_tree", "bench", "drafts",
         "drafts_bfloat16", "sampling", "sampling_block", "lookup", "lookup_suffix", "adaptive", "batch", "overlap", "heads", "rounding_bfloat16", "rounding_float16")  # fmt: skip


def load_all(folder: Path) -> dict[str, dict]:
    """The result files that are there and whole, by name. Raises UserError where none is, or one was edited."""
    paths = {name: folder / f"spec_{name}.json" for name in NAMES}
    found = {name: read_document(path, "--results") for name, path in paths.items() if path.exists()}
    found = {name: one for name, one in found.items() if one.get("status") == "complete"}
    if not found:
        raise UserError(f"--results {folder}: no finished result file in it; run `make results`")
    return found


def where_measured(bench: dict) -> str:
    """Where and from which commit the committed results come."""
    where, target = bench["environment"], bench["config"]["target"]
    packages = ", ".join(f"{name} {where['packages'][name]}" for name in ("torch", "transformers"))
    return (
        f"{target['name']} with {bench['config']['draft']['name']}, {where['cpu_model']}, {where['threads']} threads, "
        f"{where['memory_bytes'] / 2**30:.0f} GiB, {where['dtype']} arithmetic with `--cpu-linear {target['cpu_linear']}`, "
        f"{target['pass']} passes of both models, greedy unless said; Python {where['python']}, {packages}; "
        f"commit {where['git_commit'][:12]}, {bench['created_at'][:10]}."
    )


def conditions(document: dict) -> str:
    """The settings of a table: text, tokens, turns, load as the run began."""
    config, busy = document["config"], document["environment"].get("cpu_busy")
    text, count = config.get("workload"), len(config.get("prompt_ids_sha256") or ())
    parts = [text and (f"all {count} texts" if text == "all" else text), f"{config['n_tokens']} tokens" if "n_tokens" in config else None,
             f"k = {config['k']}" if config.get("k") else None, f"{turns_of(config['repeats'])} of every arm",
             None if busy is None else f"{busy:.0%} of the CPUs in use by others at the start"]  # fmt: skip
    return f"`{document['command']}`: " + ", ".join(filter(None, parts)) + "."


def where_a_pass_goes(cost: dict) -> str:
    """What stands between a pass and its floor, from the measured parts."""
    rows, summary = {row["tokens"]: row for row in cost["rows"]}, cost["summary"]
    one, eight = rows[1], rows[8]
    return (
        f"This machine reads {summary['read_bytes_per_s'] / 1e9:.0f} GB/s and multiplies {summary['operations_per_s'] / 1e9:.0f} GFLOP/s, so checking could be free "
        f"up to n* = {summary['ridge_tokens']:.1f} tokens. A pass over one token takes {one['pass_ms']:.1f} ms: {one['floor_ms']:.1f} ms are the floor, "
        f"{one['linears_ms'] - one['floor_ms']:.1f} ms more are what the linear layers lose to it (many small products), and {one['pass_ms'] - one['linears_ms']:.1f} ms are "
        f"everything else: dispatch, attention, norms, the cache. Over eight tokens it is {eight['floor_ms']:.1f}, {eight['linears_ms'] - eight['floor_ms']:.1f} "
        f"and {eight['pass_ms'] - eight['linears_ms']:.1f} of {eight['pass_ms']:.1f} ms."
    )


def slower_cells(all_of: dict) -> str:
    """Every measured cell that is slower than the target alone, of every script, by the verdict and not by the point."""
    named_rows = [(f"{row['workload']} at k = {row['k']}", row) for kind in ("k", "workload") for row in part(all_of["bench"], kind)]
    named_rows += [(f"draft {row['draft']} over all texts", row) for row in all_of["drafts"]["summary"]["drafts"] if not row["error"]]
    if "sampling" in all_of:
        warm, k = all_of["sampling"]["summary"]["temperatures"], all_of["sampling"]["config"]["k"]
        named_rows += [(f"sampling at temperature {row['temperature']:g}, k = {k}", row) for row in warm if not row["error"]]
    if "lookup" in all_of:
        named_rows += [(f"{row['text']} by {row['method']}", row) for row in part(all_of["lookup"], "look-up")]
    if "overlap" in all_of:
        named_rows += [(f"{row['text']} by {row['method']}", row) for row in part(all_of["overlap"], "overlap") if row["method"] != "chain"]
    if "heads" in all_of:
        named_rows += [(f"{row['method']} over all texts", row) for row in all_of["heads"]["summary"]["methods"] if not row["error"]]
    if "batch" in all_of:
        k = all_of["batch"]["config"]["k"]
        named_rows += [(f"a batch of {row['batch']}, k = {k}", row) for row in part(all_of["batch"], "batch")]
    slow = [f"{name}: {speed_words(row)}" for name, row in named_rows if judge_speed(row) == "slower"]
    if not slow:
        return "No cell measured here is slower than the target alone beyond the noise."
    return "\n".join(["Slower than the target alone, beyond the noise:", "", *(f"- {line}" for line in dict.fromkeys(slow))])


def tables(all_of: dict) -> dict[str, str]:
    """The long tables of RESULTS.md, each with the command and settings that it comes from."""
    found = {f"from_{name}": conditions(one) for name, one in all_of.items() if name != "one_pass"}
    if cost := all_of.get("precondition"):
        forms = cost["summary"]["compared"].get("forms of pass")
        found |= {"costs": cost_table(cost["rows"], False), "passes": where_a_pass_goes(cost), "forms": forms and variants_table(forms)}
    if cost := all_of.get("precondition_bfloat16"):
        found["costs_bfloat16"] = cost_table(cost["rows"], False)
    if "decode" in all_of:
        row = part(all_of["decode"], "decode")[0]
        found |= {"decode_table": what_it_does(row, None), "versus": against_transformers(row)}
    if "decode_tree" in all_of:
        found["tree_table"] = what_it_does(part(all_of["decode_tree"], "decode")[0], None)
    if bench := all_of.get("bench"):
        found |= {"sweep": sweep_table(part(bench, "k"), wide=True), "workloads": workload_table(part(bench, "workload"), wide=True),
                  "bench_words": bench_verdict(bench["summary"], bench["config"]["workload"]), "machine": where_measured(bench)}  # fmt: skip
    if drafts := all_of.get("drafts"):
        rows = drafts["summary"]["drafts"]
        found |= {"draft_table": draft_table(rows, wide=True), "bigger": draft_verdict(rows), "acceptance_float32": acceptance(drafts)}
    if "bench" in all_of and "drafts" in all_of:
        found["not_pay"] = slower_cells(all_of)
    if "drafts_bfloat16" in all_of:
        found["acceptance_bfloat16"] = acceptance(all_of["drafts_bfloat16"])
    return found | further_tables(all_of)


def further_tables(all_of: dict) -> dict[str, str]:
    """The tables of what goes beyond the essay."""
    found = {}
    if "sampling" in all_of:
        found["sampling_table"] = sampling_table(all_of["sampling"]["summary"]["temperatures"], wide=True)
    if "sampling_block" in all_of:
        found["block_table"] = block_table(all_of["sampling_block"]["summary"]["temperatures"])
    if "lookup" in all_of:
        found["lookup_table"] = lookup_table(part(all_of["lookup"], "look-up"), wide=True)
    if "lookup_suffix" in all_of:
        found["suffix_table"] = lookup_table(part(all_of["lookup_suffix"], "look-up"), wide=True)
    if "adaptive" in all_of:
        arms = all_of["adaptive"]["summary"]["arms"]
        texts = [text for text in dict.fromkeys(row["text"] for row in arms) if text != "all"]
        found |= {"adaptive_table": adaptive_table(arms, "all", wide=True), "adaptive_texts": by_text(arms, texts)}
    if "batch" in all_of:
        found["batch_table"] = batch_tables(part(all_of["batch"], "batch"), wide=True)
    if "overlap" in all_of:
        found |= {"overlap_table": overlap_table(part(all_of["overlap"], "overlap"), wide=True), "overlap_words": overlap_verdict(all_of["overlap"]["summary"])}
    if "heads" in all_of:
        rows = all_of["heads"]["summary"]["methods"]
        found |= {"heads_table": heads_table(rows, wide=True), "heads_words": heads_verdict(rows)}
    rounding = [row for name in ("rounding_bfloat16", "rounding_float16") for row in all_of.get(name, {"rows": []})["rows"]]
    if rounding:
        shown = [row for row in rounding if row["rows"] == USUAL_K + 1]
        found["rounding_table"] = markdown_table(shown, [("dtype", "dtype", str), *ROUNDING])
    return found


def acceptance(drafts: dict) -> str:
    """alpha of every draft on every workload and, over all of them, by place in the block: of the guesses judged there,
    the share that was right."""
    cells = {row["workload"]: row["drafts"] for row in part(drafts, "draft")}
    texts, places = list(cells), range(drafts["config"]["k"])
    shown = []
    for name in next(iter(cells.values()), {}):
        mine = {text: rows[name] for text, rows in cells.items()}
        rounds = [pair for row in mine.values() for pair in zip(row["accepted_lengths"], row["proposed_lengths"], strict=True)]
        judged = [[kept > place for kept, guessed in rounds if kept >= place and guessed > place] for place in places]
        alphas = {text: row["alpha"] or 0.0 for text, row in mine.items()}
        by_place = {f"p{i}": f"{sum(one) / len(one):.2f}" if one else "-" for i, one in enumerate(judged)}
        shown.append({"draft": name, "mean": sum(alphas.values()) / len(alphas), **alphas, **by_place})
    columns = [("draft", "draft", str), *((text, text, fixed(2)) for text in texts), ("mean", "mean", fixed(2))]
    return markdown_table(shown, columns + [(f"p{i}", f"guess {i + 1}", str) for i in places])


def filled(text: str, values: dict[str, str | None]) -> str:
    """A page with every marker's text replaced; what has not been measured says so."""
    for name in re.findall(r"<!-- (\w+) -->", text):
        value = values.get(name) or "not measured yet; `make results` does"
        pattern = re.compile(rf"(<!-- {name} -->)(\n?).*?(<!-- /{name} -->)", re.DOTALL)
        text = pattern.sub(lambda match, value=value: match[1] + match[2] + value + match[2] + match[3], text)
    return text


def code_states(document: dict) -> dict[str, str | None]:
    """The state of each file that measured; files made before that was kept have one for the whole suite."""
    where = document["environment"]
    return where.get("code") or {"the suite": where.get("code_sha256")}


def measured_by_one_code(all_of: dict) -> None:
    """Raises UserError where two files were measured by different states of a file of the suite, or by code that was not
    committed."""
    seen = {}
    for name, one in all_of.items():
        for file, state in code_states(one).items():
            first, earlier = seen.setdefault(file, (name, state))
            if state != earlier:
                raise UserError(f"{first} and {name} were measured by two states of {file}; run `make results`")
    if any(one["environment"]["git_dirty"] for one in all_of.values()):
        raise UserError("results of code that was not committed; commit it and run `make results FRESH=1`")


@command
def main(argv=None) -> int:
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the result files")
    parser.add_argument("--check", action="store_true", help="only say whether the pages are what the results say")
    args = parser.parse_args(argv)
    all_of = load_all(args.results)
    measured_by_one_code(all_of)
    values, stale = essay_claims(all_of, USUAL_K) | further_claims(all_of, CLOSE) | tables(all_of), []
    for page in PAGES.values():
        text = page.read_text(encoding="utf-8")
        new = filled(text, values)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    said = "not what the results say; run spec_report.py" if args.check else "rewritten"
    tell(f"{' and '.join(stale)}: {said}" if stale else "as the results say")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
