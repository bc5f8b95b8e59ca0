"""Chat templates: from messages to the text that a model was trained on, in a sandbox that bounds its cost.

A template comes with a model, so it is somebody else's program. Jinja's sandbox keeps it away from everything
but its arguments; what is here also bounds its time and the size of every text and list that it makes. Knows
no tokens and no files.
"""

from __future__ import annotations

import json
import re
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_SECONDS = 2.0
MIN_SIZE = 1 << 20
"""Characters, or items, that anything may have however small the conversation is."""
GROWTH = 4
"""So many times the conversation's characters may it have where that is more."""
TOTAL = 128
"""So many times that may all have together that are made on the way."""
MAX_WIDTH = 10_000
"""The largest number that a function which pads or repeats may be given."""
MAX_BITS = 1024
"""Of a product or a power of whole numbers."""
_WIDE = re.compile(r"\d{5,}|\*")
_REFUSED_METHODS = frozenset({"translate", "to_bytes", "maketrans"})
_SIZED = (str, bytes, list, tuple)


class TemplateTooCostly(jinja2.TemplateError):
    """It was stopped."""


class _Budget:
    """Of one rendering."""

    def __init__(self, num_characters: int) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._max_size = max(MIN_SIZE, GROWTH * num_characters)
        self._rest = TOTAL * self._max_size

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateTooCostly(f"it takes longer than {MAX_SECONDS:g} seconds")

    def check_size(self, size: int) -> None:
        self.check_time()
        if size > self._max_size:
            raise TemplateTooCostly(f"it makes something of more than {self._max_size} characters or items")
        self._rest -= size
        if self._rest < 0:
            raise TemplateTooCostly("it makes too much on its way")

    def check_arguments(self, values: Iterable[Any]) -> None:
        self.check_time()
        for value in values:
            if isinstance(value, int) and not -MAX_WIDTH <= value <= MAX_WIDTH:
                raise TemplateTooCostly(f"it pads or repeats by more than {MAX_WIDTH}")


class ChatTemplate:
    """A compiled template, for any number of threads. Raises ValueError for one that is not valid."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
            names = self._environment.parse(source).find_all(nodes.Name)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not valid: {error}") from None
        self.takes_tools = any(each.name == "tools" and each.ctx == "load" for each in names)
        """Whether it mentions them: else the model would never see any."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Raises ValueError for messages that the template refuses, or takes too long over."""
        budget = _Budget(_count(messages) + _count(tools))
        pieces: list[str] = []
        size = 0
        with self._environment.within(budget):
            try:
                for piece in self._template.generate(messages=messages, tools=tools, **variables):
                    pieces.append(piece)
                    size += len(piece)
                    budget.check_size(size)
            except (jinja2.TemplateError, TypeError) as error:
                raise ValueError(f"messages: the chat template refuses them: {error}") from None
            except Exception as error:  # a template may do wrong whatever it likes; what it says may quote
                reason = f"the chat template fails on them ({type(error).__name__})"
                raise ValueError(f"messages: {reason}") from None
        return "".join(pieces)


