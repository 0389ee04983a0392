"""The command line as such: help, version, arguments that mean nothing, progress."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading

import pytest

import jaxserve
from jaxserve.cli import Subcommand, main, parse
from jaxserve.cli.arguments.chosen import chosen
from jaxserve.cli.arguments.errors import in_flags
from jaxserve.cli.plan import Plan
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.settings.config import EngineConfig

COMMANDS = ("generate", "chat", "bench", "plan", "simulate", "profile", "compile", "convert")


def test_help_names_every_command_and_does_not_wait_for_jax():
    script = (
        "import sys\n"
        "from jaxserve.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print('JAX' if 'jax' in sys.modules else 'no JAX')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(f"• {name} " in run.stdout for name in COMMANDS)
    assert "jaxserve generate" in run.stdout
    assert run.stdout.endswith("no JAX\n")


GROUPS = {"bench": ("offline", "serve", "accuracy"), "cluster": ("status", "restart", "resize")}
ALL = [
    [name, *rest]
    for name in (*COMMANDS, "batch", "serve", "cluster", "launch", "search", "train-speculator")
    for rest in ([[word] for word in GROUPS[name]] if name in GROUPS else [[]])
]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_explains_every_option_in_words_of_the_command_line(words, capsys, monkeypatch):
    """A default is a value or is said in words, and options are named by their flags."""
    monkeypatch.setenv("COLUMNS", "100")  # one column of options
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    options = [
        (found[1], re.search(r"  \w", found[2]) or re.match(r".{3,} {3}\S", after))
        for line, after in itertools.pairwise(lines)
        if (found := re.match(r". (?:-\w \w+, )?(--\w[\w-]*)(.*)", line))
    ]
    assert all(is_told for _, is_told in options), options
    names = {each.name for each in chosen(words, Subcommand).settings.values()}
    assert {flag[2:].replace("-", "_") for flag, _ in options} <= names
    text = " ".join(" ".join(lines).replace("│", " ").split())
    assert options and not re.search(r"\(default: (?:None)?\)", text)
    names -= {"num_speculative_tokens"}  # a key of --speculative-config, too
    assert not {word for word in re.findall(r"(?<!`)\b\w+_\w+", text) if word in names}


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


def test_completion_for_a_shell_that_is_not_there(capsys):
    for args in (["nosh"], []):
        assert main(["--completion", *args]) == 1
        assert capsys.readouterr().err.endswith("give bash or zsh.\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--completion", shell])
    assert not stop.value.code
    script = capsys.readouterr().out
    assert "--max-num-seqs" in script and "generate" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["dance"], "dance"),
        (["batch"], "error: INPUT and OUTPUT are missing; `jaxserve batch --help`"),
        (["batch", "in.jsonl"], "error: OUTPUT is missing;"),
        (["bench"], "error: `jaxserve bench` needs a command: accuracy, offline, serve."),
        (["cluster", "sttus"], "no command 'sttus' of `jaxserve cluster`; did you mean status?"),
        (["--max-num-seqs=3", "plan"], "error: `jaxserve` needs a command before --max-num-seqs"),
        (["generate", "hi", "there"], "error: there is no argument 'there';"),
        (["generate", "hi", "there"], "Put a prompt of several words into quotes."),
        (
            ["generate", "hi", "--max-tokens", "many"],
            "--max-tokens: 'many' is not an integer;",
        ),
        (["generate", "hi", "--max-num-seqs", "many"], "--max-num-seqs: 'many' is not an integer"),
        (["generate", "hi", "--temperature", "9"], "error: --temperature must be"),
        (["serve", "--max-model-len=x"], "`jaxserve serve --help` lists the options."),
        (
            ["generate", "hi", "--scheduler", "fifo"],
            "'fifo'; it must be one of static, orca",
        ),
        (
            ["plan", "--log-level=loud"],
            "'loud'; it must be one of debug, info",
        ),
        (["generate", "hi", "--dtype=int3"], "error: --dtype is 'int3'; it must be one of"),
        (["generate", "hi", "-n", "0"], "n must be"),
        (["generate", "hi", "--raw", "--system=Be brief."], "error: --system has no effect"),
        (["bench", "offline", "--num-prompts", "0"], "error: --num-prompts is 0"),
        (["plan", "--host-kv-bytes=2GiX"], "'2GiX' is not a size"),
        (["plan", "--devices=0,1"], "but --tensor-parallel-size 1 x"),
        (["sreve"], "there is no command 'sreve'; did you mean serve?"),
        (["plan", "--devices=a,b"], "--devices: 'a,b' is not a list of integers"),
        (["plan", "--max-nm-seqs=3"], "no option --max-nm-seqs; did you mean --max-num-seqs?"),
        (["bench", "offline", "--no-jsn"], "no option --no-jsn; did you mean --no-json?"),
        (["generate", "hi", "--xyzzy"], "`jaxserve generate --help` lists the options."),
        (["profile", "--nope"], "no option --nope; `jaxserve profile --help` lists"),
        (["bench", "serve", "--url=x"], "no option --url; did you mean --base-url?"),
        (["serve", "--enable-log-requests"], "use --log-requests."),
        (["serve", "--enable-auto-tool-choice"], "calls are parsed in the format of the chat"),
        (["serve", "--tool-call-parser", "hermes"], "error: --tool-call-parser is a setting of"),
        (["serve", "--log-requets"], "no option --log-requets; did you mean --log-requests?"),
        (["serve", "--api-key", "--host=0.0.0.0"], "error: --api-key: it has no value; give one"),
        (["generate", "Why", "is", "it?"], "there is no argument 'is'; "),
        (["generate", "hi", "-m", "x"], "no argument '-m'; write --model."),
        (["chat", "./model"], "no argument './model'; a model is given by --model"),
        (
            ["generate", "hi", "--enable-lora", "false"],
            "write --enable-lora for yes and --no-enable-lora",
        ),
        (["serve", "--port"], "error: --port has no value; `jaxserve serve --help`"),
        (["serve", "--block-size=16"], "error: --block-size is a setting of vLLM"),
        (["serve", "--no-enable-chunked-prefill"], "--enable-chunked-prefill is a setting of vLLM"),
        (["serve", "--gpu-memory-utilization", "0.5"], "use --memory-utilization."),
    ],
)
def test_arguments_that_cannot_be_understood_are_named(args, named, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("module", ["tyro", "jax"])
def test_an_interrupt_while_modules_are_imported_ends_the_command(module):
    """Silently, as the signal does by default."""
    script = f"""
