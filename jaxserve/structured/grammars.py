"""Compiles and caches an engine's grammars in background threads."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError

from jaxserve.core.errors import OverloadedError, RequestError
from jaxserve.core.requests.structured_outputs import StructuredOutputs
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.text import Tokenizer

COMPILE_S = 10.0
"""Compile timeout of a grammar, without its time in the queue."""

WAIT_S = 30.0
"""Timeout in the compile queue, and for the vocabulary that the first grammar makes."""

MAX_WAITING = 32
"""Maximum length of the compile queue. Further requests are rejected as overload."""

COMPILERS = 2
"""Number of compiler threads. A running compilation cannot be stopped."""

COMPILER_STACK_BYTES = 256 << 20
"""Stack of a compiler thread, as address space. A chain of as many rules as fit MAX_GRAMMAR_BYTES
would overflow a default stack, which would kill the process."""

CACHED_GRAMMARS = 64
"""Maximum number of cached grammars (LRU)."""

CACHED_BYTES = 1 << 20
"""Total source size of cached grammars. Compiled, they take some 100 times as much, most less."""


class Grammars:
    """An engine's grammars, compiled on first request. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Builds nothing until the first grammar is requested."""
        self._make_vocabulary = functools.partial(Vocabulary, tokenizer, vocab_size, eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._cached: collections.OrderedDict[StructuredOutputs, _Compilation] = (
            collections.OrderedDict()
        )
        self._waiting: collections.deque[_Compilation] = collections.deque()
        self._compiling = 0

    def submit(self, spec: StructuredOutputs) -> Future[Grammar]:
        """A future of the compiled grammar of `spec`. Cancelling it affects no other caller.

        Raises OverloadedError when the queue is full. The future raises RequestError as Grammar
        does, and on a compile timeout, and OverloadedError on a timeout in the queue.
        """
        return _own(self._compilation(spec, MAX_WAITING).in_time)

    def get(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of `spec`, without timeouts: another engine has already accepted it.

        Raises RequestError as Grammar does.
        """
        return _own(self._compilation(spec).done).result()

    def _compilation(self, spec: StructuredOutputs, max_waiting: int | None = None) -> _Compilation:
        with self._lock:
            compilation = self._cached.get(spec)
            if compilation is None:
                if max_waiting is not None and len(self._waiting) >= max_waiting:
                    raise OverloadedError(
                        f"{len(self._waiting)} grammars wait to be compiled; try again."
                    )
                compilation = self._cached[spec] = _Compilation(spec)
                self._waiting.append(compilation)
                self._start_compiler()
                self._make_room()
            self._cached.move_to_end(spec)
        return compilation

    def _make_room(self) -> None:
        """Evicts least recently requested grammars. Callers that wait for one still get it."""
        num_bytes = sum(compilation.num_bytes for compilation in self._cached.values())
        while len(self._cached) > CACHED_GRAMMARS or num_bytes > CACHED_BYTES:
            _, forgotten = self._cached.popitem(last=False)
            num_bytes -= forgotten.num_bytes

    def _start_compiler(self) -> None:
        """Starts another compiler thread, if allowed. It ends when the queue is empty, and is a
        daemon, since a compilation cannot be stopped."""
        if self._compiling == COMPILERS:
            return
        self._compiling += 1
        before = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            threading.Thread(target=self._compile, name="jaxserve-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _compile(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._compiling -= 1
                    return
                compilation = self._waiting.popleft()
            try:
                with self._making:
                    if self._vocabulary is None:
                        self._vocabulary = self._make_vocabulary()
                compilation.begin()
                compilation.end(Grammar(self._vocabulary, compilation.spec))
            except Exception as error:
                compilation.end(error)


class _Compilation:
    """A grammar being compiled. `done` has the grammar or its error; `in_time` fails earlier on a
    timeout, while compilation continues for later requests."""

    def __init__(self, spec: StructuredOutputs) -> None:
        self.spec = spec
        self.num_bytes = len(str(getattr(spec, spec.kind)).encode())
        self.done: Future[Grammar] = Future()
        self._early: Future[Grammar] = Future()
        self._refuse_after(
            WAIT_S,
            OverloadedError(
                f"structured_outputs.{spec.kind} has waited {WAIT_S} s to be compiled; try again."
            ),
        )

    @property
    def in_time(self) -> Future[Grammar]:
        return self.done if self.done.done() else self._early

    def begin(self) -> None:
        """Marks the start of compilation."""
        self._alarm.cancel()
        self._refuse_after(
            COMPILE_S,
            RequestError(
                f"structured_outputs.{self.spec.kind} was not compiled in time (at most "
                f"{COMPILE_S} s); make it smaller."
            ),
        )

    def end(self, outcome: Grammar | Exception) -> None:
        self._alarm.cancel()
        _settle(self.done, outcome)
        _settle(self._early, outcome)

    def _refuse_after(self, seconds: float, error: Exception) -> None:
        self._alarm = threading.Timer(seconds, _settle, (self._early, error))
        self._alarm.daemon = True
        self._alarm.start()


def _settle(future: Future[Grammar], outcome: Grammar | Exception) -> None:
    """Sets the outcome of a future, unless it is done or cancelled."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _own(shared: Future[Grammar]) -> Future[Grammar]:
    """A caller's own copy of a shared future: cancelling it does not cancel `shared`. The error is
    copied too, since raising it attaches the caller's traceback."""
    own: Future[Grammar] = Future()

    def copy(shared: Future[Grammar]) -> None:
        error = shared.exception()
        _settle(own, shared.result() if error is None else type(error)(*error.args))

    shared.add_done_callback(copy)
    return own
