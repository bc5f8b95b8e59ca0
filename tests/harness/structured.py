"""A model whose tokens are bytes, for structured outputs: small, random, and any text can be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.harness.models import save_model

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

EOS = 2
VOCAB_SIZE = 300
"""Not a multiple of 32, and more than the tokenizer has."""


def save_byte_tokenizer(path: Path, more_special: Sequence[str] = ()) -> None:
    """256 bytes, after three special tokens; and some pairs, so that a mask is more than the next byte.
    `more_special`: tokens that come last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": EOS}
    vocab |= {char: 3 + place for place, char in enumerate(alphabet)}
    merges = [("t", "r"), ("a", "l"), ("1", "2"), ('"', ":"), ("a", "b")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<pad>", "<s>", "</s>", *more_special)
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.save(str(path / "tokenizer.json"))


def save_byte_model(path: Path, family: str = "jamba", **overrides: Any) -> None:
    save_model(family, path, seed=3, vocab_size=VOCAB_SIZE, **overrides)
    save_byte_tokenizer(path)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """One that has texts which end soon."""
    kinds = ["integer", "boolean", "null", "string", "enum", *(["object", "array"] if depth else [])]
    kind = rng.choice(kinds)
    if kind == "object":
        names = rng.sample("abcd", rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    return {
        "integer": {"type": "integer", "minimum": -20, "maximum": rng.randint(0, 300)},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "string": {"type": "string", "pattern": f"^[a-c]{{1,{rng.randint(1, 4)}}}$"},
        "enum": {"enum": rng.sample([1, "x", None, "ab", False, "é"], 3)},
    }[kind]
