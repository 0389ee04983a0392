"""A server of several replicas on Kubernetes: a RayCluster, which KubeRay starts."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from typing import Any

import yaml

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Job, require
from jaxserve.distributed.launch.k8s import check_name, give_gpus, literal, share_memory

_PORT = 8000
_KEY_SECRET = "jaxserve-key"
_KEY_PATH = "/etc/jaxserve"
_GRACE_S = 60
"""More than `serve --shutdown-timeout`."""
_WORKERS = "host"
_SERVED = ("--host", "0.0.0.0", "--port", str(_PORT), "--api-key-file", f"{_KEY_PATH}/key")


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """A RayCluster (ray.io/v1) of a job's hosts, which the operator KubeRay must serve, and the
    Service of its server. The server runs on the first host, beside Ray's head, and has Ray start
    its replicas on all of them. KubeRay replaces a host that ends; its replicas' requests go on in
    others meanwhile. With the first host the server ends, and begins again.

    Attributes:
        image: container image with jaxserve[cluster] and bash.
        namespace: namespace of the cluster; by default the current one.
    """

    image: str | None = None
    namespace: str | None = None

    def dry_run(self, job: Job) -> str:
        return yaml.safe_dump_all(self.manifests(job), sort_keys=False)

    def run(self, job: Job) -> int:
        manifest = self.dry_run(job)
        require("kubectl", "k8s")
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=manifest.encode()).returncode

    def manifests(self, job: Job) -> list[dict[str, Any]]:
        """Raises ConfigError for what such a cluster cannot have."""
        hosts = job.required_hosts()
        if self.image is None:
            raise ConfigError("backend k8s needs --image, a container image with jaxserve.")
        check_name(job)
        job.refuse("k8s and several replicas", "python", "port", "timeout_s", "independent")
        if job.accelerator is not None and job.accelerator.startswith("tpu"):
            raise ConfigError(
                f"accelerator is {job.accelerator}, and replicas on several hosts are for GPUs and "
                "CPUs; start a server for each slice."
            )
        head = self._pod(job, [*_start_ray("&"), *_serve(job)])
        container = head["containers"][0]
        container["ports"] = [{"containerPort": _PORT}]
        container["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": _PORT},
            "periodSeconds": 5,
        }
        spec: dict[str, Any] = {
            "headGroupSpec": {"rayStartParams": {}, "template": _template(head, {"app": job.name})}
        }
        if hosts > 1:
            spec["workerGroupSpecs"] = [
                {
                    "groupName": _WORKERS,
                    "replicas": hosts - 1,
                    "minReplicas": hosts - 1,
                    "maxReplicas": hosts - 1,
                    "rayStartParams": {},
                    "template": _template(self._pod(job, _start_ray("")), {}),
                }
            ]
        cluster = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": self._metadata(job.name)
            # Without it KubeRay would put its own command in the place of the server's.
            | {"annotations": {"ray.io/overwrite-container-cmd": "true"}},
            "spec": spec,
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            # The name itself is that of the head's service, with a suffix, which KubeRay makes.
            "metadata": self._metadata(f"{job.name}-api"),
            "spec": {"selector": {"app": job.name}, "ports": [{"port": _PORT}]},
        }
        return [cluster, service]

    def _metadata(self, name: str) -> dict[str, Any]:
        return {"name": name} | ({"namespace": self.namespace} if self.namespace else {})

    def _pod(self, job: Job, lines: list[str]) -> dict[str, Any]:
        pod: dict[str, Any] = {
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [
                {
                    "name": "jaxserve",
                    "image": self.image,
                    "command": ["/bin/bash", "-c"],
                    "args": ["\n".join(lines)],
                    # As where Ray starts with the server: replicas are no batch jobs.
                    "env": [{"name": "RAY_worker_niceness", "value": "0"}],
                    "volumeMounts": [{"name": "key", "mountPath": _KEY_PATH}],
                }
            ],
            "volumes": [{"name": "key", "secret": {"secretName": _KEY_SECRET}}],
        }
        if job.accelerator is None:
            share_memory(pod)
            return pod
        if job.accelerator != "gpu":
            pod["nodeSelector"] = {"cloud.google.com/gke-accelerator": job.accelerator}
        give_gpus(pod, job.required_devices("GPUs"))
        return pod


def _start_ray(end: str) -> list[str]:
    """KubeRay gives the pod's own `ray start`, which runs until Ray ends, as a variable."""
    return [f'eval "$KUBERAY_GEN_RAY_START_CMD" {end}'.rstrip()]


def _serve(job: Job) -> list[str]:
    words = [literal(word) for word in ("jaxserve", *job.command, *_SERVED)]
    return [
        "until ray health-check 2> /dev/null; do sleep 1; done",
        f"RAY_ADDRESS=auto exec {shlex.join(words)}",
    ]


def _template(pod: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    return ({"metadata": {"labels": labels}} if labels else {}) | {"spec": pod}
