"""accelerate's stages compute what the model does that is not split."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest
import torch

from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.stages import llama
from bigmodel.benchmarks.stages_forward import batch
from bigmodel.benchmarks.stages_peer import PACKAGE, Peer, stages_of_accelerate


@pytest.mark.long
@pytest.mark.slow
def test_stages_compute_each_batch_as_the_whole_model() -> None:
    pytest.importorskip(PACKAGE)
    model = llama(2, 64, 128)
    with stages_of_accelerate(2, [2, 3], 2, 64, 128, 1e12) as peer, torch.no_grad():
        for rows in (3, 2):
            peer.forward(rows)
            torch.testing.assert_close(peer.logits(), model(batch(rows)).logits, rtol=1e-4, atol=1e-4)


def test_a_stage_that_has_ended_is_an_error_with_its_words() -> None:
    command, pipe = [sys.executable, "-c", "import sys; sys.exit('no such layer')"], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
        pytest.raises(BenchmarkError, match="no such layer"),
    ):
        Peer([process], log).forward(2)
