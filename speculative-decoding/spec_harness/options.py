"""What the user picks in every script that decodes: the pair, the prompts, how much to write and how; and how a run opens."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from spec_common import UserError, dtype_name, remark, tell

from spec_cli import at_least, fraction, reachable, set_up
from spec_harness.arms import Task
from spec_harness.machine import BUSY, environment
from spec_harness.prompts import Wanted, read_prompts
from spec_harness.results import ResultFile, settings
from spec_harness.theory import measured_v
from spec_loop import LOOPS
from spec_methods.policy import LOOP_OVERHEAD, POLICIES, THRESHOLD, make_policy
from spec_models.checkpoint import overridden
from spec_models.checks import Loaded, check_room, context_limit
from spec_models.find import locate
from spec_models.load import load_tokenizer
from spec_models.pairs import PAIRS, PASSES, form, load_pair
from spec_models.words import check_ids, ids_of, prompt_ids, stopping_ids
from workloads import DEFAULT_WORKLOAD, WORKLOADS


def add_task_options(parser) -> None:
    """The pair, how much to write, how."""
    parser.add_argument("--pair", choices=PAIRS, default="smollm2", help="a target and draft that belong together")
    parser.add_argument("--target", help="hub id, folder, .gguf file or 'smollm2'; the pair's if left out")
    parser.add_argument(
        "--draft", help="hub id, folder, .gguf file or 'cut:0,1,29' (layers of the target); the pair's if left out"
    )
    parser.add_argument("--draft-revision", help="revision of the draft on the hub")
    add_decoding_options(parser)


def add_draft_options(parser) -> None:
    """The draft's head, and the form of pass of both models."""
    parser.add_argument(
        "--draft-vocab",
        type=at_least(0),
        metavar="N",
        help="cut the draft's head to the N most frequent ids, 0: the whole head; left out: 16384 for a draft that ships, else the whole",
    )
    parser.add_argument(
        "--draft-vocab-text", type=Path, metavar="FILE", help="count those ids in a text; left out: the list that ships"
    )
    parser.add_argument(
        "--allow-tokenizer-differences", action="store_true",
        help="take a draft to which some ids mean other words (the text stays exact, guesses suffer)",
    )  # fmt: skip
    parser.add_argument(
        "--pass", dest="pass_form", choices=PASSES, default="auto",
        help="of target and draft. fused: Llama's layers with fewer operators; graph: those captured, one CUDA graph for each size of pass; plain: as transformers runs them; auto: fused on a CPU where both can",
    )  # fmt: skip


