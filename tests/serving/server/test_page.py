"""The page at / in a real browser: questions, answers as they come, what can be done with them, and hostile text."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("aiohttp")

from ptqpipe.serving.command import serving as chats
from ptqpipe.serving.options import ServeOptions
from tests import processors
from tests.serving.engine import images
from tests.serving.engine.models import PROMPTS, greedy, tokenizer
from tests.serving.server import browser
from tests.serving.server.conftest import TEMPLATE, Server, serving
from tests.serving.server.test_api import text

pytestmark = [
    pytest.mark.skipif(browser.BINARY is None, reason="no Chromium on this machine"),
    pytest.mark.slow,
]


async def ask(page: browser.Page, message: str, tokens: int = 40) -> None:
    """``tokens``: of the answer at most; as many as there may be where it is to be stopped before its end."""
    await page.until(
        "document.readyState === 'complete' && document.querySelector('#model').textContent.includes('demo')"
    )
    await page.value(
        f"document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = {tokens}"
    )
    await page.value("document.querySelector('#input').focus()")
    await page.call("Input.insertText", text=message)
    await press(page, "Enter", 13)


async def press(page: browser.Page, key: str, code: int) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


def right(message: str) -> str:
    chat: Any = [{"role": "user", "content": message}]
    prompt = tokenizer().apply_chat_template(chat, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
    return text(greedy(tokenizer()(prompt, add_special_tokens=False).input_ids, 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dark", "width", "height"), [(False, 1000, 700), (True, 420, 740)], ids=["light", "dark, narrow"]
)
def test_a_question_is_answered_with_its_speed(
    server: Server, tmp_path: Path, dark: bool, width: int, height: int
) -> None:
    async def main() -> None:
        async with browser.opened(server.url, width=width, height=height, dark=dark) as page:
            await ask(page, PROMPTS[0])
            await page.until("document.querySelector('.turn.assistant small') !== null")
            shown = await page.value("document.querySelector('.turn.assistant').firstChild.textContent.length")
            assert shown > 0
            assert await page.value("turns.at(-1).content") == right(PROMPTS[0])
            assert await page.value("document.querySelector('header').offsetHeight") < (60 if width > 640 else 100)
            assert float(await page.value("document.querySelector('#rate').textContent")) > 0
            assert await page.value("document.querySelector('#count').textContent") == "40"
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
            back = await page.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(int(x) for x in back[4:-1].split(",")) < 3 * 128) is dark
            assert await page.value(
                "performance.getEntriesByType('resource').every(x => x.name.startsWith(location.origin))"
            )
            await page.screenshot(tmp_path / "page.png")
            assert page.problems == []

    asyncio.run(main())


def test_stop_ends_the_answer_and_errors_are_shown() -> None:
    async def main(url: str) -> None:
        async with browser.opened(url, width=800, height=600, dark=False) as page:
            await ask(page, "Return", tokens=200)
            await page.until("document.querySelector('#send').textContent === 'Stop'")
            await page.until("+document.querySelector('#count').textContent > 1")
            await page.value("document.querySelector('#send').click()")
            await page.until("document.querySelector('.turn.assistant small')?.textContent.startsWith('stopped')")
            assert await page.value("document.querySelector('#send').textContent") == "Send"
            await page.value("document.querySelector('#max_tokens').value = 100000")
            await page.value(
                "document.querySelector('#input').value = 'again'; document.querySelector('#form').requestSubmit()"
            )
            await page.until("document.querySelector('.turn.error') !== null")
            assert "context is 256" in await page.value("document.querySelector('.turn.error').textContent")

    with serving(slow=0.1) as slow:
        asyncio.run(main(slow.url))
        assert slow.service.engine is not None
        deadline = time.monotonic() + 30  # the engine drops it at its next step, which the browser does not wait for
        while not slow.service.engine.counters.finished and time.monotonic() < deadline:
            time.sleep(0.05)
        assert slow.service.engine.counters.finished == {"cancelled": 1}


@pytest.mark.slow
def test_while_an_answer_is_written_its_end_is_marked_and_who_reads_above_stays_there() -> None:
    async def main(url: str) -> None:
        async with browser.opened(url, width=800, height=320, dark=False) as page:
            await ask(page, "Return", tokens=200)
            await page.until("document.querySelector('.turn.writing') !== null")
            mark = "getComputedStyle(document.querySelector('.writing > div'), '::after').content"
            assert await page.value(mark.replace("> div", "> .text")) == '"▍"'  # before the first token
            assert await page.value("document.querySelector('.writing').ariaBusy") == "true"
            await page.until("+document.querySelector('#count').textContent > 3")
            assert "Edit" not in await page.value("document.querySelector('#log').textContent")
            await page.value("turns.at(-1).content += '\\n\\nmore'.repeat(40)")
            await page.until("pane().scrollTop > 1000 && at_end()")  # it follows
            await page.value("pane().scrollTop = 0")
            count = int(await page.value("document.querySelector('#count').textContent"))
            await page.until(f"+document.querySelector('#count').textContent > {count + 2}")
            assert await page.value("pane().scrollTop") == 0
            await page.value("document.querySelector('#input').value = 'the next one'")
            await press(page, "Enter", 13)
            assert await page.value("running !== null")
            assert await page.value("document.querySelector('#input').value") == "the next one"
            await press(page, "Escape", 27)
            await page.until("document.querySelector('.turn.assistant small')?.textContent.startsWith('stopped')")
            assert await page.value("document.querySelector('.writing, [aria-busy]')") is None
            assert "Edit" in await page.value("document.querySelector('#log').textContent")
            assert page.problems == []

    with serving(slow=0.2) as slow:
        asyncio.run(main(slow.url))


@pytest.mark.slow
def test_a_system_prompt_an_edit_and_another_answer_are_sent(server: Server) -> None:
    async def main() -> None:
        async with browser.opened(server.url, width=1400, height=800, dark=False) as page:
            await page.until("document.querySelectorAll('#samples button').length === 4")
            assert "context 256 tokens" in await page.value("document.querySelector('#facts').textContent")
            assert await page.value("document.querySelector('#needs_key').hidden")
            await page.value("document.querySelector('#system').value = 'Be short.'")
            await ask(page, "One")
            await page.until("document.querySelector('.turn.assistant small') !== null")
            said = "JSON.stringify(body().messages.map(x => [x.role, x.content]))"
            first = await page.value("turns.at(-1).content")
            assert json.loads(await page.value(said)) == [
                ["system", "Be short."], ["user", "One"], ["assistant", first]
            ]  # fmt: skip
            await click(page, "Regenerate")
            await page.until("running === null && turns.at(-1).note !== undefined")
            assert await page.value("turns.map(x => x.role).join()") == "user,assistant"
            assert await page.value("turns.at(-1).content") == first  # at temperature 0
            await click(page, "Edit")
            assert await page.value("document.querySelector('#input').value") == "One"
            assert await page.value("turns.length") == 0
            await page.value("ask('Two')")
            await page.until("running === null && turns.length === 2")
            await page.call("Page.reload")
            await page.until("document.querySelectorAll('.turn').length === 2")
            assert await page.value("turns[0].content") == "Two"
            await page.value("document.querySelector('#clear').click()")
            assert await page.value("!document.querySelector('#empty').hidden && turns.length === 0")
            assert page.problems == []

    asyncio.run(main())


@pytest.mark.slow
def test_earlier_chats_are_kept_come_back_and_are_deleted(server: Server) -> None:
    names = "[...document.querySelectorAll('#chats button:first-child')].map(x => x.textContent).join()"

    async def main() -> None:
        async with browser.opened(server.url, width=390, height=800, dark=False) as page:
            await page.until("document.querySelectorAll('#samples button').length === 4")
            assert await page.value("document.querySelector('#past').hidden")
            for text in ("One", "Two"):
                await ask(page, text)
                await page.until("running === null && turns.length === 2")
                await page.value("document.querySelector('#clear').click()")
                assert await page.value("turns.length") == 0
            await page.call("Page.reload")
            await page.until("document.querySelectorAll('#chats button').length === 4")
            assert await page.value("turns.length") == 0  # a new chat stays a new one
            assert await page.value(names) == "Two,One"
            await click(page, "One")
            assert await page.value("turns.map(x => x.role).join()") == "user,assistant"
            assert await page.value("turns[0].content") == "One"
            assert await page.value("document.querySelector('header').offsetHeight") < 100
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
            for left, open_turns in (("Two", 0), ("", 0)):  # what is on the page goes with its chat
                await page.value("document.querySelector('#chats [aria-label=Delete]').click()")
                assert await page.value(names) == left
                assert await page.value("turns.length") == open_turns
            assert await page.value("JSON.parse(localStorage.getItem(STORE)).past.length") == 0
            assert page.problems == []

    asyncio.run(main())


def test_when_storage_is_full_the_oldest_chats_go(server: Server) -> None:
    async def main() -> None:
        async with browser.opened(server.url, width=800, height=600, dark=False) as page:
            await page.until("document.querySelectorAll('#samples button').length === 4")
            await page.value(
                "for (const at of [1, 2, 3, 4]) { turns = [{role: 'user', content: at + 'x'.repeat(1.5e6)}]; keep(); "
                "leave(); keep(); }"
            )
            kept = await page.value("JSON.parse(localStorage.getItem(STORE)).past.map(x => x.turns[0].content[0])")
            assert kept[0] == "4"
            assert 1 <= len(kept) < 4
            assert kept == sorted(kept, reverse=True)
            assert page.problems == []

    asyncio.run(main())


def test_what_a_model_thinks_is_folded_and_no_part_of_what_is_copied(server: Server) -> None:
    async def main() -> None:
        async with browser.opened(server.url, width=800, height=600, dark=False) as page:
            await page.until("document.querySelector('#model')?.textContent.includes('demo')")
            await page.value("var box = make('div'); chats = true; document.body.append(box); 1")
            shown = (
                "[box.querySelector('summary')?.textContent, box.querySelector('.thought')?.lastChild.textContent, "
                "box.lastChild.textContent]"
            )
            for text, expected in (
                ("<think>\nSo it is", ["Thinking …", "So it is", "Thinking …So it is"]),
                ("<think>\nSo it is\n</think>\n\nYes", ["Thoughts", "So it is", "Yes"]),
                ("So it is</think>Yes", ["Thoughts", "So it is", "Yes"]),  # opened by the template
                ("<think>\n\n</think>\n\nYes", [None, None, "Yes"]),
                ("The tag `</think>` ends it", [None, None, "The tag </think> ends it"]),
            ):
                await page.value(f"fill(box, {json.dumps(text)}, 'assistant')")
                assert await page.value(shown) == expected, text
            await page.value("fill(box, '<think>a', 'assistant'); box.querySelector('details').open = true; 1")
            await page.value("fill(box, '<think>a b</think>c', 'assistant')")
            assert await page.value("box.querySelector('details').open")  # who opened it goes on reading
            await page.value(
                "turns = [{role: 'user', content: 'x'}, {role: 'assistant', content: '<think>a</think>\\nYes'}]; draw()"
            )
            await page.value("var copied; copy = async text => { copied = text; }; 1")
            await page.value(
                "[...document.querySelectorAll('.assistant .foot button')].find(x => x.textContent === 'Copy').click()"
            )
            assert await page.value("copied") == "Yes"
            assert page.problems == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("language", "code", "parts"),
    [
        (
            "python",
            "def f(x): # it's\n    return 'a#b' // 2",
            "word:def remark:# it's word:return string:'a#b' number:2",
        ),
        ("js", 'const a = "//" // b', 'word:const string:"//" remark:// b'),
        ("c", "/* if\n*/ int x = 0x1F;", "remark:/* if\n*/ word:int number:0x1F"),
        ("sql", "select 1 -- one", "word:select number:1 remark:-- one"),
        ("", "if 1 # 'x'", ""),
    ],
)
def test_code_is_coloured_as_its_language_is_written(server: Server, language: str, code: str, parts: str) -> None:
    async def main() -> None:
        async with browser.opened(server.url, width=800, height=600, dark=False) as page:
            await page.until("document.querySelector('#model')?.textContent.includes('demo')")
            await page.value(f"var box = code_block({json.dumps(code)}, {json.dumps(language)}); 1")
            assert await page.value("box.querySelector('pre').textContent") == code
            found = "[...box.querySelectorAll('pre span')].map(x => x.className + ':' + x.textContent).join(' ')"
            assert await page.value(found) == parts
            assert page.problems == []

    asyncio.run(main())


async def click(page: browser.Page, label: str) -> None:
    await page.value(f"[...document.querySelectorAll('button')].find(x => x.textContent === {label!r}).click()")


MARKDOWN = """# Title
Some **bold**, *slanted* and `code <b>` text, [a link](https://example.org/a) and https://example.org/b.

1. one
2. two
   - inner

> quoted

| a | b |
|---|--:|
| 1 | `2` |

```python
print("<i>")
```
"""
HOSTILE = (
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "[x](javascript:window.broken=1) [y](data:text/html,z) [z]( javascript:1)",
    '[x](https://a.b/"onmouseover="window.broken=1)',
    "`<svg onload=window.broken=1>`\n```html\n<iframe src=//evil>\n",
    "| <b onclick=1> | x |\n|---|---|\n| <a href=javascript:1>y</a> | z |",
    "<think><img src=x onerror='window.broken = 1'></think><b onclick=1>x</b>",
    "```js\n" + "'\\\\" * 20000 + "/*" * 20000 + "`" * 2 + "<i>",
    ">" * 5000 + " deep",
    "\n".join(" " * at + "- deep" for at in range(300)),
    "`" * 20000,
    "*" * 20000 + "a" + "_" * 20000,
)


@pytest.mark.slow
def test_an_answer_is_rendered_and_nothing_in_it_is_run(server: Server) -> None:
    allowed = (
        "p, code, strong, em, a, ul, ol, li, blockquote, table, thead, tbody, tr, th, td, pre, div, span, button, hr, "
        "details, summary"
    )
    render = "var box = make('div'); chats = true; fill(box, %s, 'assistant'); document.body.append(box); "

    async def main() -> None:
        async with browser.opened(server.url, width=1000, height=700, dark=False) as page:
            await page.until("document.querySelector('#model')?.textContent.includes('demo')")
            await page.value(render % json.dumps(MARKDOWN) + "1")
            for selector, text in (
                ("h3", "Title"), ("strong", "bold"), ("em", "slanted"), ("code", "code <b>"), ("ol > li", "one"),
                ("li li", "inner"), ("blockquote", "quoted"), ("th", "a"), ("td.right code", "2"), ("th.right", "b"),
                ("pre", 'print("<i>")'), (".code span", "python"), ("a[href='https://example.org/a']", "a link"),
                ("a[href='https://example.org/b']", "https://example.org/b"),
            ):  # fmt: skip
                assert await page.value(f'box.querySelector("{selector}")?.textContent') == text, selector
            for text in HOSTILE:
                await page.value(render % json.dumps(text) + "1")
                assert await page.value(f"[...box.querySelectorAll('*')].every(x => x.matches('{allowed}'))"), text[:50]
                assert await page.value(
                    "[...box.querySelectorAll('*')].every(x => [...x.attributes].every("
                    "y => ['class', 'href', 'target', 'rel', 'type', 'start'].includes(y.name)))"
                )
                assert await page.value("[...box.querySelectorAll('a')].every(x => /^https?:$/.test(x.protocol))")
            assert await page.value("window.broken") is None
            assert page.problems == []
            await page.value("document.body.append(make('script', {textContent: 'window.broken = 2'}))")
            assert await page.value("window.broken") is None  # the policy knows the page's own scripts alone

    asyncio.run(main())


def test_a_server_with_a_key_asks_for_it() -> None:
    async def main(url: str) -> None:
        async with browser.opened(url, width=390, height=800, dark=True) as page:
            await page.until("document.querySelector('#needs_key')?.hidden === false")
            await page.value("document.querySelector('#key').value = 'secret'; look()")
            await page.until("document.querySelector('#model').textContent.includes('demo')")

    with serving(api_key="secret") as found:
        asyncio.run(main(found.url))


@pytest.mark.slow
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat", "no template"])
def test_the_first_message_is_answered_with_nothing_set(template: str | None) -> None:
    """The demo model's context is 256 tokens: as many as a fixed number of tokens may easily ask for."""

    async def main(url: str) -> None:
        async with browser.opened(url, width=800, height=600, dark=False) as page:
            await page.until("document.querySelector('#model')?.textContent.includes('demo')")
            assert await page.value("document.querySelector('#max_tokens').value") == ""
            await page.value("document.querySelector('#seed').value = 3")
            await page.value(
                "document.querySelector('#input').value = 'Return the'; document.querySelector('#form').requestSubmit()"
            )
            await page.until("document.querySelector('.turn.assistant small, .turn.error') !== null")
            assert await page.value("document.querySelector('.turn.error')") is None
            assert int(await page.value("document.querySelector('#count').textContent")) > 16
            assert page.problems == []

    with serving(template=template) as found:
        asyncio.run(main(found.url))


@pytest.mark.slow
def test_an_image_is_attached_shown_and_answered(tmp_path: Path) -> None:
    folder = processors.add(images.make(tmp_path / "model", "llava"), "llava")
    raw = processors.png(processors.picture(1))
    (tmp_path / "first.png").write_bytes(raw)
    options = ServeOptions(str(folder), port=0, dtype="float32", kv_cache_size=1 << 24, workers=1)

    async def main(url: str) -> str:
        async with browser.opened(url, width=800, height=600, dark=False) as page:
            await page.until("document.querySelector('#has_images')?.hidden === false")
            root = (await page.call("DOM.getDocument"))["root"]["nodeId"]
            node = (await page.call("DOM.querySelector", nodeId=root, selector="#images"))["nodeId"]
            for count in (1, 2):
                await page.call("DOM.setFileInputFiles", files=[str(tmp_path / "first.png")], nodeId=node)
                await page.until(f"document.querySelectorAll('#attached img').length === {count}")
            await page.value("document.querySelector('#attached button').click()")
            await page.value("document.querySelector('#temperature').value = 0")
            await page.value("document.querySelector('#max_tokens').value = 6")
            await page.value("document.querySelector('#input').value = 'w4 w5'")
            await page.value("document.querySelector('#form').requestSubmit()")
            await page.until("document.querySelector('.turn.assistant small, .turn.error') !== null")
            assert await page.value("document.querySelector('.turn.user img').naturalWidth") == 70
            assert await page.value("document.querySelectorAll('#attached img').length") == 0
            assert page.problems == []
            answer: str = await page.value("turns.at(-1).content")
            await click(page, "Edit")
            assert await page.value("document.querySelectorAll('#attached img').length") == 1
            return answer

    with chats(options, log=lambda line: None) as url:
        parts = [
            {"type": "image_url", "image_url": {"url": processors.data_uri(raw)}},
            {"type": "text", "text": "w4 w5"},
        ]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
        right = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert asyncio.run(main(url)) == right["choices"][0]["message"]["content"]


def test_a_model_of_text_has_no_place_for_images(server: Server) -> None:
    async def main() -> None:
        async with browser.opened(server.url, width=800, height=600, dark=False) as page:
            await page.until("document.querySelector('#model')?.textContent.includes('demo')")
            assert await page.value("document.querySelector('#has_images').hidden")

    asyncio.run(main())
