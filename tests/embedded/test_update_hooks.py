"""Hooks around a weight update: their order, and what is left standing when one of them fails."""

import functools
import itertools

import pytest

from lab.host.asynchronous.update_hooks import HookError, Hooks, Point
from mis_plugins.errors import ConfigError

POINTS: tuple[Point, ...] = ("pre_pause", "post_pause", "pre_resume", "post_resume")


class Engine:
    """Notes what happens to it; a second `pause` without a `resume` is a bug."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.log: list[str] = []
        self.broken = broken
        self.stands = False

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.broken:
            raise RuntimeError(f"{what} failed")

    def pause(self) -> None:
        assert not self.stands
        self.stands = True
        self.note("pause")

    def resume(self) -> None:
        self.stands = False
        self.note("resume")


def hooked(engine: Engine) -> Hooks:
    """Two hooks at each point."""
    hooks = Hooks()
    for point, which in itertools.product(POINTS, ("a", "b")):
        hooks.register(point, functools.partial(engine.note, f"{point}/{which}"), name=f"{point}/{which}")
    return hooks


def cycle(engine: Engine, hooks: Hooks) -> None:
    with hooks.paused(engine.pause, engine.resume):
        assert engine.stands
        engine.note("update")


FULL = [
    "pre_pause/a", "pre_pause/b", "pause", "post_pause/a", "post_pause/b", "update",
    "pre_resume/a", "pre_resume/b", "resume", "post_resume/a", "post_resume/b",
]  # fmt: skip


def without(*names: str) -> list[str]:
    return [name for name in FULL if name not in names]


@pytest.mark.parametrize(
    ("broken", "log"),
    [
        ("pre_pause/a", ["pre_pause/a"]),
        ("pause", without("post_pause/a", "post_pause/b", "update")),
        ("post_pause/a", without("post_pause/b", "update")),
        ("update", FULL),
        ("pre_resume/a", without("pre_resume/b")),
        ("post_resume/a", without("post_resume/b")),
    ],
)
def test_stop(broken: str, log: list[str]):
    """The rest of its point and the update do not run; whatever was paused is resumed, and can be paused again.

    What fails between the hooks is raised as it is.
    """
    engine = Engine((broken,))
    hooks = hooked(engine)
    point, of_hook = broken.partition("/")[0], "/" in broken
    said = f"{point} hook {broken} raised RuntimeError" if of_hook else f"^{broken} failed"
    with pytest.raises(HookError if of_hook else RuntimeError, match=said) as raised:
        cycle(engine, hooks)
    assert isinstance(raised.value.__cause__, RuntimeError) == of_hook
    assert engine.log == log and not engine.stands
    engine.broken, engine.log = (), []
    cycle(engine, hooks)
    assert engine.log == FULL


def test_no_failure_hides_another():
    engine = Engine(("update", "pre_resume/b"))
    with pytest.raises(HookError, match="pre_resume/b") as raised:
        cycle(engine, hooked(engine))
    cause = raised.value.__cause__
    assert cause is not None and "update failed" in str(cause.__context__)
    assert not engine.stands and engine.log[-2:] == ["post_resume/a", "post_resume/b"]


def test_an_interrupt_is_no_hook_error():
    def interrupted() -> None:
        raise KeyboardInterrupt

    engine, hooks = Engine(), Hooks()
    hooks.register("post_pause", interrupted, "mine")
    with pytest.raises(KeyboardInterrupt):
        cycle(engine, hooks)
    assert engine.log == ["pause", "resume"]


async def coroutine() -> None: ...


def test_only_plain_functions_without_arguments():
    with pytest.raises(ConfigError, match="mine is a coroutine function"):
        Hooks().register("pre_pause", coroutine, "mine")
    with pytest.raises(ConfigError, match="mine needs arguments"):
        Hooks().register("pre_pause", cycle, "mine")  # type: ignore[arg-type]
    Hooks().register("pre_pause", vars, "vars")  # tells no signature
