"""`hybridserve config check` and `config show`: all that is wrong, and where every value comes from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hybridserve.config import keys
from hybridserve.config.loader import config_keys, load_config, read_config
from tests.harness import command_line
from tests.harness.command_line import imported_by

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SECRET = "sk-very-secret"


@pytest.fixture
def run(capsys):
    """Runs a command; returns its exit status, standard output and standard error."""
    return lambda *arguments: command_line.run(capsys, arguments)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_list_of_keys_is_the_schema_s():
    assert keys.FILE.read_text() == keys.described(), "run python -m hybridserve.config.keys"
    assert [*keys.known_keys()] == [key for key in config_keys() if key != "model"]


# ---- check


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_in_configs_is_ok(run, path):
    status, said, errors = run("config", "check", path)
    assert (status, said.splitlines()[0], errors) == (0, f"{path}: ok", "")


def test_all_that_is_wrong_is_told_at_once_in_the_order_of_the_file(run, tmp_path):
    path = write(
        tmp_path,
        "model: demo\n"
        "dtype: int8\n"
        "max_num_seqs: 3\n"
        "cache:\n"
        "  blok_size: 3\n"
        "  memory_bytes: 4 XB\n"
        "seed: ${NOT_THERE}\n"
        "telepathy: 1\n"
        "kernels: 7\n"
        "lora: {allow_runtime_loading: true}\n"
        "server: {limits: {n: 0, stops: 1}}\n",
    )
    status, said, errors = run("config", "check", path)
    assert (status, said) == (2, "")
    lines = [line.removeprefix(f"hybridserve: {path}:") for line in errors.splitlines()]
    numbers, texts = zip(*(line.split(": ", 1) for line in lines), strict=True)
    assert list(numbers) == ["2", "3", "5", "6", "7", "8", "9", "10", "11", "11"]
    assert texts[0] == "dtype: 'int8': should be 'auto', 'float32', 'bfloat16' or 'float16'"
    assert texts[1].endswith("did you mean 'scheduler.max_num_seqs'?")
    assert texts[2] == "unknown key 'cache.blok_size' (value 3); did you mean 'cache.block_size'?"
    assert texts[3].startswith("cache.memory_bytes: '4 XB': a size is ")
    assert texts[4] == "seed: '${NOT_THERE}': the environment variable NOT_THERE is not set"
    assert "unknown key 'telepathy' (value 1); valid keys are model, " in texts[5]
    assert texts[6] == "kernels: 7 is not a set of keys"
    assert texts[7].startswith("lora.allow_runtime_loading: True: nothing could be loaded")
    assert {texts[8].split(" ")[0], texts[9].split(" ")[0]} == {"server.limits.n:", "unknown"}


def test_what_depends_on_a_wrong_key_is_not_told(run, tmp_path):
    """Whether lora.roots names a directory can't be said of one that is no list of them."""
    path = write(tmp_path, "model: demo\nlora: {allow_runtime_loading: true, roots: 7}\n")
    _, _, errors = run("config", "check", path)
    (line,) = errors.splitlines()
    assert "lora.roots" in line


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", "", "holds no keys"),
        ("seed: 1\n", "", "model: is required"),
        ("model: demo\nmodel: demo\n", ":2", 'found duplicate key "model"'),
        ("model: [\n", ":2", ""),
        ("modle: demo\n", ":1", "did you mean 'model'?"),
    ],
)
def test_a_file_that_says_nothing(run, tmp_path, text, line, message):
    path = write(tmp_path, text)
    status, _, errors = run("config", "check", path)
    assert status == 2
    assert errors.startswith(f"hybridserve: {path}{line}: ")
    assert len(errors.splitlines()) == 1
    assert message in errors


def test_what_is_worth_knowing(run, tmp_path):
    path = write(
        tmp_path,
        "model: /no/such/model\nlora: {adapters: {a: here}, roots: [/no/root]}\n"
        f'server: {{host: 0.0.0.0, api_keys: ["${{NOT_THERE}}", "{SECRET}"]}}\n',
    )
    status, said, errors = run("config", "check", path)
    assert (status, errors) == (0, "")
    ok, *rest = said.splitlines()
    assert ok == f"{path}: ok"
    expected = (
        ":1: model: /no/such/model is no directory here",
        f":2: lora.adapters: a: {tmp_path}/here is no directory here",
        ":2: lora.roots: /no/root is no directory here",
        ":3: server.api_keys: stands in the file itself",
        ":3: server.api_keys: the environment variable NOT_THERE is not set here",
    )
    for line, start in zip(rest, expected, strict=True):
        assert line.startswith(f"{path}{start}")
    assert SECRET not in said


def test_what_serve_would_refuse_is_worth_knowing(run, tmp_path):
    path = write(tmp_path, "model: demo\nserver: {host: 0.0.0.0}\n")
    status, said, _ = run("config", "check", path)
    assert status == 0
    assert f"{path}: `serve` refuses it as it is: server.host: " in said


@pytest.mark.parametrize("arguments", [["check"], ["show", "--effective"]])
def test_a_file_is_looked_at_without_torch(arguments):
    command = ["config", arguments[0], str(CONFIGS[0]), *arguments[1:]]
    modules = imported_by(f"from hybridserve.cli import main; main({command})")
    assert not {"torch", "numpy", "transformers", "fastapi"} & modules


# ---- show


def origins(shown: str) -> dict[str, str]:
    """Last part of a key -> what stands beside its value."""
    return dict(re.findall(r"^ *(\w+): .*?  # (.*)$", shown, re.MULTILINE))


