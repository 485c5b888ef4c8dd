"""Charts, light and dark, from the result files: the k sweep, the cost curve, the workloads, where the time went. And two
result files of one script side by side: two machines, two commits, two precisions.

Claim: every point in a chart is a row of a result file; nothing is smoothed, and a file that is not there is skipped by
name.

    python spec_plot.py                      # from results/local, beside them
    python spec_plot.py --results results    # the committed ones
    python spec_plot.py --compare results/spec_bench.json results/local/spec_bench.json
"""

from __future__ import annotations

from pathlib import Path

from spec_common import HERE, UserError, say, tell

from spec_cli import Help, Parser, command, reachable
from spec_harness.charts import CHARTS, plot_comparison
from spec_harness.compare import compared_files, read_document
from spec_harness.drawing import THEMES


def save(figure, out: Path, name: str, theme: str) -> str:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name a folder that can be made") from error
    figure.savefig(out / f"{name}_{theme}.png", dpi=120)
    return f"{name}_{theme}.png"


def draw(name: str, experiment: str, plot, folder: Path, out: Path) -> list[str]:
    """One chart in every theme; the names of its files, none where the result file is not there or has no rows for it."""
    there, drawn = (folder / f"{experiment}.json").exists(), []
    document = read_document(folder / f"{experiment}.json", "--results") if there else None
    for theme, colours in THEMES.items():
        try:
            figure = plot(document, colours) if document else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"--results: {experiment}.json in it has rows that no chart can show ({error!r}); measure again"
            ) from error
        if figure is None:
            say(f"{name}: skipped, {experiment}.json " + ("has no rows for it" if document else "is not there"))
            break
        drawn.append(save(figure, out, name, theme))
    return drawn


def compare(paths: list[Path], out: Path) -> int:
    """Two result files on the terminal and as a chart."""
    documents = [read_document(reachable(path, "--compare"), "--compare") for path in paths]
    try:
        tell(compared_files(*documents, (paths[0].name, paths[1].name)))
        figures = {theme: plot_comparison(*documents, colours) for theme, colours in THEMES.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--compare: rows that nothing can be compared by ({error!r}); measure again") from error
    drawn = [save(figure, out, f"compare_{documents[0]['experiment']}", theme) for theme, figure in figures.items()]
    tell(f"\n{len(drawn)} charts in {out}: {', '.join(drawn)}")
    return 0


def parse_args(argv):
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "local", help="the folder of the result files"
    )
    parser.add_argument("--out", type=Path, help="where the charts go; the same folder if left out")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two result files of one script, instead of charts of each")  # fmt: skip
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    out = args.out or args.results
    if args.compare:
        return compare(args.compare, reachable(out, "--out"))
    if not reachable(args.results, "--results").is_dir():
        raise UserError(f"--results {args.results}: no such folder; run spec_bench.py first")
    if not any(args.results.glob("*.json")):
        raise UserError(f"--results {args.results}: no result file in it; run spec_bench.py first")
    drawn = []
    for name, (experiment, plot) in CHARTS.items():
        drawn += draw(name, experiment, plot, args.results, out)
    if not drawn:
        raise UserError(
            f"--results {args.results}: no result file with rows; run spec_bench.py and spec_precondition.py first"
        )
    tell(f"{len(drawn)} charts in {out}: {', '.join(drawn)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
