"""What belongs to one process is made anew in a forked child.

Children are forked from processes of their own: one whose threads have computed gradients must not be forked.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bigmodel.dispatch.weights.fork_safe import ForkSafe
from tests import preloaded

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

COMMON = """
import os, sys, threading
import torch
from torch import nn
from bigmodel.devices import virtual
from bigmodel.dispatch import dispatch_model

virtual.enable(2, capacity="1GiB", strict=False)  # a fork may not use strict ones, nor CUDA
torch.set_num_threads(1)  # the threads of OpenMP are not there in a forked child, which would wait for them

def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
"""


def run(script: str, *arguments: object) -> None:
    """Run `script` in a fresh process; it fails by an assertion."""
    done = preloaded.run(["-c", COMMON + script, *arguments])
    assert done.returncode == 0, done.stderr


class Counted(ForkSafe):
    """Counts how often it is started; the start can be held up."""

    def __init__(self) -> None:
        self.starts = 0
        self.begun, self.go_on = threading.Event(), threading.Event()

    def _start(self) -> None:
        self.begun.set()
        assert self.go_on.wait(30)
        self.starts += 1


def test_threads_that_find_it_not_started_start_it_once() -> None:
    counted = Counted()
    threads = [threading.Thread(target=counted.start) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert counted.begun.wait(30)
    assert not counted.is_started, "nobody may use what is half made"
    counted.go_on.set()
    for thread in threads:
        thread.join(30)
    assert (counted.starts, counted.is_started) == (1, True)


@FORKS
@pytest.mark.slow
def test_a_model_of_every_kind_of_offload_runs_in_a_child(tmp_path: Path) -> None:
    run(
        """
def sequence():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()

x = torch.ones(2, 64)
with torch.no_grad():
    expected = sequence()(x)
    models = [
        dispatch_model(sequence(), {"": "cpu"}, main_device=0),
        dispatch_model(sequence(), {"": "cpu", "2": "disk"}, main_device=0, offload_dir=sys.argv[1]),
        dispatch_model(sequence(), {"": "disk"}, offload_dir=sys.argv[1]),
    ]
    for model in models:
        assert torch.equal(model(x), expected)

    def use_all():
        for model in models:
            for _ in range(2):
                assert torch.equal(model(x), expected)

    in_child(lambda: in_child(use_all))
    in_child(use_all)
    use_all()
""",
        tmp_path,
    )


@FORKS
@pytest.mark.slow
def test_a_child_that_is_forked_while_a_forward_runs_has_the_host_weights() -> None:
    """The parent's other thread is within a streamed block, and within one that encloses it."""
    run(
        """
class Gated(nn.Linear):
    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)
        return super().forward(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.5))
        self.first, self.gated = nn.Linear(64, 64), Gated(64, 64)

    def forward(self, x):
        return self.gated(self.first(x)) * self.scale

inside, go_on = threading.Event(), threading.Event()
torch.manual_seed(0)
model = Model().eval()
x = torch.ones(2, 64)
with torch.no_grad():
    expected = model(x)
dispatch_model(model, {"": "cpu"}, main_device=0)
host = dict(model.named_parameters())
found = []

def forward():
    with torch.no_grad():
        found.append(model(x))

def check():
    for name, parameter in model.named_parameters():
        assert parameter is host[name], f"{name} lies on {parameter.device}"
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)

thread = threading.Thread(target=forward)
thread.start()
assert inside.wait(60)
assert model.scale is not host["scale"] and model.gated.weight is not host["gated.weight"]
in_child(check)
go_on.set()
thread.join(60)
assert torch.equal(found[0], expected)
check()
"""
    )
