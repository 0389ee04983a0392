"""What each backend would run or submit, and what none of them would."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from jaxserve.cli import main
from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Job
from jaxserve.distributed.launch.k8s import Kubernetes
from jaxserve.distributed.launch.local import Local
from jaxserve.distributed.launch.slurm import Slurm
from jaxserve.distributed.launch.ssh import Ssh
from jaxserve.distributed.launch.tpu_vm import TpuVm
from jaxserve.distributed.rendezvous import SECRET_VARIABLE

# Whatever a process can be given: no NUL, and what UTF-8 can say.
ARGUMENT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
ARGUMENTS = st.lists(ARGUMENT, max_size=4)
THIRTY = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TWO_HOSTS = Job(("-m", "job"), hosts=2)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """Whatever machine this is."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def dry_run(capsys):
    def run(*args: str | Path) -> str:
        status = main(["launch", "--dry-run", *map(str, args)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


@pytest.fixture
def refused(capsys):
    def run(*args: str | Path) -> str:
        """What standard error says of a command line that cannot be launched."""
        try:
            status = main(["launch", *map(str, args)])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        assert status in (1, 2)
        assert printed.out == ""
        return " ".join(printed.err.replace("│", " ").split())

    return run


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode-1\n\nme@node-2  # with the large disk\n")
    return path


class TestQuoting:
    """A real shell takes the lines apart; `python` is a program that tells its arguments."""

    @pytest.fixture
    def python(self, tmp_path):
        return self.program(tmp_path / "it's python", "printf '%s\\0' \"$@\"")

    @staticmethod
    def program(path: Path, text: str) -> str:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    @staticmethod
    def told(line: str, path: str = os.defpath) -> list[str]:
        """The command that a shell gives to Python for this line or script."""
        done = subprocess.run(
            ["/bin/sh"], input=line.encode(), capture_output=True, env={"PATH": path}, check=True
        )
        arguments = done.stdout.decode().split("\0")[:-1]
        return arguments[arguments.index("--") + 1 :]

    @THIRTY
    @given(arguments=ARGUMENTS)
    def test_local(self, python, arguments):
        job = dataclasses.replace(TWO_HOSTS, python=python, hosts=1, command=("x", *arguments))
        assert self.told(Local().dry_run(job)) == ["x", *arguments]

    @THIRTY
    @given(arguments=ARGUMENTS)
    def test_ssh(self, python, tmp_path, arguments):
        (tmp_path / "hosts").write_text("node")
        job = Job(("x", *arguments), python=python)
        # Once by the shell that dry_run writes for, once by the one on the host.
        *_, remote = shlex.split(Ssh(tmp_path / "hosts").dry_run(job))
        assert self.told(remote) == ["x", *arguments]

    @THIRTY
    @given(arguments=ARGUMENTS)
    def test_tpu_vm(self, python, arguments):
        job = Job(("x", *arguments), hosts=1, python=python)
        remote = shlex.split(TpuVm().dry_run(job))[-1].removeprefix("--command=")
        assert self.told(remote) == ["x", *arguments]

    @THIRTY
    @given(arguments=ARGUMENTS)
    def test_slurm(self, python, tmp_path, arguments):
        self.program(
            tmp_path / "srun", 'while case $1 in -*) true;; *) false; esac; do shift; done; "$@"'
        )
        self.program(tmp_path / "mkdir", "")
        job = dataclasses.replace(TWO_HOSTS, python=python, command=("x", *arguments))
        path = f"{tmp_path}:{os.defpath}"
        assert self.told(Slurm().dry_run(job), path) == ["x", *arguments]

    @THIRTY
    @given(arguments=ARGUMENTS)
    def test_kubernetes(self, arguments):
        job = dataclasses.replace(TWO_HOSTS, command=("x", *arguments))
        _, manifest = yaml.safe_load_all(Kubernetes("image").dry_run(job))
        command = [expanded(word, {"JOB_COMPLETION_INDEX": "1"}) for word in command_of(manifest)]
        assert "--host=1" in command
        assert command[command.index("--") + 1 :] == ["x", *arguments]


def command_of(manifest: dict) -> list[str]:
    [replicated] = manifest["spec"]["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container["command"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it: $$ is $, and $(NAME) the variable, if there is one."""
    result, place = "", 0
    while place < len(text):
        if text.startswith("$$", place):
            result, place = result + "$", place + 2
            continue
        end = text.find(")", place)
        if text.startswith("$(", place) and text[place + 2 : end] in variables and end > 0:
            result, place = result + variables[text[place + 2 : end]], end + 1
            continue
        result, place = result + text[place], place + 1
    return result


def test_local_hosts_get_a_number_each_and_one_coordinator(dry_run):
    command = ("generate", "hi", "--tensor-parallel-size=6")
    lines = dry_run("--hosts=3", "--devices-per-host=2", "--", *command).splitlines()
    assert len(lines) == 3
    common = {tuple(word for word in line.split() if "--host=" not in word) for line in lines}
    assert len(common) == 1
    for number, line in enumerate(lines):
        assert {f"--host={number}", "--num-hosts=3", "--devices=2"} <= set(line.split())
        assert line.endswith(" -- generate hi --tensor-parallel-size=6")


def test_local_hosts_divide_the_gpus(dry_run, refused, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7,8")
    lines = dry_run("--hosts=2", "--", "-m", "job").splitlines()
    assert [line.split()[0] for line in lines] == [
        "CUDA_VISIBLE_DEVICES=4,5",
        "CUDA_VISIBLE_DEVICES=GPU-a,7",
    ]
    error = refused("--hosts=3", "--devices-per-host=2", "--", "-m", "job")
    assert "has 5 GPUs, but 3 hosts of 2 need 6" in error


def test_slurm_writes_a_batch_script(dry_run):
    script = dry_run(
        *("--backend=slurm", "--hosts=4", "--devices-per-host=8", "--accelerator=h200"),
        *("--nodes=2", "--partition=main", "--account=a", "--time=1:00:00", "--name=big"),
        *("--sbatch-option=--exclusive", "--sbatch-option=--comment=two words"),
        *("--", "generate", "hi", "--tensor-parallel-size=32"),
    )
    assert [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line] == [
        "--job-name=big",
        "--output=big-%j.log",
        "--ntasks=4",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gpus-per-task=h200:8",
        "--partition=main",
        "--account=a",
        "--time=1:00:00",
        "--exclusive",
        '"--comment=two words"',
    ]
    host = shlex.split(script[script.index("exec srun") :])
    assert "--kill-on-bad-exit=1" in host
    assert host[-4:] == ["--", "generate", "hi", "--tensor-parallel-size=32"]
    assert not any(word.startswith(("--coordinator", "--host=")) for word in host)  # JAX finds them
    draw = next(line for line in script.splitlines() if line.startswith(SECRET_VARIABLE))
    shell = f"{draw}; export {SECRET_VARIABLE}; printenv {SECRET_VARIABLE}"
    assert f"export {SECRET_VARIABLE}" in script.splitlines()
    drawn = {subprocess.check_output(["sh", "-c", shell], text=True) for _ in range(2)}
    assert len(drawn) == 2 and all(len(secret) == 65 for secret in drawn)


def test_kubernetes_gpu_pods_meet_at_the_first(dry_run):
    secret, manifest = yaml.safe_load_all(
        dry_run(
            *("--backend=k8s", "--hosts=2", "--devices-per-host=8", "--accelerator=nvidia-h100"),
            *("--image=repo/jaxserve:1", "--namespace=llm", "--name=big"),
            *("--", "generate", "hi", "--tensor-parallel-size=16"),
        )
    )
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "big", "namespace": "llm"}
    [replicated] = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (2, 2)
    assert job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100"}
    [container] = pod["containers"]
    assert container["image"] == "repo/jaxserve:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    # A pod's name is JOBSET-GROUP-JOB-INDEX, and JobSet's service is named for the JobSet.
    first = f"big-{replicated['name']}-0-0.big"
    assert f"--coordinator={first}:8476" in container["command"]
    assert "--host=$(JOB_COMPLETION_INDEX)" in container["command"]
    assert (secret["kind"], secret["metadata"]["namespace"]) == ("Secret", "llm")
    [variable] = container["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert variable["name"] == SECRET_VARIABLE
    assert reference["name"] == secret["metadata"]["name"] == "big-job-secret"
    assert len(secret["stringData"][reference["key"]]) == 64


def test_kubernetes_tpu_pods_are_a_slice(dry_run, refused):
    options = ("--backend=k8s", "--image=i", "--accelerator=tpu-v6e-slice", "--topology=4x4")
    command = ("--", "generate", "hi", "--tensor-parallel-size=16")
    secret, manifest = yaml.safe_load_all(
        dry_run(*options, "--hosts=4", "--devices-per-host=4", *command)
    )
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert not any("--coordinator" in word for word in pod["containers"][0]["command"])
    assert secret["kind"] == "Secret"
    assert pod["containers"][0]["env"][0]["name"] == SECRET_VARIABLE
    error = refused(*options, "--hosts=2", "--devices-per-host=4", "--", "-m", "job")
    assert "topology 4x4 has 16 chips, but 2 hosts of 4 have 8" in error


def test_a_tpu_slice_is_made_filled_and_run(dry_run, tmp_path):
    wheel = tmp_path / "jaxserve.whl"
    wheel.touch()
    lines = dry_run(
        *("--backend=tpu-vm", "--name=slice", "--hosts=2", "--zone=z", "--project=p", "--create"),
        *("--accelerator=v6e-8", "--devices-per-host=4", "--version=v2", "--spot"),
        *(f"--install={wheel}", "--", "dir/my job.py", "x"),
    ).splitlines()
    steps = [shlex.split(line) for line in lines]
    assert all(step[:4] == ["gcloud", "compute", "tpus", "tpu-vm"] for step in steps)
    assert all({"--zone=z", "--project=p"} <= set(step) for step in steps)
    assert [step[4] for step in steps] == ["create", "scp", "ssh", "scp", "ssh", "ssh"]
    create, copy, install, copy_script, *hosts = steps
    assert {"slice", "--accelerator-type=v6e-8", "--version=v2", "--spot"} <= set(create)
    assert {str(wheel), "slice:jaxserve.whl", "--worker=all"} <= set(copy)
    assert "--command=python3 -m pip install './jaxserve.whl[tpu]'" in install
    assert {"dir/my job.py", "slice:", "--worker=all"} <= set(copy_script)
    for number, host in enumerate(hosts):
        assert f"--worker={number}" in host
        [command] = [word for word in host if word.startswith("--command=")]
        assert command.endswith(" -- './my job.py' x")


def test_ssh_hosts_meet_at_the_first(dry_run, hostfile):
    lines = dry_run("--backend=ssh", "--hostfile", hostfile, "--", "generate", "hi").splitlines()
    assert [shlex.split(line)[-2] for line in lines] == ["node-1", "me@node-2"]
    for number, line in enumerate(lines):
        remote = shlex.split(line)[-1]
        assert remote.startswith(f"cd {shlex.quote(os.getcwd())} && exec ")
        assert {"--coordinator=node-1:8476", "--num-hosts=2", f"--host={number}"} <= set(
            remote.split()
        )


def test_hosts_that_join_each_other_are_given_a_new_secret(hostfile):
    job = TWO_HOSTS
    for hosts in (
        lambda: Local()._hosts(job),
        lambda: Ssh(hostfile)._hosts(job),
        lambda: TpuVm()._plan(job)[1],
    ):
        first, second = hosts(), hosts()
        assert len({host.stdin for host in first}) == 1
        assert first[0].stdin != second[0].stdin
        assert len(first[0].stdin) == 65
        for host in first:
            assert "--secret-on-stdin" in " ".join(host.argv)
            assert first[0].stdin.decode().strip() not in str(host)


def test_a_host_without_the_secret_it_should_read_says_so():
    command = [sys.executable, "-m", "jaxserve.cli.host", "--secret-on-stdin", "--", "-m", "job"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert b"standard input does not begin with the job's secret" in done.stderr


SCRIPT = ("--", "job.py")
MESH_OF_8 = ("--backend=slurm", "--hosts=2", "--devices-per-host=4")
TPU_PODS = ("--backend=k8s", "--hosts=2", "--image=i", "--accelerator=tpu-v6e-slice")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hosts=2"], "no command was given to launch"),
        (["--hosts=2", "--", "launch", "--hosts=2"], "itself `launch`"),
        (["--hosts=0", *SCRIPT], "hosts is 0"),
        (["--hosts=2", "--devices-per-host=0", *SCRIPT], "--devices-per-host is 0"),
        (["--hosts=2", "--port=65536", *SCRIPT], "port is 65536"),
        (["--hosts=2", "--name=../x", *SCRIPT], "name is '../x'"),
        (["--hosts=2", "--topology=4x4", *SCRIPT], "--topology is an option of backend k8s"),
        (["--hosts=2", "--accelerator=gpu", *SCRIPT], "--accelerator has no effect"),
        (["--backend=slurm", "--hosts=2", "--port=80", *SCRIPT], "--port has no effect"),
        (
            ["--backend=slurm", "--hosts=2", "--shutdown-timeout=9", *SCRIPT],
            "--shutdown-timeout has no effect",
        ),
        (["--backend=tpu-vm", "--hosts=2", "--port=80", *SCRIPT], "--port has no effect"),
        (SCRIPT, "--hosts N"),
        (["--backend=slurm", *SCRIPT], "--hosts N"),
        (["--backend=lsf", "--hosts=2", *SCRIPT], "lsf"),
        (["--hosts=2", "--partition=p", *SCRIPT], "--partition is an option of backend slurm"),
        (["--hosts=2", "--", "generate", "hi", "--max-tokens=x"], "--max-tokens"),
        (["--hosts=2", "--", "generate", "hi", "--top-p=2"], "--top-p"),
        (
            ["--hosts=2", "--devices-per-host=4", "--", "generate", "hi"],
            "2 hosts of 4 devices have 8, but the mesh of the command's engine has 1; give the "
            "command --tensor-parallel-size 8",
        ),
        (
            [*MESH_OF_8, "--", "bench", "offline", "--pipeline-parallel-size=4"],
            "the mesh of the command's engine has 4",
        ),
        (["--backend=slurm", "--hosts=3", "--nodes=2", *SCRIPT], "nodes is 2 and hosts 3"),
        (["--backend=slurm", "--hosts=2", "--sbatch-option=x", *SCRIPT], "'x' is not an option"),
        (["--backend=slurm", "--hosts=2", "--accelerator=gpu", *SCRIPT], "--devices-per-host D"),
        (["--backend=k8s", "--hosts=2", *SCRIPT], "--image"),
        (["--backend=k8s", "--hosts=2", "--image=i", "--name=My_job", *SCRIPT], "'My_job'"),
        (["--backend=k8s", "--hosts=2", "--image=i", "--topology=4x4", *SCRIPT], "only TPUs"),
        ([*TPU_PODS, *SCRIPT], "topology is None"),
        ([*TPU_PODS, "--topology=4by4", *SCRIPT], "topology is '4by4'"),
        ([*TPU_PODS, "--topology=2x4", *SCRIPT], "--devices-per-host D"),
        ([*TPU_PODS, "--topology=2x4", "--port=80", *SCRIPT], "--port has no effect"),
        (["--backend=tpu-vm", "--hosts=2", "--create", *SCRIPT], "--accelerator"),
        (["--backend=tpu-vm", "--hosts=2", "--spot", *SCRIPT], "add --create"),
        (["--backend=ssh", *SCRIPT], "--hostfile"),
        (["--backend=ssh", "--hostfile=/nowhere", *SCRIPT], "'/nowhere' cannot be read"),
    ],
)
def test_bad_input_is_refused_by_name(refused, args, words):
    assert words in refused(*args)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# none\n", "lists no host"),
        ("a\nb\nme@a\n", "lists 'a' 2 times"),
        ("a b\n", "has the line 'a b'"),
        ("-oProxyCommand=x\n", "has the line '-oProxyCommand=x'"),
    ],
)
def test_a_bad_hostfile_is_refused(refused, hostfile, text, words):
    hostfile.write_text(text)
    assert words in refused("--backend=ssh", "--hostfile", hostfile, *SCRIPT)


def test_a_hostfile_of_another_length_is_refused_with_both(refused, hostfile):
    error = refused("--backend=ssh", "--hosts=3", "--hostfile", hostfile, *SCRIPT)
    assert "lists 2 hosts, but --hosts is 3" in error


@pytest.mark.parametrize(
    ("backend", "tool"),
    [
        (Local(), "/none/python"),
        (Slurm(), "sbatch"),
        (Kubernetes("image"), "kubectl"),
        (TpuVm(), "gcloud"),
    ],
)
def test_a_tool_that_is_missing_is_named(monkeypatch, tmp_path, backend, tool):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"needs the program '{tool}'"):
        backend.run(dataclasses.replace(TWO_HOSTS, python="/none/python"))


def test_ssh_that_is_missing_is_named(monkeypatch, tmp_path, hostfile):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program 'ssh'"):
        Ssh(hostfile).run(Job(("-m", "job")))
