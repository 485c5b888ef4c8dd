"""The five prompts, from the most predictable to the least.

Every prompt is the beginning of a text that the model goes on with, so the words alone decide how predictable it is.
"""

from __future__ import annotations

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
DEFAULT_WORKLOAD = "open prose"
