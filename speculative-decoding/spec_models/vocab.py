"""A cheaper head for any draft: only the N ids that texts use most, mapped back when the draft proposes.

The head of a small draft on a large vocabulary is a good part of its pass (49152 rows here). Cut to the frequent ids it
costs a fraction, needs no training, and stays exact by construction: what a draft cannot say, it never proposes, and the
target writes it. FR-Spec (Zhao et al. 2025) does this to the heads of EAGLE.

    python spec_decode.py --draft-vocab 4096                              # the list that ships
    python spec_decode.py --draft-vocab 4096 --draft-vocab-text FILE      # counted from a text
    python -m spec_models.vocab --target FOLDER --data data                     # how the one that ships was counted
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

from spec_common import HERE, UserError, tell

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from spec_cli import Help, Parser, command, reachable

SHIPPED_LIST = HERE / "drafts" / "frequent_ids.json"
BYTES_AT_A_TIME = 1 << 20  # of a text: tokenizers slow down on one very long string


def vocabulary_hash(tokenizer) -> str:
    """What identifies a vocabulary: its tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def vocabulary_size(tokenizer) -> int:
    """One more than the highest id: a vocabulary may have holes."""
    return max(tokenizer.get_vocab().values()) + 1


def ranked(counts: Counter, size: int) -> list[int]:
    """Every id below `size`, the most frequent first; those never seen follow in order (a low id is an early merge)."""
    return sorted(range(size), key=lambda token: (-counts[token], token))


def joined(earlier: list[int], seen: list[int]) -> list[int]:
    """An earlier list and what new texts add to it: its order stays, so no size of head loses an id that it had."""
    return list(dict.fromkeys([*earlier, *seen]))


def count_text(tokenizer, text: str) -> Counter:
    """How often each id occurs in a text, read in pieces that end at a line."""
    counts, piece = Counter(), ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= BYTES_AT_A_TIME:
            counts.update(tokenizer(piece, add_special_tokens=False)["input_ids"])
            piece = ""
    counts.update(tokenizer(piece, add_special_tokens=False)["input_ids"])
    return counts


def shipped_ids(tokenizer) -> list[int]:
    """The list that ships, counted from what the embedded target writes. Raises UserError for another vocabulary."""
    stored = json.loads(SHIPPED_LIST.read_text())
    if stored["vocabulary_sha256"] != vocabulary_hash(tokenizer):
        raise UserError(
            "--draft-vocab: the list of frequent ids that ships belongs to another tokenizer; give --draft-vocab-text FILE to count one"
        )
    return list(dict.fromkeys([*stored["ids"], *range(vocabulary_size(tokenizer))]))


def frequent_ids(tokenizer, text_file: Path | None) -> list[int]:
    """Ids by falling frequency, from the shipped list or a text file. Raises UserError."""
    if text_file is None:
        return shipped_ids(tokenizer)
    try:
        text = reachable(text_file, "--draft-vocab-text").read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"--draft-vocab-text {text_file.name}: {getattr(error, 'strerror', None) or error}") from error
    counts = count_text(tokenizer, text)
    if not counts:
        raise UserError(f"--draft-vocab-text {text_file.name}: no token in it; give some text")
    return ranked(counts, vocabulary_size(tokenizer))


class CutHead(nn.Module):
    """The rows `kept` of a head: hidden (..., in) -> logits (..., len(kept)). Row i speaks of id kept[i]."""

    def __init__(self, head: nn.Linear, kept: torch.Tensor):
        super().__init__()
        self.linear = nn.Linear(head.in_features, len(kept), head.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(head.weight.detach()[kept].contiguous(), requires_grad=False)
        if head.bias is not None:
            self.linear.bias = nn.Parameter(head.bias.detach()[kept].contiguous(), requires_grad=False)
        self.register_buffer("kept", kept)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


def cut_head(model, ids: list[int], size: int, vocabulary: int) -> None:
    """Leave `model`, in place, a head of the first `size` of `ids` that lie below `vocabulary`, the target's rows.
    Raises UserError where the head is no linear layer."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError("--draft-vocab: this draft's head is no linear layer and cannot be cut; leave the option out")
    if head.weight.is_meta:
        raise UserError("--draft-vocab: this draft's head is not in memory and cannot be cut; choose a smaller model")
    limit = min(vocabulary, head.out_features)
    kept = sorted([token for token in ids if token < limit][:size])
    model.set_output_embeddings(CutHead(head, torch.tensor(kept, device=head.weight.device)))


def count_shards(folder: Path) -> Counter:
    """How often the target wrote each id in the shards of draft_training.data: the continued positions, not the prompts."""
    counts = Counter()
    for path in sorted(folder.glob("shard-*.safetensors")):
        shard = load_file(path)
        rows = shard["ids"].split(shard["lengths"].tolist())
        written = [row[prompt:] for row, prompt in zip(rows, shard["prompt_lengths"].tolist(), strict=True)]
        counts.update(torch.cat(written).tolist())
    return counts


def parse_args(argv):
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument("--target", required=True, help="folder with the tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="folder of teacher shards")
    parser.add_argument(
        "--join", type=Path, metavar="FILE", help="an earlier list of the same tokenizer, joined with this one"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED_LIST, help="the list to write")
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    counts = count_shards(args.data)
    if not counts:
        raise UserError(f"--data {args.data}: no shard with a token in it; make some with draft_training.data")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    seen = [token for token in ranked(counts, vocabulary_size(tokenizer)) if counts[token]]
    document = {"vocabulary_sha256": vocabulary_hash(tokenizer), "tokens_counted": counts.total(), "ids": seen}
    if args.join:
        earlier = json.loads(args.join.read_text())
        if earlier["vocabulary_sha256"] != document["vocabulary_sha256"]:
            raise UserError(f"--join {args.join.name}: of another tokenizer; leave it out")
        document["tokens_counted"] += earlier["tokens_counted"]
        document["ids"] = joined(earlier["ids"], seen)
    args.out.write_text(json.dumps(document) + "\n")
    tell(f"{len(document['ids'])} ids of {document['tokens_counted']} tokens in {args.out.name}")
    for size in (1024, 2048, 4096, 8192, 16384):
        tell(f"the first {size} are {sum(counts[token] for token in seen[:size]) / counts.total():.2%} of them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