import os, signal, sys

class Interrupts:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
sys.argv = ["jaxserve", "plan", "no-such-model"]
from jaxserve.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_without_arguments_the_help_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jaxserve"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert "train-speculator" in capsys.readouterr().out


def test_sizes_have_units_and_dtypes_short_names():
    engine = parse(["plan", "--kv-cache-memory-bytes=2GiB", "--dtype=bf16"]).engine
    assert (engine.kv_cache_memory_bytes, engine.dtype) == (2 << 30, "bfloat16")
    engine = parse(["plan", "--weights-on=disk", "--resident-weight-bytes=1MiB"]).engine
    assert engine.resident_weight_bytes == 1 << 20
    assert parse(["plan", "--kv-cache-memory-bytes=4096"]).engine.kv_cache_memory_bytes == 4096
    assert parse(["plan", "--kv-cache-memory-bytes=None"]).engine.kv_cache_memory_bytes is None
    assert parse(["serve", "--max-body-bytes=1.5MB"]).max_body_bytes == 1_500_000


def test_help_names_flags_and_their_values(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "{None" not in text and "(default: )" not in text
    assert "--config PATH" in text and "--log-level {debug,info,warning,error}" in text
    assert "what is left of --memory-utilization" in text and "memory_utilization" not in text


def test_optional_words_and_paths():
    assert parse(["serve", "--uds=None"]).uds is None
    assert parse(["generate", "hi", "--system=none", "--quantization=None"]).system == "none"
    assert parse(["generate", "hi", "--quantization=int8"]).engine.quantization == "int8"


def test_help_has_few_engine_settings_before_the_others(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out.partition("advanced engine options")
    basic, advanced = (re.findall(r"^\W*(--[a-z][\w-]+)", part, re.M) for part in shown[::2])
    basic = basic[basic.index("--model") :]
    assert "--max-num-seqs" in basic and "--page-size" in advanced
    assert len(basic) <= 10
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {flag[2:].replace("-", "_") for flag in (*basic, *advanced)} == names


CONFIG = """
model: my-model
max-num-seqs: 16
dtype: bf16
enable_prefix_caching: false
kv-cache-memory-bytes: 2GiB
devices: [3, 5]
tensor-parallel-size: 2
served-model-name: [a, b]
quantization: null
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(CONFIG)
    return path


def test_options_of_a_file(config_file):
    written = "serve my-model --max-num-seqs 16 --dtype bf16 --no-enable-prefix-caching"
    written += " --kv-cache-memory-bytes 2GiB --devices 3,5 --tensor-parallel-size 2"
    expected = parse([*written.split(), "--served-model-name", "a", "b"])
    assert parse(["serve", "--config", str(config_file)]) == expected
    assert parse(["serve", f"--config={config_file}"]) == expected


def test_the_command_line_takes_precedence_over_a_file(config_file):
    args = ["other", "--config", str(config_file), "--max_num_seqs=4", "--enable-prefix-caching"]
    engine = parse(["serve", *args]).engine
    assert (engine.model, engine.max_num_seqs, engine.dtype) == ("other", 4, "bfloat16")
    assert engine.enable_prefix_caching


def test_a_file_may_follow_options_with_lists(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("n: 2\nstop: [x, y]\n")
    assert parse(["generate", "hi", "-n", "1", "--config", str(path)]).n == 1
    command = parse(["generate", "hi", "--stop", "z", "--config", str(path)])
    assert (command.prompt, command.n, command.sampling.stop) == ("hi", 2, ("z",))
    path.write_text("num_prompts: 3\n")
    assert parse(["bench", "offline", "--config", str(path)]).kind.num_prompts == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max-nm-seqs: 3",
            "'max-nm-seqs', which is no option of `jaxserve plan`; did you mean 'max-num-seqs'?",
        ),
        ("dtype: {a: 1}", "give a text, number or list"),
        ("- 3", "must have lines such as"),
        ("a: [", "is not YAML"),
    ],
)
def test_files_that_are_refused(text, message, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(["plan", "--config", str(path)])
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(["plan", "--config", str(tmp_path / "none")])


def test_only_the_names_of_settings_become_flags():
    message = "/a/max_num_seqs: max_num_seqs 3, seed, 'page_size' and page_size.py; set page_size."
    assert in_flags(message, Plan) == (
        "/a/max_num_seqs: --max-num-seqs 3, seed, 'page_size' and page_size.py; set --page-size."
    )
    assert in_flags("seed is None", Plan) == "--seed is None"


@pytest.mark.parametrize(
    ("environment", "args", "level"),
    [
        (None, ["serve"], "INFO"),
        (None, ["plan"], "WARNING"),
        ("debug", ["serve"], "DEBUG"),
        ("debug", ["serve", "--log-level=error"], "ERROR"),
    ],
)
def test_the_level_of_the_log(environment, args, level, monkeypatch):
    monkeypatch.delenv("JAXSERVE_LOG_LEVEL", raising=False)
    if environment is not None:
        monkeypatch.setenv("JAXSERVE_LOG_LEVEL", environment)
    command = parse(args)
    levels = []
    logger = logging.getLogger("jaxserve")
    monkeypatch.setattr(
        type(command), "run", lambda self: levels.append(logging.getLevelName(logger.level)) or 0
    )
    before = logger.level
    try:
        assert main(args) == 0
    finally:
        logger.setLevel(before)
    assert levels == [level]


def test_an_unknown_level_is_told():
    script = [sys.executable, "-m", "jaxserve", "bench", "serve", "--num-requests=0"]
    environment = os.environ | {"JAXSERVE_LOG_LEVEL": "loud"}
    run = subprocess.run(script, capture_output=True, text=True, env=environment)
    (said, *_) = run.stderr.splitlines()
    assert said.startswith("JAXSERVE_LOG_LEVEL is 'loud'; set it to one of debug")
    assert run.stderr.count("JAXSERVE_LOG_LEVEL") == 1


def test_progress_survives_threads_that_report_out_of_order(capsys):
    steps = list(range(1, 101))
    random.Random(0).shuffle(steps)
    with TerminalProgress() as progress:
        threads = [
            threading.Thread(
                target=lambda own: [progress("weights", s, 100) for s in own], args=(own,)
            )
            for own in (steps[::2], steps[1::2])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("Loading weights: done after ")
