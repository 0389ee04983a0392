"""A server of several replicas on Kubernetes: a RayCluster, which KubeRay starts."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Job
from jaxserve.distributed.launch.k8s import check_name
from jaxserve.distributed.launch.pods import (
    GRACE_S,
    PORT,
    SERVED,
    Applied,
    give_job_gpus,
    literal,
    mount_key,
    share_memory,
)

_WORKERS = "host"


@dataclasses.dataclass(frozen=True)
class RayCluster(Applied):
    """A RayCluster (ray.io/v1) of a job's hosts, which the operator KubeRay must serve, and the
    Service of its server. The server runs on the first host, beside Ray's head, and has Ray start
    its replicas on all of them. KubeRay replaces a host that ends; its replicas' requests continue
    in others meanwhile. With the first host the server ends, and begins again. The image must
    have jaxserve[cluster] and bash.
    """

    def manifests(self, job: Job) -> list[dict[str, Any]]:
        """Raises ConfigError for what such a cluster cannot have."""
        hosts = job.required_hosts()
        self.check_image()
        check_name(job)
        job.refuse("k8s and several replicas", "python", "port", "timeout_s", "independent")
        if job.accelerator is not None and job.accelerator.startswith("tpu"):
            raise ConfigError(
                f"accelerator is {job.accelerator}, and replicas on several hosts are for GPUs and "
                "CPUs; start a server for each slice."
            )
        head = self._pod(job, [*_start_ray("&"), *_serve(job)])
        container = head["containers"][0]
        container["ports"] = [{"containerPort": PORT}]
        container["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": PORT},
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
            "metadata": self.metadata(job.name)
            # Without it KubeRay would put its own command in the place of the server's.
            | {"annotations": {"ray.io/overwrite-container-cmd": "true"}},
            "spec": spec,
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            # The name itself is that of the head's service, with a suffix, which KubeRay makes.
            "metadata": self.metadata(f"{job.name}-api"),
            "spec": {"selector": {"app": job.name}, "ports": [{"port": PORT}]},
        }
        return [cluster, service]

    def _pod(self, job: Job, lines: list[str]) -> dict[str, Any]:
        pod: dict[str, Any] = {
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [
                {
                    "name": "jaxserve",
                    "image": self.image,
                    "command": ["/bin/bash", "-c"],
                    "args": ["\n".join(lines)],
                    # As where Ray starts with the server: replicas are no batch jobs.
                    "env": [{"name": "RAY_worker_niceness", "value": "0"}],
                }
            ],
        }
        mount_key(pod)
        if job.accelerator is None:
            share_memory(pod)
        else:
            give_job_gpus(pod, job)
        return pod


def _start_ray(end: str) -> list[str]:
    """KubeRay gives the pod's own `ray start`, which runs until Ray ends, as a variable."""
    return [f'eval "$KUBERAY_GEN_RAY_START_CMD" {end}'.rstrip()]


def _serve(job: Job) -> list[str]:
    words = [literal(word) for word in ("jaxserve", *job.command, *SERVED)]
    return [
        "until ray health-check 2> /dev/null; do sleep 1; done",
        f"RAY_ADDRESS=auto exec {shlex.join(words)}",
    ]


def _template(pod: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    return ({"metadata": {"labels": labels}} if labels else {}) | {"spec": pod}
