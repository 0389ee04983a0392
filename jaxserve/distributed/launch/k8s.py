"""A JobSet on Kubernetes: one indexed job, each pod of which is a host."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import yaml

from jaxserve.distributed.launch.job import Job, require
from jaxserve.errors import ConfigError

_PYTHON = "python3"
_PORT = 8476
_GROUP = "host"
# Pods are named NAME-host-0-N, followed by a dash and five letters; a label has 63 characters.
_MAX_NAME = 63 - len(f"-{_GROUP}-0-9999-abcde")


@dataclasses.dataclass(frozen=True)
class Kubernetes:
    """A JobSet, which the cluster must know (jobset.sigs.k8s.io). Labels are those of GKE.

    Attributes:
        image: a container image with jaxserve, and with the script if one is launched.
        namespace: where the job is; by default the current one.
        topology: how the chips of a TPU slice are connected, as 4x4.
    """

    image: str | None = None
    namespace: str | None = None
    topology: str | None = None

    def dry_run(self, job: Job) -> str:
        return yaml.safe_dump(self._manifest(job), sort_keys=False)

    def run(self, job: Job) -> int:
        manifest = self.dry_run(job)
        require("kubectl", "k8s")
        applied = subprocess.run(["kubectl", "apply", "-f", "-"], input=manifest.encode())
        if applied.returncode == 0:
            where = f" --namespace={self.namespace}" if self.namespace else ""
            print(
                f"Follow: kubectl logs{where} --follow --prefix --max-log-requests={job.hosts} "
                f"--selector=jobset.sigs.k8s.io/jobset-name={job.name}\n"
                f"End:    kubectl delete{where} jobset {job.name}",
                file=sys.stderr,
            )
        return applied.returncode

    def _manifest(self, job: Job) -> dict[str, Any]:
        hosts = job.required_hosts()
        if self.image is None:
            raise ConfigError("backend k8s needs --image, a container image with jaxserve.")
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > _MAX_NAME:
            raise ConfigError(
                f"name is {job.name!r}; Kubernetes wants at most {_MAX_NAME} small letters, "
                "digits and dashes, a letter first."
            )
        if self.topology is not None and not _is_tpu(job):
            raise ConfigError(
                f"topology is {self.topology}, and accelerator {job.accelerator}; only TPUs have "
                "one, as --accelerator tpu-v6e-slice."
            )
        one_job = {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": self._pod(job)},
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                "name": job.name,
                **({"namespace": self.namespace} if self.namespace else {}),
            },
            "spec": {
                # A host that fails ends the job: the others could not go on.
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {"name": _GROUP, "replicas": 1, "template": {"spec": one_job}},
                ],
            },
        }

    def _pod(self, job: Job) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": "jaxserve",
            "image": self.image,
            "command": self._command(job),
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": job.grace_s,
            # Or else the host would be process 1, which SIGTERM does not end.
            "shareProcessNamespace": True,
            "containers": [container],
        }
        if job.accelerator is None:
            return pod
        if _is_tpu(job):
            self._check_slice(job)
            pod["nodeSelector"] = {
                "cloud.google.com/gke-tpu-accelerator": job.accelerator,
                "cloud.google.com/gke-tpu-topology": self.topology,
            }
            container["resources"] = {"limits": {"google.com/tpu": job.devices_per_host}}
            return pod
        if job.accelerator != "gpu":
            pod["nodeSelector"] = {"cloud.google.com/gke-accelerator": job.accelerator}
        container["resources"] = {"limits": {"nvidia.com/gpu": job.required_devices("GPUs")}}
        # NCCL talks through shared memory, of which a container has little by default.
        container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        return pod

    def _check_slice(self, job: Job) -> None:
        """Raises ConfigError when the hosts are not just the slice's chips."""
        job.refuse("k8s with TPUs", "port")
        if self.topology is None or not re.fullmatch(r"\d+(x\d+)+", self.topology, re.ASCII):
            raise ConfigError(
                f"topology is {self.topology!r}; TPU pods need the slice's, as 4x4 or 2x2x4."
            )
        chips = math.prod(map(int, self.topology.split("x")))
        devices = job.required_devices("TPU chips")
        if chips != job.required_hosts() * devices:
            raise ConfigError(
                f"topology {self.topology} has {chips} chips, and {job.hosts} hosts of {devices} "
                f"are {job.required_hosts() * devices}; make them equal."
            )

    def _command(self, job: Job) -> list[str]:
        """Kubernetes puts variables into arguments: the pod's index, and nothing of the user's."""
        command = tuple(map(_literal, job.command))
        job = dataclasses.replace(job, command=command, python=_literal(job.python or _PYTHON))
        if _is_tpu(job):  # GKE tells every pod of a slice all that JAX asks for.
            return job.host_command(_PYTHON)
        first = f"{job.name}-{_GROUP}-0-0.{job.name}:{job.port or _PORT}"
        return job.host_command(_PYTHON, coordinator=first, host="$(JOB_COMPLETION_INDEX)")


def _is_tpu(job: Job) -> bool:
    return job.accelerator is not None and job.accelerator.startswith("tpu")


def _literal(argument: str) -> str:
    return argument.replace("$", "$$")
