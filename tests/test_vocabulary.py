"""One word for one thing: names that were replaced, and words that newcomers stumble over."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "pallas_kernels", "sharding_rules")
FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "mkdocs.yml", "pyproject.toml")]
FILES += [
    path
    for folder in (*PACKAGES, "docs", "colab", "tests", "benchmarks", "docker")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".ipynb", ".toml", ".Dockerfile") and path != Path(__file__)
]

REPLACED = {
    "context_parallel_size": "sequence_parallel_size",
    "sequence_parallel": "sequence_parallel_norms|tokens_apart",
    "snapshot": r"checkpoint_dir\b|--checkpoint-dir",
    "EngineCore, InputProcessor, OutputProcessor": r"class (Steps|Intake|Generation)\b",
    "ReplicatedLog, rendezvous, Participant": "AgreedLog|roll_call|[Aa]ttendee",
    "request_queue, in_flight": r"waiting\.py|under_way",
    "OffloadManager, TransferWorker, TierPool": r"class (Mover|Copier|Ticket|Shelf)\b",
    "ProgramShapes": r"\bGeometry\b|geometry\.py",
    "page bytes": r"ImageLayout|PageImages|\bimage_(bytes|elements|dtype)\b",
    "ParsedRequest": r"class (Messages|Responses)Call\b|def call\(self, model|class Chat:",
    "step_times_us": r"\b_took(_us)?\b",
    "QuantizedWeight, self_check": r"PackedWeight|\btrial_process|class Trial\b",
    "OutputQueue": r"\b(Mailbox|Outbox)\b",
    "kv_offload_pages, kv_transfers_in_flight": "kv_lower_pages|kv_moves_under_way",
    "transfers of KV": r"MOVE_PAGES|MOVE_SIZES|MoveError|\bkv_moved?_",
    "--shutdown-timeout, --independent, slo_itl": r"--?grace[-_]s\b|--separate\b|slo[-_]tbt",
    "core/steps/results.py, runtime/programs/device_step.py": r"\b(steps|runtime)[./]in_flight\b",
    "dual_batch.py, perfetto.py": r"\bforward[./]halves\b|\bhalves\.py|\bmetrics[./]trace\b",
    "KVExecutor, open_kv": r"class Paging\b|\b_paging\b|runtime[./]paging|[Pp]age_?[Tt]ransfers\b",
    "SimulatedTransferWorker": r"\bSimulatedTransfers\b|\bsimulator[./]transfers\b",
    "decisions 5 to 7": "moving-pages|whose-turn|what-a-kernel-knows",
    "lock, timeout": r"\b_door\b|\b_shut\b|LAST_WORDS|\b_?patience_u?s\b|UNKNOWN_PATIENCE",
    "cancel_on_disconnect, wait_until_unresponsive": r"unless_hung_up|\bimport silence\b",
    "SCALE_LOW_FREENESS, MOVE_LOW_FREENESS": r"\b(LOW|HIGH)_FREENESS",
    "HORIZON, OUTLIER_FACTOR": r"^MEMORY =|\bSURPRISE\b|SPEED_MEMORY|MEMORY_OF_ALL",
    "FixedDraftLength, AdaptiveDraftLength": r"\b(Fixed|Chosen)Drafts\b|\bTRIAL_[A-Z]+\b",
    "EMPTY_CONVERSATION": r"\bNOTHING\b",
    "accepted drafts": r"\bkept_nodes\b|\bdrafts? (that )?((is|are|were) )?kept\b|keeps? drafts",
    "acceptance distribution": r"\b(seeded|gamma) law\b",
    "target devices": "devices that are not (here|there)",
    "disaggregated prefill and decode": "[Pp]refills?[- ]and[- ]decodes?[- ]apart",
    "autoscaling, prefix cache": "come-and-go|[Ss]tore[- ]of[- ]prefixes",
    "most likely": "[Ll]ikeliest",
    "options, invariants, transfer": r"\b([Ww]ish(es)?|forsake|[Tt]icket|dealt)\b",
    "extents": r"\bpage_runs\b|\bswap_runs\b",
}
"""Our name for a thing, and the pattern of the names that it had."""

QUAINT = (
    r"\b([Nn]obody|[Ss]omebody|[Aa]nybody|[Ww]hoever|in vain|in the midst|for want of|for people"
    r"|who waits|means? harm|as far as one knows|each knows the other|in its own way)\b"
)


def lines_with(pattern):
    """Of all files, their own names among them."""
    found = re.compile(pattern)
    names = [str(path.relative_to(ROOT)) for path in FILES]
    return [name for name in names if found.search(name)] + [
        f"{name}:{number}: {line.strip()}"
        for name, path in zip(names, FILES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if found.search(line)
    ]


def test_every_folder_is_read():
    read = {path.suffix for path in FILES}
    assert {".py", ".md", ".ipynb", ".toml"} <= read and len(FILES) > 700


@pytest.mark.parametrize("ours", REPLACED)
def test_replaced_names_are_gone(ours):
    """The changelog alone tells the old names."""
    assert lines_with(REPLACED[ours]) == []


def test_the_prose_is_plain():
    assert lines_with(QUAINT) == []


def _public_names(path):
    """Classes and type aliases of a module."""
    for node in ast.parse(path.read_text()).body:
        if type(node) is ast.ClassDef:
            yield node.name
        elif type(node) is ast.Assign and type(node.targets[0]) is ast.Name:
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name


def test_public_classes_have_names_of_their_own():
    """Type aliases too. Bodies of HTTP are called as in OpenAPI, and commands as they are typed;
    these may be called as what they are about."""
    modules = {
        path: set(_public_names(path))
        for path in FILES
        if path.suffix == ".py" and path.is_relative_to(ROOT / "jaxserve")
    }
    counts = Counter(name for names in modules.values() for name in names if name[0] != "_")
    package = ROOT / "jaxserve"
    exempt = modules[package / "protocol/response_models.py"] | modules[package / "cli/profile.py"]
    assert {name for name, count in counts.items() if count > 1} <= exempt