def add_decoding_options(parser) -> None:
    """How much to write and how: the same in every script that decodes."""
    add_draft_options(parser)
    parser.add_argument("--n-tokens", type=at_least(1), default=64, help="tokens to write")
    parser.add_argument(
        "--loop", choices=LOOPS, default="lean", help="lean: k draft passes a round; essay: k+1, always a full k"
    )
    parser.add_argument(
        "--stop-at-eos", action="store_true", help="stop at the model's end token; otherwise write on to --n-tokens"
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt through the target's chat template")
    parser.add_argument(
        "--allow-near-ties",
        action="store_true",
        help="half precision: report a text that parts at a tie within rounding, but do not fail (float32: never excused)",
    )


def add_policy_options(parser) -> None:
    """How far to look ahead; -k is then the most that a round may ask for."""
    parser.add_argument(
        "--k-policy", choices=POLICIES, default="fixed",
        help="fixed: k every round; heuristic: +2 / -1; confidence: stop after a guess the draft doubts; cost: from measured costs",
    )  # fmt: skip
    parser.add_argument(
        "--confidence",
        type=fraction,
        default=THRESHOLD,
        help="of --k-policy confidence: it stops after a less likely guess",
    )


def check_policy(args) -> None:
    if args.k_policy != "fixed" and args.loop == "essay":
        raise UserError("--k-policy: --loop essay always drafts a full k; leave one of them out")


def policy_of(args, k: int, costs: dict):
    """The k policy asked for; `costs` as `costs_at` gives them, which only 'cost' looks at."""
    return make_policy(args.k_policy, k, costs["c_places"], measured_v(costs), args.confidence, LOOP_OVERHEAD)


def add_prompt_options(parser, names=tuple(WORKLOADS), default: str = DEFAULT_WORKLOAD, seed: bool = True) -> None:
    """The text or texts to go on from; `seed`: whether what --sample draws has a --seed of its own."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--workload", default=default, help=f"one of: {', '.join(dict.fromkeys(('all', *names)))}")
    group.add_argument("--prompt", help="a prompt of your own")
    group.add_argument(
        "--prompt-file",
        type=Path,
        help="a text (one prompt), or a .jsonl or .json of strings or objects with prompt, text, question, messages, turns",
    )
    add = add_file_options(parser)
    add("--max-prompt-tokens", type=at_least(1), metavar="N", help="leave out those that are longer, the template included")
    if seed:
        add("--seed", type=at_least(0), default=0, help="of what --sample draws")


def add_file_options(parser) -> Callable:
    """Which prompts of a file; gives what adds an option to that group."""
    add = parser.add_argument_group("of --prompt-file").add_argument
    add("--limit", type=at_least(1), metavar="N", help="no more than that many, from its beginning")
    add("--sample", type=at_least(1), metavar="N", help="so many of them, drawn by --seed")
    add("--skip-bad", action="store_true", help="leave out what cannot be read; otherwise it ends the run")
    return add


def wanted_of(args) -> Wanted:
    return Wanted(args.limit, args.sample, args.seed, args.skip_bad)


def fill_pair(args) -> None:
    target, draft = PAIRS[args.pair]
    args.target = target if args.target is None else args.target
    if args.draft is None:
        if args.target != target:
            raise UserError("--draft: missing; the pair's own belongs to another target, so name one for yours")
        args.draft = draft


def workload_prompt(name: str, flag: str = "--workload") -> tuple[str, str]:
    if name not in WORKLOADS:
        raise UserError(f"{flag} {name}: unknown; choose all, {', '.join(WORKLOADS)}")
    return name, WORKLOADS[name]


def chosen_prompts(args) -> list[tuple[str, str]]:
    """(name, text) of each prompt asked for. Raises UserError."""
    if args.prompt is not None:
        if not args.prompt.strip():
            raise UserError("--prompt: empty; give some text")
        return [("prompt", args.prompt)]
    if args.prompt_file is not None:
        found = read_prompts(reachable(args.prompt_file, "--prompt-file"), wanted_of(args))
        return short_enough(args, found) if args.max_prompt_tokens else found
    if args.workload == "all":
        return list(WORKLOADS.items())
    return [workload_prompt(args.workload)]


def short_enough(args, prompts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of at most --max-prompt-tokens ids. Raises UserError where none is."""
    name = args.target or PAIRS[args.pair][0]
    tokenizer = load_tokenizer(locate(name, "--target"), name, "--target", args.revision, args.trust_remote_code)
    reader = Loaded(None, tokenizer, name, "--target")
    sizes = [len(ids_of(reader, text, args.chat)) for _, text in prompts]
    kept = [one for one, size in zip(prompts, sizes, strict=True) if size <= args.max_prompt_tokens]
    if not kept:
        raise UserError(f"--max-prompt-tokens {args.max_prompt_tokens}: the shortest prompt has {min(sizes)}; raise it")
    if len(kept) < len(prompts):
        remark(f"--max-prompt-tokens {args.max_prompt_tokens}: {len(prompts) - len(kept)} of {len(prompts)} prompts are longer")
    return kept


def make_task(args, target, draft, text: str) -> Task:
    """The task of one prompt, everything about it checked; `draft` is None where no model drafts. Raises UserError."""
    prompt = prompt_ids(target, text, args.chat, target.model.device)
    models = [target] if draft is None else [target, draft]
    check_room(target, prompt.shape[1], args.n_tokens, "--n-tokens")
    own = None if draft is None else context_limit(draft.model)
    own = own if own is not None and own < prompt.shape[1] + args.n_tokens else None
    if draft is not None:
        check_ids(draft, prompt[0].tolist(), target.tokenizer, getattr(args, "allow_tokenizer_differences", False))
    limits = [limit for limit in (context_limit(model.model) for model in models) if limit is not None]
    ends = stopping_ids(target) if args.stop_at_eos else frozenset()
    task = Task(target.model, prompt, args.n_tokens, args.loop, ends, min(limits, default=None), own)
    if own is not None:
        remark(
            f"{draft.flag} {draft.name}: made for texts of up to {own} tokens; from token {task.alone_from} of {args.n_tokens} "
            "on the target writes alone (target_alone_from in the file)"
        )
    return task


def prompt_hashes(args, target, drafts: list, prompts: list[tuple[str, str]]) -> dict[str, str]:
    """Check every prompt before the first is measured. Returns the hash of each one's ids, by name: part of a result
    file's settings, so that no run resumes on another text of the same name. Raises UserError."""
    hashes, sizes = {}, []
    for name, text in prompts:
        try:
            for draft in drafts or [None]:
                task = make_task(args, target, draft, text)
        except UserError as error:
            own = getattr(args, "prompt_file", None)
            raise (UserError(f"--prompt-file {name}: {error}") if own else error) from error
        hashes[name] = hashlib.sha256(str(task.prompt[0].tolist()).encode()).hexdigest()[:16]
        sizes.append(task.prompt.shape[1])
    if len(sizes) > 1 and getattr(args, "prompt_file", None):
        remark(f"{args.prompt_file.name}: {len(sizes)} prompts of {min(sizes)} to {max(sizes)} tokens")
    return hashes


# ------------------------------------------------------------------------------------------------- from options to a run


class Opened(NamedTuple):
    """A run about to begin: its result file, the target, the drafts; and where `open_run` was given it, what `ready` found."""

    file: ResultFile
    target: Loaded
    drafts: list[Loaded]


def load_one_draft(args, device, dtype) -> tuple[Loaded, list[Loaded]]:
    """The pair that most scripts run: a target and one draft."""
    fill_pair(args)
    return load_pair(args, device, dtype, [args.draft])


@contextlib.contextmanager
def open_run(args, name: str, prompts: list[tuple[str, str]] = (), load=load_one_draft, ready=None):
    """All that a script does between its options and its first measurement, in one place: device, models, prompts checked,
    the line that names them, the result file with its settings and environment. Raises UserError.

    `load(args, device, dtype)` gives the target and its drafts; `ready(target)`, if given, looks at what else was asked
    for before anything is written, and what it returns comes last in what is opened.
    """
    device, dtype = set_up(args)
    target, drafts = load(args, device, dtype)
    found = [ready(target)] if ready else []
    about = [draft.about for draft in drafts]
    more = {"prompt_ids_sha256": prompt_hashes(args, target, drafts, prompts)} if prompts else {}
    config = settings(args, target=target.about, draft=about[0] if len(about) == 1 else None, drafts=about,
                      generation_config_overridden=overridden(target.model), **more)  # fmt: skip
    names = [target.name, *(form(draft) for draft in drafts)]
    tell(
        f"{' + '.join(names)}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}\n"
    )
    where = environment(device, dtype, target.model)
    if device.type == "cpu" and where["cpu_busy"] > BUSY:
        remark(f"the machine is busy ({where['cpu_busy']:.0%} of its CPUs are in use by others): times will be noisy")
    if device.type == "cpu" and where["threads"] > (where["cpus_allowed"] or where["threads"]):
        remark(
            f"{where['threads']} threads on {where['cpus_allowed']} CPUs: they wait for one another; lower --threads"
        )
    with ResultFile(args.results, name, config, where, getattr(args, "resume", None)) as file:
        yield (*Opened(file, target, drafts), *found)
