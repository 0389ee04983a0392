"""Trees of drafts: which guesses of a step follow which, as a setting."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from jaxserve.core.errors import ConfigError

MAX_TREE_TOKENS = 63
"""Most drafts of a tree, which with the newest token make 64 of a row."""
_NAME = "speculative_token_tree of speculative_config"
_HOW = (
    "give the paths of its drafts, such as [[0], [1], [0, 0]], or how many follow each "
    "token at each depth, such as [2, 1]."
)

Path = tuple[int, ...]
"""The rank of each draft on the way from the newest token, among the guesses after the one before
it: (0,) is the best guess, (0, 1) the second best after that."""


def parse_tree(value: Any) -> tuple[Path, ...]:
    """The paths of a tree's drafts, shorter ones first, from a list of paths, from counts by depth,
    or from either as text, as vLLM has it.

    Raises ConfigError for what is neither, for a tree of more than MAX_TREE_TOKENS drafts, and for
    a path twice or without the one that it continues.
    """
    given = value
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ConfigError(f"{_NAME} is {given!r:.200}, which is no list; {_HOW}") from None
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{_NAME} is {given!r:.200}; {_HOW}")
    if all(isinstance(each, list | tuple) for each in value):
        _check_size(len(value))
        paths = [tuple(each) for each in value]
        numbers = [*itertools.chain.from_iterable(paths)]
        least = 0
    else:
        numbers, least = list(value), 1
    if not numbers or not all(type(number) is int and number >= least for number in numbers):
        raise ConfigError(f"{_NAME} is {given!r:.200}; {_HOW}")
    if least:
        _check_size(max(numbers))
        paths = []
        for path in _product(numbers):
            paths.append(path)
            _check_size(len(paths))
    if () in paths:
        raise ConfigError(f"{_NAME} has the path [], which is no draft; leave it out.")
    known = {(), *paths}
    for path in paths:
        if path[:-1] not in known:
            raise ConfigError(
                f"{_NAME} has the path {list(path)} and not {list(path[:-1])}, which it continues; "
                "add that one."
            )
        if path[-1] >= MAX_TREE_TOKENS:
            raise ConfigError(
                f"{_NAME} has the path {list(path)}, with a guess of rank {path[-1]}; ranks go "
                f"from 0 to {MAX_TREE_TOKENS - 1}."
            )
    if len(known) <= len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"{_NAME} has the path {list(twice)} twice; leave one of them out.")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _check_size(count: int) -> None:
    if count > MAX_TREE_TOKENS:
        raise ConfigError(
            f"{_NAME} has more than {MAX_TREE_TOKENS} drafts, the most that one step verifies of a "
            "sequence; give a smaller tree."
        )


def _product(counts: list[int]) -> Iterator[Path]:
    """Every path of a tree where each token has so many drafts after it, by depth."""
    for depth in range(1, len(counts) + 1):
        yield from itertools.product(*map(range, counts[:depth]))


@functools.cache
def parents(tree: tuple[Path, ...]) -> tuple[int, ...]:
    """For each draft of a tree the token that it follows: 0 is the newest one, i + 1 draft i."""
    places = {(): 0} | {path: place for place, path in enumerate(tree, 1)}
    return tuple(places[path[:-1]] for path in tree)


def ways(tree: tuple[Path, ...]) -> tuple[tuple[int, ...], ...]:
    """For each draft of a tree the drafts on the way to it, by depth, then itself again up to the
    longest path."""
    places = {path: place for place, path in enumerate(tree)}
    depths = range(1, len(tree[-1]) + 1)
    return tuple(tuple(places[path[:depth]] for depth in depths) for path in tree)
