"""What a user would ask: prompts from a file, requests that the target writes itself, several turns, long contexts.

An instruct model given only the opening of a user's turn goes on with a user's request (Magpie, arXiv 2406.08464), so
a model needs nobody's data to practise on. All of it goes through the chat template, as an instruct model is used.
"""

import hashlib
import json

from spec_common import UserError

from draft_training.teacher import continue_rows

HELD_OUT_SHARE = 20  # one in so many prompts of the user's own is judged on, never trained on
LONGEST_PROMPT = 1000  # ids; what is longer is left out
OWN_IDS = 80  # ids that a request of the target's own may have
FEWEST_WORDS = 4
CODE_ASKS = (
    "Complete the following code:\n",
    "Finish this function:\n\n",
    "Write the body of this function.\n\n",
    "What does this code do?\n\n",
)
FOLLOW_UPS = (
    "Rewrite your previous response in fewer words.",
    "Explain that to a child.",
    "Can you give an example?",
    "Why?",
    "Go on.",
    "Now do the same as a list.",
    "Say it more politely.",
    "What are the drawbacks?",
    "Summarise your answer in one sentence.",
    "Give two more.",
    "Translate your answer into French.",
    "Are you sure? Check it.",
    "Turn it into a short poem.",
    "What should I do first?",
    "How does that compare with the alternatives?",
    "Write it as an email.",
    "Put it into a table.",
)
LONG_ASKS = (
    "Summarize the following text:\n{text}",
    "{text}\n\nWrite a summary of the text above.",
    "{text}\n\nTL;DR:",
    "Read the passages and say what each is about.\n\n{text}",
    "Answer the question from the passages below.\n\n{text}\n\nQuestion: What does the text say about {word}?\nAnswer:",
    "{text}\n\nUsing only the text above, explain what is said about {word}.",
    "Correct the spelling and grammar of this text:\n\n{text}",
    "Translate into English:\n\n{text}",
)


def read_prompts(path, flag="--prompts"):
    """The prompts of a .jsonl file, {"kind", "prompt"} or a plain string a line, each once. Raises UserError."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{flag} {path.name}: {getattr(error, 'strerror', None) or error}; give a .jsonl of prompts"
        ) from error
    found = {}
    for number, one in enumerate(records, 1):
        text = one.get("prompt") if isinstance(one, dict) else one
        if not isinstance(text, str) or not text.strip():
            raise UserError(f'{flag} {path.name}: line {number} has no text under "prompt"; give one a line')
        found[text] = one.get("kind", "") if isinstance(one, dict) else ""
    if not found:
        raise UserError(f"{flag} {path.name}: no prompt in it; give one JSON object with a prompt a line")
    return [(kind, text) for text, kind in found.items()]


def is_held_out(text):
    """Whether a prompt is kept for judging: by its hash, so that it stays out however the file is ordered."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def asked(kind, text, rng):
    """The prompt as a request: a beginning of code mostly comes with what to do with it."""
    return rng.choice(CODE_ASKS) + text if kind == "code" and rng.random() < 0.7 else text


def templated(tokenizer, turns):
    """Ids of a conversation (user and assistant by turns) up to where the target answers."""
    roles = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    text = tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def long_request(texts, rng):
    """A task over several passages: prompts of the file stand for them, as long texts as it has."""
    passages = sorted(rng.sample(texts, min(8, len(texts))), key=len)[-rng.randint(2, 4) :]
    rng.shuffle(passages)
    text = "\n\n".join(passages)
    words = [word.strip(".,;:()\"'") for word in text.split() if len(word) > 6] or ["it"]
    return rng.choice(LONG_ASKS).format(text=text, word=rng.choice(words))


def opening(tokenizer):
    """Ids of the template up to where a user begins to write. Raises UserError where the template is of another
    kind."""
    mark = "ZQXJ"
    before, found, _ = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).partition(
        mark
    )
    if not found:
        raise UserError("--target: its chat template drops the user's text; give prompts with --prompts FILE.jsonl")
    return tokenizer(before, add_special_tokens=False)["input_ids"]


def is_request(text):
    """Whether a text reads as one request: some words, an end, not the same words over and over."""
    words = text.split()
    ends = text.rstrip().endswith((".", "?", "!", ":", ")", "}", '"', "`"))
    return len(words) >= FEWEST_WORDS and ends and len({word.lower() for word in words}) > 0.5 * len(words)


def own_requests(teacher, tokenizer, count, generator):
    """Requests that the target writes after the opening of a user's turn, sampled from its best 16 ids at temperature
    1, without what did not end, is short, doubled or repeats itself (of the embedded target one in eight)."""

    begun, stop = opening(tokenizer), tokenizer.eos_token_id
    rows = continue_rows(teacher, [begun] * count, OWN_IDS, [OWN_IDS] * count, stop, generator)
    texts = []
    for ids, *_ in rows:
        text = tokenizer.decode(ids[len(begun) :], skip_special_tokens=True).strip()
        if len(ids) < len(begun) + OWN_IDS - 1 and is_request(text):
            texts.append(text)
    return list(dict.fromkeys(texts))


def conversations(teacher, tokenizer, requests, rng, new_tokens=64):
    """The second turns of conversations that begin with `requests`, and third turns of a part: the target answers
    between."""
    rows = answered(teacher, tokenizer, [templated(tokenizer, [request]) for request in requests], new_tokens)
    turns = [[request, row, rng.choice(FOLLOW_UPS)] for request, row in zip(requests, rows, strict=True)]
    longer = turns[: len(turns) // 3]
    rows = answered(teacher, tokenizer, [templated(tokenizer, one) for one in longer], new_tokens)
    for one, row in zip(longer, rows, strict=True):
        one += [row, rng.choice(FOLLOW_UPS)]
    return [templated(tokenizer, one) for one in turns]


def answered(teacher, tokenizer, prompts, new_tokens):
    """The target's greedy answers to conversations, as text, cut at the end of a sentence where there is one."""

    if not prompts:
        return []
    rows = continue_rows(teacher, prompts, new_tokens, [0] * len(prompts), tokenizer.eos_token_id)
    texts = []
    for prompt, (ids, *_) in zip(prompts, rows, strict=True):
        text = tokenizer.decode(ids[len(prompt) :].tolist(), skip_special_tokens=True).strip()
        end = max(text.rfind(". "), text.rfind(".\n"))
        texts.append((text[: end + 1] if end > 20 else text) or "Yes.")
    return texts