def _count(value: object) -> int:
    """Characters of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count, value.items()))
    return sum(map(_count, value)) if isinstance(value, list | tuple) else 0


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the assistant wrote; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guards(NodeTransformer):
    """Makes a template ask for every item of a loop, and for every text joined by `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _ask("guarded_items", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _ask("guarded_texts", node.nodes, node.lineno)


def _ask(name: str, arguments: Sequence[nodes.Node], line: int) -> nodes.Expr:
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, list(arguments), [], None, None, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """With the settings, functions and tags that chat templates are written for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before there is a budget
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._rendering = threading.local()
        self.filters["tojson"] = _tojson
        self.filters = {name: self._guarded_filter(name, each) for name, each in self.filters.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.concat = self._guarded_concat  # type: ignore[method-assign]

    def within(self, budget: _Budget) -> _Within:
        return _Within(self._rendering, budget)

    @property
    def budget(self) -> _Budget:
        budget: _Budget = self._rendering.budget
        return budget

    def overlay(self, *args: Any, **options: Any) -> Any:
        raise SecurityError("a template has one environment")

    # ---- what a template does without calling anything

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        guarded: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return guarded

    def guarded_items(self, items: Iterable[Any]) -> Iterator[Any]:
        check_time = self.budget.check_time
        for item in items:
            check_time()
            yield item

    def guarded_texts(self, *parts: Any) -> str:
        return self._guarded_concat([str(part) for part in parts])

    def _guarded_concat(self, parts: Iterable[str]) -> str:
        texts = list(parts)
        self.budget.check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, _SIZED) and isinstance(right, _SIZED):
                self.budget.check_size(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str | bytes) and (isinstance(left, bytes) or _WIDE.search(left)):
                raise TemplateTooCostly("it pads a text by more than 9999")
        else:
            self._check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _check_product(self, operator: str, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, _SIZED) and isinstance(times, int):
                self.budget.check_size(len(value) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            )
            if bits > MAX_BITS:
                raise TemplateTooCostly("it computes a number of too many digits")

    # ---- functions, methods, filters

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # the names are Jinja's: a template may pass arguments by any other
        budget = __self.budget
        budget.check_time()
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            __self._check_method(owner, method.__name__, args, kwargs)
        elif __obj is __self.globals.get("lipsum"):
            budget.check_arguments((*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, _SIZED):
            budget.check_size(len(result))
        return result

    def _check_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name in _REFUSED_METHODS:
            raise TemplateTooCostly(f"{name} is not allowed")
        self.budget.check_arguments((*args, *kwargs.values()))
        if not isinstance(owner, str):
            return
        if name in ("format", "format_map") and _WIDE.search(owner):
            raise TemplateTooCostly("it pads a text by more than 9999")
        if name == "replace" and len(args) >= 2:
            self._check_replace(owner, args[0], args[1])
        elif name == "join" and args:
            self._check_join(owner, args[0])
        elif name == "expandtabs":
            self.budget.check_size(len(owner) + owner.count("\t") * max([8, *args, *kwargs.values()]))

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        text, old, new = str(text), str(old), str(new)
        self.budget.check_size(len(text) + text.count(old) * len(new))

    def _check_join(self, separator: Any, items: Any) -> None:
        if isinstance(items, _SIZED):
            self.budget.check_size(len(items) * len(str(separator)))

    def _guarded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # with the marks that tell Jinja what to pass
        def guarded(*args: Any, **kwargs: Any) -> Any:
            skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
            value, *rest = args[skipped:]
            self.budget.check_arguments((*rest, *kwargs.values()))
            self._check_filter(name, value, [*rest, *kwargs.values()])
            result = function(*args, **kwargs)
            if isinstance(result, _SIZED):
                self.budget.check_size(len(result))
            return result

        return guarded

    def _check_filter(self, name: str, value: Any, arguments: list[Any]) -> None:
        if name == "replace" and len(arguments) >= 2:
            self._check_replace(value, arguments[0], arguments[1])
        elif name == "join" and arguments:
            self._check_join(arguments[0], value)
        elif name == "indent":
            width = arguments[0] if arguments else 4
            size = width if isinstance(width, int) else len(str(width))
            self.budget.check_size(len(str(value)) + (1 + str(value).count("\n")) * size)
        elif name == "format" and _WIDE.search(str(value)):
            raise TemplateTooCostly("it pads a text by more than 9999")
        elif name == "sum" and any(isinstance(each, _SIZED) for each in arguments):
            raise TemplateTooCostly("it adds up lists")


class _Within:
    """Sets the budget of what this thread renders."""

    def __init__(self, rendering: threading.local, budget: _Budget) -> None:
        self._rendering = rendering
        self._budget = budget

    def __enter__(self) -> None:
        self._rendering.budget = self._budget

    def __exit__(self, *_: object) -> None:
        del self._rendering.budget


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(style: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(style[:200])


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
