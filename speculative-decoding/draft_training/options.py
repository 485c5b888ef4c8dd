"""What the three commands of this folder ask for alike, and what training can be told."""

import argparse
import math
import pathlib

from spec_cli import Help, Parser, at_least, fraction


def training_parser(doc, target, out, prompts, threads=1):
    """A parser with the options that data.py, train.py and make_draft.py share; what each means by a folder, in words."""
    parser = Parser(description=doc, formatter_class=Help)
    parser.add_argument("--target", required=True, help=target)
    parser.add_argument("--out", required=True, type=pathlib.Path, help=out)
    parser.add_argument("--prompts", type=pathlib.Path, metavar="FILE", help=prompts)
    parser.add_argument("--threads", type=at_least(1, 1024), default=threads, help="threads of the arithmetic")
    return parser


def layer_list(text):
    """A type for argparse: layer numbers with commas between, in the order given."""
    numbers = [at_least(0, 1000)(part) for part in text.split(",")]
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"'{text}' names a layer twice")
    return numbers


def above_zero(text):
    """A type for argparse: a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def add_draft_options(parser):
    """What is trained: the layers, and what they begin from."""
    add = parser.add_argument_group("the draft").add_argument
    add("--layers", type=layer_list, default=[0, 1, 23], help="the target's layers that the draft keeps, from 0")
    add("--grow", type=pathlib.Path, metavar="FILE",
        help="begin from this trained draft; it may have fewer of the layers")  # fmt: skip
    add("--guesses", type=at_least(1, 64), default=1,
        help="guesses that one pass is trained to make; above 1: with a mask vector")  # fmt: skip


def add_budget_options(parser):
    """How long, in what steps, how often it is looked at."""
    add, whole = parser.add_argument_group("the budget").add_argument, at_least(0, 10**9)
    add("--minutes", type=above_zero, default=60, help="of time, that of earlier runs (--resume) included")
    add("--steps", type=whole, default=0, help="of steps; 0 is none")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--warm-steps", type=at_least(1), default=50, help="steps of warm-up")
    add("--decay", type=float, default=0.25, help="last share of the budget, in which the rate falls to zero")
    add("--weight-decay", type=float, default=0.01, help="of AdamW")
    add("--batch-tokens", type=at_least(1), default=1024, help="tokens a step, padding included")
    add("--check-every", type=at_least(1, 10**9), default=300, help="steps between two held-out tables and checkpoints")
    add("--seed", type=whole, default=0, help="of the order of rows and the negatives")


def add_loss_options(parser):
    """What is learnt from which positions."""
    add = parser.add_argument_group("the loss").add_argument
    add("--negatives", type=at_least(0), default=1024, help="random ids in every union of candidates")
    add("--hard", type=float, default=0.5, help="weight of the teacher's own choice")
    add("--state", type=float, default=1.0, help="weight of the distance between last hidden states")
    add("--prompt-share", type=fraction, default=0.3,
        help="share of the positions inside prompts that is learnt from (continued ones all are)")  # fmt: skip
    add("--keep-out", type=pathlib.Path, nargs="*", default=[], metavar="FILE",
        help=".jsonl files of prompts that the draft will be judged on: no row that shares 12 ids in a row is trained on")  # fmt: skip
