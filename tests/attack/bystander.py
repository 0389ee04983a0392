"""An ordinary client, in a process of its own: it writes how long each answer took.

Usage: bystander.py PORT KEY FILE. It ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx

PAUSE_S = 0.1
BODY = {"prompt": "hi", "max_tokens": 3, "temperature": 0}


def main(port: str, key: str, file: str) -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    # Another address than the attackers', as another client has.
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    headers = {"authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{port}"
    with (
        open(file, "w", buffering=1) as log,
        httpx.Client(base_url=url, headers=headers, transport=transport, timeout=600) as client,
    ):
        while not over.is_set():
            for path, body in (("/health", None), ("/v1/completions", BODY)):
                begin = time.monotonic()
                answer = client.get(path) if body is None else client.post(path, json=body)
                wait_s = time.monotonic() - begin
                log.write(json.dumps([path, answer.status_code, begin, wait_s]) + "\n")
            over.wait(PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
