"""Every command line and program in the documents and in `jaxserve --help`, run as it stands there.

A line runs in a directory that has the files it names, on SmolLM2. What cannot run on this machine
is listed with the reason, and is parsed, or shown by `--dry-run`, instead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import documented
import httpx
import pytest
import yaml
from documented import Line
from exhaustive import exhaustive
from lora_step import write_adapter
from patience import PATIENCE_S
from unoptimised import XLA_FLAGS

from jaxserve.cli.batch import Batch
from jaxserve.cli.bench.accuracy import Accuracy
from jaxserve.cli.bench.offline import Offline
from jaxserve.cli.bench.serve import BenchServe
from jaxserve.cli.chat import Chat
from jaxserve.cli.cluster import ResizeReplica, Restart, Status
from jaxserve.cli.compile import Compile
from jaxserve.cli.generate import Generate
from jaxserve.cli.launch import Launch
from jaxserve.cli.plan import Plan
from jaxserve.cli.profile import Profile
from jaxserve.cli.search import Search
from jaxserve.cli.serve import Serve
from jaxserve.cli.simulate import Simulate
from jaxserve.cli.train_speculator import TrainSpeculator
from jaxserve.distributed.launch.job import is_script
from jaxserve.models.loading.checkpoint import open_checkpoint

ELSEWHERE = {
    "--backend slurm": "needs Slurm",
    "--backend tpu-vm": "needs Cloud TPUs",
    "--backend k8s": "needs Kubernetes",
    "--backend ssh": "needs hosts to log in to",
    "srun": "needs Slurm",
    "--data-parallel-size": "needs [cluster]; tests/cluster/test_cluster.py has it",
    "--max-replicas": "needs [cluster]; tests/cluster/test_cluster.py has it",
    "--prefill-replicas": "needs [cluster]; tests/cluster/test_moves.py has what it starts",
    "jaxserve cluster": "asks a server of [cluster]; tests/cluster/test_cluster.py has it",
    "batch in.jsonl out.jsonl --tensor-parallel-size": "compiles for minutes on every host; "
    "tests/batch/test_batch_command.py runs two hosts as one engine, on a tiny model",
    "jaxserve profile": "measures for minutes; tests/cli/test_cli_simulate.py has a tiny model",
    "--devices-per-host 1 -- generate": "compiles on two hosts; "
    "tests/real_model/test_real_meshes.py launches it with fewer programs",
    "--devices-per-host 1 -- serve": "compiles on two hosts; tests/server/test_serve_hosts.py and "
    "tests/distributed/test_hosts_snapshot.py have a tiny model",
    "--offload auto": "compiles two engines; tests/batch/test_offload_settings.py has its policy",
    "bench accuracy": "compiles two engines; tests/cli/test_cli_bench.py has a tiny model",
    "--find-capacity": "sends a dozen loads; tests/loadgen/test_find_capacity.py has its server",
    "train-speculator": "trains for minutes; tests/training has a tiny model",
    "simulate --profile": "reads what `jaxserve profile` writes; as above",
}
"""Parts of jaxserve's lines that are not run here."""
OTHERS = {
    "git clone": "needs the network",
    "python3 -m venv": "tests run in an environment",
    "--completion": "tests/cli/test_cli_main.py prints the script",
    "docker": "needs docker; .ci/run runs the steps of the CPU image without it",
    "pip": "needs a package index; .ci/run runs the README's lines",
    "lm_eval": "tests/clients/test_lm_eval.py runs it",
    "python benchmarks/": "needs the compilers or the devices that it measures",
    "python tests/models/golden/": "needs torch, and rewrites files of the repository",
    "python tests/models/models_page.py": "rewrites files of the repository",
    "python tests/suites/": "needs a checkout of the other server",
    "pytest": "tests do not run themselves",
    "jupyter": "rewrites files of the repository",
    "kubectl": "needs Kubernetes",
    "ruff": "rewrites files of the repository",
}
"""Lines of other programs, which are not run here."""
NOT_PROGRAMS = {
    "docs/adding-a-model.md": "quotations, which tests/test_docs.py compares with the code",
    "docs/parallel.md": "three engines, as tests/meshes/test_mesh_devices.py has them",
}
"""Documents whose Python is not to be run."""
ALIKE = {
    "JAXSERVE_CACHE=./cache jaxserve compile MODEL": "tests/cli/test_cli_plan.py has a tiny model",
    "jaxserve generate Why is the sky blue?": ".ci/run runs it as a line of the README",
    "jaxserve generate --system Summarize in one sentence.": "as with --json",
    "jaxserve generate Hi --model ./my-model": "as batch --model",
    "jaxserve generate Hi --trace-file run.json": "tests/cli/test_cli_generate.py has the file",
    "jaxserve batch questions.jsonl answers.jsonl": "as batch --model",
    "jaxserve launch --hosts 4 --independent -- batch in.jsonl out.jsonl --shard {host}/{hosts}": ""
    "tests/batch/test_batch_command.py has two hosts",
    "jaxserve bench offline": "tests/cli/test_cli_bench.py has a tiny model",
    "jaxserve batch questions.jsonl in-blocks.jsonl --weights-on disk --steps-per-weight-read 8 "
    "--max-num-seqs 64": "as generate --weights-on disk",
    "jaxserve generate --system Summarize in one sentence. --kv-on host "
    "--kv-cache-memory-bytes 12960KiB --page-size 32 --max-num-seqs 1 "
    "--max-num-batched-tokens 129 --max-model-len 2560": "tests/real_model has it, and as plan",
    "jaxserve plan my-model --device h200 --devices 8": "as on one device",
    "jaxserve simulate my-model --device h200 --devices 8 --trace azure_conv.csv "
    '--speculative-config {"method": "ngram", "num_speculative_tokens": "auto"} '
    "--draft-acceptance 0.8,0.6": "as without drafts",
    "jaxserve search my-model --device h200,l4 --devices 1,2 --max-num-seqs 32 --scheduler sarathi "
    "--max-num-batched-tokens 544 --trace azure_conv.csv --slo ttft=2s,itl_p90=50ms "
    "--manifest serving.yaml --image registry/jaxserve:1": "colab/planning.ipynb has a manifest",
    "jaxserve serve --snapshot-dir work": "tests/server/test_serve_limits.py restarts a server",
    "jaxserve serve --enable-lora --lora-modules sql=path/to/sql-adapter": "as the program",
    "JAX_NUM_CPU_DEVICES=4 jaxserve serve MODEL --tensor-parallel-size 2 --devices 2,3": ""
    "as generate --tensor-parallel-size",
    'jaxserve serve --speculative-config {"method": "ngram", "num_speculative_tokens": 3}': ""
    "as the program",
    "run_batch(llm, ": "as batch --model",
    "source.export_request(": "tests/engine/snapshot/test_engine_export.py has tiny models",
    "llm.chat(question, params)": "as the README's program",
}
"""Lines, and parts of programs, that only `EXHAUSTIVE=1` runs here, and what is as good for CI."""
OWN_PROGRAMS = "tensor.parallel.size|speculative.config|(weights|kv).on|page.size|enable.lora"
"""Settings that a line shares with no other; tests/real_model has them as users do."""
AHEAD = {"jaxserve serve", "JAXSERVE_CACHE=./cache jaxserve compile MODEL"}
"""Lines whose programs are compiled before the first request, as for users. Other lines compile
those that they call."""
URL = "http://127.0.0.1:8000"
OF_LONG_ANSWERS = "tokens/s at which 99% are fluid"
"""A line that `bench serve` leaves out where answers are as short as those of TRACE."""
RUN_S = 500
QUESTIONS = [{"prompt": "The capital of France is", "max_tokens": 8}] * 2 + [
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
]
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,40,40\n0.1,400,20\n0.3,80,40\n"


