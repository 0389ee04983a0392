"""The LoRA adapters of a running engine: which are loaded, and in which slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from jaxserve.core.errors import EngineClosedError, OverloadedError, RequestError
from jaxserve.core.requests.lora import LoadedAdapter, LoRARequest, check_lora_request
from jaxserve.models.loading.adapter import Adapter, read_adapter
from jaxserve.models.registry import param_specs
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan


class StagedAdapter(NamedTuple):
    """An adapter that was read to host memory and checked."""

    request: LoRARequest
    adapter: Adapter


class AdapterSlots:
    """Loads adapters into the slots of a runner, between its steps. None of this compiles anything.

    An adapter without a free slot takes that of the one used longest ago, if that is not pinned and
    no request uses it.
    """

    def __init__(
        self, plan: EnginePlan, runner: Runner, in_use: Callable[[], Iterable[LoadedAdapter]]
    ) -> None:
        """`in_use` returns the adapters of unfinished requests."""
        self._plan = plan
        self._runner: Runner | None = runner
        self._in_use = in_use
        self._loaded: dict[str, LoadedAdapter] = {}

    @property
    def names(self) -> list[str]:
        """Names of the adapters that are loaded, the one used longest ago first."""
        return list(self._loaded)

    def staged(self, request: LoRARequest, again: bool = False) -> StagedAdapter | None:
        """The adapter that a request names, read and checked; None if it is loaded already, unless
        it is to be read `again`, from any path. Changes nothing, in any thread.

        Raises RequestError without `enable_lora`, or when another adapter has its name, and
        AdapterError when it does not fit.
        """
        if again:
            self._check_request(request)
            return self._read(request)
        return None if self._found(request) is not None else self._read(request)

    def load(
        self, wanted: LoRARequest | StagedAdapter, *, in_place: bool = False, pinned: bool = True
    ) -> LoadedAdapter:
        """Loads an adapter unless it is loaded. A `pinned` one stays until it is removed.
        `in_place`: it takes the place of the one with its name if there is one, whose slot is free
        once the requests that use it have finished.

        Raises as `staged` does, and OverloadedError when no slot is free and none can be freed; the
        one before then stays.
        """
        if in_place:
            return self._replace(wanted)
        request = wanted.request if isinstance(wanted, StagedAdapter) else wanted
        found = self._found(request) or self._load(self._staged(wanted))
        if pinned:
            found = dataclasses.replace(found, pinned=True)
        self._loaded.pop(request.name, None)
        self._loaded[request.name] = found
        return found

    def use(self, request: LoRARequest) -> LoadedAdapter:
        """The adapter of a request, loaded if it was not. Raises as `load` does."""
        return self.load(request, pinned=False)

    def remove(self, name: str) -> None:
        """Unloads an adapter. Its slot is free once the requests that use it have finished. Raises
        RequestError when there is no such adapter."""
        if name not in self._loaded:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise RequestError(f"no adapter is loaded as {name!r:.200}; loaded: {known}.")
        del self._loaded[name]

    def check(self, adapter: LoadedAdapter | None) -> None:
        """Raises OverloadedError if an adapter has made room for another since it was returned."""
        if adapter is not None and all(
            (adapter.slot, adapter.digest) != (each.slot, each.digest)
            for each in self._loaded.values()
        ):
            raise self._full()

    def close(self) -> None:
        """Frees what it holds of the device."""
        self._runner = None

    def _replace(self, wanted: LoRARequest | StagedAdapter) -> LoadedAdapter:
        request = wanted.request if isinstance(wanted, StagedAdapter) else wanted
        self._check_request(request)
        staged = self._staged(wanted)
        before = self._loaded.pop(request.name, None)
        try:
            return self.load(staged)
        except BaseException:
            if before is not None:
                self._loaded[request.name] = before
            raise

    def _found(self, request: LoRARequest) -> LoadedAdapter | None:
        """The loaded adapter with a request's name. Raises RequestError for another path."""
        self._check_request(request)
        found = self._loaded.get(request.name)
        if found is not None and found.request.path != request.path:
            raise RequestError(
                f"adapter {request.name!r:.200} is loaded from {found.request.path!r}, not from "
                f"{request.path!r}; unload it first, load it in place, or use another name."
            )
        return found

    def _check_request(self, request: LoRARequest) -> None:
        check_lora_request(request)
        if not self._plan.config.enable_lora:
            raise RequestError(
                f"adapter {request.name!r:.200} is asked for, and enable_lora is False; load the "
                "engine with enable_lora=True."
            )

    def _staged(self, wanted: LoRARequest | StagedAdapter) -> StagedAdapter:
        return wanted if isinstance(wanted, StagedAdapter) else self._read(wanted)

    def _read(self, request: LoRARequest) -> StagedAdapter:
        plan = self._plan
        specs, dtype = param_specs(plan.checkpoint.config), plan.shapes.dtype
        adapter = read_adapter(request.path, specs, plan.config.max_lora_rank, dtype)
        return StagedAdapter(request, adapter)

    def _load(self, staged: StagedAdapter) -> LoadedAdapter:
        if self._runner is None:
            raise EngineClosedError("the engine was closed; make a new one.")
        slot, shapes = self._free_slot(), self._plan.shapes
        shardings = jax.tree.map(lambda array: array.sharding, shapes.adapter.abstract)
        arrays = staged.adapter.placed(shapes.adapter.specs, shardings, shapes.dtype)
        self._runner.set_adapter(slot, arrays)
        return LoadedAdapter(staged.request, slot, staged.adapter.digest)

    def _busy_slots(self) -> set[int]:
        return {adapter.slot for adapter in self._in_use()}

    def _free_slot(self) -> int:
        busy = self._busy_slots()
        taken = busy | {adapter.slot for adapter in self._loaded.values()}
        for slot in range(1, self._plan.config.max_loras + 1):
            if slot not in taken:
                return slot
        for name, adapter in self._loaded.items():
            if not adapter.pinned and adapter.slot not in busy:
                del self._loaded[name]
                return adapter.slot
        raise self._full()

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"all {self._plan.config.max_loras} slots of adapters are taken "
            f"({', '.join(self._loaded)}); retry when requests have finished, unload an adapter, "
            "or raise max_loras."
        )
