"""Kubernetes manifests of a server, as `jaxserve search --manifest` writes them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxserve.cli import parse
from jaxserve.cli.serve import Serve
from jaxserve.core.devices import DeviceSpec
from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.serving import ServedDeployment

GIB = 2**30
RAY_CLUSTER = json.loads((Path(__file__).parent / "raycluster_v1.json").read_text())["schema"]


def served(device: str, replicas: int, devices: int, **more: object) -> ServedDeployment:
    command = ("serve", "org/name", "--tensor-parallel-size", str(devices))
    spec = DeviceSpec.of(device)
    sizes = 40 * GIB, 2 * GIB
    found = ServedDeployment(command, replicas, devices, spec, *sizes, "registry/jaxserve:1")
    return dataclasses.replace(found, **more)


def objects(deployment: ServedDeployment) -> dict[str, dict]:
    """Its manifests by their kinds."""
    found = list(yaml.safe_load_all(deployment.manifest()))
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def pod_of(workload: dict) -> dict:
    if workload["kind"] == "JobSet":
        (replicated,) = workload["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]["template"]["spec"]
    return workload["spec"]["template"]["spec"]


def serve_of(pod: dict) -> Serve:
    (container,) = pod["containers"]
    words = container.get("args") or container["command"][container["command"].index("--") + 1 :]
    return parse([word.replace("$$", "$") for word in words])


def mounts(pod: dict) -> dict[str, str]:
    return {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("replicas", [1, 4])
def test_one_pod_has_all_engines_of_a_host(replicas):
    found = objects(served("h200", replicas, 2))
    assert ("jaxserve[cluster]" in served("h200", replicas, 2).manifest()) == (replicas > 1)
    deployment = found["Deployment"]
    assert deployment["spec"]["replicas"] == 1
    # Without spare GPUs a second pod would wait for ever for those of the first.
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = pod_of(deployment)
    serve = serve_of(pod)
    assert serve.data_parallel_size == replicas
    assert serve.engine.tensor_parallel_size == 2
    assert (serve.host, str(serve.api_key_file)) == ("0.0.0.0", "/etc/jaxserve/key")
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2 * replicas}}
    assert mounts(pod).keys() == {"/dev/shm", "/etc/jaxserve", "/cache"}
    assert set(mounts(pod).values()) == {volume["name"] for volume in pod["volumes"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 8000}
    assert "nodeSelector" not in pod
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"]
    assert labels == found["Service"]["spec"]["selector"]
    claim = found["PersistentVolumeClaim"]
    storage = f"{40 + 2 * replicas + 16}Gi"
    assert claim["spec"]["resources"]["requests"] == {"storage": storage}
    (cache,) = (volume for volume in pod["volumes"] if volume["name"] == "cache")
    assert cache["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_replicas_on_several_hosts_are_a_pod_each():
    found = objects(served("h100", 3, 4))
    workload = found["StatefulSet"]
    assert workload["spec"]["replicas"] == 3
    assert workload["spec"]["serviceName"] == found["Service"]["metadata"]["name"]
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    pod = pod_of(workload)
    assert serve_of(pod).data_parallel_size == 1
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert mounts(pod)["/cache"] == claim["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "58Gi"}
    text = served("h100", 3, 4).manifest()
    assert "&" not in text  # no anchors
    assert "# - 3 servers share one address" in text
    assert "# - where there are several kinds of GPUs" in text


def test_prefill_and_decode_on_one_host_are_one_pod():
    found = objects(served("h200", 4, 2, prefill_replicas=3))
    assert found.keys() == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = pod_of(found["Deployment"])
    serve = serve_of(pod)
    assert (serve.prefill_replicas, serve.decode_replicas, serve.num_replicas) == (3, 1, 4)
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}


@pytest.mark.parametrize(("replicas", "devices", "hosts"), [(4, 4, 2), (3, 8, 3), (5, 3, 3)])
def test_prefill_and_decode_on_several_hosts_are_a_ray_cluster(replicas, devices, hosts):
    deployment = served("h200", replicas, devices, prefill_replicas=1)
    found = objects(deployment)
    assert found.keys() == {"RayCluster", "Service"}
    cluster = found["RayCluster"]
    jsonschema.validate(cluster, RAY_CLUSTER)
    head = cluster["spec"]["headGroupSpec"]["template"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert workers["replicas"] == hosts - 1
    (container,) = head["spec"]["containers"]
    # No engine has GPUs of two hosts.
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus % devices == 0
    assert gpus * hosts >= replicas * devices
    words = shlex.split(container["args"][0].splitlines()[-1])
    serve = parse(words[words.index("jaxserve") + 1 :])
    assert (serve.prefill_replicas, serve.decode_replicas) == (1, replicas - 1)
    assert serve.engine.tensor_parallel_size == devices
    assert found["Service"]["spec"]["selector"] == head["metadata"]["labels"]
    assert "# - the cluster must have the operator KubeRay" in deployment.manifest()


@pytest.mark.parametrize(("devices", "hosts"), [(16, 2), (12, 2), (9, 3)])
def test_an_engine_over_hosts_is_the_job_of_jaxserve_launch(devices, hosts):
    found = objects(served("h200", 1, devices))
    assert found.keys() == {"Secret", "JobSet", "Service"}
    (replicated,) = found["JobSet"]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["parallelism"] == hosts
    pod = pod_of(found["JobSet"])
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": devices // hosts}}
    assert mounts(pod).keys() == {"/dev/shm", "/etc/jaxserve"}
    assert serve_of(pod).host == "0.0.0.0"
    assert found["Service"]["spec"]["selector"] == {
        "jobset.sigs.k8s.io/jobset-name": found["JobSet"]["metadata"]["name"],
        "batch.kubernetes.io/job-completion-index": "0",
    }
    # A JobSet makes a headless service of its own name.
    assert found["Service"]["metadata"]["name"] != found["JobSet"]["metadata"]["name"]


@pytest.mark.parametrize(
    ("device", "replicas", "devices", "labels"),
    [
        ("v6e", 1, 8, ("tpu-v6e-slice", "2x4")),
        ("v5e", 2, 2, ("tpu-v5-lite-podslice", "2x2")),
        ("v5p", 1, 4, ("tpu-v5p-slice", "2x2x1")),
    ],
)
def test_tpu_pods_are_slices_of_one_host(device, replicas, devices, labels):
    pod = pod_of(objects(served(device, replicas, devices))["Deployment"])
    assert tuple(pod["nodeSelector"].values()) == labels
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": replicas * devices}}
    assert ("/dev/shm" in mounts(pod)) == (replicas > 1)  # Ray's


def test_what_is_no_argument_is_not_expanded():
    found = served("l4", 1, 1, command=("serve", "org/$(HOME)"))
    pod = pod_of(objects(found)["Deployment"])
    assert pod["containers"][0]["args"][1] == "org/$$(HOME)"


def test_a_model_that_is_here_is_not_there(tmp_path):
    text = served("l4", 1, 1, command=("serve", str(tmp_path))).manifest()
    assert f"# - {tmp_path} must be in the image" in text
    assert "must be in the image, or" not in served("l4", 1, 1).manifest()


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        (served("h200", 2, 16), "spans 2 hosts of up to 8, and there are 2 of them"),
        (served("v6e", 1, 16), "launch --backend k8s --topology"),
        (served("v6e", 1, 2), "those with 1, 4, 8 chips have"),
        (served("v6e", 4, 4, prefill_replicas=2), "one server has those of GPUs only"),
    ],
)
def test_what_no_manifest_can_say(deployment, words):
    with pytest.raises(ConfigError, match=words):
        deployment.manifest()


@pytest.mark.interfaces
@pytest.mark.parametrize(
    "deployment",
    [
        served("h200", 4, 2),
        served("h200", 4, 2, prefill_replicas=1),
        served("h100", 3, 4),
        served("v6e", 1, 8),
        served("l4", 1, 1),
        served("h200", 1, 16),
    ],
)
def test_kubernetes_knows_every_field(deployment):
    from kubernetes_schema import built, check

    for manifest in yaml.safe_load_all(deployment.manifest()):
        if manifest["kind"] == "JobSet":  # A custom resource, of jobs that are none.
            (replicated,) = manifest["spec"]["replicatedJobs"]
            built("V1JobTemplateSpec", replicated["template"], "JobSet")
        else:
            check(manifest)


@pytest.mark.interfaces
def test_a_field_that_kubernetes_does_not_know_is_found():
    from kubernetes_schema import check

    service = objects(served("l4", 1, 1))["Service"]
    service["spec"]["port"] = 8000
    with pytest.raises(AssertionError, match=r"Service.spec has {'port'}"):
        check(service)
    deployment = objects(served("l4", 1, 1))["Deployment"]
    del deployment["spec"]["selector"]
    with pytest.raises(ValueError, match="selector"):
        check(deployment)
