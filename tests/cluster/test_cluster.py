"""Two replicas in processes of Ray behind one server, which the kernel kills."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from server_process import CONTEXT, ServerProcess, prompt_of, write_chat_model

from jaxserve.cli import main
from jaxserve.core.errors import ConfigError, DistributedError, MissingDependencyError
from jaxserve.core.settings.config import EngineConfig

pytestmark = pytest.mark.cluster
ray = pytest.importorskip("ray")
openai = pytest.importorskip("openai")

NUM_TOKENS = 160
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 9, "logprobs": 2},
    {"temperature": 0, "n": 2, "max_tokens": NUM_TOKENS // 2},
    {"temperature": 1.0, "seed": 10, "stop": ["qq"]},
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("clustered"))


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("cluster") / "log"
    server = ServerProcess(chat_model, log, "--served-model-name=tiny", "--data-parallel-size=2")
    yield server.wait_ready()
    processes = descendants(server.process.pid)
    assert server.stop() == 0, server.text()
    until(lambda: not any(map(alive, processes)))


@pytest.fixture
def client(server: ServerProcess):
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descendants(pid: int) -> list[int]:
    """The processes below a process, its children first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


def replicas(server: ServerProcess) -> list[int]:
    """The process ids of the replicas, by their numbers."""
    told = re.findall(r"replica (\d) is ready.*: process (\d+) ", server.text())
    return [pid for _, pid in sorted({number: int(pid) for number, pid in told}.items())]


def metrics_of_both(server: ServerProcess) -> dict[tuple[str, ...], float]:
    """The server's metrics, in which a replica may be missing that answers late."""
    found: dict[tuple[str, ...], float] = {}

    def complete() -> bool:
        found.clear()
        found.update(server.metrics())
        return all(("vllm:num_requests_running", number) in found for number in "01")

    until(complete)
    return found


def all_up(server: ServerProcess) -> bool:
    metrics = server.metrics()
    return all(metrics.get(("jaxserve:replica_up", number)) == 1 for number in "01")


class Received(list[int]):
    """The numbers of requests of which tokens come; calls `then` at the one that is so many."""

    def __init__(self, after: int, then: Callable[[], object]) -> None:
        super().__init__()
        self._then, self._calls = then, iter([*[False] * (after - 1), True])

    def append(self, number: int) -> None:
        super().append(number)
        if next(self._calls, False):  # In one thread alone.
            self._then()


def ask(
    client, number: int, received: list[int], stream: bool = True, num_tokens: int = NUM_TOKENS
) -> list[Any]:
    """For each choice of request `number` its text, finish reason and logprobs; a token of a
    stream is counted in `received`."""
    options = {"max_tokens": num_tokens} | OPTIONS[number % len(OPTIONS)]
    prompt, more = prompt_of(10 + number, seed=number), {"ignore_eos": True}
    if not stream:
        answer = client.completions.create(model="tiny", prompt=prompt, extra_body=more, **options)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return [(c.text, c.finish_reason, tokens_of(c)) for c in choices]
    count = options.get("n", 1)
    texts, reasons, tokens = [""] * count, [None] * count, [[] for _ in range(count)]
    for chunk in client.completions.create(
        model="tiny", prompt=prompt, extra_body=more, stream=True, **options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            tokens[choice.index] += tokens_of(choice)
        received.append(number)
    return list(zip(texts, reasons, tokens))


def tokens_of(choice) -> list[str]:
    return list(choice.logprobs.tokens) if choice.logprobs is not None else []


def ask_all(client, received: list[int]) -> list[list[Any]]:
    """Twelve requests at once, each third of them not streamed."""
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(ask, client, n, received, n % 3 != 2) for n in range(12)]
        return [each.result() for each in asked]


def ask_until(client, wanted: list[list[Any]], condition: Callable[[], bool]) -> None:
    """The same requests, each again as soon as it is answered, until a condition holds."""
    met = threading.Event()

    def ask_again(number: int) -> None:
        while not met.is_set():
            assert ask(client, number, [], number % 3 != 2) == wanted[number]

    with ThreadPoolExecutor(12) as threads:
        asking = [threads.submit(ask_again, number) for number in range(12)]
        try:
            until(condition)
        finally:
            met.set()
        for each in asking:
            each.result()


