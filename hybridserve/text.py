"""Between text and token ids: tokenizer, chat template, incremental detokenizing, stop strings.

Knows the files of a tokenizer and characters; does not know models, requests or torch. Never runs code that
comes with a model: the chat template is rendered in a sandbox.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    from hybridserve.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""As OpenAI has them: {"type": "function", "function": {"name", "description", "parameters"}}."""


class TokenizerMissing(ValueError):
    """Text was given or asked for, and the model has no tokenizer; token ids work without one."""


class Tokenizer:
    """The `tokenizer.json` of a directory, and what `tokenizer_config.json` says of special tokens and chats.

    Raises TokenizerMissing if there is no such file, ValueError if a file is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        path = self.file = self._directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerMissing(f"no tokenizer.json in {directory}")
        self._backend = _load_backend(path)
        self._config = _read_json(self._directory / "tokenizer_config.json")
        decoders = _decoder_types(json.loads(path.read_bytes()).get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        # Decoders drop the space of a first word: what a token adds to a text shows only after another token.
        self._anchor = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        return cls(directory)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Names as in `bos_token` -> the token's text."""
        values = {key: self._config.get(key) for key in self._config if key.endswith("_token")}
        texts = {
            key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()
        }
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens that the tokenizer puts around a text."""
        try:  # a batch: while it works on one, other threads of Python run
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (TypeError, UnicodeEncodeError):
            raise ValueError("prompt: holds half of a surrogate pair, which is not text") from None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids` as a text of its own; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens, starts_text=True)
        return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()

    def decode_token(self, token_id: int) -> str:
        """What a token adds to a text, special tokens by name; U+FFFD for each part of a character."""
        return self.piece(token_id).decode("utf-8", errors="replace")

    def detokenizer(self, *, shown_ids: Collection[int] = ()) -> IncrementalDetokenizer:
        """For the ids that follow a prompt."""
        return IncrementalDetokenizer(self, shown_ids=shown_ids)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written like this, if there is one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def piece(self, token_id: int, *, starts_text: bool = False) -> bytes:
        """The UTF-8 bytes, perhaps half a character, that a token adds to a text; empty for an unknown id."""
        key = (token_id, starts_text)
        if key not in self._pieces:
            self._pieces[key] = self._find_piece(token_id, starts_text)
        return self._pieces[key]

    def _find_piece(self, token_id: int, starts_text: bool) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)) and int(match[1], 16) >= 0x80:
            return bytes([int(match[1], 16)])
        before = [] if starts_text else self._anchor
        text = self._backend.decode([*before, token_id], skip_special_tokens=False)
        return text[len(self._backend.decode(before, skip_special_tokens=False)) :].encode()

    @cached_property
    def max_bytes_an_id(self) -> int | None:
        """Bytes of a text that one id stands for at most; None if there may be no limit, as where a text is
        changed or cut before it is encoded."""
        backend = json.loads((self._directory / "tokenizer.json").read_bytes())
        added = self._backend.get_added_tokens_decoder().values()
        keeps_all = (
            backend.get("normalizer") is None
            and (backend.get("pre_tokenizer") or {}).get("type") == "ByteLevel"
            and not any(token.lstrip or token.rstrip for token in added)
        )
        return max(len(self.piece(token_id)) for token_id in range(self.vocab_size)) if keeps_all else None

    @cached_property
    def chat_template(self) -> str | None:
        """The source of `chat_template.jinja`, or of the default one in `tokenizer_config.json`."""
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        source = self._config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return source if isinstance(source, str) else None

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError("messages: the tokenizer has no chat template; give a prompt")
        from hybridserve.chat_template import ChatTemplate  # with Jinja, which only a chat needs

        return ChatTemplate(self.chat_template)

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> str:
        """The text of a conversation. Raises ValueError for messages that the template refuses, and for tools
        where it has no place for them.

        The content of an assistant's message may be None, where it called a tool and said nothing.
        """
        said: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(f"messages: {message!r} is not a dict with role and content")
            if message["content"] is None and message["role"] != "assistant":
                raise ValueError(f"messages[{index}].content: is None; only an assistant may say nothing")
            said.append(dict(message) | {"content": "" if message["content"] is None else message["content"]})
        if not said:
            raise ValueError("messages: a conversation needs at least one message")
        if tools and not self._template.takes_tools:
            raise ValueError("tools: the model's chat template has no place for them")
        return self._template.render(
            said,
            **self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            documents=None,
        )

    def chat_ids(
        self, messages: Messages, *, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> list[int]:
        """The ids of a conversation. The template writes all special tokens, so none is added to them."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)


class IncrementalDetokenizer:
    """Turns one sequence's ids into text as they come: whole characters only, each as soon as it is complete.

    All that is returned, joined, is what `Tokenizer.decode` makes of all the ids, but for the leading space
    of a first word: a continuation keeps it, a text of its own (`starts_text`) may not. A token costs the
    same however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        starts_text: bool = False,
        shown_ids: Collection[int] = (),
    ) -> None:
        """`shown_ids`: special tokens that are never skipped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_ids = shown_ids
        self._starts_text = starts_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        if is_skipped and token_id not in self._shown_ids:
            return ""
        piece = self._tokenizer.piece(token_id, starts_text=self._starts_text)
        self._starts_text = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD if the ids ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Finds the first stop string to be completed in a text that comes in pieces.

    Holds back text only while it may be the beginning of a stop string. What is found does not depend on how
    the text was cut: it is the match that ends first and, of several that end there, the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._held = ""
        self._num_exempt = 0  # characters at the front of `_held` in which no match may end

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Adds `text`; returns (what may be shown, the stop string that ended the text or None).

        A stop string is not shown, and nothing may be added after it. No match ends in a text that was added
        with `may_stop` false.
        """
        if not self._stop:
            return text, None
        self._held += text
        if not may_stop:
            self._num_exempt = len(self._held)
        elif match := self._find():
            start, stop = match
            return self._held[:start], stop
        return self._release(len(self._held) - self._num_undecided()), None

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        return self._release(len(self._held))

    def _find(self) -> tuple[int, str] | None:
        found, end = None, len(self._held) + 1
        for stop in self._stop:
            start = self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))
            if start >= 0 and start + len(stop) < end:
                found, end = (start, stop), start + len(stop)
        return found

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = min(len(self._stop[0]) - 1, len(self._held))
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._num_exempt = max(0, self._num_exempt - length)
        return text


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: is not a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder_types(decoder: Any) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_types(inner) for inner in decoder.get("decoders", ())))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return content