def test_every_value_has_its_origin(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "64MiB")
    path = write(tmp_path, "model: demo\nscheduler:\n  policy: priority\ncache: {memory_bytes: '${SIZE}'}\n")
    status, shown, errors = run("config", "show", path, "--effective", "--max-num-seqs", "7")
    assert (status, errors) == (0, "")
    found = origins(shown)
    assert found["model"] == f"{path}:1"
    assert found["policy"] == f"{path}:3"
    assert found["memory_bytes"] == f"{path}:4, environment ${{SIZE}}"
    assert found["max_num_seqs"] == "--scheduler.max_num_seqs"
    assert found["block_size"] == "default"
    assert "  memory_bytes: 64MiB " in shown
    tree = YAML(typ="safe").load(shown)
    listed = [f"{key}.{name}" for key in tree for name in (tree[key] if isinstance(tree[key], dict) else ())]
    assert {key for key in config_keys() if key.count(".") == 1} <= set(listed)


def test_without_effective_only_what_was_set(run, tmp_path):
    path = write(tmp_path, "model: demo\ncache: {block_size: 32}\n")
    _, shown, _ = run("config", "show", path)
    assert YAML(typ="safe").load(shown) == {"model": "demo", "cache": {"block_size": 32}}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize("arguments", [["--effective"], []])
def test_what_is_shown_loads_back(run, tmp_path, path, arguments):
    status, shown, _ = run("config", "show", path, *arguments)
    assert status == 0
    again = load_config(file=write(tmp_path, shown), with_keys=False)
    assert again == load_config(file=path, with_keys=False)


@pytest.mark.parametrize(
    "value",
    [
        "a b",
        "客",
        "yes",
        "1e3",
        "007",
        "- x",
        "#",
        "a: b",
        "\x7f\u2028",
        "null",
        "'",
        '"',
        "x\ty",
        "😀",
        "*a",
    ],
)
def test_any_text_loads_back(tmp_path, value):
    from hybridserve.config.effective import as_yaml

    configuration = read_config("demo", overrides={"served_name": value, "lora.adapters": {"a": value}})
    path = write(tmp_path, as_yaml(configuration, with_defaults=True))
    again = load_config(file=path)
    assert again.served_name == value
    if not value.startswith("~"):
        assert again.lora.adapters == {"a": str(tmp_path / value)}


def test_keys_of_clients_are_never_shown(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_ENVIRONMENT", "sk-of-the-environment")
    path = write(
        tmp_path, f'model: demo\nserver: {{api_keys: ["${{OF_THE_ENVIRONMENT}}", "x${{A}}", {SECRET}]}}\n'
    )
    status, shown, _ = run("config", "show", path, "--effective", "--server.admin_keys", f"{SECRET}2,y")
    assert status == 0
    assert SECRET not in shown
    assert "sk-of-the-environment" not in shown
    server = YAML(typ="safe").load(shown)["server"]
    assert server["api_keys"] == ["${OF_THE_ENVIRONMENT}", "${NOT_SHOWN_API_KEY_2}", "${NOT_SHOWN_API_KEY_3}"]
    assert server["admin_keys"] == ["${NOT_SHOWN_ADMIN_KEY_1}", "${NOT_SHOWN_ADMIN_KEY_2}"]
    with pytest.raises(ValueError, match="NOT_SHOWN_API_KEY_2 is not set"):
        load_config(file=write(tmp_path, shown))  # serving without them would be serving anybody


# ---- B046


SPELLINGS = (
    ["--scheduler.max_num_seqs=7", "--policy=priority"],
    ["--policy", "priority", "--max-num-seqs", "7"],
    ["--max_num_seqs", "9", "--scheduler.policy=priority", "--max_num_seqs", "7"],  # the last one counts
)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=" ".join)
@pytest.mark.parametrize("is_first", [True, False])
def test_b046_the_order_of_arguments_changes_nothing(run, tmp_path, spelling, is_first):
    path = write(tmp_path, "scheduler: {max_num_seqs: 3}\nmodel: demo\n")
    arguments = [*spelling, path, "--effective"] if is_first else ["--effective", path, *spelling]
    status, shown, errors = run("config", "show", *arguments)
    assert (status, errors) == (0, "")
    expected = load_config("demo", overrides={"max_num_seqs": 7, "policy": "priority"})
    assert load_config(file=write(tmp_path, shown)) == expected


def test_b046_the_order_of_a_file_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQS", "7")
    lines = ["model: demo", "seed: 5", "scheduler: {policy: priority, max_num_seqs: 7}", "max_model_len: 64"]
    expected = load_config(file=write(tmp_path, "\n".join(lines)))
    assert load_config(file=write(tmp_path, "\n".join(reversed(lines)))) == expected
    nested = (
        "max_model_len: 64\nscheduler:\n  max_num_seqs: ${SEQS}\n  policy: priority\nseed: 5\nmodel: demo\n"
    )
    assert load_config(file=write(tmp_path, nested)) == expected


@pytest.mark.parametrize("is_first", [True, False])
def test_b046_an_unknown_key_is_an_error_wherever_it_stands(run, tmp_path, is_first):
    path = write(tmp_path, "model: demo\n")
    arguments = ["--max_num_sequences=7", path] if is_first else [path, "--max_num_sequences=7"]
    status, _, errors = run("config", "show", *arguments)
    assert status == 2
    assert "unknown argument '--max_num_sequences=7'; did you mean --max_num_seqs?" in errors
