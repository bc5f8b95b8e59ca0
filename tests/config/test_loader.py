"""Configuration from files, keywords and options: what is accepted, and one readable line for what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from hybridserve.config.loader import ConfigError, TextValue, config_keys, load_config

ROOT = Path(__file__).parents[2]


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_file_in_configs_loads(path):
    load_config(file=path, with_keys=False)


def test_the_demo_configuration_shows_every_key():
    from ruamel.yaml import YAML

    def keys(tree, prefix=""):
        for key, value in tree.items():
            yield from keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]

    shown = list(keys(YAML(typ="safe").load(ROOT / "configs" / "demo-cpu.yaml")))
    assert shown == list(config_keys())


def test_defaults():
    config = load_config("demo")
    assert (config.cache.memory_fraction, config.cache.block_size, config.cache.state_dtype) == (
        0.9,
        16,
        "float32",
    )
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
    assert {key: info.description for key, info in config_keys().items() if not info.description} == {}
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1


def test_flat_dotted_and_nested_options_mean_the_same():
    flat = load_config("demo", overrides={"max_num_seqs": 8, "block_size": 32})
    dotted = load_config("demo", overrides={"scheduler.max_num_seqs": 8, "cache.block_size": 32})
    nested = load_config("demo", overrides={"scheduler": {"max_num_seqs": 8}, "cache": {"block_size": 32}})
    assert flat == dotted == nested
    assert (flat.scheduler.max_num_seqs, flat.cache.block_size) == (8, 32)


def test_a_top_level_key_wins_over_the_same_name_in_a_section():
    config = load_config("demo", overrides={"dtype": "bfloat16"})
    assert (config.dtype, config.cache.dtype) == ("bfloat16", "auto")


def test_options_win_over_the_file_and_the_model_argument_over_both(tmp_path):
    path = write(tmp_path, "model: a\nseed: 1\ncache:\n  block_size: 32\n  memory_bytes: 1GiB\n")
    config = load_config("b", path, {"block_size": 8, "model": "c"})
    assert (config.model, config.seed) == ("b", 1)
    assert (config.cache.block_size, config.cache.memory_bytes) == (8, 2**30)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("512MiB", 2**29), ("1.5 KB", 1500), ("123", 123), (4096, 4096)],
)
def test_sizes(text, size):
    assert load_config("demo", overrides={"memory_bytes": text}).cache.memory_bytes == size


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "7", 7),
        ("max_model_len", "null", None),
        ("tokenizer", "null", None),
        ("tokenizer", "7", "7"),
        ("dtype", "float32", "float32"),
        ("cache.memory_bytes", "1MiB", 2**20),
        ("cache.memory_fraction", "0.5", 0.5),
        ("cache.check_integrity", "true", True),
    ],
)
def test_text_from_a_command_line_takes_the_type_of_its_key(key, text, value):
    section, _, name = key.rpartition(".")
    config = load_config("demo", overrides={key: TextValue(text)})
    assert getattr(getattr(config, section) if section else config, name) == value


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "cache:\n  blok_size: 3\n",
            3,
            "unknown key 'cache.blok_size' (value 3); did you mean 'cache.block_size'?",
        ),
        (
            "max_num_seq: 3\n",
            2,
            "unknown key 'max_num_seq' (value 3); did you mean 'scheduler.max_num_seqs'?",
        ),
        (
            "max_num_seqs: 3\n",
            2,
            "unknown key 'max_num_seqs' (value 3); did you mean 'scheduler.max_num_seqs'?",
        ),
        (
            "telepathy: {dtype: int8}\n",
            2,
            "unknown key 'telepathy' (value {'dtype': 'int8'}); "
            "valid keys are model, tokenizer, *, server; see hybridserve generate --help",
        ),
        (
            "cache:\n  pages: 3\n",
            3,
            "unknown key 'cache.pages' (value 3); "
            "valid keys of cache are memory_fraction, *; see hybridserve generate --help",
        ),
        (
            "cache:\n  max_num_seqs: 3\n",
            3,
            "unknown key 'cache.max_num_seqs' (value 3); did you mean 'scheduler.max_num_seqs'?",
        ),
        ("cache: 3\n", 2, "cache: 3 is not a set of keys"),
        ("cache:\n  block_size: 3\n", 3, "cache.block_size: 3: must be a power of two"),
        ("cache:\n  block_size: 512\n", 3, "cache.block_size: 512: should be less than or equal to 256"),
        ("cache:\n  block_size: yes\n", 3, "cache.block_size: 'yes': should be a valid integer"),
        ("cache:\n  block_size: true\n", 3, "cache.block_size: True: should be a valid integer"),
        ("cache:\n  check_integrity: 1\n", 3, "cache.check_integrity: 1: should be a valid boolean"),
        ("cache:\n  memory_bytes: 4 XB\n", 3, "cache.memory_bytes: '4 XB': a size is a number of bytes, *"),
        ("cache:\n  memory_fraction: .nan\n", 3, "cache.memory_fraction: nan: *"),
        (
            "cache:\n  memory_fraction: 1.5\n",
            3,
            "cache.memory_fraction: 1.5: should be less than or equal to 1",
        ),
        ("cache:\n  memory_fraction: 0\n", 3, "cache.memory_fraction: 0: should be greater than 0"),
        ("dtype: int8\n", 2, "dtype: 'int8': should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("device: gpu\n", 2, "device: 'gpu': should be 'auto', 'cpu' or 'cuda'"),
        ("hardware: h100\n", 2, "hardware: 'h100': should be 'auto', 'h100-80gb', *"),
        ("seed: -1\n", 2, "seed: -1: should be greater than or equal to 0"),
        (
            "scheduler:\n  max_num_seqs: 0\n",
            3,
            "scheduler.max_num_seqs: 0: should be greater than or equal to 1",
        ),
        ("seed: ${NOT_THERE}\n", 2, "seed: '${NOT_THERE}': the environment variable NOT_THERE is not set"),
        ("model: b\n", 2, 'found duplicate key "model" *'),
        ("seed: [\n", 3, "*"),
        ("---\nmodel: b\n", 2, "but found another document"),
        ("tokenizer: !!python/name:os.system x\n", 2, "tokenizer: *: should be a valid string"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path, text, line, message):
    path = write(tmp_path, "model: demo\n" + text)
    with pytest.raises(ConfigError) as error:
        load_config(file=path)
    expected = f"{path}:{line}: {message}"
    said = str(error.value)
    assert "\n" not in said
    if "*" in expected:
        start, _, end = expected.partition("*")
        assert said.startswith(start)
        assert said.endswith(end)
    else:
        assert said == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no keys"),
        (b"- model\n", "holds no keys"),
        (b"seed: 3\n", "model: is required: a directory, a hub id, or demo"),
        (b"model: \xff\n", "is not UTF-8 text"),
        (b"model: \x01\n", "special characters are not allowed"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(file=path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(file=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"max_num_seq": 3},
            "option max_num_seq: unknown key 'max_num_seq' (value 3); did you mean 'scheduler.max_num_seqs'?",
        ),
        (
            {"max_num_seqs": "3"},
            "option max_num_seqs: scheduler.max_num_seqs: '3': should be a valid integer",
        ),
        (
            {"cache": {"block_sise": 3}},
            "option cache: unknown key 'cache.block_sise' (value 3); did you mean 'cache.block_size'?",
        ),
        ({"policy": TextValue("x")}, "--policy: scheduler.policy: 'x': should be 'fcfs' or 'priority'"),
        ({"block_size": TextValue("x")}, "--block_size: cache.block_size: 'x': should be a valid integer"),
    ],
)
def test_a_mistake_in_an_option_names_the_option(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config("demo", overrides=overrides)
    assert str(error.value) == message


def test_a_key_of_no_section_is_not_taken_for_one_that_ends_alike():
    with pytest.raises(
        ConfigError, match=r"unknown key 'telepathy\.dtype' \(value 'int8'\); valid keys are model, "
    ):
        load_config("demo", overrides={"telepathy.dtype": "int8"})


def test_several_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        load_config("demo", overrides={"seed": -1, "block_size": 3, "policy": "x"})
    assert len(str(error.value).splitlines()) == 3


def test_environment_variables_are_expanded_in_braces_only(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOM", "64MiB")
    monkeypatch.setenv("COUNT", "12")
    path = write(tmp_path, "model: $COUNT/${COUNT}\nseed: ${COUNT}\ncache:\n  memory_bytes: ${ROOM}\n")
    config = load_config(file=path)
    assert (config.model, config.seed, config.cache.memory_bytes) == ("$COUNT/12", 12, 2**26)


def test_merged_keys_and_yaml_1_2(tmp_path):
    path = write(tmp_path, "model: no\ncache: {memory_fraction: 1e-1, block_size: 0x10}\n")
    config = load_config(file=path)
    assert (config.model, config.cache.memory_fraction, config.cache.block_size) == ("no", 0.1, 16)


@pytest.mark.parametrize(
    "text",
    [
        "scheduler: {<<: {max_num_seqs: 7}}\n",
        "scheduler:\n  <<: {max_num_seqs: 7}\n  policy: fcfs\n",
        "<<: {scheduler: {max_num_seqs: 7}}\n",
    ],
)
def test_merged_mappings(tmp_path, text):
    assert load_config(file=write(tmp_path, "model: demo\n" + text)).scheduler.max_num_seqs == 7


def test_a_mistake_in_a_merged_mapping_has_a_place(tmp_path):
    path = write(tmp_path, "model: demo\nscheduler: {<<: {max_num_seqs: x}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file=path)
    assert str(error.value) == f"{path}:2: scheduler.max_num_seqs: 'x': should be a valid integer"


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("", {}, "model: '': should have at least 1 character"),
        ("demo", {"cache.block_size": TextValue("x")}, "--cache.block_size: 'x': should be a valid integer"),
        ("demo", {"dtype": TextValue("x")}, "--dtype: 'x': should be 'auto', *"),
        ("demo", {"cache": 3}, "option cache: 3 is not a set of keys"),
    ],
)
def test_a_key_is_named_once(model, overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(model, overrides=overrides)
    assert str(error.value).startswith(message.rstrip("*"))


def test_needs_no_torch_and_reads_no_yaml_without_a_file():
    code = (
        "import sys; from hybridserve.config.loader import load_config; load_config('demo');"
        "sys.exit(bool({'torch', 'numpy', 'ruamel.yaml'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_section_with_nothing_under_it_is_its_defaults(tmp_path):
    path = write(tmp_path, "model: demo\ncache:\nlora: null\nscheduler:\n  # policy: priority\n")
    assert load_config(file=path) == load_config("demo")


@pytest.mark.parametrize("spelling", ["{a: x/a, b: ../b, c: /c, d: ~/d}", "a=x/a,b=../b,c=/c,d=~/d"])
def test_directories_of_adapters_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch, spelling):
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf", f"model: m/x\ntokenizer: t\nlora:\n  adapters: {spelling}\n  roots: [r, /s]\n")
    monkeypatch.chdir(tmp_path)
    for folder in (Path("conf"), tmp_path / "conf"):
        config = load_config(file=folder / "config.yaml")
        there = tmp_path / "conf"
        assert config.lora.adapters == {
            "a": f"{there}/x/a",
            "b": f"{there}/../b",
            "c": "/c",
            "d": "~/d",
        }
        assert config.lora.roots == (f"{there}/r", "/s")
        assert (config.model, config.tokenizer) == ("m/x", "t")
    config = load_config(file="conf/config.yaml", overrides={"lora.adapters": {"a": "x/a"}})
    assert (config.lora.adapters, config.lora.roots) == ({"a": "x/a"}, (f"{there}/r", "/s"))


def test_a_directory_that_the_environment_names_is_relative_to_the_file_too(tmp_path, monkeypatch):
    monkeypatch.setenv("NAME", "x")
    monkeypatch.setenv("PAIRS", "b=y")
    for spelling, expected in (
        ("{a: '${NAME}'}", {"a": f"{tmp_path}/x"}),
        ("${PAIRS}", {"b": f"{tmp_path}/y"}),
    ):
        path = write(tmp_path, f"model: demo\nlora:\n  adapters: {spelling}\n")
        assert load_config(file=path).lora.adapters == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("  adapters: {demo: /x}\n", "lora.adapters.demo: is a name of the base model"),
        ("  adapters: {'a b': /x}\n", "lora.adapters.a b: 'a b': a name is 1 to 64 of the characters"),
        ("  adapters: {a.b: ''}\n", "lora.adapters.a.b: '': should have at least 1 character"),
        ("  allow_runtime_loading: true\n", "lora.allow_runtime_loading: True: nothing could be loaded"),
    ],
)
def test_adapters_that_can_not_be_are_named_with_file_and_key(tmp_path, lines, message):
    path = write(tmp_path, f"model: demo\nlora:\n{lines}")
    with pytest.raises(ConfigError) as caught:
        load_config(file=path)
    assert str(caught.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize("key", ["lora.max_running_per_adapter", "max_model_len", "scheduler.max_num_seqs"])
def test_a_count_on_the_command_line_is_told_its_range(key):
    with pytest.raises(ConfigError, match=f"^--{key}: 0: should be greater than or equal to 1$"):
        load_config("demo", None, {key: TextValue("0")})


def test_no_adapters_on_the_command_line():
    assert load_config("demo", None, {"lora.adapters": TextValue("{}")}).lora.adapters == {}
