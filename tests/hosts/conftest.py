"""What tests of versions, kept sets and heads share: the process of a host's rollouts."""

from collections.abc import Iterator

import pytest
import rollout_process

from mis_plugins.hosts.versions.rollouts import Numbering


@pytest.fixture
def numbering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbering]:
    """The job's shelf behind Ray's actors, and the host's client, anew for a test."""
    with rollout_process.fresh(monkeypatch) as own:
        yield own
