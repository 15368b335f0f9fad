"""Hooks that run around a weight update: before and after generation pauses, before and after generation resumes.

    with hooks.paused(engine.pause, engine.resume):
        engine.update_weights(...)

Hooks are plain functions without arguments, called in the order of their registration, on the caller's thread. When one
raises, the later hooks of its point do not run, nor does the update where it is still to come. Once generation has
paused, the pre-resume hooks, the resume and the post-resume hooks follow. Then a `HookError` names the hook.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from mis_plugins.errors import ConfigError, MisError

Hook = Callable[[], object]
Point = Literal["pre_pause", "post_pause", "pre_resume", "post_resume"]


class HookError(MisError):
    """A hook raised; the exception is its cause."""


class Hooks:
    """The registered hooks."""

    def __init__(self) -> None:
        self._registered: dict[Point, list[tuple[str, Hook]]] = defaultdict(list)

    def register(self, point: Point, hook: Hook, name: str) -> None:
        """Register a hook. `pre_pause` runs while generation still goes on, and is the place to recompute.

        `post_pause` runs before the update, `pre_resume` after it, also after a failed one, both while generation is
        paused; `post_resume` runs when generation goes on again.

        Raises:
            ConfigError: the hook is a coroutine function, or needs arguments.
        """
        if inspect.iscoroutinefunction(hook):
            raise ConfigError(f"{name} is a coroutine function; give a plain one, hooks are not awaited")
        if not _takes_nothing(hook):
            raise ConfigError(f"{name} needs arguments; hooks are called without any")
        self._registered[point].append((name, hook))

    @contextmanager
    def paused(self, pause: Hook, resume: Hook) -> Iterator[None]:
        """Keep generation paused during the block. Once `pause` is called, `resume` will be, whatever raises.

        Raises:
            HookError: a hook raised. If it was a pre-pause hook, `pause` was not called.
        """
        self._run("pre_pause")
        try:
            pause()
            self._run("post_pause")
            yield
        finally:
            try:
                self._run("pre_resume")
            finally:
                resume()
                self._run("post_resume")

    def _run(self, point: Point) -> None:
        for name, hook in self._registered[point]:
            try:
                hook()
            except Exception as error:
                message = f"{point} hook {name} raised {type(error).__name__}: {error}"
                raise HookError(message) from error


def _takes_nothing(hook: Hook) -> bool:
    """Whether a hook can be called without arguments; true where the hook does not tell its signature."""
    try:
        inspect.signature(hook).bind()
    except TypeError:
        return False
    except ValueError:
        return True
    return True
