"""Models, adapters, tokens, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybridserve.server.app import _ROUTES
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Client

ADAPTERS = {"adapters": ("law", "med")}
GATEWAY_METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "num_preemptions",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "cache_config_info",
    "lora_requests_info",
    "admission_rejections",
    "corrupted_requests",
    "slabs",
    "state_slots_used",
    "adapter_slots",
    "adapter_slots_used",
    "adapter_load_seconds",
    "step_seconds",
)


def test_models_and_their_adapters():
    async def scenario(client: Client) -> None:
        base, *adapters = (await client.get("/v1/models")).json["data"]
        assert (base["id"], base["root"], base["parent"]) == ("tiny", "demo", None)
        assert [(card["id"], card["parent"]) for card in adapters] == [("law", "tiny"), ("med", "tiny")]
        assert all(card["root"] != "" for card in [base])
        assert base["max_model_len"] == 2048

    serving(scenario, served_name="tiny", **ADAPTERS)


def test_one_model_by_its_name():
    async def scenario(client: Client) -> None:
        base, law, _ = (await client.get("/v1/models")).json["data"]
        for name, card in [("org/tiny", base), ("demo", base), ("law", law)]:
            answer = await client.get(f"/v1/models/{name}")
            assert (answer.status, answer.json) == (200, card)
        for name in ("nobody", "org", "org/tiny/", "", "law/../med"):
            answer = await client.get(f"/v1/models/{name}")
            assert (answer.status, answer.error["param"]) == (404, "model")
            assert answer.error["code"] == "model_not_found"
        document = (await client.get("/openapi.json")).json
        (parameter,) = document["paths"]["/v1/models/{id}"]["get"]["parameters"]
        assert (parameter["name"], parameter["in"], parameter["required"]) == ("id", "path", True)
        series = await client.series()
        name = 'hybridserve_http_responses_total{path="/v1/models/{id:path}",status="404"}'
        assert series[name] == 5

    serving(scenario, served_name="org/tiny", **ADAPTERS)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/v1/models"])
def test_head_is_answered_as_get_is(path):
    async def scenario(client: Client) -> None:
        get, head = await client.get(path), await client.call("HEAD", path)
        assert (head.status, head.headers["content-length"]) == (200, get.headers["content-length"])

    serving(scenario)


@pytest.mark.parametrize("adapters", [{}, ADAPTERS], ids=["alone", "adapters"])
def test_who_names_an_unknown_model_is_told_the_base_models_name(adapters):
    async def scenario(client: Client) -> None:
        for answer in (
            await client.complete(model="nobody", prompt="a"),
            await client.chat(model="nobody", messages=[{"role": "user", "content": "a"}]),
        ):
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
            assert "org/tiny" in answer.error["message"]

    serving(scenario, served_name="org/tiny", **adapters)


def test_an_adapter_is_chosen_by_model():
    async def scenario(client: Client) -> None:
        for model, adapter in [("law", "law"), ("tiny", None), ("demo", None), (None, None)]:
            answer = await client.complete(model=model, prompt="a", max_tokens=1)
            assert answer.status == 200
            assert client.engine.fake.received[-1].request.adapter == adapter
            assert answer.json["model"] == (model or "tiny")
        for model in ("nobody", "", "law/../med", "LAW"):
            answer = await client.chat(model=model, messages=[{"role": "user", "content": "a"}])
            assert (answer.status, answer.error["param"]) == (404, "model")

    serving(scenario, served_name="tiny", **ADAPTERS)


def test_adapters_come_and_go():
    async def scenario(client: Client) -> None:
        named = {"lora_name": "law"}
        assert (await client.post("/v1/unload_lora_adapter", named)).error["code"] == "adapter_not_found"
        loaded = await client.post("/v1/load_lora_adapter", {**named, "lora_path": "/a/b"})
        assert (loaded.status, loaded.json["lora_name"], loaded.json["rank"]) == (200, "law", 8)
        assert (await client.complete(model="law", prompt="a", max_tokens=1)).status == 200
        call = client.start("POST", "/v1/completions", {"model": "law", "prompt": "a", "max_tokens": 200})
        while not client.engine.num_in_flight:
            await client.get("/version")
        await asyncio.sleep(0.05)  # it is on its way to the engine
        unloaded = await client.post("/v1/unload_lora_adapter", named)
        assert unloaded.json == {"status": "unloaded", "lora_name": "law", "still_in_use": True}
        assert (await call.answer()).status == 200
        assert (await client.complete(model="law", prompt="a")).status == 404

    serving(scenario, step_seconds=0.01)


def test_b040_adapters_that_are_refused():
    async def scenario(client: Client) -> None:
        body = {"lora_name": "law", "lora_path": "x"}
        for reason, status, param, prefix in [
            ("/a/b/adapter_config.json: is not JSON", 400, "lora_path", "lora_path: "),
            ("path: 'x' is not under one of lora.roots", 400, "lora_path", "lora_"),
            ("adapter: 'law' is a name of the base model", 400, "lora_name", "lora_name: "),
            ("lora.allow_runtime_loading: is off, so loading is refused", 403, None, ""),
        ]:
            client.engine.fake.refuse_adapters = reason
            answer = await client.post("/v1/load_lora_adapter", body)
            assert (answer.status, answer.error["param"]) == (status, param)
            assert answer.error["message"] == prefix + reason.removeprefix("adapter: ")
        for fields in (
            {},
            {"lora_name": "a"},
            {"lora_path": "a"},
            {**body, "lora_name": ""},
            {**body, "lora_path": 5},
        ):
            assert (await client.post("/v1/load_lora_adapter", fields)).status == 400
        assert (await client.post("/v1/load_lora_adapter", {**body, "lora_weight": 1})).error[
            "code"
        ] == "unknown_field"

    serving(scenario)


def test_tokens_and_back():
    async def scenario(client: Client) -> None:
        answer = (await client.post("/tokenize", {"prompt": "hello world", "return_token_strs": True})).json
        assert answer == {
            "count": 5,
            "max_model_len": 2048,
            "tokens": [1, 263, 688, 83, 1282],
            "token_strs": ["<s>", "he", "ll", "o", " world"],
        }
        text = await client.post("/detokenize", {"tokens": answer["tokens"]})
        assert text.json == {"prompt": "hello world"}
        plain = await client.post("/tokenize", {"prompt": "hello world", "add_special_tokens": False})
        assert plain.json["tokens"] == answer["tokens"][1:]
        assert "token_strs" not in plain.json
        assert (await client.post("/tokenize", {"prompt": ""})).json["count"] == 0
        for body in ({}, {"prompt": "a", "messages": []}, {"messages": []}, {"prompt": 5}):
            assert (await client.post("/tokenize", body)).status == 400

    serving(scenario)


def test_what_a_remote_tokenizer_needs():
    async def scenario(client: Client) -> None:
        info = (await client.get("/tokenizer_info")).json
        assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", "<pad>")
        assert info["chat_template"].startswith("{{ bos_token }}")
        assert (info["vocab_size"], info["model_max_length"], info["add_bos_token"]) == (4096, 2048, True)

    serving(scenario)


def test_the_metrics_parse_and_have_the_names_that_gateways_read():
    async def scenario(client: Client) -> None:
        client.engine.fake.stats |= {
            "num_running": 0,
            "num_preemptions": 3,
            "cache_utilisation": 0.5,
            "cache_num_slots": 2,
            "cache_num_checkpoints": 1,
            "cache_num_block_slabs": 3,
            "cache_num_slot_slabs": 1,
            "cache_num_usable_slabs": 9,
            "num_adapters_on_device": 1,
            "adapter_load_seconds": 0.25,
            "forward_seconds": 1.5,
        }
        await client.complete(prompt="hello", max_tokens=7, n=2)
        await client.complete(prompt="hello", max_tokens=0, stream=True)
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
        assert all(name.startswith("hybridserve_") for name in families)
        assert all(family.documentation and family.type != "unknown" for family in families.values())
        assert {f"hybridserve_{name}" for name in GATEWAY_METRICS} <= families.keys()
        series = await client.series()
        assert series["hybridserve_prompt_tokens_total"] == 8
        assert series['hybridserve_request_success_total{finished_reason="length"}'] == 3
        assert series["hybridserve_e2e_request_latency_seconds_count"] == 2
        assert series['hybridserve_request_generation_tokens_bucket{le="16.0"}'] == 2
        assert series['hybridserve_request_generation_tokens_bucket{le="8.0"}'] == 1
        assert series['hybridserve_slabs{kind="free"}'] == 5
        assert series['hybridserve_step_seconds_total{phase="forward"}'] == 1.5
        assert series["hybridserve_inter_token_latency_seconds_count"] == 12

    serving(scenario)


def test_names_that_clients_choose_make_no_series():
    async def scenario(client: Client) -> None:
        for i in range(100):
            await client.get(f"/path{i}")
            await client.complete(prompt="a", model=f"name{i}")
        series = await client.series()
        assert len(series) < 300
        assert series['hybridserve_http_responses_total{path="(other)",status="404"}'] == 100

    serving(scenario)


@pytest.mark.parametrize("name", ["Completion", "ChatCompletion", "ChatChunk", "ErrorBody", "ChatRequest"])
def test_the_openapi_document_describes(name):
    async def scenario(client: Client) -> None:
        document = (await client.get("/openapi.json")).json
        assert document["components"]["schemas"][name]["type"] == "object"
        text = json.dumps(document)
        for part in text.split('"$ref": "#/components/schemas/')[1:]:
            assert part.split('"')[0] in document["components"]["schemas"]

    serving(scenario)


def test_the_openapi_document_has_every_route():
    async def scenario(client: Client) -> None:
        document = (await client.get("/openapi.json")).json
        assert document["paths"].keys() == {route.public_path for route in _ROUTES}
        for route in _ROUTES:
            operation = next(iter(document["paths"][route.public_path].values()))
            assert operation["summary"]
            assert operation["description"]
            assert {"400", "401", "503"} <= operation["responses"].keys()
            if route.body is not None:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                assert body == {"$ref": f"#/components/schemas/{route.body.__name__}"}
        sampling = document["components"]["schemas"]["CompletionRequest"]["properties"]
        assert "anyOf" in sampling["prompt"]
        assert "anyOf" in sampling["stop"]

    serving(scenario)


def test_what_may_be_done_with_a_path_that_has_a_head():
    async def scenario(client: Client) -> None:
        for path, allowed in (("/health", "GET, HEAD"), ("/v1/models", "GET, HEAD"), ("/version", "GET")):
            answer = await client.call("OPTIONS", path)
            assert (answer.status, answer.headers["allow"]) == (405, allowed)

    serving(scenario)
