"""An OpenAI endpoint that follows a script, to hold clients to: `uvicorn scripted_server:app`.

The model that is asked for names the script. Tokens come `GAP_S` apart, and each is one word.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

GAP_S = 0.02
LONG_GAP_S = 0.25
"""Between events that a client must not read at once, though it may be busy."""
STRICT_FIELDS = {"model", "prompt", "stream", "max_tokens"}
SLOW_S = 30.0
TURN = asyncio.Lock()


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    asked = json.loads(body) if body else {}
    path = scope["path"]
    if path.startswith("/silent/"):
        return await asyncio.sleep(SLOW_S)
    if path.endswith("/v1/models"):
        return await reply(send, 200, {"data": [{"id": "plain"}, {"id": "other"}]})
    if path == "/ids/tokenize":
        return await reply(send, 200, {"tokens": [7, 8, 9, 8, 7], "count": 5})
    if path.removeprefix("/ids") in ("/v1/completions", "/v1/chat/completions"):
        return await SCRIPTS[asked["model"]](send, asked)
    await reply(send, 404, {"detail": "Not Found"})


async def reply(send, status, content):
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def begin(send):
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def say(send, *contents):
    """Events in one write."""
    datas = [content if isinstance(content, str) else json.dumps(content) for content in contents]
    body = "".join(f"data: {data}\n\n" for data in datas).encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def end(send):
    await send({"type": "http.response.body", "body": b""})


def piece(asked, text, **more):
    if "messages" in asked:
        return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}
    return {"choices": [{"index": 0, "text": text, **more}]}


def prompt_tokens(asked):
    """Text counts two tokens a word, and three for the text as such."""
    prompt = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
    return 3 + 2 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def plain(send, asked, per_event=1, knows=("stream_options",), usage=True, gap_s=GAP_S):
    """`max_tokens` words, `per_event` in each event."""
    await begin(send)
    left = asked["max_tokens"]
    while left:
        await asyncio.sleep(gap_s)
        count = min(per_event, left)
        left -= count
        more = {} if left else {"finish_reason": "length"}
        if "return_token_ids" in knows and asked.get("return_token_ids"):
            more["token_ids"] = [1] * count
        await say(send, piece(asked, " word" * count, **more))
    if usage and asked.get("stream_options"):
        counted = {
            "prompt_tokens": prompt_tokens(asked),
            "completion_tokens": asked["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        await say(send, {"choices": [], "usage": counted})
    await say(send, "[DONE]")
    await end(send)


async def bundled(send, asked):
    await plain(send, asked, per_event=3, gap_s=LONG_GAP_S)


async def with_ids(send, asked):
    knows = ("stream_options", "return_token_ids")
    await plain(send, asked, per_event=3, knows=knows, gap_s=LONG_GAP_S)


async def no_usage(send, asked):
    await plain(send, asked, usage=False)


async def strict(send, asked):
    """Knows OpenAI's first fields alone."""
    if unknown := set(asked) - STRICT_FIELDS:
        return await reply(send, 400, {"error": {"message": f"unknown: {sorted(unknown)}"}})
    await plain(send, asked)


async def new_limit(send, asked):
    """Wants the chat's newer name for the limit."""
    if "max_tokens" in asked:
        return await reply(send, 400, {"error": {"message": "use max_completion_tokens"}})
    await plain(send, asked | {"max_tokens": asked["max_completion_tokens"]})


async def breaks(send, asked):
    """Two tokens, and then the connection is cut."""
    await begin(send)
    await say(send, piece(asked, " one"), piece(asked, " two"))
    raise ConnectionResetError("cut")


async def stops_short(send, asked):
    """Two tokens, and then a clean end without a reason."""
    await begin(send)
    await say(send, piece(asked, " one"), piece(asked, " two"))
    await end(send)


async def error_event(send, asked):
    await begin(send)
    await say(send, piece(asked, " one"), {"error": {"message": "out of luck"}})
    await end(send)


async def garbage(send, asked):
    await begin(send)
    await say(send, piece(asked, " one"), "{not json")
    await end(send)


async def empty(send, asked):
    await begin(send)
    await say(send, piece(asked, "", finish_reason="stop"), "[DONE]")
    await end(send)


async def busy(send, asked):
    await reply(send, 429, {"error": {"message": "too many requests"}})


async def broken(send, asked):
    await reply(send, 500, {"error": {"message": "it is broken"}})


async def odd_lengths(send, asked):
    """Refuses answers of an even number of tokens."""
    await (plain if asked["max_tokens"] % 2 else busy)(send, asked)


async def one_token(send, asked):
    """Refuses answers of more."""
    await (plain if asked["max_tokens"] == 1 else broken)(send, asked)


async def one_by_one(send, asked):
    """Answers one request at a time; the others wait."""
    async with TURN:
        await plain(send, asked)


async def hangs(send, asked):
    """One token, and then nothing for a long time."""
    await begin(send)
    await say(send, piece(asked, " one"))
    await asyncio.sleep(SLOW_S)


async def interrupts(send, asked, number=signal.SIGINT):
    """After an answer of several tokens, Ctrl-C for the process that started this server."""
    await plain(send, asked)
    if asked["max_tokens"] > 1:
        await asyncio.sleep(0.5)
        os.kill(os.getppid(), number)


async def terminates(send, asked):
    await interrupts(send, asked, signal.SIGTERM)


SCRIPTS = {
    script.__name__: script
    for script in (
        plain,
        bundled,
        with_ids,
        no_usage,
        strict,
        new_limit,
        breaks,
        stops_short,
        error_event,
        garbage,
        empty,
        busy,
        broken,
        odd_lengths,
        one_token,
        one_by_one,
        hangs,
        interrupts,
        terminates,
    )
}
