"""`jaxserve serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxserve.cli.arguments.options import Common, ModelSettings
from jaxserve.cli.arguments.values import Size, Texts
from jaxserve.cli.follow import follow
from jaxserve.cli.replicas import check_replica_counts, check_replicas
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.requests.lora import DEFAULT_MAX_LORAS, LoRARequest
from jaxserve.core.requests.sampling_params import MAX_LOGPROBS
from jaxserve.core.settings.chat_settings import ChatSettings, ReasoningParser

if TYPE_CHECKING:
    from jaxserve.engine.client import EngineClient
    from jaxserve.server.http.listening import Tls

_KEY = re.compile("[!-~]+")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Serve(Common):
    """Serve a model with an OpenAI-compatible HTTP API, on localhost by default.

    Completions, chats, responses and embeddings are as in OpenAI's API, messages as in Anthropic's.
    Requests get 503 until the model is loaded. On SIGTERM or Ctrl-C the server finishes the
    requests in flight and ends; a second signal ends it without waiting for them.

    Attributes:
        host: address to listen on; 0.0.0.0 is all interfaces.
        port: port to listen on.
        uds: listen on a Unix socket at this path instead.
        root_path: path below which a proxy serves this API, such as /llm.
        ssl_certfile: serve HTTPS with this certificate (PEM, with its chain).
        ssl_keyfile: key of the certificate; by default it is in the same file.
        ssl_ca_certs: require client certificates of these authorities (PEM).
        api_key: API keys; a request must send one of them, except to /health, /livez and
            /ping. Each key is a tenant. Other users of this machine can see them in the process
            list: prefer a file.
        api_key_file: a file with one API key per line.
        metrics_without_api_key: let scrapers read /metrics without a key.
        served_model_name: names that requests may use for the model; by default MODEL, as given.
        lora_modules: LoRA adapters to serve, each as name=path; needs enable_lora. A request names
            one as its model (docs/lora.md).
        allowed_hosts: names accepted in a request's Host header, in addition to localhost and
            addresses. By default any with API keys or uds, and none without: add the name of the
            host, or of a proxy in front of it.
        min_priority: lowest priority that requests may set, where lower runs first; by default any.
        hide_cached_tokens: report 0 cached tokens in every `usage`: the number tells what was asked
            before with the same API key.
        allowed_origins: origins of web pages that may use this server (CORS), such as
            https://chat.example.com; * is any. By default none.
        reasoning_parser: how reasoning is split from content, by vLLM's name for the model; auto
            looks for <think> or channels in the chat template, none leaves it in the content.
        trust_request_chat_template: let requests bring a chat_template of their own.
        max_logprobs: most log probabilities for a token that a request may ask for, 20 at most.
        max_queued_requests: sequences that may wait beyond those that run; more get 429.
        max_body_bytes: maximum size of a request body.
        watchdog_timeout: seconds that a step may take before the server exits with status 1,
            because the device or another host hangs; 0 is no limit. By default 20 times the slowest
            step so far, but at least 60, and 600 for each of the first hundred steps.
        shutdown_timeout: seconds that requests in flight get to finish at shutdown.
        snapshot_dir: write a snapshot of the requests unfinished by then and exit with status 75.
            The next server resumes them: a client that resends its request with the same
            X-Request-Id gets the response. Without it they end with partial output.
        dev_mode: add the routes of a training loop, /sleep, /wake_up, /is_sleeping and
            /update_weights_from_disk, and those of adapters, /v1/load_lora_adapter and
            /v1/unload_lora_adapter. Every client may then use them.
        log_requests: log a line per request, with times and token counts.
        trace_file: write a trace at exit, to open in ui.perfetto.dev.
        data_parallel_size: number of replicas of the engine, each on devices of its own, on CPUs on
            its share of the cores; more than one needs jaxserve[cluster] (docs/cluster.md).
        prefill_replicas: number of replicas that only compute prompts and the first token of each;
            needs decode_replicas, instead of data_parallel_size.
        decode_replicas: number of replicas to which requests move, with their KV, once they have a
            token.
        disaggregation: with auto, a simulation before the start decides how many of the
            data_parallel_size replicas only compute prompts and how many only decode, or that all
            do both.
        slo: for disaggregation: limits of percentiles that requests should meet, such as
            ttft=2s,itl=100ms.
        expected_trace: for disaggregation: the requests to expect, a file as for `jaxserve simulate
            --trace`; by default prompts of 1024 tokens and outputs of 128.
        profile: for disaggregation: measured times of steps, a file of `jaxserve profile`; by
            default those modelled for GPUs and TPUs that `jaxserve plan` knows.
        min_replicas: with max_replicas, number of replicas to start, and to keep; by default 1.
        max_replicas: most replicas while the load is high: the server adds and removes them. Needs
            devices for all of them; instead of data_parallel_size.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    root_path: str = ""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    api_key: Texts = ()
    api_key_file: Path | None = None
    metrics_without_api_key: bool = False
    served_model_name: Texts = ()
    lora_modules: Texts = ()
    allowed_hosts: Texts = ()
    min_priority: int | None = None
    hide_cached_tokens: bool = False
    allowed_origins: Texts = ()
    reasoning_parser: ReasoningParser = "auto"
    trust_request_chat_template: bool = False
    max_logprobs: int = MAX_LOGPROBS
    max_queued_requests: int = 1024
    max_body_bytes: Size = 8 << 20
    watchdog_timeout: float | None = None
    shutdown_timeout: float = 20.0
    snapshot_dir: Path | None = None
    dev_mode: bool = False
    log_requests: bool = False
    trace_file: Path | None = None
    data_parallel_size: int = 1
    prefill_replicas: int = 0
    decode_replicas: int = 0
    disaggregation: Literal["none", "auto"] = "none"
    slo: str | None = None
    expected_trace: Path | None = None
    profile: Path | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None

    def run(self) -> int:
        self._check()
        if self.disaggregation == "auto":
            return self._chosen().run()
        import jax

        if jax.distributed.is_initialized() and jax.process_index() > 0:
            return follow(self.engine)
        from jaxserve.engine.snapshot.files import check_writable
        from jaxserve.server.app import AppSettings
        from jaxserve.server.http.listening import listen, listening_on_file
        from jaxserve.server.run import Stopping, serve
        from jaxserve.server.service import ClientPolicy, Service

        keys, tls = self._keys(), self._tls()
        settings = AppSettings(
            api_keys=keys,
            max_body_bytes=self.max_body_bytes,
            log_requests=self.log_requests,
            allowed_hosts=self._hosts(bool(keys)),
            metrics_without_api_key=self.metrics_without_api_key,
            root_path=self.root_path.rstrip("/"),
            allowed_origins=self.allowed_origins,
            dev_mode=self.dev_mode,
            has_replicas=self.num_replicas > 1,
        )
        if self.snapshot_dir is not None:
            check_writable(self.snapshot_dir)
        policy = ClientPolicy(self.min_priority, self.hide_cached_tokens)
        chat = ChatSettings(self.reasoning_parser, self.trust_request_chat_template)
        adapters = self._adapters()
        service = Service(
            self._names, self.max_queued_requests, policy, chat, self.max_logprobs, adapters
        )
        uds = self.uds
        address = listen(self.host, self.port) if uds is None else listening_on_file(uds)
        with address as listener:
            stopping = Stopping(self.shutdown_timeout, self.snapshot_dir)
            return asyncio.run(serve(service, settings, listener, self._load, stopping, tls))

    def _chosen(self) -> Serve:
        """The same server, with the replicas that are chosen. Raises ConfigError."""
        from jaxserve.cli.planning.disaggregation import Chooser

        chooser = Chooser(self.slo or "", self.expected_trace, self.profile)
        split = chooser.choose(self.engine, self.data_parallel_size)
        return dataclasses.replace(
            self,
            disaggregation="none",
            slo=None,
            expected_trace=None,
            profile=None,
            data_parallel_size=1 if split.num_prefill else self.data_parallel_size,
            prefill_replicas=split.num_prefill,
            decode_replicas=split.num_decode,
        )

    def _load(self) -> EngineClient:
        if self.num_replicas > 1:
            from jaxserve.cluster.ray_replicas import load_replicas

            return load_replicas(
                self.engine,
                self.num_replicas,
                self.watchdog_timeout,
                self.prefill_replicas,
                None if self.max_replicas is None else self.min_replicas or 1,
                self._asked_by,
            )
        from jaxserve.async_engine import AsyncEngine

        with TerminalProgress() as progress:
            return AsyncEngine.load(
                **dataclasses.asdict(self.engine),
                progress=progress,
                trace_file=self.trace_file,
                watchdog_timeout=self.watchdog_timeout,
            )

    def _check(self) -> None:
        """Raises ConfigError for invalid settings, before the model is loaded."""
        for name, least in (
            ("data_parallel_size", 1),
            ("prefill_replicas", 0),
            ("decode_replicas", 0),
            ("min_replicas", 1),
            ("max_replicas", 2),
            ("max_queued_requests", 0),
            ("max_logprobs", 0),
            ("max_body_bytes", 1),
            ("shutdown_timeout", 0),
            ("watchdog_timeout", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:  # also rejects NaN
                raise ConfigError(f"{name} is {value!r}; it must be {least} or more.")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs is {self.max_logprobs}; it must be {MAX_LOGPROBS} or less: programs "
                "return no more."
            )
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file are both given; give one of them.")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name has an empty name; leave it out, or give another.")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path is {self.root_path!r}; start it with a slash.")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}; write an origin as browsers do, such as "
                    "https://chat.example.com, or '*' for any."
                )
        self._check_model()
        check_replica_counts(self, "data_parallel_size")
        self._check_disaggregation()
        if self.num_replicas > 1:
            self._check_replicas()
        if self.trace_file is not None:
            check_output_file("trace_file", self.trace_file)

    def _check_model(self) -> None:
        """Raises ConfigError where an option of several values has taken the MODEL after it."""
        if self.engine.model != ModelSettings.model:
            return
        for name in ("api_key", "served_model_name", "allowed_hosts", "allowed_origins"):
            *before, last = getattr(self, name) or ("",)
            alone = name == "served_model_name" and not before
            if os.path.exists(last) or (_REPOSITORY.fullmatch(last) and not alone):
                raise ConfigError(
                    f"{name} has the value {last!r:.200}, which looks like a model; write MODEL "
                    f"before options: `jaxserve serve {last:.200}`, or the model that is meant, "
                    "and the options after it."
                )

    @property
    def num_replicas(self) -> int:
        apart = self.prefill_replicas + self.decode_replicas
        return self.max_replicas or apart or self.data_parallel_size

    def _check_disaggregation(self) -> None:
        """Raises ConfigError for `disaggregation` that cannot be chosen."""
        if self.disaggregation == "none":
            for name in ("slo", "expected_trace", "profile"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is for disaggregation auto; leave it out.")
            return
        if self.prefill_replicas or self.max_replicas is not None:
            raise ConfigError(
                "disaggregation is auto, which chooses among data_parallel_size replicas; leave "
                "prefill_replicas, decode_replicas and max_replicas out."
            )
        if self.data_parallel_size < 2:
            raise ConfigError(
                "disaggregation is auto, but data_parallel_size is 1; disaggregated prefill "
                "and decode take two replicas at least, one of each."
            )
        if self.slo is None:
            raise ConfigError(
                "disaggregation is auto; give --slo, limits that requests must meet, such as "
                "ttft=2s,itl=100ms."
            )

    def _check_replicas(self) -> None:
        """Raises ConfigError for settings that are of one engine, MissingDependencyError without
        Ray."""
        if self.dev_mode:
            raise ConfigError(
                "dev_mode adds routes that change one engine, but there are "
                f"{self.num_replicas} replicas; leave one of them out."
            )
        settings = {"snapshot_dir": self.snapshot_dir, "trace_file": self.trace_file}
        check_replicas(self.num_replicas, settings, self._asked_by)

    @property
    def _asked_by(self) -> str:
        """The option that asks for replicas."""
        if self.max_replicas:
            return "max_replicas"
        return "prefill_replicas" if self.prefill_replicas else "data_parallel_size"

    @property
    def _names(self) -> tuple[str, ...]:
        return self.served_model_name or (str(self.engine.model),)

    def _adapters(self) -> list[LoRARequest]:
        """Raises ConfigError for an adapter that is not name=path, for two of one name, for more
        than the engine holds, and without enable_lora."""
        if self.lora_modules and not self.engine.enable_lora:
            raise ConfigError("lora_modules needs enable_lora; add --enable-lora.")
        slots = self.engine.max_loras or DEFAULT_MAX_LORAS
        if len(self.lora_modules) > slots:
            raise ConfigError(
                f"lora_modules has {len(self.lora_modules)} adapters, and max_loras is {slots}; "
                f"add --max-loras {len(self.lora_modules)}."
            )
        adapters, names = [], set(self._names)
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path:
                raise ConfigError(
                    f"lora_modules has {module!r:.200}; each is name=path, such as sql=/models/sql."
                )
            if name in names:
                raise ConfigError(
                    f"lora_modules has {module!r:.200}, but a model {name!r:.200} is served "
                    "already; use another name."
                )
            names.add(name)
            adapters.append(LoRARequest(name, path))
        return adapters

    def _tls(self) -> Tls | None:
        """Raises ConfigError for files that cannot be used."""
        from jaxserve.server.http.listening import Tls

        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs ssl_certfile.")
            return None
        tls = Tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        tls.check()
        return tls

    def _keys(self) -> tuple[str, ...]:
        """Raises ConfigError for a key that no header can carry, or a file without keys."""
        keys = self.api_key
        if self.api_key_file is not None:
            where = f"api_key_file {str(self.api_key_file)!r}"
            try:
                lines = self.api_key_file.read_text(encoding="ascii").splitlines()
            except OSError as error:
                raise ConfigError(f"{where} cannot be read: {error.strerror}.") from None
            except ValueError:
                raise ConfigError(f"{where} must be printable ASCII, one key per line.") from None
            keys = tuple(key for line in lines if (key := line.strip()))
            if not keys:
                raise ConfigError(f"{where} has no key; write one per line.")
        for place, key in enumerate(keys, 1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"API key {place} must be printable ASCII without spaces.")
        return keys

    def _hosts(self, has_keys: bool) -> tuple[str, ...] | None:
        """Names that Host headers may have; None for any."""
        is_open = not has_keys and self.uds is None  # No web page reaches a Unix socket.
        return self.allowed_hosts if self.allowed_hosts or is_open else None