def test_a_killed_replica_loses_no_request(server, client):
    """One, the other, and both at once, at moments of the streams' own making."""
    wanted = ask_all(client, [])
    assert all(choices for choices in wanted)
    for round_number, (kills, after) in enumerate([([0], 40), ([1], 300), ([0, 1], 150)], 1):
        before = server.metrics()
        victims = replicas(server)
        assert len(victims) == 2

        def kill(victims=victims, kills=kills):
            for place in kills:
                os.kill(victims[place], signal.SIGKILL)

        begin = time.monotonic()
        assert ask_all(client, Received(after, kill)) == wanted
        until(lambda: all_up(server))
        print(f"round {round_number}: all up after {time.monotonic() - begin:.1f} s")
        metrics = server.metrics()
        name = ("jaxserve:redispatched_requests_total",)
        assert metrics[name] > before[name]
        restarts = sum(metrics["jaxserve:replica_restarts_total", n] for n in "01")
        restarts -= sum(before["jaxserve:replica_restarts_total", n] for n in "01")
        assert restarts == len(kills)
        assert server.client.get("/health").status_code == 200


def test_a_stopped_replica_is_killed_and_its_requests_go_on(server, client):
    """By SIGSTOP: its process is there, and says nothing, not even that it is lost."""
    wanted, before = ask_all(client, []), replicas(server)
    received = Received(100, lambda: os.kill(before[1], signal.SIGSTOP))
    begin = time.monotonic()
    assert ask_all(client, received) == wanted
    until(lambda: "has not answered for" in server.text())
    until(lambda: all_up(server) and replicas(server) != before)
    print(f"all up after {time.monotonic() - begin:.1f} s")
    assert not alive(before[1]) and replicas(server)[0] == before[0]


def ask_long(client, received: list[int]) -> list[list[Any]]:
    """As many long requests as one replica has room for, streamed."""
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, client, n, received, True, 1000) for n in range(4)]
        return [each.result() for each in asked]


def test_a_rolling_restart_under_load(server, client, capsys):
    """By the command line; each process is another one then, and requests have moved."""
    wanted, before, received, told = ask_long(client, []), replicas(server), [], []
    url = f"--base-url=http://127.0.0.1:{server.port}"
    moved = server.metrics()["jaxserve:moved_requests_total",]

    def restart() -> None:
        until(lambda: len(received) >= 100)
        told.append(main(["cluster", "restart", url]))

    restarter = threading.Thread(target=restart)
    restarter.start()
    while restarter.is_alive():
        assert ask_long(client, received) == wanted
    restarter.join()
    assert told == [0]
    assert re.search(r"2 of 2 replicas were restarted in", capsys.readouterr().out)
    assert not set(replicas(server)) & set(before)
    assert server.metrics()["jaxserve:moved_requests_total",] > moved
    assert main(["cluster", "status", url]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["replica", "0", "1"]
    for row, process in zip(rows[1:], replicas(server)):
        assert f"process {process} " in row and " ready " in row and "0 of 4" in row
    assert rows[3] == "the latest rolling restart has ended, with 2 of 2 replicas restarted"


def test_both_replicas_answer_and_no_page_is_left(server, client):
    ask_all(client, [])
    with client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))  # and no more: leaving aborts it
    metrics = metrics_of_both(server)
    for number in "01":
        assert metrics["vllm:generation_tokens_total", number] > 0

    def idle() -> bool:
        now = metrics_of_both(server)
        held = [now["vllm:num_requests_running", number] for number in "01"]
        held += [now["jaxserve:kv_pages", number, "used"] for number in "01"]
        return not any(held) and not now["jaxserve:open_sequences",]

    until(idle)
    assert server.client.get("/server_info").json()["settings"]["data_parallel_size"] == 2


def test_replicas_have_the_priority_of_the_server(server):
    """Those of Ray's default starve beside another busy process."""
    pids = [server.process.pid, *replicas(server)]
    assert len(pids) == 3 and len({os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}) == 1


