"""`jaxserve launch --backend k8s` of a server with several replicas: a RayCluster of KubeRay."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxserve.cli import main, parse

SCHEMA = json.loads((Path(__file__).parent / "raycluster_v1.json").read_text())["schema"]
SERVE = ("serve", "org/name", "--data-parallel-size", "6", "--tensor-parallel-size", "4")


def printed(capsys, *options: str, command: tuple[str, ...] = SERVE) -> list[dict]:
    words = "launch", "--backend", "k8s", "--image", "registry/jaxserve:1", "--dry-run", *options
    assert main([*words, "--", *command]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def known(value: object, schema: dict, where: str = "") -> None:
    """The API server drops fields that a schema lacks, and a validator says nothing."""
    if isinstance(value, dict) and "properties" in schema:
        assert value.keys() <= schema["properties"].keys(), where
        for name, each in value.items():
            known(each, schema["properties"][name], f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for each in value:
            known(each, schema["items"], where)


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_cluster_of_hosts_with_gpus(capsys, hosts):
    cluster, service = printed(
        capsys, f"--hosts={hosts}", "--devices-per-host=8", "--accelerator=nvidia-h200"
    )
    jsonschema.validate(cluster, SCHEMA)
    known(cluster, SCHEMA)
    spec = cluster["spec"]
    workers = spec.get("workerGroupSpecs", [])
    assert [group["replicas"] for group in workers] == [hosts - 1] * (hosts > 1)
    head = spec["headGroupSpec"]["template"]
    pods = [head["spec"], *(group["template"]["spec"] for group in workers)]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h200"}
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]} == {"key", "shared-memory"}
        # Else KubeRay puts a command of its own in the place of this one.
        assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
        assert container["args"][0].startswith('eval "$KUBERAY_GEN_RAY_START_CMD"')
    *_, last = head["spec"]["containers"][0]["args"][0].splitlines()
    words = shlex.split(last)
    assert words[:3] == ["RAY_ADDRESS=auto", "exec", "jaxserve"]
    serve = parse(words[3:])
    assert (serve.num_replicas, serve.engine.tensor_parallel_size) == (6, 4)
    assert (serve.host, serve.port, str(serve.api_key_file)) == (
        "0.0.0.0",
        8000,
        "/etc/jaxserve/key",
    )
    assert service["spec"]["selector"] == head["metadata"]["labels"]


def test_what_it_cannot_be(capsys):
    def refused(*options: str, backend: str = "k8s") -> str:
        words = "launch", "--backend", backend, "--dry-run", *options
        assert main([*words, "--", *SERVE]) == 1
        return capsys.readouterr().err

    assert "give --backend k8s" in refused("--hosts=2", backend="slurm")
    assert "needs --image" in refused("--hosts=2")
    hosts = "--image=i", "--hosts=2"
    assert "start a server for each slice" in refused(*hosts, "--accelerator=tpu-v6e-slice")
    assert "give --devices-per-host" in refused(*hosts, "--accelerator=gpu")
    assert "--port has no effect" in refused(*hosts, "--port=1")
    named = "--image=i", "--hosts=2", "--name=Not-Allowed"
    assert "lowercase letters" in refused(*named)