def reasons(line: Line) -> set[str]:
    """The entries of the lists that keep a line from being run."""
    entries = ELSEWHERE if is_ours(line) else OTHERS
    return {part for part in entries if part in " ".join(line.words)}


def is_ours(line: Line) -> bool:
    return line.program in ("jaxserve", "srun")


def is_run(line: Line) -> bool:
    """`--dry-run` needs no cluster."""
    return "--dry-run" in line.words or not reasons(line)


def once(shown: list[Line]) -> list[Any]:
    """Parameters of a test, one for all lines that say the same."""
    found = {}
    for line in shown:
        variables = line.words[: line.words.index("jaxserve")]
        found.setdefault(repr((variables, line.command)), line)
    named = {" ".join(line.words): line for line in found.values()}
    return [pytest.param(line, id=name, marks=marks(name in ALIKE)) for name, line in named.items()]


def marks(is_alike: bool) -> list[pytest.MarkDecorator]:
    return [exhaustive] if is_alike else []


OURS = [line for line in documented.lines() if is_ours(line)]
HERE = [line for line in OURS if is_run(line)]
SERVERS = [line for line in HERE if isinstance(line.command, Serve)]
LOADS = [line for line in HERE if isinstance(line.command, BenchServe)]
PROGRAMS = [
    block
    for block in documented.blocks()
    if block.language == "python" and block.document not in NOT_PROGRAMS
]
CLIENTS = [block for block in PROGRAMS if "base_url=" in block.text]


