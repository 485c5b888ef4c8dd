"""What passes through two depths of a shape say of the whole (spec_models/depth.py): their seconds, turn by turn."""

from __future__ import annotations

from spec_common import UserError

from spec_models.depth import Depth


def carried_seconds(seconds: dict, depth: Depth) -> dict:
    """The seconds of the whole shape, turn by turn, from those of its two depths: {n: ...} of 2N layers, {("part", n): ...}
    of N; a draft's are its own. A turn in which some pass through 2N layers came out so short that nothing is left for the
    whole was disturbed, and is left out for all. Raises UserError where no turn is left."""
    sizes = [name for name in seconds if isinstance(name, int)]
    whole = {name: values for name, values in seconds.items() if isinstance(name, str)}
    for n in sizes:
        turns = zip(seconds["part", n], seconds[n], strict=True)
        whole[n] = [depth.carried(part, twice) for part, twice in turns]
    good = [turn for turn in range(len(whole[sizes[0]])) if all(whole[n][turn] > 0 for n in sizes)]
    if not good:
        raise UserError(
            f"--layers {depth.part}: in every turn a pass took no longer through {2 * depth.part} layers than through "
            f"{depth.part}; give more layers, or a quiet machine"
        )
    return {name: [values[turn] for turn in good] for name, values in whole.items()}


def check_layers(args) -> None:
    """Refuse what does not go with --layers. Raises UserError."""
    if args.layers and not args.random_weights:
        raise UserError("--layers: measures a part of a shape; give --random-weights with it")
    if args.layers and (args.vs_plain or args.compare_linears or args.compare_passes or args.pass_form == "graph"):
        raise UserError(
            "--layers: measures two depths beside one another; leave --vs-plain, --compare-linears, --compare-passes and --pass graph out"
        )
