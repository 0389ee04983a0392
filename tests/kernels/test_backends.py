"""Who does the work: choices, refusals, and kernels that must be tried first."""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from patience import PATIENCE_S
from scripts import run_script

from pallas_kernels import backends, self_check


def double(x, *, times=1):
    return x * 2 * times


def make_operation(monkeypatch, kernel=None, unsupported=lambda x, times=1: None, calls=None):
    """An operation whose kernel, for the one platform there is, is this function."""
    module = types.ModuleType("a_kernel")
    module.unsupported = unsupported

    def double(x, *, times=1, interpret=None):
        if calls is not None:
            calls.append(interpret)
        return (kernel or (lambda x, times: x + x * (2 * times - 1)))(x, times)

    module.double = double
    monkeypatch.setitem(sys.modules, "a_kernel", module)
    return backends.Operation(
        name="double",
        xla=globals()["double"],
        kernels={"gpu": "a_kernel", "tpu": "a_kernel"},
        shapes_class=lambda x, times=1: f"{x.dtype} times {times}",
        check_case=lambda arguments, options, rng: self_check.CheckCase(
            (self_check.random_like(rng, (5,), arguments[0].dtype),), options, 1e-6
        ),
    )


def tried_here(check):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(check._replace(platform="tpu").run).result()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Pretends that the CPU is a Hopper GPU, about which nothing is known."""
    monkeypatch.setattr(backends, "target", lambda: ("gpu", "NVIDIA H200", True))
    monkeypatch.setattr(self_check, "verified", lambda: {})
    monkeypatch.setattr(self_check, "_tried", {})
    # Functions made here cannot be sent to another process, and no device runs on 4 of its SMs.
    monkeypatch.setattr(self_check.self_check_process, "run", tried_here)
    monkeypatch.setattr(backends, "_for_now", set())
    backends._warn_once.cache_clear()


def test_on_cpus_xla_unless_the_kernel_is_asked_for(monkeypatch):
    calls = []
    operation = make_operation(monkeypatch, calls=calls)
    x = jnp.arange(3.0)
    for backend in ("auto", "xla"):
        np.testing.assert_array_equal(operation.run(backend, x), 2 * x)
    assert calls == []
    np.testing.assert_array_equal(operation.run("pallas", x, times=2), 4 * x)
    assert calls == [True], "it is interpreted"


def test_what_auto_means_may_be_said_for_all_of_a_program(monkeypatch):
    calls = []
    operation = make_operation(monkeypatch, calls=calls)
    program = backends.using("pallas")(lambda x: operation.run("auto", x))
    jax.jit(program).lower(jnp.ones(3))
    assert calls == [True]
    operation.run("auto", jnp.ones(3))
    with backends.using("pallas"):
        operation.run("xla", jnp.ones(3))
    assert calls == [True]


def test_a_kernel_is_tried_once_for_each_class_of_shapes(monkeypatch, on_a_gpu):
    """Also in the middle of tracing, and for shapes that the check does not have. Each shape is
    then traced once, however many layers ask."""
    calls = []
    operation = make_operation(monkeypatch, calls=calls)
    program = jax.jit(lambda x: operation.run("auto", x) + operation.run("auto", x))
    np.testing.assert_array_equal(program(jnp.ones((2, 3))), jnp.full((2, 3), 4.0))
    assert len(calls) == 1 + 1
    operation.run("auto", jnp.ones(4))
    assert len(calls) == 1 + 1 + 1
    operation.run("auto", jnp.ones(4, jnp.int32))
    assert len(calls) == 1 + 1 + 1 + 2


def test_a_verified_kernel_is_not_tried(monkeypatch, on_a_gpu):
    calls = []
    operation = make_operation(monkeypatch, calls=calls)
    known = {"NVIDIA H200": {self_check.fingerprint(): {"double": ["float32 times 1"]}}}
    monkeypatch.setattr(self_check, "verified", lambda: known)
    operation.run("auto", jnp.ones(4))
    assert len(calls) == 1
    known["NVIDIA H200"] = {"jax 0.1, ptxas 9, sources 0": known["NVIDIA H200"].popitem()[1]}
    operation.run("auto", jnp.ones(5))
    assert len(calls) == 1 + 1 + 1, "by other compilers or of other sources it is another kernel"


def fails(x, times):
    raise RuntimeError("no such instruction")


WRONG = [
    (lambda x, times: x * 2 * times + 1e-3, "was wrong by"),
    (lambda x, times: x * jnp.nan, "was wrong by inf"),
    (fails, "its self-check raised: no such instruction"),
]


@pytest.mark.parametrize(("kernel", "reason"), WRONG)
def test_a_wrong_kernel_is_not_used_and_one_warning_says_so(monkeypatch, on_a_gpu, kernel, reason):
    operation = make_operation(monkeypatch, kernel)
    x = jnp.ones(4)
    with pytest.warns(backends.KernelWarning, match=f"runs in plain XLA.*{reason}"):
        np.testing.assert_array_equal(operation.run("auto", x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(operation.run("auto", x), 2 * x)
    with pytest.raises(ValueError, match=reason):
        operation.run("pallas", x)
    assert backends.fell_back_for_now()


def test_what_failed_on_another_host_is_not_used_here(monkeypatch, on_a_gpu):
    """Though it is right here, or is known to be."""
    operation = make_operation(monkeypatch)
    known = {"NVIDIA H200": {self_check.fingerprint(): {"double": ["int32 times 1"]}}}
    monkeypatch.setattr(self_check, "verified", lambda: known)
    operation.run("pallas", jnp.ones(4))
    assert self_check.failures() == []
    failed = [
        self_check.Failure("double", "NVIDIA H200", f"{dtype} times 1", "on another host it failed")
        for dtype in ("float32", "int32")
    ]
    self_check.adopt(failed)
    for x in (jnp.ones(4), jnp.ones(4, jnp.int32)):
        with pytest.raises(ValueError, match="on another host it failed"):
            operation.run("pallas", x)
    assert self_check.failures() == failed


def test_what_a_kernel_refuses_goes_to_xla_or_back_to_the_caller(monkeypatch, on_a_gpu):
    operation = make_operation(
        monkeypatch, unsupported=lambda x, times=1: "x is too long; it can be one of 1, 2."
    )
    with pytest.warns(backends.KernelWarning, match="it can be one of 1, 2"):
        operation.run("auto", jnp.ones(4))
    with pytest.raises(ValueError, match="gpu kernel of double cannot be used: x is too long"):
        operation.run("pallas", jnp.ones(4))
    assert not backends.fell_back_for_now(), "it will be the same the next time"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (("gpu", "NVIDIA A100", True), "Hopper generation, and this is NVIDIA A100"),
        (("rocm", "MI300", True), "there is none for rocm, only for gpu, tpu"),
    ],
)
def test_devices_without_a_kernel(monkeypatch, on_a_gpu, target, reason):
    monkeypatch.setattr(backends, "target", lambda: target)
    operation = make_operation(monkeypatch)
    with pytest.warns(backends.KernelWarning, match=reason):
        operation.run("auto", jnp.ones(4))


def test_where_xla_does_as_well_there_is_nothing_to_say(monkeypatch, on_a_gpu):
    operation = dataclasses.replace(make_operation(monkeypatch), kernels={"gpu": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend in ("auto", "pallas"):
            assert operation.choose(backend, jnp.ones(4)) is operation.xla


def test_what_a_kernel_needs_and_is_not_installed(monkeypatch, on_a_gpu):
    operation = make_operation(monkeypatch)
    monkeypatch.setitem(sys.modules, "a_kernel", None)
    with pytest.warns(backends.KernelWarning, match="on GPUs absl-py") as warned:
        operation.run("auto", jnp.ones(4))
    assert warned[0].filename == __file__
    assert backends.fell_back_for_now()


def test_an_unknown_backend_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="backend is 'triton'; it can be auto, xla, pallas"):
        make_operation(monkeypatch).run("triton", jnp.ones(4))


def test_the_device_is_the_one_of_the_mesh_in_use_else_the_default_one():
    assert backends.target() == ("cpu", jax.devices()[0].device_kind, True)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=_described("NVIDIA H200", "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert backends.target() == ("gpu", "NVIDIA H200", False)


def test_whether_a_kernel_would_be_tried(monkeypatch, on_a_gpu):
    operation = make_operation(monkeypatch, unsupported=lambda x: "2-d" if x.ndim > 1 else None)
    assert operation.supports(jnp.ones(4))
    assert not operation.supports(jnp.ones((4, 4)))
    with backends.using("xla"):
        assert not operation.supports(jnp.ones(4))


def _described(kind, platform):
    from jax._src.mesh import AbstractDevice

    return AbstractDevice(device_kind=kind, num_cores=132, platform=platform)


def test_what_is_verified_is_well_formed():
    for versions in self_check.verified().values():
        for operations in versions.values():
            assert all(isinstance(shapes, list) for shapes in operations.values())


def test_only_kernels_for_gpus_need_absl():
    """JAX does not bring it, and its own modules for Mosaic GPU import it."""
    run_script(
        """
        import sys
        sys.modules["absl"] = None
        import pallas_kernels.collective_matmul, pallas_kernels.ring_attention
        from pallas_kernels.page_copy import mosaic_tpu
        from pallas_kernels.paged_attention.tpu import attention, write
        from pallas_kernels.quantized_matmul import mosaic_tpu
        """,
        timeout_s=PATIENCE_S,
    )
