"""Nothing that is imported opens a connection, and no hook of a training job does."""

import pytest
from commands import ROOT, ran

WATCHED = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
"""
IMPORTED = """
import importlib, pkgutil

for package in ("mis_plugins", "true_on_policy"):
    for found in pkgutil.walk_packages([f"{ROOT}/{package}"], f"{package}."):
        try:
            importlib.import_module(found.name)
        except ImportError as error:  # of a host or an engine, which is not installed here
            assert error.name and not error.name.startswith(package), error
"""
PLANTED = "import socket; socket.getaddrinfo('localhost', 1)"
CALLED = """
import torch
from argparse import Namespace
from mis_plugins.mis import compute_mis_weights_with_cp

mis = {"weight": {"level": "token", "upper": 2.0}}
args = Namespace(use_tis=True, mis=mis, context_parallel_size=1, qkv_format="thd")
batch = dict(pg_loss=torch.zeros(8), loss_masks=[torch.ones(5), torch.ones(3)])
lengths = dict(response_lengths=[5, 3], total_lengths=[7, 4])
train = [torch.randn(5), torch.randn(3)]
engine = [x - 0.1 for x in train]
compute_mis_weights_with_cp(args, train_log_probs=train, rollout_log_probs=engine, **batch, **lengths)
print("called")
"""


@pytest.mark.parametrize(
    ("code", "asks"), [(WATCHED + IMPORTED + CALLED, ""), (WATCHED + PLANTED, "socket.getaddrinfo")]
)
def test_no_connection_is_opened(code: str, asks: str) -> None:
    done = ran("-c", code.replace("{ROOT}", str(ROOT)))
    assert done.returncode == bool(asks) and asks in done.stderr, done.stderr[-2000:]
