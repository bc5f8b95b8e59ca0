"""The page at / in a real Chromium: what people see, type and hear of, and that text stays text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.frontend import protocol
from tests.harness.browser import Browser, Page, find_chromium
from tests.harness.processes import wait_until
from tests.harness.required import need
from tests.harness.web import web_server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt;"
KEY = "sk-of-a-user"
UNAUTHORIZED = "status of 401"


@pytest.fixture(scope="session", autouse=True)
def _chromium() -> None:
    need(find_chromium() is not None, "no chromium on this machine (apt install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(find_chromium() or "", tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def wait_ready(page: Page) -> None:
    page.wait("document.querySelector('#model-a')?.options.length > 0")


def ask(page: Page, text: str) -> None:
    page.focus("#prompt")
    page.type(text)
    page.press("Enter")


def wait_done(page: Page, count: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.answer').length >= {count}")
    page.wait(
        "!document.querySelector('[aria-busy]') && document.querySelector('#send').innerText === 'Send'"
    )


def test_an_answer_comes_with_its_speed(browser):
    said = "It was the best of times,\n\n  it was the worst of times."
    with web_server(said, step_seconds=0.02) as web, browser.page(web.url) as page:
        wait_ready(page)
        ask(page, "tell me")
        page.wait("document.querySelector('.text').textContent.includes('the best')")
        assert page.text("#send") == "Stop"
        assert page.run("document.querySelector('.text').textContent.length") < len(said)
        wait_done(page)
        assert page.run("document.querySelector('.text').textContent") == said
        assert page.text(".turn .prompt") == "tell me"
        assert page.run("document.querySelector('#prompt').value") == ""
        facts = page.text(".facts").split("\n")
        num_tokens = len(web.engine.tokenizer.encode(said, add_special_tokens=False)) + 1
        assert facts[0].startswith("first token ")
        assert 5 < float(facts[1].removesuffix(" tok/s")) < 60
        assert facts[2:] == [f"{num_tokens} tokens", "stop"]
        assert page.text("#announcer") == f"demo: {num_tokens} tokens, stop"
        assert all(url.startswith(web.url) for url in page.requests())


def test_a_conversation_is_told_whole_and_begun_anew(browser):
    with web_server("Yes.") as web, browser.page(web.url) as page:
        wait_ready(page)
        page.choose("[name=system]", "Be brief.")
        ask(page, "one")
        wait_done(page)
        ask(page, "two")
        wait_done(page, 2)
        told = web.prompts()[-1]
        places = [told.index(part) for part in ("Be brief.", "one", "Yes.", "two")]
        assert places == sorted(places)
        page.click("#new")
        assert page.run("document.querySelectorAll('.turn').length") == 0
        assert page.run("document.activeElement.id") == "prompt"
        ask(page, "three")
        wait_done(page)
        assert "one" not in web.prompts()[-1]


def test_two_models_side_by_side(browser):
    def say(request):
        return f"I am {request.adapter or 'the base'}."

    with web_server(say, adapters=("law", "med")) as web, browser.page(web.url) as page:
        wait_ready(page)
        page.click("#compare")
        assert page.run("[...document.querySelectorAll('#model-b option')].map(o => o.value)") == [
            "demo",
            "law",
            "med",
        ]
        page.choose("#model-b", "med")
        ask(page, "who?")
        wait_done(page, 2)
        ask(page, "really?")
        wait_done(page, 4)
        texts = page.run("[...document.querySelectorAll('.text')].map(box => box.textContent)")
        assert texts == ["I am the base.", "I am med."] * 2
        lefts = page.run(
            "[...document.querySelectorAll('.answer')].map(box => box.getBoundingClientRect().left)"
        )
        assert lefts[0] < lefts[1]
        newest = {request.adapter: text for request, text in zip(web.requests, web.prompts(), strict=True)}
        assert "I am the base." in newest[None]
        assert "I am med." not in newest[None]
        assert "I am med." in newest["med"]


def test_markup_is_text_wherever_it_comes_from(browser):
    name = "<img src=x onerror=document.title='owned'>"
    with web_server(HOSTILE, adapters=(name,), served_name=HOSTILE) as web, browser.page(web.url) as page:
        wait_ready(page)
        page.click("#compare")
        page.choose("#model-b", name)
        ask(page, HOSTILE)
        wait_done(page, 2)
        page.wait("document.querySelector('#adapters .name')")
        assert (
            page.run("[...document.querySelectorAll('.text')].map(box => box.textContent)") == [HOSTILE] * 2
        )
        assert page.text(".turn .prompt") == HOSTILE
        assert page.run("document.querySelector('#adapters .name').textContent") == name
        assert page.run("document.querySelectorAll('img, body script, b:not([id])').length") == 0
        assert page.run("document.title") == "hybridserve"


def test_the_page_could_not_run_markup_if_it_wanted(browser):
    """And a page that tries is noticed by these tests."""
    with web_server("a") as web, browser.page(web.url) as page:
        wait_ready(page)
        for script in (
            "document.body.innerHTML = '<b>x</b>'",
            "eval('1')",
            "document.head.append(Object.assign(document.createElement('script'), {text: 'window.x = 1'}))",
        ):
            before = len(page.complaints())
            page.run(f"(() => {{ try {{ {script} }} catch (error) {{ }} }})()")
            page.wait("document.title === 'hybridserve'")
            assert len(page.complaints()) > before, script
        page.run("fetch('http://localhost:9/').catch(() => 0)")
        assert "localhost:9" in page.complaints()[-1]
        page.expected = ("",)


def test_escape_stops_and_the_engine_hears_of_it(browser):
    with web_server("word " * 500, step_seconds=0.02) as web, browser.page(web.url) as page:
        wait_ready(page)
        page.choose("[name=max_tokens]", "")
        ask(page, "go on")
        page.wait("document.querySelector('.text')?.textContent.length > 20")
        page.press("Escape")
        wait_done(page)
        assert page.text(".facts").endswith("stopped")
        assert wait_until(lambda: web.engine.num_in_flight == 0, 2)
        assert any(isinstance(message, protocol.Abort) for message in web.received)
        page.press("Escape")
        ask(page, "and again")
        page.wait("document.querySelectorAll('.text')[1]?.textContent.length > 20")
        page.click("#send")
        wait_done(page, 2)
        assert page.text(".turn:last-child .facts").endswith("stopped")


def test_enter_sends_and_shift_enter_does_not(browser):
    with web_server("a") as web, browser.page(web.url) as page:
        wait_ready(page)
        page.focus("#prompt")
        page.press("Enter")
        page.type("one")
        low = page.run("document.querySelector('#prompt').offsetHeight")
        page.press("Enter", shift=True)
        page.type("two")
        assert page.run("document.querySelector('#prompt').value") == "one\ntwo"
        assert page.run("document.querySelector('#prompt').offsetHeight") > low
        assert web.requests == []
        page.press("Enter")
        wait_done(page)
        assert len(web.requests) == 1
        assert "one\ntwo" in web.prompts()[0]


def test_sampling_goes_to_the_engine(browser):
    with web_server("a") as web, browser.page(web.url) as page:
        wait_ready(page)
        values = {"temperature": "0.25", "top_p": "0.5", "top_k": "7", "min_p": "0.125", "max_tokens": "9"}
        for name, value in {**values, "seed": "42", "stop": "one\ntwo words"}.items():
            page.choose(f"[name={name}]", value)
        ask(page, "x")
        wait_done(page)
        params = web.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.125)
        assert (params.max_tokens, params.seed, params.stop) == (9, 42, ("one", "two words"))
        assert "temperature 0.25" in page.text("#gist")
        for name in (*values, "seed", "stop"):
            page.choose(f"[name={name}]", "")
        page.choose("[name=format]", "plain")
        ask(page, "to be or")
        wait_done(page, 2)
        assert web.params.temperature == 1
        assert web.params.seed is None
        assert "<|user|>" in web.prompts()[0]
        assert web.prompts()[1] == "<s>to be or"


def test_a_wrong_value_is_shown_and_not_sent(browser):
    with web_server("a") as web, browser.page(web.url) as page:
        wait_ready(page)
        page.choose("[name=top_p]", "1.5")
        ask(page, "x")
        assert page.run("document.querySelector('#settings').open")
        assert page.run("document.activeElement.name") == "top_p"
        assert web.requests == []
        page.choose("[name=top_p]", "1")
        page.choose("[name=max_tokens]", "100000")
        page.focus("#prompt")
        page.press("Enter")
        wait_done(page)
        assert "max_tokens" in page.text(".error")
        assert page.text(".facts") == "failed"
        page.expected = ("status of 400",)


def test_a_key_is_asked_for_and_kept_in_the_tab(browser):
    with web_server("a", server={"api_keys": [KEY]}) as web, browser.page(web.url) as page:
        page.expected = (UNAUTHORIZED,)
        page.wait("document.querySelector('#status').innerText === 'needs an API key'")
        page.wait("document.querySelector('#settings').open")
        page.focus("#key")
        page.type(KEY)
        wait_ready(page)
        page.wait("document.querySelector('#status').innerText.includes('ready')")
        ask(page, "x")
        wait_done(page)
        assert page.text(".answer .text") == "a"
        assert page.run("Object.values(sessionStorage)") == [KEY]
        assert page.run("localStorage.length") == 0
        assert page.call("Network.getCookies")["cookies"] == []
        assert not any(KEY in url for url in page.requests())
        page.call("Page.reload")
        wait_ready(page)
        page.choose("#key", "")
        assert page.run("sessionStorage.length") == 0


def test_an_engine_that_dies_is_said_to_be_dead(browser):
    with web_server("word " * 500, step_seconds=0.02) as web, browser.page(web.url) as page:
        page.expected = ("status of 503",)
        wait_ready(page)
        ask(page, "x")
        page.wait("document.querySelector('.text')?.textContent.length > 20")
        web.soon(web.engine.die)
        wait_done(page)
        assert page.text(".error") != ""
        assert page.text(".facts").endswith("failed")
        page.wait("document.querySelector('#status').innerText.includes('the engine has failed')")
        ask(page, "y")
        wait_done(page, 2)
        assert "engine" in page.text(".turn:last-child .error")


def test_what_the_arena_is_used_for(browser):
    sizes = {"kv_live": 2**20, "state_live": 2**20, "kv_cached": 2**21, "checkpoints": 0, "free": 2**22}
    with web_server("word") as web, browser.page(web.url) as page:
        wait_ready(page)
        assert page.text("#hits") == ""
        web.engine.fake.stats |= {f"cache_bytes_{kind}": size for kind, size in sizes.items()}
        web.engine.fake.stats |= {
            "cache_num_usable_bytes": 2**23,
            "prefix_num_queried_tokens": 400,
            "prefix_num_hit_tokens": 100,
        }
        page.wait("document.querySelector('#hits').innerText === '25% of prompts were there'")
        assert page.text("#used") == "25%"
        assert page.text("#bytes-kv_cached") == "2 MiB"
        assert page.text("#bytes-fragmented") == "0 B"
        widths = page.run("[...document.querySelector('#shares').children].map(part => part.offsetWidth)")
        live, state, kept, checkpoints, between, free = widths
        assert checkpoints == between == 0
        assert abs(live - state) <= 1
        assert abs(kept - 2 * live) <= 2
        assert abs(free - 4 * live) <= 4
        assert "kv cached 2 MiB" in page.run("document.querySelector('#shares').ariaLabel")


def test_the_engine_is_seen_at_work(browser):
    with (
        web_server("word " * 500, step_seconds=0.05, adapters=("law",)) as web,
        browser.page(web.url) as page,
    ):
        wait_ready(page)
        assert page.text("#requests") == "None: the engine rests."
        page.click("#compare")
        ask(page, "x")
        page.wait("document.querySelector('#running').innerText === '2'")
        assert [page.text(f"#num-{kind}") for kind in ("kv", "state", "null")] == ["2", "2", "1"]
        assert "2 slabs of KV, 2 of state" in page.run("document.querySelector('#arena').ariaLabel")
        names = "[...document.querySelectorAll('#requests .name')].map(name => name.textContent)"
        assert sorted(page.run(names)) == ["base", "law"]
        page.wait("parseFloat(document.querySelector('#rate').innerText) > 10")
        assert page.run("document.querySelectorAll('.chart canvas').length") == 3
        drawn = page.run(
            "[...document.querySelectorAll('canvas')].map(canvas => canvas.getContext('2d')"
            ".getImageData(0, 0, canvas.width, canvas.height).data.some(value => value))"
        )
        assert drawn == [True] * 4
        page.press("Escape")
        page.wait("document.querySelector('#running').innerText === '0'")
        web.soon(web.engine.fake.adapters.__setitem__, "new", "")
        page.wait("document.querySelectorAll('#model-a option').length === 3")
        assert page.run("document.querySelector('#model-b').value") == "law"


def test_the_keyboard_is_enough(browser):
    with web_server("a b c", adapters=("law",)) as web, browser.page(web.url) as page:
        wait_ready(page)
        page.run("document.activeElement.blur()")
        seen = []
        for _ in range(9):
            page.press("Tab")
            seen.append(
                page.run("(({id, className, tagName}) => id || className || tagName)(document.activeElement)")
            )
            ring = page.run(
                "(style => style.outlineStyle + style.outlineWidth)(getComputedStyle(document.activeElement))"
            )
            assert ring == "solid2px", seen
        assert seen == [
            "skip",
            "model-a",
            "compare",
            "new",
            "turns",
            "SUMMARY",
            "prompt",
            "send",
            "engine",
        ]
        page.focus("#compare")
        page.press("Space")
        page.press("Tab", shift=True)
        assert page.run("document.activeElement.id") == "model-b"
        page.focus("summary")
        page.press("Enter")
        page.press("Tab")
        assert page.run("document.activeElement.name") == "temperature"
        page.press("Enter")
        assert web.requests == []
        page.focus(".skip")
        page.press("Enter")
        page.wait("document.activeElement.id === 'prompt'")
        page.type("x")
        page.press("Enter")
        wait_done(page, 2)
        assert len(web.requests) == 2


def test_everything_has_a_name_for_those_who_hear_it(browser):
    with web_server("a", adapters=("law",)) as web, browser.page(web.url) as page:
        wait_ready(page)
        page.click("#compare")
        page.run("document.querySelector('#settings').open = true")
        ask(page, "x")
        wait_done(page, 2)
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = {
            "button",
            "textbox",
            "combobox",
            "spinbutton",
            "img",
            "image",
            "main",
            "complementary",
            "navigation",
        }
        found = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and node["role"]["value"] in roles
        ]
        assert len(found) >= 18
        assert [pair for pair in found if not pair[1]] == []


@pytest.mark.parametrize("width", [360, 700, 961, 1280])
def test_nothing_is_wider_than_the_screen(browser, width):
    with (
        web_server("Wort" * 80 + " and more", adapters=("a-name-that-is-longer-than-most-names-are",)) as web,
        browser.page(web.url, width=width, height=740) as page,
    ):
        wait_ready(page)
        page.click("#compare")
        page.run("document.querySelector('#settings').open = true")
        ask(page, "Donaudampfschifffahrt" * 8)
        wait_done(page, 2)
        page.wait("document.querySelector('#adapters .adapter')")
        for view in ("chat", "engine"):
            if width <= 960:
                page.click(f".views [data-view={view}]")
            out = page.run(
                "[...document.querySelectorAll('body *')].filter(each => each.checkVisibility() &&"
                " !each.closest('.unseen, .skip')"
                " && (each.getBoundingClientRect().right > innerWidth + 1 || (!each.matches('select, input')"
                " && getComputedStyle(each).overflowX !== 'hidden' && each.clientWidth"
                " && each.scrollWidth > each.clientWidth + 1)))"
                ".map(each => [each.className || each.tagName, each.scrollWidth, each.clientWidth])"
            )
            assert out == []
            assert page.run("document.documentElement.scrollWidth") == width
            both = ["main", "aside"] if width > 960 else [{"chat": "main", "engine": "aside"}[view]]
            assert (
                page.run("['main', 'aside'].filter(tag => document.querySelector(tag).checkVisibility())")
                == both
            )
        if width <= 960:
            page.click(".views [data-view=chat]")
        box = page.run("document.querySelector('#send').getBoundingClientRect().toJSON()")
        assert box["bottom"] <= 740
        assert box["height"] >= 40


def test_dark_light_and_still(browser):
    paper, motion = {}, {}
    for dark, still in ((False, False), (True, True)):
        with (
            web_server("word " * 90, step_seconds=0.05) as web,
            browser.page(web.url, dark=dark, still=still) as page,
        ):
            wait_ready(page)
            paper[dark] = page.run("getComputedStyle(document.body).backgroundColor")
            ask(page, "x")
            page.wait("document.querySelector('.coming')")
            motion[still] = page.run(
                "getComputedStyle(document.querySelector('.coming'), '::after').animationName"
            )
            low = page.run(_CONTRAST)
            assert low == []
            page.press("Escape")
            wait_done(page)
    assert paper == {False: "rgb(250, 248, 243)", True: "rgb(21, 20, 18)"}
    assert motion == {False: "blink", True: "none"}


_CONTRAST = """(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parse(colour).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    const { backgroundColor } = getComputedStyle(element);
    return parse(backgroundColor)[3] === 0 ? ground(element.parentElement) : backgroundColor;
  };
  return [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
      && !element.closest(".skip")
      && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((element) => {
      const colours = [getComputedStyle(element).color, ground(element)];
      const [a, b] = colours.map(light).sort((a, b) => b - a);
      return [element.className || element.tagName, (a + 0.05) / (b + 0.05)];
    }).filter(([, ratio]) => ratio < 4.5);
})()"""
"""Texts that stand out too little from what they stand on: below 4.5 to 1 (WCAG 2.2, AA)."""
