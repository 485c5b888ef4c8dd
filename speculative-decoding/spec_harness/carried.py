"""What passes through two depths of a shape say of the whole (spec_models/depth.py): their seconds, turn by turn."""

from __future__ import annotations

from spec_common import UserError

from spec_models.depth import Depth


def carried_seconds(seconds: dict, depth: Depth) -> dict:
    """The seconds of the whole shape, turn by turn, from those of its two depths: {n: ...} of 2N layers, {("part", n): ...}
    of N. A draft's are its own. Raises UserError where a turn was too noisy to carry on."""
    whole = {name: values for name, values in seconds.items() if isinstance(name, str)}
    for n in (name for name in seconds if isinstance(name, int)):
        turns = zip(seconds["part", n], seconds[n], strict=True)
        whole[n] = [depth.carried(part, twice) for part, twice in turns]
        if min(whole[n]) <= 0:
            raise UserError(
                f"--layers {depth.part}: a pass over {n} tokens took no longer through {2 * depth.part} layers than through {depth.part}; give more layers, or a quiet machine"
            )
    return whole


def check_layers(args) -> None:
    """Refuse what does not go with --layers. Raises UserError."""
    if args.layers and not args.random_weights:
        raise UserError("--layers: measures a part of a shape; give --random-weights with it")
    if args.layers and (args.vs_plain or args.compare_linears or args.compare_passes or args.pass_form == "graph"):
        raise UserError(
            "--layers: measures two depths beside one another; leave --vs-plain, --compare-linears, --compare-passes and --pass graph out"
        )