def test_a_refusal_of_a_replica_is_the_servers(server):
    answer = server.post("/v1/completions", {"prompt": [5] * (CONTEXT + 1), "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_replicas_end_with_a_killed_server(chat_model, tmp_path):
    """Its clients lose their requests, as those of one engine; the device is free for the next."""
    server = ServerProcess(chat_model, tmp_path / "log", "--data-parallel-size=2").wait_ready()
    processes = replicas(server)
    assert len(processes) == 2 and all(map(alive, processes))
    server.stop(signal.SIGKILL)
    until(lambda: not any(map(alive, processes)))


def test_replicas_come_under_load_and_go_after_it(chat_model, tmp_path, capsys):
    """One to two. All that is asked meanwhile is answered as ever."""
    server = ServerProcess(
        chat_model, tmp_path / "log", "--served-model-name=tiny", "--max-replicas=2"
    ).wait_ready()
    url = f"http://127.0.0.1:{server.port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def number() -> float:
        return server.metrics()["jaxserve:replicas",]

    assert number() == 1
    wanted = ask_all(client, [])
    # Without a pause, in which the load would not be one that stays.
    ask_until(client, wanted, lambda: server.metrics().get(("jaxserve:replica_up", "1")) == 1)
    assert number() == 2
    assert ask_all(client, []) == wanted
    processes = replicas(server)
    assert len(processes) == 2 and all(map(alive, processes))
    until(lambda: number() == 1)
    until(lambda: sum(map(alive, processes)) == 1)
    until(lambda: server.metrics()["jaxserve:replicas_removed_total",] == 1)
    assert main(["cluster", "status", f"--base-url={url}"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == "autoscaling of 1 to 2 replicas: 1 added, 1 removed"
    assert ask_all(client, []) == wanted
    client.close()
    assert server.stop() == 0, server.text()


def test_a_split_by_unknown_step_times_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--disaggregation=auto", "--data-parallel-size=2", "--slo=ttft=1s,itl=50ms"]
    assert main(["serve", *options]) != 0
    assert "the step times of cpu are not known; measure them by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_replicas_than_devices_are_refused():
    from jaxserve.cluster.ray_replicas import load_replicas, share

    five, two = {"CPU": 5.0}, {"CPU": 2.0}
    assert share(EngineConfig(), 2, five, [five]) == ({"num_cpus": 2}, 2)
    assert share(EngineConfig(), 2, {"CPU": 8.0}, [five, {"CPU": 3.0}]) == ({"num_cpus": 3}, 3)
    with pytest.raises(ConfigError, match=r"3 replicas take 1 core each, but Ray has 2;"):
        share(EngineConfig(), 3, two, [two])
    with pytest.raises(ConfigError, match="leave it out"):
        load_replicas(EngineConfig(devices=(0,)), 2)


def test_a_ray_that_replicas_cannot_use_is_refused():
    from jaxserve.cluster.ray_replicas import check_ray

    project = Path(__file__).parents[2] / "pyproject.toml"
    major, minor = map(int, re.findall(r"ray>=(\d+)\.(\d+)", project.read_text())[0])
    check_ray(f"{major}.{minor}.0rc1")
    with pytest.raises(MissingDependencyError, match=f"ray {major}.{minor} or newer"):
        check_ray(f"{major}.{minor - 1}.0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_ray(address=address)
    with pytest.raises(DistributedError, match=f"RAY_ADDRESS is {address}, where no Ray cluster"):
        check_ray(address=address)


def test_gpus_are_divided(monkeypatch):
    from jaxserve.cluster.ray_replicas import share

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    config = EngineConfig(tensor_parallel_size=2)
    four, three = {"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 3.0}
    assert share(config, 2, four, [four]) == ({"num_cpus": 1, "num_gpus": 2}, None)
    with pytest.raises(ConfigError, match="take 2 GPUs each, but Ray has 4; start at most 2"):
        share(config, 3, four, [four])
    # Six, but of each three one is left over.
    with pytest.raises(ConfigError, match="Ray has 6 on 2 machines; start at most 2"):
        share(config, 3, {"CPU": 32.0, "GPU": 6.0}, [three, three])
    with pytest.raises(ConfigError, match="Ray has 0"):  # and not on CPUs instead
        share(config, 1, four | {"GPU": 0.0}, [four])


def test_a_model_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "jaxserve", "serve", str(tmp_path / "no")]
    run = subprocess.run(
        [*command, "--port=0", "--data-parallel-size=2"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: ")
