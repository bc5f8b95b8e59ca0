"""Encoding, chat templates and the messages for what is missing or damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

import hybridserve
from hybridserve.text import Tokenizer, TokenizerMissing

DEMO = Path(hybridserve.__file__).parent / "models" / "demo"
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " two\nlines "}],
    [
        {"role": "user", "content": "<b> & 'quotes' 客"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why?"},
    ],
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}\n{% endfor %}",
    "{% for m in messages %}\n    {% if loop.first %}\n{{ m | tojson }}\n    {% endif %}\n{% endfor %}",
    "{% for m in messages %}{{ m | tojson(indent=1) }}{% break %}{% endfor %}",
    "{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}{{ eos_token }}",
    "{{ strftime_now('%Y') | length }}{{ messages | map(attribute='role') | join }}{{ tools is defined }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


def with_template(directory: Path, template: str) -> Path:
    """The demo's tokenizer with another chat template."""
    shutil.copy(DEMO / "tokenizer.json", directory)
    shutil.copy(DEMO / "tokenizer_config.json", directory)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def test_special_tokens(demo):
    assert (demo.bos_id, demo.eos_id, demo.vocab_size) == (1, 2, 4096)
    assert demo.encode("The") == [1, *demo.encode("The", add_special_tokens=False)]
    assert demo.encode("") == [1]


def test_half_a_surrogate_pair_is_refused(demo):
    with pytest.raises(ValueError, match=r"prompt: .*surrogate"):
        demo.encode("\ud83d")


@pytest.mark.parametrize("messages", CHATS, ids=["one", "system", "turns"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_is_that_of_transformers(demo, messages, add_generation_prompt):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(DEMO)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    ids = demo.chat_ids(messages, add_generation_prompt=add_generation_prompt)
    assert ids == expected
    assert ids.count(demo.bos_id) == 1


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS, ids=["one", "system", "turns"])
def test_templates_render_as_in_transformers(tmp_path, template, messages):
    from transformers import AutoTokenizer

    directory = with_template(tmp_path, template)
    reference = AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.load(directory).render_chat(messages) == expected


@pytest.mark.parametrize("wrapped", [True, False], ids=["named", "single"])
def test_template_in_the_tokenizer_config(tmp_path, wrapped):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    template = "{{ bos_token }}{{ messages[0].content }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    config = {"bos_token": {"content": "<s>"}, "chat_template": named if wrapped else template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "<s>Hello"


@pytest.mark.parametrize(
    "template",
    [
        "{{ lipsum.__globals__['os'] }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_may_not_do_is_a_readable_error(tmp_path, template):
    tokenizer = Tokenizer.load(with_template(tmp_path, template))
    with pytest.raises(ValueError, match=r"^messages: the chat template refuses them: ."):
        tokenizer.render_chat(CHATS[0])


def test_a_template_that_does_not_parse(tmp_path):
    with pytest.raises(ValueError, match="chat template is not valid"):
        Tokenizer.load(with_template(tmp_path, "{% for %}")).render_chat(CHATS[0])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": "user"}], [{"content": "x"}]])
def test_messages_that_are_none(demo, messages):
    with pytest.raises(ValueError, match=r"^messages: "):
        demo.chat_ids(messages)


def test_an_assistant_may_say_nothing(demo):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    silent = [turns[0], {"role": "assistant", "content": None}]
    assert demo.render_chat(silent) == demo.render_chat(turns)
    assert silent[1]["content"] is None


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_nobody_else_may_say_nothing(demo, role):
    with pytest.raises(ValueError, match=r"^messages\[1\]\.content: "):
        demo.render_chat([{"role": "user", "content": "Hi"}, {"role": role, "content": None}])


def test_no_chat_template(tmp_path):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(tmp_path).chat_ids(CHATS[0])


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(TokenizerMissing, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.load(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: is not a JSON object"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).encode("one two three four five six") == Tokenizer.load(DEMO).encode(
        "one two three four five six"
    )


def test_needs_neither_torch_nor_transformers():
    code = "import sys, hybridserve.text; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "text", ["", "x", " two  spaces\n", "<s>客单价</s>", "e\u0301\u200d😀", "\x00\x7f", "ab " * 999]
)
def test_encoding_is_that_of_the_library(demo, text):
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for special in (True, False):
        assert (
            demo.encode(text, add_special_tokens=special)
            == backend.encode(text, add_special_tokens=special).ids
        )


def test_other_threads_run_while_a_long_text_is_encoded(demo):
    text = "the people of the states " * 5_000
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(demo.encode, text)
        num_turns = 0
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns > 10


def test_no_id_stands_for_more_than_the_limit(demo):
    """So a text of more than so many bytes an id can't fit into so many ids."""
    limit = demo.max_bytes_an_id
    longest = max(range(demo.vocab_size), key=lambda token_id: len(demo.piece(token_id)))
    assert len(demo.piece(longest)) == limit
    assert len(demo.encode(demo.piece(longest).decode() * 50, add_special_tokens=False)) >= 50


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": ""}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {"added_tokens": {"lstrip": True}},
        {"added_tokens": {"rstrip": True}},
    ],
    ids=str,
)
def test_where_text_may_vanish_there_is_no_limit(tmp_path, change):
    content = json.loads((DEMO / "tokenizer.json").read_bytes())
    if "added_tokens" in change:
        content["added_tokens"][1] |= change["added_tokens"]
    else:
        content |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).max_bytes_an_id is None
