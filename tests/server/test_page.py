"""The page at / in a real browser: one asks, the right answer comes in pieces, and its speed is shown."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.engine.models import PROMPTS, greedy, tokenizer
from tests.server import browser
from tests.server.conftest import TEMPLATE, Server, serving
from tests.server.test_api import text

pytestmark = [
    pytest.mark.skipif(browser.BINARY is None, reason="no Chromium on this machine"),
    pytest.mark.slow,
]


async def ask(page: browser.Page, message: str) -> None:
    await page.until(
        "document.readyState === 'complete' && document.querySelector('#model').textContent.includes('demo')"
    )
    await page.value(
        "document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = 40"
    )
    await page.value("document.querySelector('#input').focus()")
    await page.call("Input.insertText", text=message)
    for kind in ("keyDown", "keyUp"):
        await page.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )


def right(message: str) -> str:
    chat: Any = [{"role": "user", "content": message}]
    prompt = tokenizer().apply_chat_template(chat, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
    return text(greedy(tokenizer()(prompt, add_special_tokens=False).input_ids, 40))


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
            parts = "[...document.querySelector('.turn.assistant').childNodes].filter(x => x.nodeType === 3)"
            answer = f"{parts}.map(x => x.data).join('')"
            assert await page.value(answer) == right(PROMPTS[0])
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
            await ask(page, "Return")
            await page.until("document.querySelector('#send').textContent === 'Stop'")
            await page.until("+document.querySelector('#count').textContent > 1")
            await page.value("document.querySelector('#send').click()")
            await page.until("document.querySelector('.turn.assistant small')?.textContent.startsWith('stopped')")
            await page.value("document.querySelector('#max_tokens').value = 100000")
            await page.value(
                "document.querySelector('#input').value = 'again'; document.querySelector('#form').requestSubmit()"
            )
            await page.until("document.querySelector('.turn.error') !== null")
            assert "context is 256" in await page.value("document.querySelector('.turn.error').textContent")

    with serving(slow=0.1) as slow:
        asyncio.run(main(slow.url))
        assert slow.service.engine is not None
        assert slow.service.engine.counters.finished == {"cancelled": 1}


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