class Run(NamedTuple):
    """A command that ended, and the directory it ran in."""

    stdout: str
    stderr: str
    directory: Path


@pytest.fixture(scope="session")
def files(tmp_path_factory, session_cache) -> Path:
    """What the documents name: models, inputs, keys, a list of hosts."""
    directory = tmp_path_factory.mktemp("documented")
    shell("jaxserve convert smollm2-135m-instruct my-model", directory)
    for name in ("MODEL", "path/to/model"):
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).symlink_to(directory / "my-model")
    (directory / "cache").symlink_to(session_cache)
    write_adapter(directory / "path/to/sql-adapter", open_checkpoint().config, rank=8, seed=0)
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    for name in ("in.jsonl", "questions.jsonl"):
        (directory / name).write_text(lines)
    (directory / "azure_conv.csv").write_text(TRACE)
    (directory / "prices.toml").write_text("h200 = 4.0\nl4 = 0.8\n")
    (directory / "key.txt").write_text("secret\n")
    (directory / "notes.txt").write_text("The meeting is on Monday.\n")
    (directory / "hosts.txt").write_text("node-1\nnode-2\n")
    (directory / "my_script.py").write_text("import jax\nprint(jax.device_count())\n")
    return directory


@pytest.fixture
def workplace(files, tmp_path) -> Path:
    """A directory of its own for each command, with all of the files."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def environment(text: str) -> dict[str, str]:
    """With `jaxserve` and `python` of this interpreter, and what the tests import.

    Most lines share the programs of the default settings, which run sooner as users have them.
    Those of OWN_PROGRAMS compile for longer than they run, so they are unoptimised.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    paths = [str(documented.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(paths)}
    found.pop("XLA_FLAGS", None)
    if text in AHEAD:
        found.pop("TESTS_COMPILE", None)
    return found | ({"XLA_FLAGS": XLA_FLAGS} if re.search(OWN_PROGRAMS, text) else {})


def shell(line: str, directory: Path, stdin: str = "") -> Run:
    """Runs a line in a shell. It must end with status 0."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=directory,
        env=environment(line),
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return Run(done.stdout, done.stderr, directory)


@contextlib.contextmanager
def serving(line: Line, directory: Path) -> Iterator[Path]:
    """The server of a line, from when it is ready until SIGTERM has ended it well; its log."""
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8000)) != 0, "port 8000 of the documents is in use"
    log = directory / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {line.text}"],
            stderr=stderr,
            cwd=directory,
            env=environment(line.text),
        )
    try:
        deadline = time.monotonic() + RUN_S
        while not healthy():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield log
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def healthy() -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{URL}/health").status_code == 200
    return False


def assert_as_documented(command: Any, run: Run) -> None:
    """The shape of what a command prints and writes."""
    if isinstance(command, Launch):
        if command.dry_run:
            written = run.directory / "jaxserve.yaml"
            text = written.read_text() if written.exists() else run.stdout
            kinds = [manifest["kind"] for manifest in yaml.safe_load_all(text)]
            assert kinds in (["Secret", "JobSet"], ["RayCluster", "Service"])
        elif is_script(command.job.command):
            assert run.stdout == f"{command.job.hosts * command.job.devices_per_host}\n"
        else:
            assert_as_documented(documented.parsed(command.job.command_on(0)), run)
    elif isinstance(command, Generate):
        assert len(run.stdout.split()) > 1
        assert re.search(r"\d+ tokens, [\d.]+ tokens/s, first token after", run.stderr)
        if command.trace_file is not None:
            assert json.loads((run.directory / command.trace_file).read_text())["traceEvents"]
    elif isinstance(command, Chat):
        assert run.stdout.strip() and "/help" in run.stderr
    elif isinstance(command, Plan):
        last = "PROGRAMS" if command.device is None else "ONE USER'S TURN, MODELLED"
        assert "MEMORY" in run.stdout and last in run.stdout
    elif isinstance(command, Simulate):
        assert re.search(r"^completed +3$", run.stdout, re.MULTILINE)
        assert "modelled (roofline)" in run.stdout
    elif isinstance(command, Search):
        assert re.search(r"^best: jaxserve serve my-model ", run.stdout, re.MULTILINE)
        if command.report is not None:
            assert "<svg" in (run.directory / command.report).read_text()
        if command.manifest is not None:
            manifests = yaml.safe_load_all((run.directory / command.manifest).read_text())
            assert "Deployment" in [manifest["kind"] for manifest in manifests]
    elif isinstance(command, Compile):
        assert re.search(r"\d+ programs compiled, \d+ already cached", run.stdout)
    elif isinstance(command, Offline):
        assert re.search(r"^output tokens/s +[\d.,]+$", run.stdout, re.MULTILINE)
        assert re.search(r"^share of the limit reached +[\d.]+%$", run.stdout, re.MULTILINE)
    elif isinstance(command, Batch):
        answers = [json.loads(line) for line in (run.directory / command.output).open()]
        assert sorted(answer["custom_id"] for answer in answers) == ["line-1", "line-2", "line-3"]
        assert {answer["response"]["status_code"] for answer in answers} == {200}
        if command.report is not None:
            assert "<html" in (run.directory / command.report).read_text()
    elif isinstance(command, BenchServe):
        assert re.search(r"^completed +3$", run.stdout, re.MULTILINE) or not command.load.trace
        if command.plot is not None:
            assert "<svg" in (run.directory / command.plot).read_text()
    else:
        raise AssertionError(f"nothing is known of the output of {type(command).__name__}")


def labels(table: str) -> set[str]:
    """The first column of the lines that have several."""
    return {parts[0] for line in table.splitlines() if len(parts := re.split(" {2,}", line)) > 1}


def test_there_are_commands_of_every_document():
    shown = {line.document for line in OURS}
    assert {"--help", "docs/getting-started.md", "docs/launch.md", "docs/batch.md"} <= shown


def test_every_line_is_run_or_listed():
    """And no entry of the lists is left over."""
    used = set()
    for line in documented.lines():
        found = reasons(line)
        assert found or line in HERE, f"{line.document}: {line.text}"
        used |= found
    assert used == {*ELSEWHERE, *OTHERS}


def test_what_only_exhaustive_runs_is_documented():
    """No entry of the list is left over."""
    names = {" ".join(line.words) for line in HERE}
    for entry in ALIKE:
        assert entry in names or any(entry in block.text for block in PROGRAMS), entry


@pytest.mark.parametrize("line", documented.spans(), ids=lambda line: line.text)
def test_lines_in_running_text_are_commands(line):
    """A name alone, such as `jaxserve batch`, is of a command; with arguments it is parsed."""
    name, *arguments = line.words[1:]
    assert name in documented.command_names()
    if arguments == ["--help"]:
        with pytest.raises(SystemExit) as stop:
            _ = line.command
        assert stop.value.code == 0
    elif arguments:
        assert line.command is not None


def test_service_files():
    """What systemd and Kubernetes are told to run."""
    text = "".join(block.text for block in documented.blocks())
    units = re.findall(r"^ExecStart=\S+/jaxserve (.*)$", text, re.MULTILINE)
    manifests = re.findall(r"^ *args: (\[.*\])$", text, re.MULTILINE)
    commands = [unit.split() for unit in units] + [yaml.safe_load(args) for args in manifests]
    assert len(commands) == 2
    for command in commands:
        assert isinstance(documented.parsed([str(word) for word in command]), Serve)


@pytest.mark.parametrize("line", [line for line in OURS if line not in HERE], ids=lambda x: x.text)
def test_a_line_for_another_machine_is_accepted(line, tmp_path, monkeypatch, capsys):
    """A job is made as far as it can be without its cluster; `srun` is given what Slurm sets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("node-1\nnode-2\n")
    (tmp_path / "my_script.py").touch()
    (tmp_path / "pyproject.toml").touch()
    if line.program == "srun":
        inner = Line(line.document, line.words[-1].replace("$SLURM_PROCID/$SLURM_NTASKS", "1/4"))
        assert isinstance(inner.command, Batch)
        return
    command = line.command
    others = (
        Accuracy
        | Batch
        | BenchServe
        | Profile
        | ResizeReplica
        | Restart
        | Serve
        | Simulate
        | Status
        | TrainSpeculator
    )
    if isinstance(command, others):
        return
    assert isinstance(command, Launch)
    words = line.words[line.words.index("launch") :]
    assert documented.cli.main([*words[:1], "--dry-run", *words[1:]]) == 0
    assert command.job.command[0] in capsys.readouterr().out


@pytest.mark.documented
@pytest.mark.parametrize(
    "line", once([line for line in HERE if line not in SERVERS and line not in LOADS])
)
def test_a_line_runs(line, workplace):
    run = shell(line.text, workplace, stdin="Hi\n")
    assert_as_documented(line.command, run)


@pytest.mark.documented
@pytest.mark.parametrize("line", once(SERVERS))
def test_a_server_answers(line, workplace):
    """The documents' own clients and loads, where it is the server that these ask for."""
    command = line.command
    key = "none" if command.api_key_file is None else "secret"
    with serving(line, workplace) as log:
        ask = {"prompt": "Hi", "max_tokens": 4}
        for name in command.served_model_name or [str(command.engine.model)]:
            answer = httpx.post(
                f"{URL}/v1/completions",
                json=ask | {"model": name},
                headers={"Authorization": f"Bearer {key}"},
                timeout=PATIENCE_S,
            )
            assert answer.status_code == 200, answer.text
        if command.api_key_file is not None:
            assert (
                httpx.post(f"{URL}/v1/completions", json=ask, timeout=PATIENCE_S).status_code == 401
            )
        if command == Serve():
            for client in CLIENTS:
                assert run_program(client.text, workplace).stdout.strip()
            for (load,) in (parameter.values for parameter in once(LOADS)):
                run = shell(load.text, workplace)
                assert_as_documented(load.command, run)
                shown = following_output(load)
                assert labels(shown) - {OF_LONG_ANSWERS} <= labels(run.stdout)
    if command.log_requests:
        (shown,) = [block for block in documented.blocks() if block.text.startswith("id=")]
        fields = [set(re.findall(r"\b(\w+)=", text)) for text in (shown.text, log.read_text())]
        assert fields[0] <= fields[1]


def following_output(line: Line) -> str:
    """The block without a language that comes after a line's own in the same section; nothing where
    there is none."""
    found = documented.blocks()
    for block, after in itertools.pairwise(found):
        own = block.text.replace("\\\n", " ")
        is_own = block.document == line.document and line.text in own
        together = (block.document, block.section) == (after.document, after.section)
        if is_own and together and not after.language:
            return after.text
    return ""


def run_program(text: str, directory: Path) -> Run:
    (directory / "program.py").write_text(text)
    return shell("python program.py", directory)


@pytest.mark.documented
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            block, id=block.document, marks=marks(any(part in block.text for part in ALIKE))
        )
        for block in PROGRAMS
        if block not in CLIENTS
    ],
)
def test_a_program_runs(program, workplace):
    printed = run_program(program.text, workplace).stdout
    assert printed.strip() or "print(" not in program.text
    shown = following_output(Line(program.document, program.text))
    assert printed.startswith(shown)


def test_clients_and_loads_have_their_server():
    assert CLIENTS and LOADS
    assert Serve() in [line.command for line in SERVERS]
