"""Kubernetes manifests of a server and its Service: a Deployment, a StatefulSet, a JobSet, or for
disaggregated prefill and decode on several hosts a RayCluster."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import yaml

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.devices import DeviceSpec
from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Job
from jaxserve.distributed.launch.k8s import Kubernetes
from jaxserve.distributed.launch.pods import (
    GRACE_S,
    KEY_SECRET,
    PORT,
    SERVED,
    give_gpus,
    give_tpus,
    literal,
    mount,
    mount_key,
    share_memory,
)
from jaxserve.distributed.launch.ray_cluster import RayCluster

_NAME = "jaxserve"
_USER = 1000
"""That of the images in docker/."""
_CACHED_GIB = 16
"""Of a claim, for programs and what else there is beside the model."""


@dataclasses.dataclass(frozen=True)
class ServedDeployment:
    """A server of `replicas` engines, each on `devices` devices of one kind.

    Attributes:
        command: arguments of jaxserve, from `serve` on, without the number of replicas.
        spec: the kind of device, and how many of them a host has.
        model_bytes: of the model's files.
        disk_kv_bytes: of the disk tier of each engine.
        image: container image with jaxserve and, for several replicas, with Ray.
        prefill_replicas: of the replicas, those that only prefill; if any do, the others only
            decode, and all are of one server, whatever their hosts.
    """

    command: tuple[str, ...]
    replicas: int
    devices: int
    spec: DeviceSpec
    model_bytes: int
    disk_kv_bytes: int
    image: str
    prefill_replicas: int = 0

    def manifest(self) -> str:
        """YAML that `kubectl apply -f` takes, after a comment that says what it needs.

        Raises ConfigError for engines that span hosts where there are several, or of TPUs, and for
        a number of TPU chips that no host has.
        """
        per_host = self.spec.devices_per_host
        if self.devices > per_host:
            documents, needs = self._over_hosts()
        elif self.prefill_replicas and self.replicas * self.devices > per_host:
            documents, needs = self._apart_on_hosts()
        else:
            documents, needs = self._on_hosts()
        always = [
            f"kubectl create secret generic {KEY_SECRET} --from-file=key  (a file of API keys)",
            f"{self.image} must be an image that the cluster can pull",
        ]
        if Path(self.command[1]).exists():
            always.append(f"{self.command[1]} must be in the image, or in a volume of yours")
        comment = "".join(f"# - {line}\n" for line in (*always, *needs))
        return "# What this needs:\n" + comment + yaml.safe_dump_all(documents, sort_keys=False)

    def _on_hosts(self) -> tuple[list[dict[str, Any]], list[str]]:
        """One pod with all engines behind a router, where a host has the devices; else one for each
        engine."""
        together = self.replicas * self.devices <= self.spec.devices_per_host
        pods = 1 if together else self.replicas
        engines = self.replicas if together else 1
        pod = self._pod(engines)
        disk_bytes = self.model_bytes + self.disk_kv_bytes * engines
        claim = self._claim(math.ceil(disk_bytes / 2**30) + _CACHED_GIB)
        labels = {"app": _NAME}
        spec: dict[str, Any] = {
            "replicas": pods,
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        }
        needs = []
        if engines > 1:
            needs.append(f"{self.image} must have jaxserve[cluster], for {engines} replicas")
        if self.spec.platform == "gpu":
            needs.append(
                f"where there are several kinds of GPUs, add a nodeSelector for {self.spec.name}"
            )
        if pods == 1:
            mount(
                pod, "cache", "/cache", {"persistentVolumeClaim": {"claimName": "jaxserve-cache"}}
            )
            # The next pod needs the devices, and the volume, of the one before it.
            spec["strategy"] = {"type": "Recreate"}
            claim["metadata"]["name"] = "jaxserve-cache"
            workload = _object("apps/v1", "Deployment", _NAME, spec)
            claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | claim
            return [claim, workload, self._service(labels)], needs
        # Its pods have a claim each, and are replaced one by one, each before its successor starts.
        mount(pod, "cache", "/cache", None)
        spec |= {
            "serviceName": _NAME,
            "podManagementPolicy": "Parallel",
            "volumeClaimTemplates": [claim | {"metadata": {"name": "cache"}}],
        }
        needs.append(
            f"{pods} servers share one address: connections go to each of them in turn or at random"
        )
        return [_object("apps/v1", "StatefulSet", _NAME, spec), self._service(labels)], needs

    def _apart_on_hosts(self) -> tuple[list[dict[str, Any]], list[str]]:
        """One server with prefill and decode replicas on several hosts: requests move among them.
        Raises ConfigError for TPUs."""
        if self.spec.platform == "tpu":
            raise ConfigError(
                f"{self.replicas} replicas of disaggregated prefill and decode need several "
                "hosts, and one server has those of GPUs only; search with fewer devices, or set "
                "prefill_replicas to 0."
            )
        engines = min(self.spec.devices_per_host // self.devices, self.replicas)
        hosts = cdiv(self.replicas, engines)
        accelerator = "gpu" if self.spec.platform == "gpu" else None
        command = (*self.command, *self._replicas_words(self.replicas))
        job = Job(command, hosts, engines * self.devices, accelerator, name=_NAME)
        needs = [
            "the cluster must have the operator KubeRay (ray.io/v1)",
            f"{self.image} must have jaxserve[cluster], for {self.replicas} replicas",
            "each pod downloads the model: put it into the image, or into a volume for its cache",
        ]
        return RayCluster(self.image).manifests(job), needs

    def _replicas_words(self, engines: int) -> tuple[str, ...]:
        """The options of a server of so many engines."""
        if self.prefill_replicas:
            decode = engines - self.prefill_replicas
            prefill = str(self.prefill_replicas)
            return ("--prefill-replicas", prefill, "--decode-replicas", str(decode))
        return ("--data-parallel-size", str(engines)) if engines > 1 else ()

    def _over_hosts(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The JobSet of `jaxserve launch`, with the key, and the Service of its first host."""
        per_host = self.spec.devices_per_host
        least = cdiv(self.devices, per_host)
        hosts = next(n for n in range(least, self.devices + 1) if self.devices % n == 0)
        spans = f"an engine of {self.devices} devices spans {hosts} hosts of up to {per_host}"
        if self.replicas > 1:
            raise ConfigError(
                f"{spans}, and there are {self.replicas} of them, which one server cannot have; "
                "search with devices for one engine, and apply its manifest several times."
            )
        if self.spec.platform == "tpu":
            raise ConfigError(
                f"{spans}, whose slice has a topology that you choose; see `jaxserve launch "
                "--backend k8s --topology`."
            )
        command = (*self.command, *SERVED)
        accelerator = "gpu" if self.spec.platform == "gpu" else None
        job = Job(command, hosts, self.devices // hosts, accelerator, name=_NAME)
        secret, job_set = Kubernetes(self.image).manifests(job)
        (replicated,) = job_set["spec"]["replicatedJobs"]
        pod = replicated["template"]["spec"]["template"]["spec"]
        mount_key(pod)
        needs = [
            "the cluster must have JobSet (jobset.sigs.k8s.io)",
            "each pod downloads the model: put it into the image, or into a volume for /cache",
            "when a host ends, the job ends: delete it, and apply this again",
        ]
        first = {
            "jobset.sigs.k8s.io/jobset-name": _NAME,
            "batch.kubernetes.io/job-completion-index": "0",
        }
        # A JobSet has a headless service of its own name.
        return [secret, job_set, self._service(first, f"{_NAME}-api")], needs

    def _pod(self, engines: int) -> dict[str, Any]:
        words = (*self.command, *self._replicas_words(engines), *SERVED)
        pod: dict[str, Any] = {
            "terminationGracePeriodSeconds": GRACE_S,
            "securityContext": {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [
                {
                    "name": _NAME,
                    "image": self.image,
                    "args": list(map(literal, words)),
                    # A volume's own directory is not private to the server's user.
                    "env": [{"name": "JAXSERVE_CACHE", "value": "/cache/jaxserve"}],
                    "ports": [{"containerPort": PORT}],
                    **_probed(),
                }
            ],
        }
        self._give_devices(pod, engines)
        mount_key(pod)
        return pod

    def _give_devices(self, pod: dict[str, Any], engines: int) -> None:
        """Raises ConfigError."""
        count = engines * self.devices
        if self.spec.platform == "gpu":
            give_gpus(pod, count)
        elif self.spec.platform == "tpu":
            topologies = self.spec.gke_topologies
            if str(count) not in topologies:
                raise ConfigError(
                    f"a host with {count} of {self.spec.name} has no topology; those with "
                    f"{', '.join(topologies) or 'no number of'} chips have: search with other "
                    "devices, or add it to the gke_topologies of the device's file."
                )
            give_tpus(pod, self.spec.gke_accelerator, topologies[str(count)], count)
        if self.spec.platform != "gpu" and engines > 1:
            share_memory(pod)

    def _claim(self, gib: int) -> dict[str, Any]:
        resources = {"requests": {"storage": f"{gib}Gi"}}
        return {
            "metadata": {},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": resources},
        }

    def _service(self, selector: dict[str, str], name: str = _NAME) -> dict[str, Any]:
        return _object("v1", "Service", name, {"selector": selector, "ports": [{"port": PORT}]})


def _probed() -> dict[str, Any]:
    """`/health` is 503 while a server starts, drains or stalls; `/livez` is 200 then, so that it
    needs no startup probe."""

    def asked(path: str, **times: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": PORT}} | times

    return {
        "readinessProbe": asked("/health", periodSeconds=5),
        "livenessProbe": asked("/livez", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
    }


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
