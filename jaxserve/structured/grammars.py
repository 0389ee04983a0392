"""An engine's grammars: each compiled once, beside the engine, and kept while it is asked for."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.params import StructuredOutputs
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.text import Tokenizer

COMPILE_S = 10.0
"""A grammar that takes longer to compile is refused. Waiting for its turn does not count."""

WAIT_S = 30.0
"""One that has waited so long for its turn is refused."""

MAX_WAITING = 32
"""Grammars that wait for their turn. Whoever asks for one more is told to come later."""

COMPILERS = 2
"""Threads that compile: none of them can be stopped in what it does."""

COMPILER_STACK_BYTES = 256 << 20
"""Of address space. A chain of as many rules as MAX_GRAMMAR_BYTES has room for recurses deeper than
an ordinary stack, whose overflow would end the process."""

CACHED_GRAMMARS = 64
"""Kept compiled, those asked for last."""

CACHED_BYTES = 1 << 20
"""Of what those were compiled from. They take some hundred times as much, most of them less."""


class Grammars:
    """An engine's grammars, compiled when they are first asked for. For any number of threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Nothing is done until somebody asks for a grammar."""
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
        """The grammar of `spec`, when it is compiled. Whoever waits no longer may cancel it.

        Raises OverloadedError when too many wait already. The future raises RequestError as Grammar
        does, and when compiling takes too long, and OverloadedError when its turn does not come.
        """
        return _own(self._compilation(spec, MAX_WAITING).in_time)

    def get(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of `spec`, which another engine has accepted: however long it takes.

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
        """Forget those asked for longest ago. Who waits for one gets it all the same."""
        num_bytes = sum(compilation.num_bytes for compilation in self._cached.values())
        while len(self._cached) > CACHED_GRAMMARS or num_bytes > CACHED_BYTES:
            _, forgotten = self._cached.popitem(last=False)
            num_bytes -= forgotten.num_bytes

    def _start_compiler(self) -> None:
        """One more thread, if there may be. It ends when nothing waits, and never holds up the end
        of the process, since what it does cannot be stopped."""
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
            compilation.begin()
            try:
                with self._making:
                    if self._vocabulary is None:
                        self._vocabulary = self._make_vocabulary()
                compilation.end(Grammar(self._vocabulary, compilation.spec))
            except Exception as error:
                compilation.end(error)


class _Compilation:
    """A grammar to be. `done` when it is there or refused for what it is; `in_time` ends earlier
    for one that takes too long, which is there later for those who ask again."""

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
        """Its turn has come."""
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
    """Gives a future its outcome, unless it has one or was given up."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _own(shared: Future[Grammar]) -> Future[Grammar]:
    """A future of one caller, to be cancelled as he likes. An error is his own too: whoever raises
    one hangs his stack on it."""
    own: Future[Grammar] = Future()

    def copy(shared: Future[Grammar]) -> None:
        error = shared.exception()
        _settle(own, shared.result() if error is None else type(error)(*error.args))

    shared.add_done_callback(copy)
    return own
