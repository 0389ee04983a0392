"""Kubernetes backend: a JobSet with one indexed job, each pod of which is a host."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from typing import Any

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import COORDINATOR_PORT, Job, new_secret
from jaxserve.distributed.launch.pods import Applied, give_job_gpus, give_tpus, literal
from jaxserve.distributed.rendezvous import SECRET_VARIABLE

_PYTHON = "python3"
_SECRET_KEY = "job-secret"
_GROUP = "host"
# Pods are named NAME-host-0-N, followed by a dash and five letters; a label has 63 characters.
_MAX_NAME = 63 - len(f"-{_GROUP}-0-9999-abcde")


@dataclasses.dataclass(frozen=True)
class Kubernetes(Applied):
    """A JobSet (jobset.sigs.k8s.io), which the cluster must support. Labels are GKE's.

    Attributes:
        topology: topology of a TPU slice, such as 4x4.
    """

    topology: str | None = None

    def run(self, job: Job) -> int:
        status = super().run(job)
        if status == 0:
            where = f" --namespace={self.namespace}" if self.namespace else ""
            print(
                f"Follow: kubectl logs{where} --follow --prefix --max-log-requests={job.hosts} "
                f"--selector=jobset.sigs.k8s.io/jobset-name={job.name}\n"
                f"End:    kubectl delete{where} --ignore-not-found jobset/{job.name} "
                f"secret/{_secret_name(job)}",
                file=sys.stderr,
            )
        return status

    def manifests(self, job: Job) -> list[dict[str, Any]]:
        """The JobSet, after the secret of its hosts if they join each other."""
        job_set = self._job_set(job)
        if job.independent:
            return [job_set]
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self.metadata(_secret_name(job)),
            "stringData": {_SECRET_KEY: new_secret()},
        }
        return [secret, job_set]

    def _job_set(self, job: Job) -> dict[str, Any]:
        hosts = job.required_hosts()
        self.check_image()
        check_name(job)
        if self.topology is not None and not _is_tpu(job):
            raise ConfigError(
                f"topology is {self.topology}, and accelerator {job.accelerator}; only TPUs have "
                "one, such as --accelerator tpu-v6e-slice."
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
            "metadata": self.metadata(job.name),
            "spec": {
                # A failed host ends the job: the others cannot continue.
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
        if not job.independent:
            reference = {"name": _secret_name(job), "key": _SECRET_KEY}
            variable = {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": reference}}
            container["env"] = [variable]
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": job.shutdown_timeout,
            # Otherwise the host would be PID 1, which ignores SIGTERM by default.
            "shareProcessNamespace": True,
            "containers": [container],
        }
        if job.accelerator is None:
            return pod
        if _is_tpu(job):
            self._check_slice(job)
            give_tpus(pod, job.accelerator, self.topology, job.devices_per_host)
            return pod
        give_job_gpus(pod, job)
        return pod

    def _check_slice(self, job: Job) -> None:
        """Raises ConfigError if the hosts' devices do not match the slice."""
        job.refuse("k8s with TPUs", "port")
        if self.topology is None or not re.fullmatch(r"\d+(x\d+)+", self.topology, re.ASCII):
            raise ConfigError(
                f"topology is {self.topology!r}; TPU pods need the slice's, such as 4x4 or 2x2x4."
            )
        chips = math.prod(map(int, self.topology.split("x")))
        devices = job.required_devices("TPU chips")
        if chips != job.required_hosts() * devices:
            raise ConfigError(
                f"topology {self.topology} has {chips} chips, but {job.hosts} hosts of {devices} "
                f"have {job.required_hosts() * devices}; make them equal."
            )

    def _command(self, job: Job) -> list[str]:
        """Kubernetes expands variables in arguments: allow only the pod's index, not the user's."""
        command = tuple(map(literal, job.command))
        job = dataclasses.replace(job, command=command, python=literal(job.python or _PYTHON))
        if _is_tpu(job):  # GKE sets all that JAX needs in every pod of a slice.
            return job.host_command(_PYTHON)
        first = f"{job.name}-{_GROUP}-0-0.{job.name}:{job.port or COORDINATOR_PORT}"
        return job.host_command(_PYTHON, coordinator=first, host="$(JOB_COMPLETION_INDEX)")


def check_name(job: Job) -> None:
    """Raises ConfigError for a name that Kubernetes does not allow."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > _MAX_NAME:
        raise ConfigError(
            f"name is {job.name!r}; Kubernetes allows at most {_MAX_NAME} lowercase letters, "
            "digits and dashes, starting with a letter."
        )


def _secret_name(job: Job) -> str:
    return f"{job.name}-{_SECRET_KEY}"


def _is_tpu(job: Job) -> bool:
    return job.accelerator is not None and job.accelerator.startswith("tpu")
