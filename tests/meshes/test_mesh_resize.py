"""A replica that is given another mesh while it serves: its requests go on with their KV."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from pathlib import Path

import pytest
from exhaustive import EXHAUSTIVE
from mesh_engines import on_mesh
from mesh_workload import GREEDY
from tiny_engines import CONTEXT, LONGEST, PROMPT_LENGTHS, TinyModel

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from mortal import Mortal, ask, metric, run

from jaxserve.cluster.router import Router
from jaxserve.core.errors import ConfigError, RestartError
from jaxserve.core.settings.config import EngineConfig

pytestmark = pytest.mark.meshes

PROMPTS = [PROMPT_LENGTHS.index(length) for length in (17, 33, 60)]
HELD = 5


def test_requests_go_on_with_their_kv_on_each_mesh(answered):
    on_mesh("", go_from_mesh_to_mesh, answered)


def test_what_others_have_room_for_moves_there(answered):
    on_mesh("", go_with_another_replica, answered)


def go_from_mesh_to_mesh(_: str, answered: Path) -> None:
    router, (replica,), answers = served(answered, 1)

    async def scenario():
        with pytest.raises(ConfigError, match="has these sizes"):
            await router.resize_replica(0, {"tensor_parallel_size": 1})
        with pytest.raises(ConfigError, match="there are only 8"):
            await router.resize_replica(0, {"tensor_parallel_size": 2, "context_parallel_size": 8})
        with pytest.raises(RestartError, match="replica 3 is not one of those"):
            await router.resize_replica(3, {"tensor_parallel_size": 2})
        sizes_kept = recorded(replica)
        staged = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
        meshes = [{"tensor_parallel_size": 4}, staged] if EXHAUSTIVE else [staged]
        for number, sizes in enumerate(meshes):
            resize = await resized(router, replica, answers, sizes, f"{number}")
            assert (resize.error, resize.num_kept, resize.num_cut) == (None, len(PROMPTS), 0)
            config = replica._replica._engine.plan().config
            assert {name: getattr(config, name) for name in sizes} == sizes
            # The newest token of each, and what the host did not know of when KV was taken.
            assert await metric(router, "prefill_tokens_total", "0") <= 3 * len(PROMPTS)
        replica.loads = ["failed", "failed"]  # Then as before.
        replica.at_move = "a part is damaged"  # of the KV of the first, which is computed again
        least, *most = sorted(sizes_kept[-len(PROMPTS) :])

        async def max_kept_bytes():
            return sum(most) + least // 2

        replica.max_kept_bytes = max_kept_bytes  # It has no room for that of the shortest.
        before = replica._replica._engine.plan().config.sizes
        resize = await resized(router, replica, answers, {"context_parallel_size": 2}, "failed")
        assert "its previous sizes are restored" in resize.error
        assert (resize.num_kept, resize.num_cut) == (len(PROMPTS) - 2, 1)
        (status,) = (await router.cluster_status()).replicas
        assert (status.sizes, status.num_losses, status.state) == (before, 0, "ready")

    ended(router, scenario)


def go_with_another_replica(_: str, answered: Path) -> None:
    router, replicas, answers = served(answered, 2)

    async def scenario():
        hold(replicas[0])
        asking = [
            asyncio.create_task(ask(router, prompt, GREEDY, f"r{number}"))
            for number, (prompt, _) in enumerate(answers)
        ]
        await held_back(router, replicas[0])
        await router.resize_replica(0, {"tensor_parallel_size": 4})
        with pytest.raises(RestartError, match="is being resized"):
            await router.restart_replicas()
        for task, (_, expected) in zip(asking, answers):
            tokens, _ = await task
            assert tokens == expected
        while (status := await router.cluster_status()).resize.running:
            await asyncio.sleep(0.02)
        assert (status.resize.error, status.resize.num_kept) == (None, 0)
        assert await metric(router, "moved_requests_total") > 0
        assert [each.sizes == status.resize.sizes for each in status.replicas] == [True, False]

    ended(router, scenario)


def served(answered: Path, count: int):
    """A router of `count` replicas of one device each, and prompts with their tokens."""
    model = TinyModel.open(answered / "model")
    with open(answered / "answers.pickle", "rb") as file:
        answers, _ = pickle.load(file)
    config = EngineConfig.of(
        model=model.path,
        max_model_len=CONTEXT,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        page_size=8,
        program_scope="step",
        kv_cache_memory_bytes=80 * 8 * model.token_bytes,
    )
    replicas = [Mortal() for _ in range(count)]
    router = Router(lambda: replicas, config)
    return router, replicas, [(model.prompts[i], answers[i][:LONGEST]) for i in PROMPTS]


def ended(router: Router, scenario) -> None:
    try:
        run(scenario())
    finally:
        router.close()


def recorded(replica: Mortal) -> list[int]:
    """Bytes of what is kept of each of its requests."""
    found = []

    async def keep_request(*arguments):
        num_bytes, parts = await replica._replica.keep_request(*arguments)
        found.append(num_bytes)
        return num_bytes, parts

    replica.keep_request = keep_request
    return found


def hold(replica: Mortal) -> None:
    """Its engine makes no step once each of its requests has `HELD` tokens."""
    engine = replica._replica._engine._engine
    step = engine.step

    def step_a_little():
        sequences = [r.sequence_outputs[0].seq for r in engine._requests.values()]
        if sequences and all(len(seq.output_token_ids) >= HELD for seq in sequences):
            time.sleep(0.01)
            return []
        return step()

    engine.step = step_a_little


async def held_back(router: Router, replica: Mortal) -> None:
    """Waits until the requests of a replica have their `HELD` tokens."""
    engine = replica._replica._engine._engine
    while True:
        sequences = [r.sequence_outputs[0].seq for r in list(engine._requests.values())]
        if sequences and all(len(seq.output_token_ids) >= HELD for seq in sequences):
            return
        await asyncio.sleep(0.01)


async def resized(router: Router, replica: Mortal, answers, sizes, name):
    """Resizes the only replica during all requests, and returns the status."""
    hold(replica)
    asking = [
        asyncio.create_task(ask(router, prompt, GREEDY, f"{name}-{number}"))
        for number, (prompt, _) in enumerate(answers)
    ]
    while len(replica._replica._engine._engine._requests) < len(answers):
        await asyncio.sleep(0.01)
    await held_back(router, replica)
    await router.resize_replica(0, sizes)
    for task, (_, expected) in zip(asking, answers):
        tokens, output = await task
        assert tokens == list(output.outputs[0].token_ids) == expected
    while (status := await router.cluster_status()).resize.running:
        await asyncio.sleep(0.02)
    return status.resize
