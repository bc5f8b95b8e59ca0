"""Incremental detokenizing: joined pieces are the whole text, and no piece holds half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import hybridserve
from hybridserve.text import IncrementalDetokenizer, Tokenizer

DEMO = Path(hybridserve.__file__).parent / "models" / "demo"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "The people of the United States",
    "客单价 и цена",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 skin tone",
    "e\u0301 combining, Z\u0351\u036b\u0343 stacked",
    " leading, trailing \n\t ",
    "\u00ff\u0100 \x00 \x7f",
    "",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 4095) | st.integers(0, 260), max_size=40), skip=st.booleans())
def test_any_ids_join_to_the_full_decode(demo, reference, ids, skip):
    pieces = stream(demo, ids, skip_special_tokens=skip)
    assert "".join(pieces) == reference.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40) | st.sampled_from(TEXTS))
def test_any_text_streams_in_whole_characters(demo, text):
    pieces = stream(demo, demo.encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_ascii_is_shown_with_its_token(demo):
    ids = demo.encode("The people of the United States have been", add_special_tokens=False)
    pieces = stream(demo, ids)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


def test_a_dangling_byte_is_flushed_once(demo):
    ids = demo.encode("客", add_special_tokens=False)
    assert len(ids) == 3
    assert stream(demo, ids[:2]) == ["", "", REPLACEMENT]


def test_special_tokens_are_skipped_or_shown_by_name(demo):
    ids = [1, *demo.encode("hi", add_special_tokens=False), 2]
    assert demo.decode(ids) == "hi"
    assert demo.decode(ids, skip_special_tokens=False) == "<s>hi</s>"
    assert demo.decode_token(2) == "</s>"


@pytest.mark.parametrize("unknown", [-1, 4096, 2**31])
def test_ids_outside_the_vocabulary_have_no_text(demo, unknown):
    assert demo.decode([unknown]) == ""


def save(directory: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """As Llama has it: a word carries its leading space, what is not in the vocabulary goes by bytes."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "ab",
        "▁ab",
        "é",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tmp_path_factory.mktemp("sentencepiece"), backend), backend


@given(text=st.text(alphabet="ab é客🙂\u0301", max_size=20))
def test_byte_fallback_and_leading_spaces(sentencepiece, text):
    tokenizer, backend = sentencepiece
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, starts_text=True)
    assert "".join(pieces) == backend.decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_leading_space_may_be_a_byte(sentencepiece):
    tokenizer, backend = sentencepiece
    ids = [backend.token_to_id(token) for token in ("<0x20>", "a", "<0x20>")]
    assert tokenizer.decode(ids) == backend.decode(ids) == "a "


def test_a_continuation_keeps_its_leading_space(sentencepiece):
    tokenizer, _ = sentencepiece
    ids = tokenizer.encode("ab a")
    assert tokenizer.decode(ids) == "ab a"
    assert stream(tokenizer, ids)[:2] == [" ab", " a"]


def test_bytes_that_are_no_character_become_one_mark_each_run(sentencepiece):
    tokenizer, _ = sentencepiece
    euro = tokenizer.encode("€")[-3:]
    a = tokenizer.encode("ba")[-1]
    assert stream(tokenizer, [*euro, euro[0], a]) == ["", "", "€", "", REPLACEMENT + "a", ""]


def test_metaspace_decoder(tmp_path):
    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "a": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = save(tmp_path, backend)
    assert tokenizer.decode([0, 1, 2]) == backend.decode([0, 1, 2]) == "the cats"
    assert "".join(stream(tokenizer, [1, 2, 0])) == " cats the"


def test_wordpiece_decoder(tmp_path):
    vocab = {"[UNK]": 0, "a": 1, "play": 2, "##ing": 3, ".": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = save(tmp_path, backend)
    assert tokenizer.decode([2, 3, 2, 4]) == backend.decode([2, 3, 2, 4]) == "playing play."
