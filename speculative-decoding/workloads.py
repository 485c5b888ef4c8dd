"""The five prompts, and three that come with a text to work on.

Every workload is the beginning of a text that the model goes on with, so the words alone decide how predictable it is.
"""

from __future__ import annotations

import re
from itertools import count

WORKLOADS = {
    "code": '''def add(a, b):
    """Return the sum of a and b."""
    return a + b


def subtract(a, b):
    """Return the difference of a and b."""
    return a - b


def multiply(a, b):
    """Return the product of a and b."""
''',
    "repetitive": "The wheel turns and the mill grinds. " * 4 + "The wheel turns and the mill grinds.",
    "open prose": "Why do people love the sea? Part of the answer is that it",
    "factual list": "The countries of Europe and their capitals:\n1. France - Paris\n2. Germany - Berlin\n3. Italy - Rome\n4. Spain -",
    "structured": '[\n  {"id": 1, "name": "kettle", "price": 24.5, "in_stock": true},\n  {"id": 2, "name": "toaster", "price": 31.0, "in_stock": false},\n  {"id": 3,',
}


# Prompts whose answer lies in the prompt: summarise a passage, edit a program, answer from a passage. Each holds its own
# text whole and ends where the answer begins, so the model that goes on with it copies.
PASSAGE = """The lighthouse at Harrow Point was built in 1871 from grey stone that was cut on the island itself. For its first sixty years \
the lamp burned whale oil, and two keepers took turns through the night to trim the wick and wind the clockwork that turned the lens. In \
1931 the lamp was changed to electric light, and one keeper was enough. The last keeper, Anna Lindqvist, lived in the tower with her two \
dogs from 1952 until the light was made automatic in 1978. She wrote down the weather every morning at six o'clock, and her notebooks, \
twenty-six of them, are kept in the library of the town of Marrow. Scientists who study the climate of the coast still use them, because \
no other record of the wind on the island goes back so far."""

PROGRAM = '''class Account:
    """A bank account with a balance in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance

    def __repr__(self):
        return f"Account({self.owner}, {self.balance})"
'''

# The model is small: it copies once its answer has begun with words of the text, so each answer is begun here.
RENAMED = (
    PROGRAM.split("        if amount")[0]
    .replace("balance", "cents")
    .replace("with a cents in cents", "with its cents")
    .rstrip()
)
QUESTION = "Who was the last keeper, and what did she write down?"

GROUNDED = {
    "summary": f"Passage:\n{PASSAGE}\n\nSummary of the passage:\nThe lighthouse at Harrow Point was built in 1871",
    "code edit": f"# account.py, version 1\n\n{PROGRAM}\n\n# account.py, version 2: `balance` is now called `cents`\n\n{RENAMED}",
    "answer": f'Passage:\n{PASSAGE}\n\nQuestion: {QUESTION}\nAnswer, quoted from the passage: "The last keeper,',
}


DEFAULT_WORKLOAD = "open prose"
FEWEST_WORDS = 4  # of a prompt made by beginning a workload's text later


def later_starts(texts=WORKLOADS):
    """(name, text): these texts, then the same ones begun at their second word, at their third, ... All differ."""
    words = {name: re.split(r"(?<=\s)(?=\S)", text) for name, text in texts.items()}
    for later in count():
        left = [name for name in words if not later or len(words[name]) - later >= FEWEST_WORDS]
        if not left:
            return
        for name in left:
            yield f"{name}, from word {later + 1}" if later else name, "".join(words[name][later:])
