"""What all manifests share: how they are applied, and parts of their pods."""

from __future__ import annotations

import abc
import dataclasses
import subprocess
from typing import Any

import yaml

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Job, require

PORT = 8000
GRACE_S = 60
"""More than `serve --shutdown-timeout`."""
KEY_SECRET = "jaxserve-key"
_KEY_PATH = "/etc/jaxserve"
SERVED = ("--host", "0.0.0.0", "--port", str(PORT), "--api-key-file", f"{_KEY_PATH}/key")
"""Options of a server that other pods reach."""


@dataclasses.dataclass(frozen=True)
class Applied(abc.ABC):
    """A backend that gives manifests to `kubectl apply`.

    Attributes:
        image: container image with jaxserve, and the script if one is launched.
        namespace: namespace of the job; by default the current one.
    """

    image: str | None = None
    namespace: str | None = None

    def dry_run(self, job: Job) -> str:
        return yaml.safe_dump_all(self.manifests(job), sort_keys=False)

    def run(self, job: Job) -> int:
        manifest = self.dry_run(job)
        require("kubectl", "k8s")
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=manifest.encode()).returncode

    @abc.abstractmethod
    def manifests(self, job: Job) -> list[dict[str, Any]]:
        """Raises ConfigError for a job that Kubernetes cannot run."""

    def check_image(self) -> None:
        """Raises ConfigError if there is none."""
        if self.image is None:
            raise ConfigError("backend k8s needs --image, a container image with jaxserve.")

    def metadata(self, name: str) -> dict[str, Any]:
        return {"name": name} | ({"namespace": self.namespace} if self.namespace else {})


def literal(argument: str) -> str:
    """An argument in which Kubernetes expands no variable."""
    return argument.replace("$", "$$")


def mount(pod: dict[str, Any], name: str, path: str, volume: dict[str, Any] | None) -> None:
    """Give the one container of a pod a volume. None: one of that name is declared elsewhere."""
    pod["containers"][0].setdefault("volumeMounts", []).append({"name": name, "mountPath": path})
    if volume is not None:
        pod.setdefault("volumes", []).append({"name": name} | volume)


def share_memory(pod: dict[str, Any]) -> None:
    """NCCL and Ray use shared memory, of which a container has little by default."""
    mount(pod, "shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}})


def mount_key(pod: dict[str, Any]) -> None:
    """The file that `SERVED` names."""
    mount(pod, "key", _KEY_PATH, {"secret": {"secretName": KEY_SECRET}})


def give_job_gpus(pod: dict[str, Any], job: Job) -> None:
    """GPUs of the job's accelerator, by GKE's label. Raises ConfigError without their number."""
    if job.accelerator != "gpu":
        pod["nodeSelector"] = {"cloud.google.com/gke-accelerator": job.accelerator}
    give_gpus(pod, job.required_devices("GPUs"))


def give_gpus(pod: dict[str, Any], count: int) -> None:
    pod["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": count}}
    share_memory(pod)


def give_tpus(pod: dict[str, Any], accelerator: str, topology: str, count: int) -> None:
    """The chips that one host has of a slice, by GKE's labels."""
    pod["nodeSelector"] = {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    pod["containers"][0]["resources"] = {"limits": {"google.com/tpu": count}}
